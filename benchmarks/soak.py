"""A long generation of the shipped model: nothing turns infinite, and the recurrent state is what float64 makes of it.

    PYTHONPATH=src python3 -m benchmarks.soak --tokens 20000 --device cuda
    PYTHONPATH=src python3 -m benchmarks.soak --tokens 4000 --model full

One sequence, sampled, through the engine's own loop, once for each --spec-tokens: of the shipped model with a longer
rotary table, or of eight random layers of full width (six delta nets of 48 heads of 128). Values that are not finite
are counted on the device: in all logits of every step, the drafter's too, and every --every steps in all state tensors.
After each step the rows that it leaves pending are copied: projected q, k, v and the gates, what the delta-net kernels
read. From them come the operands of the rule, by the reference's own operations, and float64 runs the rule again from
the state after the prompt. At a few places on the way and at the end the kernel's float32 state is compared with it.

The bound. One row takes a column m of a head's state [K, V] to

    m' = d m;  e = k . m';  u = beta (v - e);  m <- m' + k u,     that is  m <- d (I - beta k k^T) m + beta v k

As |k| <= 1 and 0 <= beta <= 1, I - beta k k^T lengthens no vector, so an error E of the column obeys
|E| <- d |E| + r: what roundings add is forgotten as the state is. With w = 2**-24, the roundings of one row add at most

    r = w ((1 + 4 + 8 |log d|) |m'|      the product with d; expf and the product in its argument, two libraries
         + beta (K + 1) |m'|             the sum over K, in any order
         + 3 |u| + |m|                   v - e, times beta, times k, and the last sum
         + beta (K + 8) (2 |e| + |v|))   the unit vector k, whose sum of squares has another order in the kernel

to first order in w; 1 % is added for the rest. The bf16 values that k, v and beta come from are taken as equal: the
operations before those roundings are the same. The operands are probed for that, by the kernel itself: from a state of
zero one replayed row leaves k u.
"""

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor

import stepfloor
from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.engine import Engine
from stepfloor.kernels._delta import DeltaConstants
from stepfloor.kernels._torch import DeltaRows, delta_rows
from stepfloor.kernels.gdn_decode import gdn_decode
from stepfloor.model.load import load_model
from stepfloor.model.model import LinearAttention, Model, Projection
from stepfloor.model.random import RandomTensors
from stepfloor.request import Request, SamplingParams
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.tools.bench.step import MIXES, random_checkpoint
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint

FULL = Path(stepfloor.__file__).parent / "shipped" / "full_config.json"
SHIPPED = Path(stepfloor.__file__).parent / "shipped"
PROMPT = "def main("
ROOM = 64  # positions beside the generated ones: the prompt, and drafts past the end
SLOT = 0  # the only sequence's
ROUNDING = 2.0**-24
HIGHER_ORDER = 1.01
PROBED_ROWS = 256
TINY = 1e-36  # below, float32 may flush to zero
BF16_STEP = 2.0**-16  # operands that differ by more than this of themselves were rounded to other bf16 values


@dataclass
class Recording:
    """What a run left: by delta-net layer unless said otherwise.

    history   [taps - 1, C] rows before the first recorded one; start  [HV, K, V] state before it
    rows      [steps, R, C], of which counts[step] were kept; gates  [steps, R, 2 HV]
    counts    [steps] int64
    states    (steps whose rows are in it, [layers, HV, K, V]) taken on the way
    bad       values that were not finite, of all logits and looks
    """

    constants: list[DeltaConstants]
    bad: Tensor
    history: list[Tensor] = field(default_factory=list)
    start: list[Tensor] = field(default_factory=list)
    rows: list[list[Tensor]] = field(default_factory=list)
    gates: list[list[Tensor]] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    states: list[tuple[int, Tensor]] = field(default_factory=list)
    looks: int = 0


@dataclass(frozen=True)
class Compared:
    """A state beside float64, after so many rows: the largest |difference| of a column over its bound, and over |m|."""

    rows: int
    ratio: float
    relative: float
    layer: int


@dataclass(frozen=True)
class Result:
    """One run. probed operands were looked at, `other` of them come from other bf16 values than the kernel's."""

    spec_tokens: int
    tokens: int
    steps: int
    seconds: float
    accepted_per_step: float
    looks: int
    not_finite: int
    finish_reason: str
    probed: int
    other: int
    compared: tuple[Compared, ...]

    @property
    def passed(self) -> bool:
        """Whether the run was finite to its end and every state is within its bound."""
        return (
            self.finish_reason == "length"
            and self.not_finite == 0
            and bool(self.compared)
            and all(c.ratio <= 1 for c in self.compared)
        )

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"k={self.spec_tokens}: {self.tokens} tokens in {self.steps} steps, {self.seconds:.1f} s, "
            f"{self.accepted_per_step:.2f} rows kept a step; ended by {self.finish_reason}; {self.not_finite} values "
            f"not finite in {self.looks} looks; {self.other} of {self.probed} probed operands from other bf16 values"
        ]
        for c in self.compared:
            lines.append(
                f"  after {c.rows:6} rows: {c.ratio:.4f} of the bound (layer {c.layer}), {c.relative:.2e} of the column"
            )
        lines.append(f"  {'passed' if self.passed else 'FAILED'}")
        return lines


def long_checkpoint(tokens: int) -> Checkpoint:
    """The shipped model with positions for so many tokens: its rotary tables go on, and nothing else knows a limit."""
    checkpoint = open_checkpoint(SHIPPED)
    longest = max(checkpoint.config.max_position_embeddings, tokens + ROOM)
    return replace(checkpoint, config=replace(checkpoint.config, max_position_embeddings=longest))


def drawn(source: Path, layers: int, tokens: int, drafts: int, device: str) -> tuple[Checkpoint, Model]:
    """The first layers of a configuration with random weights in format a and a small n-gram table."""
    config = ModelConfig.read(source)
    config = replace(
        config,
        layer_types=config.layer_types[:layers],
        ngram_vocab_size_base=min(config.ngram_vocab_size_base, 20_011),
        max_position_embeddings=max(config.max_position_embeddings, tokens + ROOM),
    )
    checkpoint = random_checkpoint(config, MIXES["a"])
    positions = EngineConfig(spec_tokens=drafts, max_model_len=tokens + ROOM).positions
    tensors = RandomTensors(config, torch.device(device))
    return checkpoint, load_model(checkpoint, positions, device, decode_rows=drafts + 1, source=tensors)


def record(
    checkpoint: Checkpoint,
    tokens: int,
    k: int,
    device: str,
    every: int,
    snapshots: int,
    say: Callable[[str], None],
    model: Model | None = None,
) -> tuple[Recording, Engine, dict[str, object]]:
    """Generate so many tokens and keep what the delta-net layers read.

    model  of the checkpoint, with a drafter; None reads it from its files
    """
    config = EngineConfig(spec_tokens=k, max_num_seqs=1, max_model_len=tokens + ROOM, device=device)
    prompt = tuple(Tokenizer.load(SHIPPED).encode(PROMPT))
    if model is None:
        model = load_model(checkpoint, config.positions, device, decode_rows=k + 1)
    if k == 0:
        model = replace(model, drafter=None)
    found = Recording(constants_of(model), torch.zeros((), dtype=torch.int64, device=device))
    engine = Engine(checkpoint, config, model=watched(model, found.bad))
    cache = engine.step.cache
    engine.submit(Request("soak", prompt, SamplingParams(temperature=0.8, top_p=0.95, seed=1), tokens))
    delivered, next_snapshot, reason = 0, tokens // snapshots, "nothing"
    begin = said = time.perf_counter()
    while engine.has_work():
        engine.advance()
        if engine.under_way is not None and SLOT in engine.under_way[0].decodes:
            keep(found, engine)
            step = len(found.counts)
            if step % every == 0:
                found.looks += 1
                look(found, engine)
            if delivered >= next_snapshot:
                found.states.append((step - 1, torch.stack([state[SLOT] for state in cache.state])))
                next_snapshot += tokens // snapshots
        while engine.pieces:
            piece = engine.pieces.popleft()
            delivered += len(piece.token_ids)
            reason = piece.finish_reason or reason
        if time.perf_counter() - said > 5:
            said = time.perf_counter()
            say(f"k={k}: {delivered} of {tokens} tokens, {said - begin:.0f} s")
    found.states.append((len(found.counts) - 1, torch.stack([state[SLOT] for state in cache.state])))
    found.looks += 1
    look(found, engine)
    facts = {"tokens": delivered, "steps": len(found.counts), "reason": reason, "seconds": time.perf_counter() - begin}
    return found, engine, facts


class Watched(Model):
    """A model that counts, inside the captured step, logits that are not finite. Make it with `watched`."""

    bad: Tensor

    def logits(self, hidden: Tensor, head: Projection | None = None) -> Tensor:
        """See Model."""
        out = Model.logits(self, hidden, head)
        self.bad.add_((~torch.isfinite(out)).sum())
        return out


def watched(model: Model, bad: Tensor) -> Watched:
    """The same model; bad [] int64 on its device is where it counts."""
    made = Watched(**{f.name: getattr(model, f.name) for f in fields(model)})
    object.__setattr__(made, "bad", bad)  # a model is frozen
    return made


def constants_of(model: Model) -> list[DeltaConstants]:
    """Of the delta-net layers, in order."""
    return [layer.attention.constants for layer in model.layers if isinstance(layer.attention, LinearAttention)]


def keep(found: Recording, engine: Engine) -> None:
    """Queue copies of what the step that was queued last left pending."""
    cache = engine.step.cache
    history = found.constants[0].history
    if not found.counts:
        # a first decode step has nothing to replay: the state is still the prompt's
        found.history = [rows[SLOT, :history].clone() for rows in cache.raw_rows]
        found.start = [state[SLOT].clone() for state in cache.state]
    found.rows.append([rows[SLOT, history:].clone() for rows in cache.raw_rows])
    found.gates.append([gates[SLOT].clone() for gates in cache.gate_rows])
    found.counts.append(engine.step.state.pending[SLOT].clone())


def look(found: Recording, engine: Engine) -> None:
    """Queue a count of values that are not finite in everything the sequence left."""
    cache = engine.step.cache
    # pages are allocated as zeros and hold what was written since
    kept = (*cache.state, *cache.raw_rows, *cache.gate_rows, *cache.keys, *cache.values, *cache.block_keys)
    for tensor in (*kept, *cache.raw_keys, cache.ngram_rows):
        looked = tensor if tensor.dtype != torch.float8_e4m3fn else tensor.float()
        found.bad += (~torch.isfinite(looked)).sum()


@dataclass(frozen=True)
class Operands:
    """Of all layers: key [L, T, HV, K], value [L, T, HV, V], log_decay and beta [L, T, HV], float32; ends of steps."""

    windows: list[Tensor]
    gates: list[Tensor]
    rows: list[DeltaRows]
    ends: list[int]


@torch.inference_mode()
def operands_of(found: Recording) -> Operands:
    """The operands of the rule for every kept row."""
    counts = torch.stack(found.counts).tolist()
    windows, gates, rows = [], [], []
    kept = torch.arange(found.rows[0][0].shape[0])[None] < torch.tensor(counts)[:, None]  # [steps, R]
    for layer, constants in enumerate(found.constants):
        mask = kept.to(found.history[layer].device)
        raw = torch.stack([step[layer] for step in found.rows])[mask]
        windows.append(torch.cat((found.history[layer], raw)))
        gates.append(torch.stack([step[layer] for step in found.gates])[mask])
        rows.append(delta_rows(windows[-1], gates[-1], constants))
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return Operands(windows, gates, rows, ends)


@torch.inference_mode()
def compare(found: Recording, operands: Operands, say: Callable[[str], None]) -> tuple[Compared, ...]:
    """Run the rule in float64 and hold every kept state beside it."""
    key = torch.stack([rows.key for rows in operands.rows]).transpose(0, 1)  # [T, L, HV, K]
    value = torch.stack([rows.value for rows in operands.rows]).transpose(0, 1)
    log_decay = torch.stack([rows.log_decay for rows in operands.rows]).transpose(0, 1)
    beta = torch.stack([rows.beta for rows in operands.rows]).transpose(0, 1)
    m = torch.stack(found.start).double()  # [L, HV, K, V]
    size = m.shape[2]
    bound = torch.zeros_like(m[:, :, 0])  # [L, HV, V]
    wanted = {operands.ends[steps]: state for steps, state in found.states}
    results: list[Compared] = []
    begin = said = time.perf_counter()
    for t in range(max(wanted)):
        # what the kernel multiplies by is the float32 exponential
        decay = log_decay[t].exp().double()[..., None]  # [L, HV, 1]
        k, b = key[t].double(), beta[t].double()[..., None]
        m *= decay[..., None]
        before = m.norm(dim=2)
        e = torch.matmul(k[:, :, None], m).squeeze(2)
        v = value[t].double()
        u = b * (v - e)
        m += k[..., None] * u[:, :, None]
        bound *= decay
        bound += ROUNDING * (
            (5 + 8 * log_decay[t].double().abs()[..., None] + b * (size + 1)) * before
            + 3 * u.abs()
            + m.norm(dim=2)
            + b * (size + 8) * (2 * e.abs() + v.abs())
        )
        if t + 1 in wanted:
            results.append(_compared(t + 1, wanted[t + 1], m, bound * HIGHER_ORDER))
        if time.perf_counter() - said > 5:
            said = time.perf_counter()
            say(f"float64: {t + 1} of {max(wanted)} rows, {said - begin:.0f} s")
    return tuple(results)


def _compared(rows: int, state: Tensor, m: Tensor, bound: Tensor) -> Compared:
    off = (state.double() - m).norm(dim=2)
    ratio = off / (bound + TINY)
    relative = off / m.norm(dim=2).clamp(min=1e-300)
    return Compared(rows, float(ratio.max()), float(relative.max()), int(ratio.flatten(1).max(1).values.argmax()))


@torch.inference_mode()
def probe(found: Recording, operands: Operands) -> tuple[int, int]:
    """Let the kernel replay single rows into states of zero, and compare k u: (operands looked at, other ones)."""
    probed = other = 0
    width = found.rows[0][0].shape[0]
    for constants, window, gates, rows in zip(
        found.constants, operands.windows, operands.gates, operands.rows, strict=True
    ):
        total = gates.shape[0]
        chosen = torch.linspace(0, total - 1, min(total, PROBED_ROWS)).long().to(window.device)
        count, history = chosen.shape[0], constants.history
        raw = window.new_zeros(count, history + width, constants.channels)
        for tap in range(history + 1):
            raw[:, tap] = window[chosen + tap]
        kept = gates.new_zeros(count, width, gates.shape[1])
        kept[:, 0] = gates[chosen]
        state = torch.zeros(count, *found.start[0].shape, device=window.device)
        slots = torch.arange(count, device=window.device)
        empty = window.new_zeros(count, width, constants.columns)
        gdn_decode(empty, state, raw, kept, slots, torch.ones_like(slots), constants)
        u = rows.beta[chosen][..., None] * rows.value[chosen]
        wanted = rows.key[chosen][..., None] * u[:, :, None]
        probed += wanted.numel()
        other += int(((state - wanted).abs() > BF16_STEP * wanted.abs() + TINY).sum())
    return probed, other


def soak(
    checkpoint: Checkpoint,
    tokens: int,
    k: int,
    device: str,
    every: int = 100,
    snapshots: int = 10,
    say: Callable[[str], None] = lambda _: None,
    model: Model | None = None,
) -> Result:
    """Generate, replay, compare."""
    found, _, facts = record(checkpoint, tokens, k, device, every, snapshots, say, model)
    operands = operands_of(found)
    probed, other = probe(found, operands)
    compared = compare(found, operands, say)
    return Result(
        k,
        int(str(facts["tokens"])),
        int(str(facts["steps"])),
        float(str(facts["seconds"])),
        operands.ends[-1] / max(1, len(found.counts)),
        found.looks,
        int(found.bad),
        str(facts["reason"]),
        probed,
        other,
        compared,
    )


def main() -> int:
    """1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--model", choices=("shipped", "full"), default="shipped")
    parser.add_argument("--layers", type=int, default=8, help="of the random model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--spec-tokens", type=lambda s: [int(v) for v in s.split(",")], default=[3, 0])
    parser.add_argument("--every", type=int, default=100, help="steps between looks at all state tensors")
    parser.add_argument("--snapshots", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--limit-s", type=int, default=240, help="give up with a traceback after this long")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit_s, exit=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    name = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu"
    model: Model | None = None
    if options.model == "full":
        drafts = max(options.spec_tokens)
        checkpoint, model = drawn(FULL, options.layers, options.tokens, drafts, options.device)
    else:
        checkpoint = long_checkpoint(options.tokens)
    results: list[Result] = []
    for k in options.spec_tokens:
        results.append(
            soak(checkpoint, options.tokens, k, options.device, options.every, options.snapshots, say, model)
        )
        print("\n".join(results[-1].lines()), flush=True)
        line = json.dumps(
            {
                "device": name,
                "torch": torch.__version__,
                "commit": options.commit,
                "model": options.model,
                "runs": [asdict(r) | {"passed": r.passed} for r in results],
            },
            separators=(",", ":"),
        )
        if options.json is not None:
            options.json.write_text(line + "\n")
    if options.json is None:
        print(line)
    return int(not all(r.passed for r in results))


if __name__ == "__main__":
    sys.exit(main())
