"""The gated delta net's decode kernel on one GPU: right first, then timed by plan; the best plan is printed.

    PYTHONPATH=src python3 -m benchmarks.delta_net [--json FILE]

1. Every family of plans is checked in a process of its own, at the model's sizes: against the float32 reference, NaN
   around outputs and kept rows, row bits for every batch and row count, 200 windows of random accepted counts against
   plain decoding bit for bit and against float64, repeated steps in place. What fails or hangs gets no times.
2. CUDA-graph replays of one call a layer, states rotated past the L2, rounds in alternating order, medians.
3. Its cost between the layer's own products: the chain in-projection, delta net, out-projection, less the same chain
   without it.
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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._jit import compile_cuda, device_arch
from stepfloor.kernels._torch import delta_rows, delta_rule
from stepfloor.kernels.gdn_decode import (
    DeltaPlan,
    gdn_decode_inputs,
    gdn_decode_reference,
    launch_for,
    pack_arguments,
)
from stepfloor.kernels.linear import StreamedWeight, linear_repack, stream_product
from stepfloor.roofline import bytes as roofline_bytes

SIZES = (16, 48, 128, 128)  # key heads, value heads, K, V
BASE = DeltaPlan(*SIZES, rows=1, kept=1, silu=False)
CHECK_KEPT = 8
ROTATED_BYTES = 250e6  # four times the L2
# sequences, new rows, pending rows
TIMED = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (16, 1, 1), (1, 4, 3), (4, 4, 3), (16, 4, 3), (1, 8, 6), (8, 8, 6)]
FAMILIES: dict[str, list[DeltaPlan]] = {
    "8 columns": [replace(BASE, parts=p, early=e) for p in (2, 1) for e in (1, 0, 2)],
    "16 columns": [replace(BASE, cols=16, parts=p) for p in (2, 1)],
    "state stays": [replace(BASE, cols=c, passing=False) for c in (8, 16)],
    "32 columns": [replace(BASE, cols=32, parts=1)],
    "cluster of 12": [replace(BASE, cols=c, parts=4) for c in (8, 16)],
    "rows elsewhere": [
        *(replace(BASE, parts=p, joined=False) for p in (1, 2, 4)),
        *(replace(BASE, cols=16, parts=p, joined=False) for p in (1, 2, 4)),
    ],
}
UNIT = 2.0**-24


def main() -> int:
    """Run all three parts; 1 if a family fails."""
    options = parse()
    device = torch.device("cuda", 0)
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.perf_counter()
    say(describe(device))
    compile_all(options.cache_dir, device)
    say(f"[{time.perf_counter() - begin:5.1f} s] kernels compiled")
    passed = check_all(options.cache_dir)
    say(f"[{time.perf_counter() - begin:5.1f} s] checks done; timed: {', '.join(passed) or 'nothing'}")
    table = [row for shape in TIMED for row in time_shape(*shape, passed, options, device)]
    say(f"[{time.perf_counter() - begin:5.1f} s] timed")
    chain = time_chain(passed, options, device) if options.chain else {}
    say(f"[{time.perf_counter() - begin:5.1f} s] chains timed\n")
    best = report(table, chain)
    failed = [family for family in FAMILIES if family not in passed]
    line = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "failed": failed, "best": best}
    if options.json is not None:
        options.json.write_text(json.dumps(line | {"chain": chain, "rows": table}, indent=1))
    say(json.dumps(line | {"chain": chain}, separators=(",", ":")))
    return int(bool(failed))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bandwidth", type=float, default=4.65e12)
    parser.add_argument("--cache-dir", type=Path, default=Path(tempfile.gettempdir()) / "stepfloor-kernels")
    parser.add_argument("--json", type=Path)
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
    text = f"{plan.cols} columns, {plan.parts} blocks, early {plan.early}"
    return text + ("" if plan.passing else ", state stays") + ("" if plan.joined else ", rows elsewhere")


def compile_all(cache_dir: Path, device: torch.device) -> None:
    """Fill the cache from several processes; what does not compile is named and left out by its check."""
    timed = {(rows, rows) for _, rows, _ in TIMED}
    every = [plan for plans in FAMILIES.values() for plan in plans]
    wanted = {replace(p, rows=r, kept=k) for p in every for r, k in timed}
    wanted |= {replace(p, rows=r, kept=CHECK_KEPT) for p in every for r in checked_rows(p)}
    jobs = [(plan, device_arch(device), cache_dir) for plan in sorted(wanted, key=str)]
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


def checked_rows(plan: DeltaPlan) -> tuple[int, ...]:
    """New rows that a plan is checked with."""
    return tuple(range(1, 9)) if plan == BASE else (1, 4, 8)


def check_family(family: str, cache_dir: Path, device: torch.device) -> int:
    """All checks of a family's plans; prints what failed and a digest of the bits."""
    faulthandler.dump_traceback_later(60, exit=True)
    problems: list[str] = []
    digests: dict[int, str] = {}
    for plan in FAMILIES[family]:
        digest = hashlib.sha256()
        for rows in checked_rows(plan):
            for sequences in (1, 2, 4, 8, 16) if plan == BASE or rows == 4 else (2, 16):
                problems += check_step(replace(plan, rows=rows, kept=CHECK_KEPT), sequences, cache_dir, device)
        problems += check_text(plan, cache_dir, device, digest)
        problems += check_repeats(replace(plan, rows=4, kept=CHECK_KEPT), cache_dir, device)
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
    to = kept if plan.joined else [tensor.clone() for tensor in kept]
    launch = launch_for(plan, sequences, held.device, cache_dir)
    if plan.early == 2:
        torch.cuda.synchronize()  # it reads before the kernel in front has ended
    launch(pack_arguments(*inputs.values(), held, *to))
    for tensor, written in zip(kept, to, strict=True):
        tensor.copy_(written)
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
    """200 windows of 4 rows, 1 to 4 of them accepted, beside plain decoding with one row; and beside float64."""
    draw, sequences, windows, width = random.Random(1), 3, 200, 4
    wide, narrow = replace(plan, rows=width, kept=CHECK_KEPT), replace(plan, rows=1, kept=CHECK_KEPT)
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
    kept = [work["raw_rows"], work["gate_rows"]]
    to = kept if plan.joined else [tensor.clone() for tensor in kept]
    wrong = torch.zeros(4, dtype=torch.int64, device=device)
    # a plan that reads early must not follow the restoring copies at once
    launch = launch_for(plan, 16, device, cache_dir, plan.early < 2)
    packed = pack_arguments(*work.values(), held, *to)
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
            (to[0], first["raw_rows"]),
            (to[1], first["gate_rows"]),
        )
        for i, (got, wanted) in enumerate(pairs):
            wrong[i] += ((got != wanted) & ~wanted.isnan()).sum()

    graph = capture(step)
    for _ in range(150):
        graph.replay()
    torch.cuda.synchronize()
    counts = dict(zip(("output", "state", "raw_rows", "gate_rows"), wrong.tolist(), strict=True))
    if not plan.joined:
        counts.pop("raw_rows"), counts.pop("gate_rows")
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
    elsewhere = [[layer["raw_rows"].clone(), layer["gate_rows"].clone()] for layer in per_layer]
    out = inputs["projected"].new_empty((sequences, rows, SIZES[1] * SIZES[3]))
    states = [layer["state"] for layer in per_layer]

    def copy() -> None:
        for state in states:
            state[1:].mul_(1.0)

    copy()
    graphs = {"state alone, by torch": capture(copy)}
    chosen = [(plan, True) for family in passed for plan in FAMILIES[family]]
    if BASE in [plan for plan, _ in chosen]:
        chosen.append((BASE, False))
    for plan, dependent in chosen:
        plan = replace(plan, rows=rows, kept=rows)
        launch = launch_for(plan, sequences, device, options.cache_dir, dependent)
        packed = [
            pack_arguments(
                *layer.values(),
                out,
                *((layer["raw_rows"], layer["gate_rows"]) if plan.joined else to),
            )
            for layer, to in zip(per_layer, elsewhere, strict=True)
        ]

        def run(launch: Callable[[bytes], None] = launch, packed: list[bytes] = packed) -> None:
            for arguments in packed:
                launch(arguments)

        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
        graphs[name_of(plan) + ("" if dependent else ", no PDL")] = capture(run)
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


def time_chain(passed: list[str], options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Us a layer that the delta net adds to its two products, by sequences (one row each) and plan; 10 layers."""
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
    plans = [plan for family in passed for plan in FAMILIES[family]]
    for sequences in (1, 4, 16):
        inputs: dict[str, Any] = gdn_decode_inputs(sequences, 1, *SIZES, torch.bfloat16, str(device))
        inputs["pending"] = torch.ones(sequences, dtype=torch.int64, device=device)
        per_layer = [own_copies(inputs) for _ in range(layers)]
        elsewhere = [[layer["raw_rows"].clone(), layer["gate_rows"].clone()] for layer in per_layer]
        x = torch.randn(sequences, 2560, device=device).to(torch.bfloat16)
        projected = inputs["projected"].view(sequences, columns)
        mixed = x.new_empty((sequences, width))

        def run(
            plan: DeltaPlan | None,
            x: Tensor = x,
            projected: Tensor = projected,
            mixed: Tensor = mixed,
            per_layer: list[dict[str, Any]] = per_layer,
            elsewhere: list[list[Tensor]] = elsewhere,
            sequences: int = sequences,
        ) -> None:
            for i in range(layers):
                stream_product(x, into[i], projected)
                if plan is None:
                    stream_product(projected[:, :width], back[i], x)
                    continue
                kept = [per_layer[i]["raw_rows"], per_layer[i]["gate_rows"]]
                launch = launch_for(plan, sequences, device, options.cache_dir)
                to = kept if plan.joined else elsewhere[i]
                launch(pack_arguments(*per_layer[i].values(), mixed, *to))
                stream_product(mixed, back[i], x)

        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for plan in (None, *plans):
            run(plan)
            torch.cuda.synchronize()
            graphs["without" if plan is None else name_of(plan)] = capture(lambda plan=plan, run=run: run(plan))
        times = medians_us(graphs, layers, options.rounds)
        without = times.pop("without")
        found[str(sequences)] = {"without": round(without, 2)} | {n: round(t - without, 2) for n, t in times.items()}
    return found


def report(table: list[dict[str, object]], chain: dict[str, dict[str, float]]) -> dict[str, object]:
    """The table a person reads, and the plans to use: columns must be one number, blocks may go by batch."""
    shapes = list(dict.fromkeys((int(str(r["sequences"])), int(str(r["rows"]))) for r in table))
    us = {(int(str(r["sequences"])), int(str(r["rows"])), str(r["kernel"])): float(str(r["us"])) for r in table}
    floors = {(int(str(r["sequences"])), int(str(r["rows"]))): float(str(r["floor_us"])) for r in table}
    say("us a call in a row of calls, PDL; sequences x rows")
    say(f"{'':46}" + "".join(f"{f'{b} x {r}':>9}" for b, r in shapes))
    say(f"{'floor':46}" + "".join(f"{floors[shape]:9.2f}" for shape in shapes))
    for kernel in dict.fromkeys(str(r["kernel"]) for r in table):
        say(f"{kernel:46}" + "".join(f"{us[(*s, kernel)]:9.2f}" if (*s, kernel) in us else " " * 9 for s in shapes))
    ours = [k for k in dict.fromkeys(str(r["kernel"]) for r in table) if "columns" in k and "no PDL" not in k]
    if not ours:
        return {}
    say(f"{'best in place':46}" + "".join(f"{_fastest(us, s, ours)[1]:9.2f}" for s in shapes))
    say(f"{'of floor':46}" + "".join(f"{floors[s] / _fastest(us, s, ours)[1]:9.0%}" for s in shapes))
    for sequences, times in chain.items():
        say(f"\nchain, {sequences} sequences, one row: us a layer {times['without']:.2f} without, and with it more:")
        for name, more in sorted(times.items(), key=lambda item: item[1]):
            if name != "without":
                say(f"  {name:50} {more:6.2f}")
    best = {f"{b}x{r}": _fastest(us, (b, r), ours)[0] for b, r in shapes}
    scores: dict[str, float] = {}
    for cols in sorted({name.split(" columns")[0] for name in ours}):
        same = [name for name in ours if name.startswith(f"{cols} columns")]
        if any("elsewhere" not in name for name in same):
            scores[cols] = round(math.exp(statistics.fmean(math.log(_fastest(us, s, same)[1]) for s in shapes)), 3)
    say(f"\ngeometric mean over shapes of the best plan in place, by columns of a warp: {scores}")
    for shape, name in best.items():
        say(f"best in place {shape}: {name}")
    return {"plans": best, "columns": scores}


def _fastest(us: dict[tuple[int, int, str], float], shape: tuple[int, int], names: list[str]) -> tuple[str, float]:
    """The fastest plan that rewrites rows in place, and needs no promise about what came before."""
    usable = [n for n in names if "elsewhere" not in n and "early 2" not in n and (*shape, n) in us]
    name = min(usable or [n for n in names if (*shape, n) in us], key=lambda n: us[(*shape, n)])
    return name, us[(*shape, name)]


def say(text: str) -> None:
    """Print at once: a hang shows where."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
