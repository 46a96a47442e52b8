"""The gated delta net's kernels on one GPU: right first, then timed; the best decode plan for each shape is printed.

    PYTHONPATH=src python3 -m benchmarks.delta_net [--json FILE] [--only decode prefill portable]

Decode, the CUDA kernel:
1. Every family of plans is checked in a process of its own, at the model's sizes: against the float32 reference, NaN
   around outputs and kept rows, row bits for several batch and row counts, windows of random accepted counts against
   plain decoding bit for bit and against float64, repeated steps in place. What fails or hangs gets no times.
2. CUDA-graph replays of one call a layer, states rotated past the L2, rounds in alternating order, medians.
3. Its cost between the layer's own products: the chain in-projection, delta net, out-projection, less the same chain
   without it. The recommended plan is the cheapest here.
Prefill: the state beside float64, then times of whole calls by number of rows, for several plans, and by kernel.
Portable: the Triton decode kernels beside the reference, then times. A part that fails leaves the others running.
"""

import argparse
import faulthandler
import hashlib
import json
import math
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._delta import prepare
from stepfloor.kernels._delta_fused import DeltaPlan, launch_for, pack_arguments
from stepfloor.kernels._jit import compile_cuda, device_arch
from stepfloor.kernels._stream_product import StreamedWeight, stream_product
from stepfloor.kernels._torch import delta_rows, delta_rule
from stepfloor.kernels.gdn_decode import gdn_decode_inputs, gdn_decode_reference, gdn_decode_triton
from stepfloor.kernels.gdn_prefill import (
    PLAN,
    PrefillPlan,
    chunked_delta_rule,
    gdn_prefill_inputs,
    gdn_prefill_triton,
)
from stepfloor.kernels.linear import linear_repack
from stepfloor.roofline import bytes as roofline_bytes

SIZES = (16, 48, 128, 128)  # key heads, value heads, K, V
BASE = DeltaPlan(*SIZES, rows=1, kept=1, silu=False)
CHECK_KEPT = 8
ROTATED_BYTES = 250e6  # four times the L2
# sequences, new rows, pending rows
TIMED = [(1, 1, 1), (4, 1, 1), (16, 1, 1), (1, 4, 3), (4, 4, 3), (16, 4, 3)]


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
PREFILL_ROWS = (512, 2048, 8192)
PREFILL_PLANS = [
    PLAN,
    replace(PLAN, stages=1),
    replace(PLAN, columns=64),
    replace(PLAN, columns=64, warps=8),
    replace(PLAN, segment_rows=1024),
    replace(PLAN, chunks=False),
]
UNIT = 2.0**-24


def main() -> int:
    """Run the parts; 1 if one fails."""
    options = parse()
    device = torch.device("cuda", 0)
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.perf_counter()
    say(describe(device))
    parts = {"decode": time_decode, "prefill": time_prefill, "portable": time_portable}
    line: dict[str, Any] = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "failed": []}
    for name in options.only:
        try:
            line[name], failed = parts[name](options, device)
            line["failed"] += failed
        except Exception:
            line["failed"].append(name)
            say(f"FAILED {name}\n{traceback.format_exc()[-1500:]}")
        say(f"[{time.perf_counter() - begin:5.1f} s] {name} done\n")
    text = json.dumps(line, separators=(",", ":"))
    if options.json is not None:
        options.json.write_text(text)
    say(text)
    return int(bool(line["failed"]))


def time_decode(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Checks and times of the CUDA kernel; and the families that failed."""
    compile_all(options.cache_dir, device)
    passed = check_all(options.cache_dir)
    say(f"checks done; timed: {', '.join(passed) or 'nothing'}")
    table = [row for shape in TIMED for row in time_shape(*shape, passed, options, device)]
    chain, failed = time_chain(passed, options, device) if options.chain else ({}, [])
    best = report(table, chain)
    failed += [family for family in FAMILIES if family not in passed]
    return {"best": best, "chain": chain, "rows": table}, failed


def time_prefill(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """The state after 600 rows beside float64, then us a call by rows and plan."""
    failed: list[str] = []
    found: dict[str, Any] = {}
    usable: list[PrefillPlan] = []
    for plan in PREFILL_PLANS:
        name = prefill_name(plan)
        try:
            off, largest = prefill_error(plan, device)
        except Exception as error:
            failed.append(f"prefill {name}")
            say(f"FAILED {name}: {str(error)[:300]}")
            continue
        # the bf16 form without its low parts would be off by 2**-8 of the largest; the derived bound is in the tests
        right = off <= 2.0**-11 * largest
        say(f"{'ok    ' if right else 'FAILED'} {name}: state off float64 by {off:.2g}, largest {largest:.3g}")
        if right:
            usable.append(plan)
        else:
            failed.append(f"prefill {name}")
    say(f"{'us a call':46}" + "".join(f"{rows:>10}" for rows in PREFILL_ROWS))
    best: dict[int, tuple[float, str]] = {}
    for plan in usable:
        times = [prefill_us(rows, plan, options.rounds, device) for rows in PREFILL_ROWS]
        found[prefill_name(plan)] = dict(zip(PREFILL_ROWS, times, strict=True))
        say(f"{prefill_name(plan):46}" + "".join(f"{us:10.1f}" for us in times))
        for rows, us in zip(PREFILL_ROWS, times, strict=True):
            best[rows] = min(best.get(rows, (us, prefill_name(plan))), (us, prefill_name(plan)))
    floors = [roofline_bytes.gdn_prefill(rows, *SIZES, 4) / options.bandwidth * 1e6 for rows in PREFILL_ROWS]
    say(f"{'floor':46}" + "".join(f"{us:10.1f}" for us in floors))
    for rows, (us, name) in best.items():
        say(f"best prefill of {rows} rows: {us:.1f} us, {name}")
    if PLAN in usable:
        prefill_kernels(device)
    return found, failed


def prefill_name(plan: PrefillPlan) -> str:
    """A plan in the table."""
    if not plan.chunks:
        return "row by row"
    return f"{plan.columns} columns, {plan.stages} stages, {plan.warps} warps, {plan.segment_rows} rows"


def prefill_error(plan: PrefillPlan, device: torch.device) -> tuple[float, float]:
    """How far the state of three heads is from float64 on the same rounded operands, and its largest value."""
    rows, heads = 600, 3
    inputs: dict[str, Any] = gdn_prefill_inputs(rows, *SIZES, torch.bfloat16, str(device))
    # the first three heads decay slowly, faster, and fast
    a_log = torch.linspace(-5, 1, SIZES[1], device=device).view(3, -1).T.flatten()
    inputs["constants"] = constants = replace(inputs["constants"], a_log=a_log)
    operands = prepare(inputs["projected"][None], inputs["raw_rows"], inputs["slots"], constants, None)
    # three value heads share the first key head
    width, dim = SIZES[0] * SIZES[2], SIZES[2]
    query = operands.mixed[:, :dim].double() * operands.scale[:, :1]
    key = operands.mixed[:, width : width + dim].double() * operands.scale[:, SIZES[0] : SIZES[0] + 1]
    value = operands.mixed[:, 2 * width :].double().unflatten(1, (SIZES[1], -1))[:, :heads].transpose(0, 1)
    state = inputs["state"][1, :heads].double()
    gates = (operands.log_decay[:, :heads].double().T, operands.beta[:, :heads].double().T)
    pair = (query.expand(heads, -1, -1), key.expand(heads, -1, -1))
    exact = chunked_delta_rule(*pair, value, *gates, state)[1]
    gdn_prefill_triton(**inputs, plan=plan)
    return float((inputs["state"][1, :heads].double() - exact).abs().max()), float(exact.abs().max())


def prefill_us(rows: int, plan: PrefillPlan, rounds: int, device: torch.device) -> float:
    """Median time of one call in a graph."""
    inputs: dict[str, Any] = gdn_prefill_inputs(rows, *SIZES, torch.bfloat16, str(device))
    gdn_prefill_triton(**inputs, plan=plan)
    torch.cuda.synchronize()
    graph = capture(lambda: gdn_prefill_triton(**inputs, plan=plan))
    times = medians_us({"call": graph}, 1, rounds)
    return round(times["call"], 1)


def prefill_kernels(device: torch.device) -> None:
    """Where a call of 8192 rows spends its time."""
    inputs: dict[str, Any] = gdn_prefill_inputs(8192, *SIZES, torch.bfloat16, str(device))
    gdn_prefill_triton(**inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gdn_prefill_triton(**inputs)
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:8]:
        say(f"  {event.key[:50]:50} {event.count:4} launches {event.device_time_total:10.1f} us")


def time_portable(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """The Triton decode kernels at the model's sizes and the small model's: beside the reference, then us a call."""
    failed: list[str] = []
    found: dict[str, float] = {}
    for sizes in (SIZES, (2, 4, 64, 64)):
        for sequences, rows, pending in ((1, 1, 1), (4, 4, 3), (16, 1, 1)):
            inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *sizes, torch.bfloat16, str(device))
            inputs["pending"] = torch.full((sequences,), pending, device=device)
            wanted, ours = copied(inputs), copied(inputs)
            reference, output = gdn_decode_reference(**wanted), gdn_decode_triton(**ours)
            share = float((output != reference).float().mean())
            off = float((ours["state"] - wanted["state"]).abs().max() / wanted["state"].abs().max())
            name = f"{sizes[1]} heads of {sizes[3]}, {sequences} x {rows}"
            if share > 0.05 or not off <= 3 * 2.0**-7 or not torch.equal(ours["raw_rows"], wanted["raw_rows"]):
                failed.append(f"portable {name}")
            graph = capture(lambda inputs=inputs: gdn_decode_triton(**inputs))
            found[name] = round(medians_us({"call": graph}, 1, options.rounds)["call"], 1)
            say(f"portable, {name}: {found[name]:.1f} us; {share:.2%} of outputs differ, state off {off:.2g}")
    return found, failed


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bandwidth", type=float, default=4.65e12)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "stepfloor-kernels")
    parser.add_argument("--json", type=Path)
    parts = ["decode", "prefill", "portable"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--no-chain", dest="chain", action="store_false")
    parser.add_argument("--limit-s", type=int, default=240, help="give up with a traceback after this long")
    parser.add_argument("--check", choices=FAMILIES, help="check one family only, here")
    return parser.parse_args()


def describe(device: torch.device) -> str:
    """What the numbers belong to."""
    p = torch.cuda.get_device_properties(device)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{p.name}, {p.multi_processor_count} multiprocessors, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"commit {commit.stdout.strip() or 'unknown'}"
    )


def name_of(plan: DeltaPlan) -> str:
    """A plan in the table."""
    return f"{plan.cols} columns, {plan.parts} blocks, early {plan.early}"


def compile_all(cache_dir: Path, device: torch.device) -> None:
    """Fill the cache from several processes; what does not compile is named and left out by its check."""
    every = [plan for family in FAMILIES.values() for plan in family]
    wanted = {replace(plan, rows=rows, kept=rows) for plan in every for _, rows, _ in TIMED}
    wanted |= {checked(plan, rows) for plan in every for rows in CHECKED_ROWS}
    distinct = {tuple(plan.macros().items()): plan for plan in wanted}
    jobs = [(plan, device_arch(device), cache_dir) for plan in sorted(distinct.values(), key=str)]
    spawn = multiprocessing.get_context("spawn")  # a forked child would share the CUDA context
    with ProcessPoolExecutor(min(14, multiprocessing.cpu_count()), mp_context=spawn) as pool:
        failures = [f for f in pool.map(build, jobs, chunksize=2) if f is not None]
    say(f"{len(jobs)} kernels, {len(failures)} do not compile")
    for failure in failures[:3]:
        say(failure[:1500])


def build(job: tuple[DeltaPlan, str, Path]) -> str | None:
    """Compile one kernel into the cache; what went wrong, if anything."""
    plan, arch, cache_dir = job
    try:
        compile_cuda("gdn_decode.cu", plan.macros(), arch, cache_dir)
    except RuntimeError as error:
        return f"{plan}: {error}"
    return None


# ---------------------------------------------------------------------- is it right


def check_all(cache_dir: Path) -> list[str]:
    """The families that pass. Bits must also agree between families with equally many columns a warp."""

    def check(family: str) -> tuple[str, int, str]:
        command = [sys.executable, "-m", "benchmarks.delta_net", "--check", family, "--cache-dir", str(cache_dir)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=70, check=False)
        except subprocess.TimeoutExpired as late:
            return family, 1, f"hangs\n{late.stdout!r}"
        return family, done.returncode, done.stdout + done.stderr[-1500:]

    passed: list[str] = []
    bits: dict[str, str] = {}
    with ThreadPoolExecutor(3) as pool:
        for family, code, text in pool.map(check, FAMILIES):
            lines = text.splitlines()
            found = dict(line.split()[1:3] for line in lines if line.startswith("bits "))
            strange = [cols for cols, digest in found.items() if bits.setdefault(cols, digest) != digest]
            say(f"{'ok    ' if code == 0 and not strange else 'FAILED'} {family}")
            for line in lines:
                if not line.startswith("bits "):
                    say(f"       {line}")
            if strange:
                say(f"       other bits than an earlier family with {', '.join(strange)} columns")
            if code == 0 and not strange:
                passed.append(family)
    return passed


CHECKED_ROWS = (1, 4)


def checked(plan: DeltaPlan, rows: int) -> DeltaPlan:
    """The plan a candidate is checked with."""
    return replace(plan, rows=rows, kept=CHECK_KEPT)


def check_family(family: str, cache_dir: Path, device: torch.device) -> int:
    """All checks of a family's plans; prints what failed and a digest of the bits."""
    faulthandler.dump_traceback_later(60, exit=True)
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


def run_plan(plan: DeltaPlan, inputs: dict[str, Any], cache_dir: Path, guard: bool = True) -> Tensor:
    """One step, in place; NaN where the kernel does not write, and behind the output, which is looked at if guarded."""
    sequences = inputs["projected"].shape[0]
    held = inputs["projected"].new_full((sequences * plan.rows + 2, plan.heads * plan.value_dim), torch.nan)
    kept = [inputs["raw_rows"], inputs["gate_rows"]]
    launch = launch_for(plan, sequences, held.device, cache_dir, plan.early < 2)  # else it is not settled
    launch(pack_arguments(*inputs.values(), held, *kept))
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
    packed = pack_arguments(*work.values(), held, work["raw_rows"], work["gate_rows"])
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


# ---------------------------------------------------------------------- times


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what run queues."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def medians_us(graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int) -> dict[str, float]:
    """Time of one call in each graph: medians over rounds whose order alternates."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 2):
        order = list(graphs) if turn % 2 else list(reversed(graphs))
        events = []
        for name in order:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            stop.record()
            events.append((name, start, stop))
        torch.cuda.synchronize()
        if turn >= 2:
            for name, start, stop in events:
                times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def time_shape(
    sequences: int, rows: int, pending: int, passed: list[str], options: argparse.Namespace, device: torch.device
) -> list[dict[str, object]]:
    """One table row for each plan."""
    state_bytes = sequences * SIZES[1] * SIZES[2] * SIZES[3] * 4
    layers = max(6, math.ceil(ROTATED_BYTES / state_bytes))
    inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *SIZES, torch.bfloat16, str(device))
    inputs["pending"] = torch.full((sequences,), pending, device=device)
    per_layer = [own_copies(inputs) for _ in range(layers)]
    out = inputs["projected"].new_empty((sequences, rows, SIZES[1] * SIZES[3]))
    states = [layer["state"] for layer in per_layer]

    def copy() -> None:
        for state in states:
            state[1:].mul_(1.0)

    copy()
    graphs = {"state alone, by torch": capture(copy)}
    packed = [pack_arguments(*layer.values(), out, layer["raw_rows"], layer["gate_rows"]) for layer in per_layer]
    for plan in usable(passed):
        launch = launch_for(replace(plan, rows=rows, kept=rows), sequences, device, options.cache_dir)

        def run(launch: Callable[[bytes], None] = launch) -> None:
            for arguments in packed:
                launch(arguments)

        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
        graphs[name_of(plan)] = capture(run)
    floor_us = roofline_bytes.gdn_decode(sequences, rows, *SIZES, 4) / options.bandwidth * 1e6
    times = medians_us(graphs, layers, options.rounds)
    torch.cuda.empty_cache()
    return [
        {
            "sequences": sequences,
            "rows": rows,
            "pending": pending,
            "kernel": name,
            "us": round(us, 2),
            "floor_us": round(floor_us, 2),
            "fraction": round(floor_us / us, 3),
        }
        for name, us in times.items()
    ]


def usable(passed: list[str]) -> list[DeltaPlan]:
    """What passed."""
    return [plan for family in passed for plan in FAMILIES[family]]


def time_chain(
    passed: list[str], options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Us a layer that the delta net adds to its two products, by sequences x rows and candidate; 10 layers.

    Also the candidates that, run once in there from equal inputs, leave other bits than the first with their columns.
    """
    failed: list[str] = []
    layers, columns, width = 10, 16480, SIZES[1] * SIZES[3]

    def weight(n: int, k: int) -> StreamedWeight:
        data = torch.randn(n, k, device=device).mul_(k**-0.5).to(torch.bfloat16)
        streamed = linear_repack(PackedWeight("bf16", (n, k), data), device, options.cache_dir)
        if not isinstance(streamed, StreamedWeight):
            raise RuntimeError(f"the product [{n}, {k}] is not streamed")
        return streamed

    into = [weight(columns, 2560) for _ in range(layers)]
    back = [weight(2560, width) for _ in range(layers)]
    found: dict[str, dict[str, float]] = {}
    for sequences, rows, pending in TIMED:
        inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *SIZES, torch.bfloat16, str(device))
        inputs["pending"] = torch.full((sequences,), pending, device=device)
        per_layer = [own_copies(inputs) for _ in range(layers)]
        x = torch.randn(sequences * rows, 2560, device=device).to(torch.bfloat16)
        projected = inputs["projected"].view(-1, columns)
        mixed = x.new_empty((sequences * rows, width))

        def run(
            candidate: DeltaPlan | None,
            x: Tensor = x,
            projected: Tensor = projected,
            mixed: Tensor = mixed,
            per_layer: list[dict[str, Any]] = per_layer,
            sequences: int = sequences,
            rows: int = rows,
        ) -> None:
            for i in range(layers):
                stream_product(x, into[i], projected)
                if candidate is None:
                    stream_product(projected[:, :width], back[i], x)
                    continue
                layer = per_layer[i]
                plan = replace(candidate, rows=rows, kept=rows)
                launch = launch_for(plan, sequences, device, options.cache_dir)
                launch(pack_arguments(*layer.values(), mixed, layer["raw_rows"], layer["gate_rows"]))
                stream_product(mixed, back[i], x)

        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        work = [x, *(layer[name] for layer in per_layer for name in ("state", "raw_rows", "gate_rows"))]
        initial = [tensor.clone() for tensor in work]
        results: dict[int, list[Tensor]] = {}
        for candidate in (None, *usable(passed)):
            run(candidate)
            torch.cuda.synchronize()
            name = "without" if candidate is None else name_of(candidate)
            graphs[name] = capture(lambda candidate=candidate, run=run: run(candidate))
            if candidate is None:
                continue
            for tensor, first in zip(work, initial, strict=True):
                tensor.copy_(first)
            graphs[name].replay()
            result = [tensor.clone() for tensor in work]
            wanted = results.setdefault(candidate.cols, result)
            if not all(torch.equal(ours, first) for ours, first in zip(result, wanted, strict=True)):
                failed.append(f"{sequences}x{rows} between products: {name}")
                say(f"FAILED {failed[-1]}: other bits than the first plan of {candidate.cols} columns")
                del graphs[name]
        times = medians_us(graphs, layers, options.rounds)
        without = times.pop("without")
        found[f"{sequences}x{rows}"] = {"without": round(without, 2)} | {
            n: round(t - without, 2) for n, t in times.items()
        }
    return found, failed


def report(table: list[dict[str, object]], chain: dict[str, dict[str, float]]) -> dict[str, str]:
    """The table a person reads, and the candidate to use for each shape: the cheapest between a layer's products."""
    shapes = list(dict.fromkeys(f"{r['sequences']}x{r['rows']}" for r in table))
    us = {(f"{r['sequences']}x{r['rows']}", str(r["kernel"])): float(str(r["us"])) for r in table}
    floors = {f"{r['sequences']}x{r['rows']}": float(str(r["floor_us"])) for r in table}
    kernels = list(dict.fromkeys(str(r["kernel"]) for r in table))
    heading = f"{'sequences x rows':50}" + "".join(f"{shape:>9}" for shape in shapes)
    floor = f"{'floor':50}" + "".join(f"{floors[shape]:9.2f}" for shape in shapes)
    say(f"us a call in a row of calls\n{heading}\n{floor}")
    for kernel in kernels:
        say(f"{kernel:50}" + "".join(f"{us[s, kernel]:9.2f}" if (s, kernel) in us else " " * 9 for s in shapes))
    if chain:
        say(f"\nus a layer more between the in-projection and the out-projection\n{heading}\n{floor}")
        for kernel in ("without", *kernels):
            if any(kernel in times for times in chain.values()):
                say(
                    f"{kernel:50}"
                    + "".join(f"{chain[s][kernel]:9.2f}" if kernel in chain[s] else " " * 9 for s in shapes)
                )
    best: dict[str, str] = {}
    say("\nRECOMMENDED, by time between the products; columns must be one number for all shapes: it decides the bits")
    for shape in shapes:
        times = chain.get(shape) or {kernel: t for (s, kernel), t in us.items() if s == shape}
        times = {kernel: t for kernel, t in times.items() if "columns" in kernel}
        if not times:
            continue
        for settled in (True, False):
            allowed = {k: t for k, t in times.items() if settled or "early 1" in k}
            for columns in ("16 columns", "any"):
                named = {k: t for k, t in allowed.items() if columns == "any" or k.startswith(columns)}
                if named:
                    name = min(named, key=lambda k, named=named: named[k])
                    best[f"{shape} {'settled' if settled else 'not settled'} {columns}"] = name
                    kind = "settled    " if settled else "not settled"
                    say(f"  {shape:6} {kind} {columns:10} {name:46} {named[name]:7.2f} us, floor {floors[shape]:.2f}")
    return best


def say(text: str) -> None:
    """Print at once: a hang shows where."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
