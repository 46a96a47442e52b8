"""hc_down and hc_mix on one GPU: right first, then 96 calls with rotated weights.

    PYTHONPATH=src:. python3 -m benchmarks.hyper_connection --rows 1,16,32,64 [--json FILE] [--commit ID]

1. Each operator and format is checked in a process of its own, at 1 to 80 rows: values against the reference, NaN past
   outputs, bits of a row against the same row alone, a chain of dependent calls with and without early start, graph
   replay. What is wrong, crashes or hangs is named and gets no times.
2. CUDA-graph replays of 96 calls, weights rotated (1.3 GB), rounds in alternating order, medians. `down` and `mix` are
   chains of one operator, each call reading the one before: a pipelined rate, as in the targets. `pair` alternates the
   two; with the router's product between pairs it is what the model does before experts. `part` is one of the two
   kernels of hc_down alone, or that product.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    BANDWIDTH,
    CACHE_DIR,
    capture,
    check_apart,
    current_commit,
    describe,
    give_up_after,
    gpu,
    load_and_capture,
    medians_us,
    multiprocessors,
    parting_runs,
    read_bandwidth,
    say,
    stopwatch,
    verdict,
    write_json,
)
from stepfloor.formats.codec import quantize
from stepfloor.kernels._choose_form import plan_stream
from stepfloor.kernels._jit import Launch
from stepfloor.kernels._stream import outer_scales, pack_tape
from stepfloor.kernels._stream_product import StreamedWeight, stream_product
from stepfloor.kernels._torch import rms_norm, sigmoid, silu
from stepfloor.kernels.hc_down import (
    MAX_ROWS,
    DownPlan,
    StreamedDown,
    hc_down_inputs,
    hc_down_reference,
    load_norms,
    load_product,
    pack_arguments,
    plan_down,
    queue_down,
)
from stepfloor.kernels.hc_mix import (
    MixPlan,
    StreamedMix,
    hc_mix_inputs,
    hc_mix_reference,
    pack_mix,
    plan_mix,
    queue_mix,
)
from tests.kernels.streamed import down_faults, mix_faults

WIDTH, STREAMS, RANK, D = 10240, 4, 320, 2560
ROUTER = 1808  # rows of the router and the shared expert's gate and up projections
PAIRS = 96
ROUTERS = 32
EPS = 1e-6
CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 40, 48, 64, 65, 80)
ALONE = (0, 3, 7, 8, 15, 16, 17, 31, 32, 47, 48, 63, 64, 79)  # rows whose bits are compared with the row alone
# us of a call: 1 and 4 rows, what the bare products cost in the prototypes (kernels.md section 5); 16 and 64, what a
# step of 16 sequences without and with drafts wants
TARGETS = {
    ("down", 1): 3.5,
    ("down", 4): 4.2,
    ("down", 16): 8.0,
    ("down", 64): 20.0,
    ("mix", 1): 3.4,
    ("mix", 4): 4.2,
    ("mix", 64): 10.0,
}
FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]
FORMATS = {"bf16": "bf16", "fp8": "fp8_channel", "mxfp8": "mxfp8"}
FAMILIES = [f"{kind} {name}" for kind in ("down", "mix") for name in FORMATS]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Everything one chain writes: two of what a call reads from the call before."""

    residual: tuple[Tensor, Tensor]
    y: tuple[Tensor, Tensor]
    weights: tuple[Tensor, Tensor]
    normed: Tensor
    low: Tensor
    routed: Tensor


def main() -> int:
    """Check and time; 1 if a check fails."""
    options = parse()
    device = gpu()
    if options.check is not None:
        return check_family(options.check, options.cache_dir, device)
    give_up_after(options.limit_s)
    stamp = stopwatch()
    say(describe(device, options.commit))
    passed = check_apart("benchmarks.hyper_connection", FAMILIES, ["--cache-dir", str(options.cache_dir)], 40)
    stamp("checks done")
    reads = read_bandwidth(device)
    say(f"read bandwidth of this run {reads / 1e12:.2f} TB/s; floors are at {options.bandwidth / 1e12:.2f}")
    times = {rows: time_rows(rows, passed, options, device) for rows in options.rows}
    stamp("times done")
    report(times, options.bandwidth)
    line = {"gpu": torch.cuda.get_device_name(device), "commit": options.commit or current_commit()}
    line |= {"torch": torch.__version__, "read_bytes_per_s": reads, "passed": sorted(passed)}
    line |= {"failed": sorted(set(FAMILIES) - passed), "us": times}
    write_json(options.json, line)
    say(json.dumps(line, separators=(",", ":")))
    return int(len(passed) < len(FAMILIES))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda s: [int(v) for v in s.split(",")], default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--cache-dir", type=Path, default=CACHE_DIR)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what was checked out, where git cannot say")
    parser.add_argument("--limit-s", type=int, default=120, help="give up with a traceback after this long")
    parser.add_argument("--check", choices=FAMILIES, help="check this only, here")
    return parser.parse_args()


def down_plan(format_name: str, device: torch.device) -> DownPlan:
    """As `hc_down_repack` makes it."""
    count = multiprocessors(device)
    return plan_down(RANK + STREAMS, RANK, STREAMS, D, count, 2, format_name, halves=2)


def mix_plan(format_name: str, device: torch.device) -> MixPlan:
    """As `hc_mix_repack` makes it."""
    count = multiprocessors(device)
    return plan_mix(D, STREAMS, RANK, count, format_name=format_name)


# ---------------------------------------------------------------------- checks


def check_family(family: str, cache_dir: Path, device: torch.device) -> int:
    """Exit status 0 if it is right for every row count."""
    begin = time.perf_counter()
    kind, name = family.split()
    check = check_down if kind == "down" else check_mix
    try:
        errors = check(FORMATS[name], cache_dir, device)
    except RuntimeError as exception:
        errors = [f"CRASHED: {exception}"]
    return verdict(family, errors, f"{time.perf_counter() - begin:.1f} s")


def check_down(format_name: str, cache_dir: Path, device: torch.device) -> list[str]:
    """What is wrong with hc_down in a format."""
    plan = down_plan(format_name, device)
    found: list[str] = []
    for write in (True, False):
        inputs: dict[str, Any] = hc_down_inputs(MAX_ROWS, D, RANK, plan.format, torch.bfloat16, str(device), write)
        weight = inputs["down"][0]
        down = StreamedDown(plan, pack_tape(weight, plan.stream), cache_dir, outer_scales(weight))
        torch.cuda.synchronize()
        wanted = hc_down_reference(**inputs)

        def call(first: int, rows: int, weights: StreamedDown = down, given: dict[str, Any] = inputs) -> FourTensors:
            residual, normed, low, weights_out = outputs = down_outputs(rows + 2, device)
            some = slice(first, first + rows)
            y, y_weights = (None if t is None else t[some] for t in (given["y"], given["y_weights"]))
            written = (residual[:rows], normed[:rows], low[:rows], weights_out[:rows])
            queue_down(weights, given["norm_scale"], (given["residual"][some], y, y_weights), written, EPS)
            return outputs

        alone = {row: call(row, 1) for row in ALONE}
        for rows in CHECKED_ROWS:
            outputs = call(0, rows)
            label = f"{rows} rows, {'with' if write else 'without'} a write:"
            if not all(bool(t[rows:].isnan().all()) for t in outputs):
                found.append(f"{label} writes past the rows")
            ours = [t[:rows] for t in outputs]
            if not write:
                if not bool(ours[0].isnan().all()):
                    found.append(f"{label} writes the residual")
                ours[0] = inputs["residual"][:rows]
            found += [f"{label} {f}" for f in down_faults(ours, [t[:rows] for t in wanted], weight)]
            for row in (r for r in ALONE if r < rows):
                pairs = list(zip(ours, alone[row], ("residual", "n", "low", "weights"), strict=True))[not write :]
                differs = [what for a, b, what in pairs if not torch.equal(a[row], b[0])]
                if differs:
                    found.append(f"{label} row {row} has other bits than alone in {', '.join(differs)}")
        if write:
            for rows in (4, 16, 64):
                found += check_chain(partial(down_chain, down, inputs, rows, device))
    return found


def check_mix(format_name: str, cache_dir: Path, device: torch.device) -> list[str]:
    """What is wrong with hc_mix in a format."""
    plan = mix_plan(format_name, device)
    inputs: dict[str, Any] = hc_mix_inputs(MAX_ROWS, D, RANK, plan.format, torch.bfloat16, str(device))
    weight = inputs["up"][0]
    tape, tape_scales = pack_mix(weight, plan)
    up = StreamedMix(plan, tape, cache_dir, tape_scales)
    torch.cuda.synchronize()
    wanted = hc_mix_reference(**inputs)
    found: list[str] = []

    def call(first: int, rows: int) -> Tensor:
        out = nan((rows + 2, D), device)
        queue_mix(up, inputs["low"][first : first + rows], inputs["normed"][first : first + rows], out[:rows])
        return out

    alone = {row: call(row, 1) for row in ALONE}
    for rows in CHECKED_ROWS:
        out = call(0, rows)
        if not bool(out[rows:].isnan().all()):
            found.append(f"{rows} rows: writes past the rows")
        low, normed = inputs["low"][:rows], inputs["normed"][:rows]
        found += [f"{rows} rows: {f}" for f in mix_faults(out[:rows], wanted[:rows], low, normed, weight)]
        differs = [row for row in ALONE if row < rows and not torch.equal(out[row], alone[row][0])]
        if differs:
            found.append(f"{rows} rows: other bits than alone in rows {differs}")
    for rows in (4, 16, 64):
        found += check_chain(partial(mix_chain, up, inputs, rows, device))
    return found


def nan(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """bf16, all NaN."""
    return torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)


def down_outputs(rows: int, device: torch.device) -> FourTensors:
    """Residual, n, low and write weights of a call, all NaN."""
    residual, normed, low, weights = (nan((rows, width), device) for width in (WIDTH, WIDTH, RANK, STREAMS))
    return residual, normed, low, weights


def down_chain(
    down: StreamedDown, inputs: dict[str, Any], rows: int, device: torch.device, early: bool
) -> tuple[Callable[[], None], list[Tensor]]:
    """Twelve calls, each reading three results of the one before."""
    start = (inputs["residual"][:rows], inputs["y"][:rows], inputs["y_weights"][:rows])
    outputs = [down_outputs(rows, device) for _ in range(12)]

    def run() -> None:
        given = start
        for out in outputs:
            queue_down(down, inputs["norm_scale"], given, out, EPS, early)
            given = (out[0], out[1].view(-1)[: rows * D].view(rows, D), out[3])

    return run, [t for out in outputs for t in out]


def mix_chain(
    up: StreamedMix, inputs: dict[str, Any], rows: int, device: torch.device, early: bool
) -> tuple[Callable[[], None], list[Tensor]]:
    """Twelve calls, each reading the result of the one before."""
    outputs = [nan((rows, D), device) for _ in range(12)]

    def run() -> None:
        low = inputs["low"][:rows]
        for out in outputs:
            queue_mix(up, low, inputs["normed"][:rows], out, early)
            low = out.view(-1)[: rows * RANK].view(rows, RANK)

    return run, outputs


def check_chain(make: Callable[[bool], tuple[Callable[[], None], list[Tensor]]]) -> list[str]:
    """A kernel that reads before the one before has finished gives other values than one that starts after it."""
    late, wanted = make(False)
    late()
    torch.cuda.synchronize()
    early, outputs = make(True)
    parting = parting_runs(early, outputs, wanted)
    return [f"a dependent chain with early start ({name}) differs from one without" for name in parting]


# ---------------------------------------------------------------------- times


def time_rows(rows: int, passed: set[str], options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """us of one call (`down`, `mix`) or of both (`pair`) for everything that passed."""
    down_store = torch.empty((PAIRS, RANK + STREAMS, WIDTH), dtype=torch.bfloat16, device=device).normal_(std=0.01)
    up_store = torch.empty((PAIRS, WIDTH, RANK), dtype=torch.bfloat16, device=device).normal_(std=0.05)
    downs: dict[str, list[StreamedDown]] = {}
    ups: dict[str, list[StreamedMix]] = {}
    for name, format_name in FORMATS.items():
        if f"down {name}" in passed:
            weight, plan = quantize(down_store[0], format_name), down_plan(format_name, device)
            tape, outer = pack_tape(weight, plan.stream), outer_scales(weight)
            downs[name] = [StreamedDown(plan, t, options.cache_dir, outer) for t in tape.repeat(PAIRS, 1)]
        if f"mix {name}" in passed:
            mix = mix_plan(format_name, device)
            tape, outer = pack_mix(quantize(up_store[0], format_name), mix)
            ups[name] = [StreamedMix(mix, t, options.cache_dir, outer) for t in tape.repeat(PAIRS, 1)]
    router = plan_stream(ROUTER, D, multiprocessors(device))
    stored = quantize(torch.empty((ROUTER, D), dtype=torch.bfloat16, device=device).normal_(std=0.02), "bf16")
    tapes = pack_tape(stored, router).repeat(ROUTERS, 1)
    routers = [StreamedWeight(router, t, options.cache_dir) for t in tapes]
    scales = 1 + 0.1 * torch.randn(PAIRS, WIDTH, device=device)
    buffers = make_buffers(rows, device)
    torch.cuda.synchronize()

    def queue(i: int, down: list[StreamedDown] | None, up: list[StreamedMix] | None, early: bool) -> None:
        now, after = i % 2, 1 - i % 2
        b = buffers
        if down is not None:
            given = (b.residual[now], b.y[now], b.weights[now])
            outputs = (b.residual[after], b.normed, b.low, b.weights[after])
            queue_down(down[i], scales[i], given, outputs, EPS, early)
        if up is not None:
            # alone, a call reads the one before; the low of a pair comes from its hc_down
            low = b.low if down is not None else b.y[now].view(-1)[: rows * RANK].view(rows, RANK)
            queue_mix(up[i], low, b.normed, b.y[after], early)

    def chain(
        down: list[StreamedDown] | None, up: list[StreamedMix] | None, early: bool = True
    ) -> torch.cuda.CUDAGraph:
        queue(0, down, up, early)  # loads the kernel outside of the capture
        torch.cuda.synchronize()
        return capture(lambda: [queue(i, down, up, early) for i in range(PAIRS)])

    def part(launch: Launch, down: list[StreamedDown]) -> torch.cuda.CUDAGraph:
        """One kernel of the two alone; the product reads the same n every time, from the L2 as it would."""
        b = buffers

        def call(i: int) -> None:
            now, after = i % 2, 1 - i % 2
            given = (b.residual[now], b.y[now], b.weights[now])
            outputs = (b.residual[after], b.normed, b.low, b.weights[after])
            launch(pack_arguments(down[i].tape, scales[i], *given, *outputs, EPS))

        return capture(lambda: [call(i) for i in range(PAIRS)])

    def route(i: int) -> None:
        stream_product(buffers.y[1 - i % 2], routers[i % ROUTERS], buffers.routed)

    def with_router(down: list[StreamedDown], up: list[StreamedMix]) -> torch.cuda.CUDAGraph:
        """Each pair, then the product that reads what it mixed."""
        return capture(lambda: [(queue(i, down, up, True), route(i)) for i in range(PAIRS)])

    def library() -> None:
        for i in range(PAIRS):
            library_pair(i, buffers, down_store, up_store, scales)

    graphs = {"pair torch": load_and_capture(library)}
    graphs |= {f"down {name}": chain(down, None) for name, down in downs.items()}
    graphs |= {f"mix {name}": chain(None, up) for name, up in ups.items()}
    graphs |= {f"pair {name}": chain(down, ups[name]) for name, down in downs.items() if name in ups}
    down, up = downs.get("bf16"), ups.get("bf16")
    if down is not None:
        plan, turns = down[0].plan, down[0].plan.turns(rows)
        graphs["part norms"] = part(load_norms(plan, turns, True, device, options.cache_dir), down)
        graphs["part product"] = part(load_product(plan, turns, device, options.cache_dir), down)
        graphs["down bf16, no PDL"] = chain(down, None, False)
    if up is not None:
        graphs["mix bf16, no PDL"] = chain(None, up, False)
    if down is not None and up is not None:
        graphs["pair bf16, no PDL"] = chain(down, up, False)
        graphs["pair bf16, again"] = chain(down, up)
        route(0)  # loads the kernel outside of the capture
        torch.cuda.synchronize()
        graphs["pair bf16, then the router"] = with_router(down, up)
        graphs["part router"] = capture(lambda: [route(i) for i in range(PAIRS)])
    return {name: round(us, 2) for name, us in medians_us(graphs, PAIRS, options.rounds).items()}


def make_buffers(rows: int, device: torch.device) -> Buffers:
    """Random inputs of the first call, room for the others."""

    def two(width: int) -> tuple[Tensor, Tensor]:
        a, b = torch.randn(2, rows, width, device=device).to(torch.bfloat16)
        return a, b

    weights = two(STREAMS)
    normed, low = two(WIDTH)[0], two(RANK)[0]
    return Buffers(two(WIDTH), two(D), (weights[0].sigmoid(), weights[1].sigmoid()), normed, low, two(ROUTER)[0])


def library_pair(i: int, b: Buffers, down_store: Tensor, up_store: Tensor, scales: Tensor) -> None:
    """The same operators from torch and cuBLAS."""
    now, after = i % 2, 1 - i % 2
    down, up = down_store[i], up_store[i]
    torch.add(
        b.residual[now], (b.y[now].unsqueeze(-2) * b.weights[now].unsqueeze(-1)).flatten(-2), out=b.residual[after]
    )
    normed = rms_norm(b.residual[after], scales[i], EPS, STREAMS)
    projected = F.linear(normed, down) / STREAMS
    low = silu(projected[:, :RANK])
    torch.mul(sigmoid(projected[:, RANK:]), 2, out=b.weights[after])
    gate = sigmoid(F.linear(low, up))
    b.y[after].copy_((gate * normed).unflatten(-1, (STREAMS, -1)).mean(-2))


def report(times: dict[int, dict[str, float]], bandwidth: float) -> None:
    """The table a person reads."""
    down_bytes, up_bytes = 2 * (RANK + STREAMS) * WIDTH + 4 * WIDTH, 2 * RANK * WIDTH
    weight_bytes = {"down": down_bytes, "mix": up_bytes, "pair": down_bytes + up_bytes}
    floors = {kind: count / bandwidth * 1e6 for kind, count in weight_bytes.items()}
    say(f"\nus a call; floors of bf16 weights: {', '.join(f'{k} {v:.2f}' for k, v in floors.items())}")
    say(f"{'':32} " + " ".join(f"M={rows:<6d}" for rows in times))
    names = list(dict.fromkeys(name for found in times.values() for name in found))
    for name in sorted(names, key=lambda n: [*floors, "part"].index(n.split()[0])):
        say(f"{name:32} " + " ".join(f"{found.get(name, math.nan):8.2f}" for found in times.values()))
    for kind, floor in floors.items():
        shares = [f"M={m} {floor / found[f'{kind} bf16']:.0%}" for m, found in times.items() if f"{kind} bf16" in found]
        say(f"share of the floor, {kind} bf16: {', '.join(shares)}")
    for (kind, rows), target in TARGETS.items():
        us = times.get(rows, {}).get(f"{kind} bf16")
        if us is not None:
            say(f"target {kind} M={rows}: {target} us, measured {us:.2f}: {'met' if us <= target else 'MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
