"""bench step: how long a decode step takes beside the least it could, offline, in one process, without a server.

A cell is one number of sequences, drafts and context. Its time is the wall time of the engine's own loop over
consecutive steps, sequences with different random prompts in every slot, nothing left out. Random weights could route
kinder than real ones, so a second, untimed run of the same cell counts the distinct experts of each step.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.engine import Engine, check_memory, open_device
from stepfloor.errors import UserError
from stepfloor.model.load import load_model
from stepfloor.model.model import Layer, Model
from stepfloor.model.random import RandomTensors
from stepfloor.request import Request, SamplingParams
from stepfloor.roofline.bytes import distinct_experts, distinct_experts_deviation
from stepfloor.roofline.floor import Floor, checkpoint_step_bytes
from stepfloor.roofline.groups import pass_group
from stepfloor.roofline.planned import CASES, WeightFormats
from stepfloor.step.bandwidth import read_bandwidth_gbps
from stepfloor.tools.bench import losses
from stepfloor.tools.bench.losses import Loss, losses_of
from stepfloor.tools.bench.profile import Profile, profile_steps
from stepfloor.weights.checkpoint import Checkpoint
from stepfloor.weights.synthetic import synthetic_checkpoint

WARM_UP_STEPS = 16
PROFILED_STEPS = 8
SHOWN_OPERATORS = 24
UNIFORM_TOLERANCE = 0.1


def _as_released(case: WeightFormats) -> WeightFormats:
    """A case of the byte model in formats that releases have: it leaves out the scales of FP8, they cannot."""
    channel = {"fp8_tensor": "fp8_channel"}
    return replace(
        case,
        dense=channel.get(case.dense, case.dense),
        head=channel.get(case.head, case.head),
        draft_head=channel.get(case.draft_head, case.draft_head),
        mtp_dense=channel.get(case.mtp_dense, case.mtp_dense),
        mtp_experts="fp8_block" if case.mtp_experts == "fp8_tensor" else case.mtp_experts,
    )


# fp8: the official FP8 release, whose dense matrices and heads are bf16
MIXES: dict[str, WeightFormats] = {
    **{name: _as_released(case) for name, case in CASES.items()},
    "fp8": WeightFormats("fp8_block", mtp_experts="fp8_block"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured cell; times in milliseconds, bandwidth in GB/s.

    acceptance  tokens a sequence is made to take a step; None: what the target accepted
    experts     distinct experts of a layer: least of a step, mean over all, most of a step; None: not counted
    expected_experts  under uniform routing; void  why the cell does not count, or None
    losses      time beyond the bytes by kind of kernel, where a profile was taken
    """

    format: str
    sequences: int
    spec_tokens: int
    context: int
    acceptance: int | None
    steps: int
    step_ms: float
    median_ms: float
    p95_ms: float
    tokens_per_step: float
    tokens_per_s: float
    step_bytes: float
    bandwidth_gbps: float
    floor_ms: float
    fraction: float
    experts: tuple[float, float, float] | None
    expected_experts: float
    void: str | None
    profile: Profile | None
    losses: tuple[Loss, ...] = ()

    def line(self) -> str:
        """One row of the table."""
        kernels = f"{self.profile.kernels:7.0f}" if self.profile else "      -"
        counted = "     -" if self.experts is None else f"{self.experts[1]:6.1f}"
        return (
            f"{self.format:>3} {self.sequences:4} {self.spec_tokens:2} {self.context:7} {self.step_ms:8.3f} "
            f"{self.median_ms:8.3f} {self.p95_ms:8.3f} {self.tokens_per_s:9.1f} {self.step_bytes / 1e9:7.2f} "
            f"{self.floor_ms:7.3f} {100 * self.fraction:6.1f} % {counted}/{self.expected_experts:<6.1f} "
            f"{kernels}" + (f"  VOID: {self.void}" if self.void else "")
        )


HEADER = "fmt  seq  k context  step ms   median      p95  tokens/s      GB floor ms   floor % experts/uniform  kernels"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every combination of sequences, spec_tokens and contexts.

    acceptance  tokens forced a step, 1 to k + 1, where k allows it; None measures what the model accepts
    steps       timed steps of a cell
    max_model_len  tokens that the engine's tables have room for; None for as many as the cell needs
    """

    format: str
    sequences: tuple[int, ...]
    spec_tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    acceptance: int | None
    steps: int
    device: str
    prefill_tokens: int = 0
    kv_cache_dtype: str = "auto"
    ngram_table: str = "device"
    count_experts: bool = True
    profile: bool = True
    max_model_len: int | None = None


def random_checkpoint(config: ModelConfig, formats: WeightFormats) -> Checkpoint:
    """A checkpoint in no file, in a mix of formats; the drafter has a head of its own where its format is another."""

    def format_of(name: str) -> str:
        if name == "mtp.lm_head":
            return "" if formats.draft_head == formats.head else formats.draft_head
        drafter = name.startswith("mtp.")
        return {
            "experts": formats.mtp_experts if drafter else formats.experts,
            "dense": formats.mtp_dense if drafter else formats.dense,
            "head": formats.head,
            "table": formats.table,
        }.get(pass_group(name), "bf16")

    return synthetic_checkpoint(config, format_of)


def bench_steps(
    checkpoint: Checkpoint,
    plan: Plan,
    say: Callable[[str], None],
    drawn: bool,
    measured: Callable[[list[Cell], dict[str, float]], None] | None = None,
) -> tuple[list[Cell], dict[str, float]]:
    """Load once, measure every cell; also the seconds that loading took and prefill's tokens/s.

    drawn     whether the weights are drawn on the device; else they are those of the checkpoint's files
    measured  called with all there is so far: after loading, after each cell, after the prefill
    Raises UserError for a cell that the model or the device cannot hold.
    """
    for k in plan.spec_tokens:  # before minutes of loading
        _check_lengths(plan, k, checkpoint.config.max_position_embeddings)
        _config(plan, max(plan.sequences), k, max(plan.contexts)).check(checkpoint.config)
    open_device(plan.device)
    begin = time.perf_counter()
    longest = max(_model_len(plan, k, context) for k in plan.spec_tokens for context in plan.contexts)
    longest = max(longest, plan.prefill_tokens + 32)
    widest = EngineConfig(spec_tokens=max(plan.spec_tokens), max_model_len=longest)
    if plan.device != "cpu":
        widest_sequences, most_drafts = max(plan.sequences), max(plan.spec_tokens)
        memory = check_memory(checkpoint, _config(plan, widest_sequences, most_drafts, max(plan.contexts)))
        for line in memory.lines:
            say(f"memory: {line.component} {line.nbytes / 2**30:.3f} GiB on the {line.where}")
        total, available = memory.total("device") / 2**30, memory.available("device") / 2**30
        say(f"memory: {total:.2f} of {available:.2f} GiB on the device")
    source = RandomTensors(checkpoint.config, torch.device(plan.device)) if drawn else None
    model = load_model(
        checkpoint,
        widest.positions,
        plan.device,
        lambda done, total: say(f"layer {done} of {total}") if done % 12 == 0 else None,
        drafter=max(plan.spec_tokens) > 0,
        decode_rows=max(plan.sequences) * (max(plan.spec_tokens) + 1),
        table_on="cpu" if plan.ngram_table == "pinned" else None,
        source=source,
    )
    _settle(plan.device)
    facts = {"load_s": time.perf_counter() - begin, "bandwidth_gbps": read_bandwidth_gbps(plan.device)}
    say(f"loaded in {facts['load_s']:.1f} s; reads {facts['bandwidth_gbps']:.0f} GB/s")
    cells: list[Cell] = []
    report = measured or (lambda cells, facts: None)
    report(cells, facts)
    for context in plan.contexts:
        for sequences in plan.sequences:
            for k in plan.spec_tokens:
                cells.append(_measure(checkpoint, model, plan, sequences, k, context, facts["bandwidth_gbps"]))
                report(cells, facts)
    if plan.prefill_tokens:
        facts["prefill_tokens_per_s"] = _prefill(checkpoint, model, plan)
        say(f"prefill of {plan.prefill_tokens} tokens: {facts['prefill_tokens_per_s']:.0f} tokens/s")
        report(cells, facts)
    return cells, facts


def _measure(
    checkpoint: Checkpoint, model: Model, plan: Plan, sequences: int, k: int, context: int, bandwidth_gbps: float
) -> Cell:
    forced = None if plan.acceptance is None or k == 0 else min(plan.acceptance, k + 1) - 1
    config = _config(plan, sequences, k, context)
    stripped = model if k else replace(model, drafter=None)

    def engine(of: Model) -> Engine:
        return Engine(checkpoint, config, model=of, forced_accept=forced, stage_sets=(frozenset(),))

    timed = engine(stripped)
    marks = list(_steps(timed, plan, sequences, k, context, forced))
    lengths = [b - a for a, b in pairwise(marks)]
    seconds = (marks[-1] - marks[0]) / len(lengths)
    delivered = timed.counters.delivered_per_step
    del timed  # its cache and graphs, before the next engine makes its own
    profile = None
    if plan.profile and plan.device != "cpu":
        profile = profile_steps(
            engine(stripped), lambda of: _steps(of, replace(plan, steps=PROFILED_STEPS), sequences, k, context, forced)
        )
    expected = distinct_experts(
        sequences * (k + 1), checkpoint.config.num_experts, checkpoint.config.num_experts_per_tok
    )
    measured = None
    void = None
    if plan.count_experts:
        counter = ExpertCounter(stripped, sequences * (k + 1))
        counting = engine(replace(stripped, on_routed=counter))
        for _ in _steps(counting, plan, sequences, k, context, forced, counter.begin):
            pass
        measured = counter.counted(plan.steps)
        void = why_void(measured, sequences * (k + 1), checkpoint.config)
    step = checkpoint_step_bytes(checkpoint.config, checkpoint.weights, sequences, k, context)
    floor = Floor(step, bandwidth_gbps)
    return Cell(
        plan.format,
        sequences,
        k,
        context,
        None if forced is None else forced + 1,
        len(lengths),
        seconds * 1e3,
        statistics.median(lengths) * 1e3,
        statistics.quantiles(lengths, n=20)[-1] * 1e3,
        delivered,
        sequences * delivered / seconds,
        step.total,
        bandwidth_gbps,
        floor.step_us / 1e3,
        floor.fraction(seconds * 1e6),
        measured,
        expected,
        void,
        profile,
        ()
        if profile is None
        else losses_of(profile, checkpoint.config, checkpoint.weights, sequences, k, context, bandwidth_gbps),
    )


def _steps(
    engine: Engine,
    plan: Plan,
    sequences: int,
    k: int,
    context: int,
    forced: int | None,
    at_start: Callable[[], None] | None = None,
) -> Iterator[float]:
    """Run a cell; the time at which each timed step's ids arrived, one more than there are steps."""
    per_step = 1 if forced is None else forced + 1
    prompt = _prompt_tokens(plan, k, context)
    make = torch.Generator().manual_seed(1234)
    last = f"cell-{sequences - 1}"
    for i in range(sequences):
        ids = torch.randint(0, engine.vocab_size, (prompt,), generator=make).tolist()
        # every sequence outlives the timed steps of the last one to begin
        tokens = 1 + (WARM_UP_STEPS + plan.steps + 3 * sequences + 4) * per_step * (k + 1 if forced is None else 1)
        tokens = min(tokens, engine.config.max_model_len - prompt)
        engine.submit(Request(f"cell-{i}", tuple(ids), SamplingParams(temperature=0.0, seed=i), tokens))
    arrived = 0
    for piece in engine.run():
        if piece.request_id != last or not piece.token_ids:
            continue
        # the last sequence to begin: from here on every step serves them all
        arrived += 1
        if arrived == WARM_UP_STEPS and at_start is not None:
            at_start()
        if arrived >= WARM_UP_STEPS:
            yield time.perf_counter()
        if arrived == WARM_UP_STEPS + plan.steps:
            break
    for i in range(sequences):
        engine.cancel(f"cell-{i}")
    for _ in engine.run():
        pass


def why_void(counted: tuple[float, float, float], rows: int, config: ModelConfig) -> str | None:
    """What keeps a cell from counting: routing that is not uniform, in the mean or in one step; None if nothing does.

    counted  distinct experts a layer, least of a step, mean, most of a step
    A step may be off by UNIFORM_TOLERANCE, or by five deviations where layers and experts are few.
    """
    least, mean, most = counted
    routing = rows, config.num_experts, config.num_experts_per_tok
    expected, deviation = distinct_experts(*routing), distinct_experts_deviation(*routing)
    room = max(UNIFORM_TOLERANCE * expected, 5 * deviation / config.num_hidden_layers**0.5)
    if abs(mean - expected) <= UNIFORM_TOLERANCE * expected and expected - room <= least <= most <= expected + room:
        return None
    return (
        f"{least:.1f} to {most:.1f} distinct experts a layer by the step, {mean:.1f} in the mean; "
        f"uniform routing has {expected:.1f}"
    )


class ExpertCounter:
    """Counts the distinct experts of every target layer and step, on the device, inside the captured step.

    Called with each layer's chosen ids; rows of a prompt and of the drafter are left out.
    """

    def __init__(self, model: Model, rows: int) -> None:
        config = model.config
        self._rows = rows
        self._drafter = None if model.drafter is None else model.drafter.layer
        self._last, self._layers = model.layers[-1], config.num_hidden_layers
        device = model.embedding.device
        self._seen = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self._ones = torch.ones((), dtype=torch.int64, device=device)
        # of the step that is counted, of all; least and most of a step
        self._step, self._total, self._least, self._most = torch.zeros((4, 1), dtype=torch.int64, device=device)
        self.begin()

    def __call__(self, layer: Layer, ids: Tensor) -> None:
        if layer is self._drafter or ids.shape[0] != self._rows:
            return
        self._seen.zero_()
        self._seen[ids.flatten()] = self._ones
        self._step += self._seen.sum()
        if layer is self._last:
            self._total += self._step
            torch.minimum(self._least, self._step, out=self._least)
            torch.maximum(self._most, self._step, out=self._most)
            self._step.zero_()

    def begin(self) -> None:
        """Forget what was counted so far."""
        for count, value in ((self._step, 0), (self._total, 0), (self._least, 2**62), (self._most, 0)):
            count.fill_(value)

    def counted(self, steps: int) -> tuple[float, float, float]:
        """Distinct experts of a layer: in the step with the least, in the mean over so many, in that with the most."""
        return (
            int(self._least) / self._layers,
            int(self._total) / (steps * self._layers),
            int(self._most) / self._layers,
        )


def _prefill(checkpoint: Checkpoint, model: Model, plan: Plan) -> float:
    """Tokens a second of one prompt, the first token's drawing included; the best of three."""
    k = max(plan.spec_tokens)
    config = EngineConfig(
        spec_tokens=k,
        max_model_len=plan.prefill_tokens + 32,
        max_num_batched_tokens=plan.prefill_tokens,
        kv_cache_dtype=cast(Any, plan.kv_cache_dtype),  # check refuses what is no choice
        device=plan.device,
    )
    engine = Engine(checkpoint, config, model=model, stage_sets=(frozenset(),))
    make = torch.Generator().manual_seed(99)
    best = float("inf")
    for i in range(3):
        ids = torch.randint(0, engine.vocab_size, (plan.prefill_tokens,), generator=make).tolist()
        _settle(plan.device)
        begin = time.perf_counter()
        engine.submit(Request(f"prefill-{i}", tuple(ids), SamplingParams(temperature=0.0, seed=0), 1))
        for _ in engine.run():
            pass
        best = min(best, time.perf_counter() - begin)
    return plan.prefill_tokens / best


def _config(plan: Plan, sequences: int, k: int, context: int) -> EngineConfig:
    return EngineConfig(
        spec_tokens=k,
        max_num_seqs=sequences,
        max_model_len=_model_len(plan, k, context),
        max_num_batched_tokens=2048,
        kv_cache_dtype=cast(Any, plan.kv_cache_dtype),  # check refuses what is no choice
        ngram_table=cast(Any, plan.ngram_table),
        device=plan.device,
    )


def _taken(plan: Plan, k: int) -> int:
    """Tokens that the timed steps add to a sequence, at most."""
    per_step = k + 1 if plan.acceptance is None else min(plan.acceptance, k + 1)
    return (WARM_UP_STEPS + plan.steps) * per_step


def _prompt_tokens(plan: Plan, k: int, context: int) -> int:
    """A prompt such that the middle of the timed steps has the wanted context."""
    return max(8, context - _taken(plan, k) // 2)


def _model_len(plan: Plan, k: int, context: int) -> int:
    return plan.max_model_len or _needed_len(plan, k, context)


def _needed_len(plan: Plan, k: int, context: int) -> int:
    return _prompt_tokens(plan, k, context) + _taken(plan, k) + 64 * (k + 1) + 8


def _check_lengths(plan: Plan, k: int, most: int) -> None:
    """Raises UserError where a cell does not end within --max-model-len, or within the model's context, `most`."""
    context = max(plan.contexts)
    needed, given = _needed_len(plan, k, context), plan.max_model_len
    cell = f"--context {context} with {plan.steps} steps of {k} drafts needs {needed} tokens"
    if given is not None and given < needed:
        raise UserError(f"{cell}, and --max-model-len is {given}; raise it, or take fewer --steps")
    if given is None and needed > most:
        raise UserError(f"{cell}, and the model's context is {most}; take fewer --steps, or a shorter --context")


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def run_and_report(checkpoint: Checkpoint, plan: Plan, drawn: bool, commit: str, output: Path | None) -> None:
    """Measure and print: progress on standard error, the table and the JSON line on standard output.

    A row of the table is printed, and the file at `output` replaced, whenever a cell is done: a run that is cut leaves
    what it measured.
    """

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    name = "cpu" if plan.device == "cpu" else torch.cuda.get_device_name(plan.device)
    head = {"device": name, "torch": torch.__version__, "commit": commit, "plan": asdict(plan)}

    def line(cells: list[Cell], facts: dict[str, float]) -> str:
        return json.dumps(head | {"facts": facts, "cells": [asdict(cell) for cell in cells]}, separators=(",", ":"))

    printed = 0

    def measured(cells: list[Cell], facts: dict[str, float]) -> None:
        nonlocal printed
        for cell in cells[printed:]:
            print(cell.line() if printed else f"{HEADER}\n{cell.line()}", flush=True)
            printed += 1
        if output is not None:
            _replace(output, line(cells, facts) + "\n")

    cells, facts = bench_steps(checkpoint, plan, say, drawn, measured)
    for cell in cells:
        if cell.profile is not None:
            print(where_it_went(cell, cell.profile))
    print(line(cells, facts))


def _replace(path: Path, text: str) -> None:
    """Put a text in a file's place, whole or not at all."""
    beside = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(text)
    beside.replace(path)


def where_it_went(cell: Cell, profile: Profile) -> str:
    """The time of a cell's step: by kind of kernel beside its bytes, largest loss first, then by kernel."""
    waits = ", ".join(f"{name} x{count}" for name, count in profile.synchronising) or "none"
    lines = [
        f"{cell.sequences} sequences, k={cell.spec_tokens}, context {cell.context}: {profile.kernels:.1f} kernels and "
        f"{profile.copies:.1f} copies a step, {profile.graph_launches:.2f} graph launches; waiting calls: {waits}; "
        f"pageable copies: {profile.pageable_copies}; between steps {profile.gap_us:.1f} us idle, inside "
        f"{profile.idle_us:.1f} us"
    ]
    lines += [losses.HEADER, *(loss.line() for loss in cell.losses)]
    for operator in profile.operators[:SHOWN_OPERATORS]:
        lines.append(f"  {operator.us:8.1f} us {operator.calls:6.1f} calls  {operator.name[:90]}")
    return "\n".join(lines)
