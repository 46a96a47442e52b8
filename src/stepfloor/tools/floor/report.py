"""What a decode step must read, how long that takes at least, what would make it less, and whether it fits.

Runs anywhere: headers and arithmetic, no torch. All figures come from `roofline`; here they are asked for.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.errors import UserError
from stepfloor.roofline.collectives import LINKS, Collective, Link, exchange_us, step_collectives
from stepfloor.roofline.floor import GIB
from stepfloor.roofline.groups import weight_component
from stepfloor.roofline.hardware import Hardware, named_device
from stepfloor.roofline.levers import (
    Change,
    Choice,
    acceptance_of_length,
    best_choice,
    changed,
    levers,
    parse_change,
    tokens_per_step,
)
from stepfloor.roofline.memory import (
    TABLE_PLACES,
    Capacity,
    MemoryPlan,
    Placement,
    discrete_capacity,
    plan_memory,
    unified_capacity,
)
from stepfloor.roofline.passes import (
    UNIFORM,
    ByteModel,
    Matrices,
    Part,
    Routing,
    by_component,
    fold,
    measured_routing,
    total,
)
from stepfloor.roofline.shards import ONE_DEVICE, Shards
from stepfloor.weights.checkpoint import Checkpoint

_WORDS = {
    "gdn": "gated delta net",
    "qsa": "sparse attention",
    "hc": "hyper-connections",
    "shared_experts": "shared experts",
    "experts": "routed experts",
    "mtp": "drafter's input",
    "ple": "n-gram projections",
    "vectors": "norms and vectors",
}


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of one model.

    device          with its bandwidth; bandwidth_gbps wins over the device's own figures
    shards          devices that share a step; link, collective_us  what they exchange over, and a measured latency
    acceptance      share of steps that accept the draft at each position, or None
    """

    device: Hardware
    bandwidth_gbps: float | None = None
    shards: Shards = ONE_DEVICE
    spec_tokens: int = 3
    sequences: int = 1
    context_tokens: int = 0
    acceptance: tuple[float, ...] | None = None
    change: Change = field(default_factory=Change)
    routing: Routing = UNIFORM
    kv_bytes: int = 2
    link: Link | None = None
    collective_us: float | None = None

    @property
    def gbps(self) -> float:
        return self.bandwidth_gbps or self.device.floor_gbps

    @property
    def achieved(self) -> tuple[float, float]:
        """Share of gbps that a step is expected to reach, from and to. Of a measured bandwidth a step may have all."""
        low, high = (share * self.device.bandwidth_gbps / self.gbps for share in self.device.achieved)
        return (low, 1.0) if self.bandwidth_gbps is None and high > 1 else (min(low, 0.9), min(high, 1.0))


def ask(
    config: ModelConfig,
    device: str,
    *,
    bandwidth: float | None = None,
    tensor_parallel_size: int = 1,
    expert_parallel: bool = False,
    spec_tokens: int | None = None,
    sequences: int = 1,
    context: int = 0,
    acceptance: str | None = None,
    acceptance_length: float | None = None,
    what_if: str = "",
    distinct_experts: str | None = None,
    kv_cache_dtype: str = "auto",
    link: str | None = None,
    collective_us: float | None = None,
) -> Question:
    """The question from the words of the command line. Raises UserError for what cannot be asked."""
    hardware = named_device(device)
    if hardware is None:
        raise UserError(f"--device {device!r} is not known; `stepfloor floor --device list` shows the table")
    drafts = spec_tokens if spec_tokens is not None else (3 if config.has_drafter else 0)
    if not 0 <= drafts <= 7 or (drafts and not config.has_drafter):
        raise UserError(f"--spec-tokens must be 0 to 7, and 0 where the checkpoint has no drafter; got {drafts}")
    if (
        min(sequences, tensor_parallel_size) < 1
        or context < 0
        or (bandwidth is not None and not 0 < bandwidth < math.inf)
    ):
        raise UserError("--sequences, --tensor-parallel-size and --bandwidth must be positive, --context not negative")
    if link is not None and link not in LINKS:
        raise UserError(f"--link must be one of {', '.join(LINKS)}; got {link!r}")
    if kv_cache_dtype not in ("auto", "bf16", "fp8"):
        raise UserError(f"--kv-cache-dtype must be auto, bf16 or fp8; got {kv_cache_dtype!r}")
    shares: tuple[float, ...] | None = None
    if acceptance is not None:
        shares = _shares(acceptance)
    try:
        if acceptance is None and acceptance_length is not None:
            shares = acceptance_of_length(acceptance_length, drafts)
        change = parse_change(what_if, config.vocab_size)
        routing = UNIFORM if distinct_experts is None else _routing(distinct_experts, config)
    except ValueError as error:
        raise UserError(f"stepfloor floor: {error}") from None
    return Question(
        device=hardware,
        bandwidth_gbps=bandwidth,
        shards=Shards(tensor_parallel_size, expert_parallel, config.num_key_value_heads),
        spec_tokens=drafts,
        sequences=sequences,
        context_tokens=context,
        acceptance=shares,
        change=change,
        routing=routing,
        kv_bytes=1 if kv_cache_dtype == "fp8" else 2,
        link=LINKS[link or hardware.link],
        collective_us=collective_us,
    )


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--acceptance wants shares with commas between, like 0.8,0.6,0.4; got {text!r}") from None
    if any(not 0 <= share <= 1 for share in shares):
        raise UserError(f"stepfloor floor: shares lie between 0 and 1; got {text}")
    return shares


def _routing(text: str, config: ModelConfig) -> Routing:
    tokens, _, experts = text.partition("=")
    try:
        measured = int(tokens), float(experts)
    except ValueError:
        raise UserError(f"--distinct-experts wants TOKENS=EXPERTS, like 4=32.5; got {text!r}") from None
    return measured_routing(*measured, config.num_experts, config.num_experts_per_tok)


def answer(checkpoint: Checkpoint, question: Question) -> dict[str, Any]:
    """The report as plain values, ready for JSON: bytes, milliseconds, tokens/s."""
    config, weights = checkpoint.config, fold(checkpoint.weights)
    after = _changed(weights, config, question.change)
    now = _Case(config, weights, question, None)
    report: dict[str, Any] = {
        "model": str(checkpoint.directory),
        "device": question.device.name,
        "bandwidth_gbps": question.gbps,
        "bandwidth": "given" if question.bandwidth_gbps else "measured" if question.device.read_gbps else "specified",
        "devices": question.shards.devices,
        "expert_parallel": question.shards.expert_parallel,
        "sequences": question.sequences,
        "spec_tokens": question.spec_tokens,
        "context_tokens": question.context_tokens,
        "distinct_experts": question.routing.distinct(
            question.sequences, question.spec_tokens + 1, config.num_experts, config.num_experts_per_tok
        ),
        "now": now.report(),
    }
    if question.change != Change():
        report["what_if"] = _Case(config, after, question, question.change.draft_vocab).report()
        report["what_if"]["change"] = str(question.change)
    report["levers"] = _levers(config, after, question)
    if question.acceptance is not None:
        report["choices"] = _choices(config, after, question)
    return report


class _Case:
    """One set of weights under one question."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, Matrices], question: Question, draft_vocab: int | None
    ) -> None:
        self.config, self.weights, self.question, self.draft_vocab = config, weights, question, draft_vocab
        self.model = ByteModel(config, weights, question.shards)

    def passes(self, spec_tokens: int, uneven: bool = False) -> tuple[tuple[Part, ...], ...]:
        q = self.question
        return self.model.step(
            q.sequences, spec_tokens, q.context_tokens, q.routing, q.kv_bytes, uneven, self.draft_vocab
        )

    def bytes(self, spec_tokens: int, uneven: bool = False) -> float:
        return sum(total(parts) for parts in self.passes(spec_tokens, uneven))

    def floor_us(self, spec_tokens: int) -> float:
        return self.bytes(spec_tokens) / self.question.gbps / 1e3

    def range_us(self, spec_tokens: int) -> tuple[float, float]:
        """What a step is expected to take, from and to: the share of the bandwidth others reached, and exchanges."""
        q = self.question
        low, high = q.achieved
        first, last = self.exchanges_us(spec_tokens)
        return (
            self.floor_us(spec_tokens) / high + first,
            self.bytes(spec_tokens, uneven=True) / q.gbps / 1e3 / low + last,
        )

    def collectives(self, spec_tokens: int) -> tuple[Collective, ...]:
        q = self.question
        return step_collectives(self.config, q.sequences, spec_tokens, q.shards, self.draft_vocab)

    def exchanges_us(self, spec_tokens: int) -> tuple[float, float]:
        q = self.question
        link = q.link or LINKS[q.device.link]
        if q.collective_us is not None:
            link = Link(link.name, (q.collective_us, q.collective_us), link.gbps, "given")
        return exchange_us(self.collectives(spec_tokens), link, q.shards.devices)

    def report(self) -> dict[str, Any]:
        q = self.question
        k = q.spec_tokens
        target, *drafts = self.passes(k)
        formats = _formats(self.weights)
        read = by_component(target)
        drafted: dict[str, float] = {}
        for parts in drafts:
            for component, size in by_component(parts).items():
                drafted[component] = drafted.get(component, 0) + size
        components = [
            {
                "component": _WORDS.get(name, name),
                "formats": formats.get(name, []),
                "target_bytes": read.get(name, 0.0),
                "draft_bytes": drafted.get(name, 0.0),
            }
            for name in dict.fromkeys((*read, *drafted))
        ]
        components.sort(key=lambda c: -(c["target_bytes"] + c["draft_bytes"]))
        categories: dict[str, float] = {}
        for parts in (target, *drafts):
            for part in parts:
                categories[part.category] = categories.get(part.category, 0) + part.num_bytes
        floor, (first, last) = self.floor_us(k), self.range_us(k)
        report: dict[str, Any] = {
            "components": components,
            "categories": categories,
            "target_bytes": total(target),
            "draft_bytes": [total(parts) for parts in drafts],
            "step_bytes": self.bytes(k),
            "floor_ms": (floor + self.exchanges_us(k)[0]) / 1e3,
            "bytes_ms": floor / 1e3,
            "expected_ms": [first / 1e3, last / 1e3],
            "exchanges": [
                {"what": c.what, "kind": c.kind, "count": c.count, "bytes": c.num_bytes} for c in self.collectives(k)
            ],
            "exchanges_ms": [us / 1e3 for us in self.exchanges_us(k)],
        }
        # without acceptance: from no draft accepted to all of them
        tokens = (1.0, k + 1.0) if q.acceptance is None else (tokens_per_step(q.acceptance, k),) * 2
        report["tokens_per_step"] = list(tokens)
        report["tokens_per_s"] = [q.sequences * tokens[0] * 1e6 / last, q.sequences * tokens[1] * 1e6 / first]
        report["floor_tokens_per_s"] = [q.sequences * t / report["floor_ms"] * 1e3 for t in tokens]
        return report


def _levers(config: ModelConfig, weights: dict[str, Matrices], question: Question) -> list[dict[str, Any]]:
    """Each change alone, by what it saves; the last entry is all of them together."""
    vocab = question.change.draft_vocab
    before = _Case(config, weights, question, vocab).floor_us(question.spec_tokens)
    found: list[dict[str, Any]] = []
    everything = weights
    for lever in levers(weights, config, vocab):
        case = _Case(config, changed(weights, config, lever.change), question, lever.change.draft_vocab or vocab)
        saved = before - case.floor_us(question.spec_tokens)
        if saved > 1e-3 * before:
            found.append({"lever": str(lever.change), "saved_ms": saved / 1e3, "risk": lever.risk, "work": lever.work})
            everything = changed(everything, config, lever.change)
            vocab = lever.change.draft_vocab or vocab
    found.sort(key=lambda lever: -lever["saved_ms"])
    if len(found) > 1:
        case = _Case(config, everything, question, vocab)
        saved = before - case.floor_us(question.spec_tokens)
        found.append({"lever": "all of these", "saved_ms": saved / 1e3, "risk": "", "work": ""})
    return [lever | {"share": lever["saved_ms"] * 1e3 / before} for lever in found]


def _choices(config: ModelConfig, weights: dict[str, Matrices], question: Question) -> dict[str, Any]:
    """The rate at the floor for each number of drafts that the acceptance speaks of."""
    shares = question.acceptance or ()
    case = _Case(config, weights, question, question.change.draft_vocab)
    choices: list[Choice] = []
    for k in range(len(shares) + 1 if config.has_drafter else 1):
        step = case.floor_us(k) + case.exchanges_us(k)[0]
        tokens = tokens_per_step(shares, k)
        choices.append(Choice(k, tokens, step, question.sequences * tokens * 1e6 / step))
    listed = [
        {
            "spec_tokens": c.spec_tokens,
            "tokens_per_step": c.tokens_per_step,
            "floor_ms": c.step_us / 1e3,
            "tokens_per_s": c.tokens_per_s,
        }
        for c in choices
    ]
    return {"acceptance": list(shares), "best": best_choice(choices).spec_tokens, "choices": listed}


def _formats(weights: dict[str, Matrices]) -> dict[str, list[str]]:
    found: dict[str, dict[str, int]] = {}
    for name, weight in weights.items():
        by_format = found.setdefault(weight_component(name), {})
        by_format[weight.format] = by_format.get(weight.format, 0) + weight.num_bytes
    return {
        component: [name for name, _ in sorted(sizes.items(), key=lambda item: -item[1])]
        for component, sizes in found.items()
    }


def memory(
    checkpoint: Checkpoint,
    question: Question,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    block_size: int,
    table: str,
    available_gib: float | None,
    host_gib: float,
    state_copies: int = 0,
    num_gpu_blocks_override: int | None = None,
) -> MemoryPlan:
    """The engine's own plan for this device. Raises UserError for what no engine could be asked."""
    config = checkpoint.config
    engine = EngineConfig(
        spec_tokens=question.spec_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
    )
    engine.check(config)
    place = next((known for known in TABLE_PLACES if known == table.replace("gpu", "device")), None)
    if place is None:
        raise UserError(f"--ngram-table must be one of {', '.join(TABLE_PLACES)}; got {table!r}")
    placement = Placement(
        table=place,
        kv_dtype="fp8" if question.kv_bytes == 1 else "bf16",
        state_copies=state_copies,
    )
    weights = _changed(fold(checkpoint.weights), config, question.change)
    return plan_memory(
        config, weights, engine, _capacity(question.device, available_gib, host_gib), placement, question.shards
    )


def _changed(weights: dict[str, Matrices], config: ModelConfig, change: Change) -> dict[str, Matrices]:
    try:
        return changed(weights, config, change)
    except ValueError as error:
        raise UserError(f"--what-if {change}: {error}") from None


def _capacity(device: Hardware, available_gib: float | None, host_gib: float) -> Capacity:
    given = None if available_gib is None else int(available_gib * GIB)
    if device.unified:
        capacity = unified_capacity({"MemAvailable": given or device.idle_bytes or device.memory_bytes})
    else:
        capacity = discrete_capacity(given or device.memory_bytes, int(host_gib * GIB))
    return capacity
