"""What is wrong with plans of the delta net's decode kernel: values, bits of a row and a sequence, windows, repeats.

Part of `benchmarks.delta_net`, which runs `check_family` in a process for each; `benchmarks.delta_many` holds its own
kernels to the same inputs and bounds.
"""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import capture, give_up_after, say
from stepfloor.kernels._delta_fused import DeltaPlan, launch_for, pack_arguments
from stepfloor.kernels._torch import delta_rows, delta_rule
from stepfloor.kernels.gdn_decode import gdn_decode_inputs, gdn_decode_reference

SIZES = (16, 48, 128, 128)  # key heads, value heads, K, V
BASE = DeltaPlan(*SIZES, rows=1, kept=1, silu=False)
CHECK_KEPT = 8


def several(early: int, *plans: tuple[int, int]) -> list[DeltaPlan]:
    """Plans of (columns, parts) to be timed."""
    return [replace(BASE, cols=c, parts=p, early=early) for c, p in plans]


FAMILIES: dict[str, list[DeltaPlan]] = {
    "as before": several(1, (16, 2), (16, 1)),
    "state before the wait": several(2, (16, 1), (8, 1)),
    "replay before the wait": several(3, (16, 1), (16, 2)),
    "replay before the wait, 8 columns": several(3, (8, 1), (8, 2)),
    "32 columns": several(1, (32, 1)) + several(3, (32, 1)),
}
UNIT = 2.0**-24


def name_of(plan: DeltaPlan) -> str:
    """A plan in the table."""
    return f"{plan.cols} columns, {plan.parts} blocks, early {plan.early}"


CHECKED_ROWS = (1, 4)


def checked(plan: DeltaPlan, rows: int) -> DeltaPlan:
    """The plan a candidate is checked with."""
    return replace(plan, rows=rows, kept=CHECK_KEPT)


def check_family(family: str, cache_dir: Path, device: torch.device) -> int:
    """All checks of a family's plans; prints what failed and a digest of the bits."""
    give_up_after(60)
    problems: list[str] = []
    digests: dict[int, str] = {}
    for plan in FAMILIES[family]:
        digest = hashlib.sha256()
        for rows in CHECKED_ROWS:
            for sequences in (2, 16):
                problems += check_step(checked(plan, rows), sequences, cache_dir, device)
        problems += check_text(plan, cache_dir, device, digest)
        problems += check_repeats(checked(plan, 4), cache_dir, device)
        if digests.setdefault(plan.cols, digest.hexdigest()) != digest.hexdigest():
            problems.append(f"{name_of(plan)}: other bits than the family's first plan")
    for problem in problems[:8]:
        say(problem)
    for cols, text in digests.items():
        say(f"bits {cols} {text[:16]}")
    return int(bool(problems))


def model_inputs(sequences: int, rows: int, kept: int, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Operands in the order of pack_arguments, slots scattered, pending rows from none to all, NaN behind them."""
    tensors: dict[str, Any] = gdn_decode_inputs(sequences, kept, *SIZES, torch.bfloat16, str(device))
    make = torch.Generator().manual_seed(seed)
    tensors["slots"] = (torch.randperm(sequences, generator=make) + 1).to(device)
    pending = torch.randint(0, kept + 1, (sequences,), generator=make)
    pending[: min(2, sequences)] = torch.tensor([kept, 0])[: min(2, sequences)]
    for slot, count in zip(tensors["slots"].tolist(), pending.tolist(), strict=True):
        tensors["raw_rows"][slot, 3 + count :] = torch.nan
        tensors["gate_rows"][slot, count:] = torch.nan
    tensors["pending"] = pending.to(device)
    tensors["projected"] = tensors["projected"][:, :rows].contiguous()
    return tensors


def packed_step(inputs: dict[str, Any], out: Tensor) -> bytes:
    """What a launch is given: rows that are kept go back to where pending ones were read."""
    arguments: tuple[Any, ...] = (*inputs.values(), out, inputs["raw_rows"], inputs["gate_rows"])
    return pack_arguments(*arguments)


def run_plan(plan: DeltaPlan, inputs: dict[str, Any], cache_dir: Path, guard: bool = True) -> Tensor:
    """One step, in place; NaN where the kernel does not write, and behind the output, which is looked at if guarded."""
    sequences = inputs["projected"].shape[0]
    held = inputs["projected"].new_full((sequences * plan.rows + 2, plan.heads * plan.value_dim), torch.nan)
    launch = launch_for(plan, sequences, held.device, cache_dir, plan.early < 2)  # else it is not settled
    launch(packed_step(inputs, held))
    if guard and not bool(held[-2:].isnan().all()):
        raise RuntimeError(f"{name_of(plan)} writes past its output")
    return held[:-2].view(sequences, plan.rows, -1)


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Operands that may be changed."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def own_copies(inputs: dict[str, Any]) -> dict[str, Any]:
    """Operands of another layer: what a layer has for itself is copied."""
    own = {name: inputs[name].clone() for name in ("state", "raw_rows", "gate_rows")}
    constants = replace(inputs["constants"], conv_weight=inputs["constants"].conv_weight.clone())
    return inputs | own | {"constants": constants}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, NaN included."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def rule_bound(rows: int, largest: float) -> float:
    """How far a float32 run of the rule strays: 2 K + 8 roundings a row of numbers up to `largest`; errors add up."""
    return rows * (2 * SIZES[2] + 8) * UNIT * largest


def check_step(plan: DeltaPlan, sequences: int, cache_dir: Path, device: torch.device) -> list[str]:
    """One step against the reference, each sequence alone, and its first row alone."""
    inputs = model_inputs(sequences, plan.rows, plan.kept, device)
    wanted, ours = copied(inputs), copied(inputs)
    reference = gdn_decode_reference(**wanted)
    output = run_plan(plan, ours, cache_dir)
    found: list[str] = []
    state, largest = ours["state"], float(wanted["state"].abs().max())
    strict = rule_bound(plan.rows + plan.kept, largest)
    # exponentials of two libraries may put a key, a query or a value on the other side of a bf16 boundary: 2**-7 of one
    # of the numbers in a sum whose largest member bounds the state
    off = (state - wanted["state"]).abs()
    if not float(off.max()) <= strict + 3 * 2.0**-7 * largest or float((off > strict).float().mean()) > 0.05:
        found.append(f"state off by {float(off.max()):.3g}, bound {strict:.3g}")
    reach = reference.float().unflatten(-1, (SIZES[1], -1)).abs().amax(-1, keepdim=True)
    away = (output.float() - reference.float()).unflatten(-1, (SIZES[1], -1)).abs()
    # four roundings to bf16 a step aside each, and the three operands as above
    if not bool((away <= 7 * 2.0**-7 * reach).all()) or float((output != reference).float().mean()) > 0.05:
        share = float((output != reference).float().mean())
        found.append(f"output off by {float((away / reach).max()):.3g} of its head's largest, {share:.1%} differ")
    for name in ("raw_rows", "gate_rows"):
        if not same_bits(ours[name], wanted[name]):
            found.append(f"{name} are not the reference's")
    if not torch.equal(state[0], inputs["state"][0]):
        found.append("a slot outside of the batch changed")
    last = sequences - 1
    alone = copied(inputs)
    for name in ("projected", "slots", "pending"):
        alone[name] = alone[name][last:]
    slot = int(inputs["slots"][last])
    if not same_bits(run_plan(plan, alone, cache_dir)[0], output[last]):
        found.append("a sequence has other bits alone")
    if not torch.equal(alone["state"][slot], state[slot]):
        found.append("a state has other bits alone")
    first = copied(inputs) | {"projected": inputs["projected"][:, :1].contiguous()}
    if not same_bits(run_plan(replace(plan, rows=1), first, cache_dir), output[:, :1]):
        found.append("a row has other bits alone")
    return [f"{name_of(plan)}, {sequences} sequences, {plan.rows} rows: {text}" for text in found]


def check_text(plan: DeltaPlan, cache_dir: Path, device: torch.device, digest: "hashlib._Hash") -> list[str]:
    """60 windows of 4 rows, 1 to 4 of them accepted, beside plain decoding with one row; and beside float64."""
    draw, sequences, windows, width = random.Random(1), 3, 60, 4
    wide, narrow = (checked(plan, rows) for rows in (width, 1))
    speculating = model_inputs(sequences, width, CHECK_KEPT, device)
    for name in ("state", "raw_rows"):
        speculating[name].zero_()
    speculating["pending"].zero_()
    plain = copied(speculating)
    make = torch.Generator(device).manual_seed(2)
    columns = plain["projected"].shape[2]
    text = torch.randn(sequences, windows * width, columns, generator=make, device=device).to(torch.bfloat16)
    rows = torch.arange(windows * width, device=device)
    outputs = text.new_empty((sequences, windows * width, SIZES[1] * SIZES[3]))
    at = [0] * sequences
    for _ in range(windows):
        good = [draw.randint(1, width) for _ in range(sequences)]
        window = torch.randn(sequences, width, columns, generator=make, device=device).to(torch.bfloat16)
        for b in range(sequences):
            window[b, : good[b]] = text[b, at[b] : at[b] + good[b]]
        got = run_plan(wide, speculating | {"projected": window}, cache_dir, guard=False)
        for b in range(sequences):
            outputs[b, at[b] : at[b] + good[b]] = got[b, : good[b]]
            at[b] += good[b]
        speculating["pending"].copy_(torch.tensor(good))
    length = min(at)
    expected = torch.empty_like(outputs)
    for t in range(length):
        row = plain | {"projected": text[:, t : t + 1].contiguous()}
        expected[:, t] = run_plan(narrow, row, cache_dir, guard=False)[:, 0]
        plain["pending"].fill_(1)
    found: list[str] = []
    if not same_bits(outputs[:, :length], expected[:, :length]):
        off = (outputs[:, :length] != expected[:, :length]).flatten(2).any(-1).any(0)
        found.append(f"replay and plain decoding part at row {int(rows[:length][off].min())}")
    digest.update(outputs[:, :length].contiguous().view(torch.int16).cpu().numpy().tobytes())
    digest.update(plain["state"].cpu().numpy().tobytes())
    # plain's state lacks its last row; in float64 from the same rounded operands
    raw, _, gates = text[0, : length - 1].split(plain["constants"].parts, -1)
    window = torch.cat((raw.new_zeros(3, raw.shape[1]), raw))
    operands = delta_rows(window, gates, plain["constants"])
    exact = torch.zeros(SIZES[1], SIZES[2], SIZES[3], dtype=torch.float64, device=device)
    doubled = replace(operands, **{name: getattr(operands, name).double() for name in operands.__slots__})
    delta_rule(doubled, exact, 0, length - 1)
    drift = float((plain["state"][int(plain["slots"][0])].double() - exact).abs().max())
    largest = float(exact.abs().max())
    # a moved operand of some row decays; a few may be alive at once
    if not drift <= rule_bound(length, largest) + 4 * 2.0**-7 * largest:
        found.append(f"state drifts by {drift:.3g} in {length} rows, largest {largest:.3g}")
    say(f"{name_of(plan)}: {windows} windows, {length} rows; largest state {largest:.3g}, off float64 by {drift:.2g}")
    return [f"{name_of(plan)}: {text}" for text in found]


def check_repeats(plan: DeltaPlan, cache_dir: Path, device: torch.device) -> list[str]:
    """The same step 150 times in a graph, restored in between: what races in place shows as other bits."""
    inputs = model_inputs(16, plan.rows, plan.kept, device)
    first = copied(inputs)
    output = run_plan(plan, first, cache_dir).clone()
    work = copied(inputs)
    held = torch.empty_like(output)
    wrong = torch.zeros(4, dtype=torch.int64, device=device)
    # settled: filling `held` is a plain kernel between the restoring copies and this one
    launch = launch_for(plan, 16, device, cache_dir)
    packed = packed_step(work, held)
    launch(packed)
    torch.cuda.synchronize()

    def step() -> None:
        for name in ("state", "raw_rows", "gate_rows"):
            work[name].copy_(inputs[name])
        held.fill_(torch.nan)
        launch(packed)
        pairs = (
            (held, output),
            (work["state"], first["state"]),
            (work["raw_rows"], first["raw_rows"]),
            (work["gate_rows"], first["gate_rows"]),
        )
        for i, (got, wanted) in enumerate(pairs):
            wrong[i] += ((got != wanted) & ~wanted.isnan()).sum()

    graph = capture(step)
    for _ in range(150):
        graph.replay()
    torch.cuda.synchronize()
    counts = dict(zip(("output", "state", "raw_rows", "gate_rows"), wrong.tolist(), strict=True))
    return [f"{name_of(plan)}: in 150 equal steps {counts}"] if any(counts.values()) else []
