"""Sampling on one GPU: right first, then timed at the released model's vocabulary.

    PYTHONPATH=src:. python3 -m benchmarks.sampling [--json FILE] [--rounds N]

1. Every operator beside its reference on the device; tokens that differ are counted with the largest gap of their
   values, which roundings have to explain (tests/kernels/test_sampling_kernels.py derives the bounds).
2. CUDA-graph replays through Sampler, rows rotated past the L2, rounds in alternating order, medians. The floor is the
   operator's bytes at the read bandwidth measured here. In a step the logits were just written and mostly lie in the
   L2, so a step's times are below these.
3. What the host spends on joining and leaving.
A part that fails says so and the others go on; the last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    BANDWIDTH,
    describe,
    give_up_after,
    gpu,
    load_and_capture,
    medians_us,
    read_bandwidth,
    say,
    stopwatch,
    write_json,
)
from stepfloor.kernels.accept_drafts import accept_drafts_inputs, accept_drafts_reference, accept_drafts_triton
from stepfloor.kernels.draw_tokens import draw_tokens_inputs, draw_tokens_reference, draw_tokens_triton
from stepfloor.kernels.process_logits import (
    process_logits_inputs,
    process_logits_reference,
    process_logits_triton,
)
from stepfloor.request import SamplingParams
from stepfloor.roofline import bytes as roofline_bytes
from stepfloor.sampler.sampler import Sampler

VOCAB = 248_320
K = 3
ROWS = (1, 4, 16, 64)
ROTATED_BYTES = 130e6  # more than twice the L2
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "temperature": SamplingParams(temperature=1.0, seed=1),
    "top_k 20, top_p 0.95": SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=1),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95, seed=1),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.1, seed=1),
}


def main() -> int:
    """Run all parts; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=int, default=120, help="give up with a traceback after this long")
    options = parser.parse_args()
    give_up_after(options.limit_s)
    stamp = stopwatch()
    say(f"{describe(gpu())}; vocabulary {VOCAB}")
    failed: list[str] = []
    line: dict[str, Any] = {"gpu": torch.cuda.get_device_name(gpu()), "torch": torch.__version__}

    def part(name: str, run: Callable[[], Any]) -> Any:
        try:
            line[name] = run()
        except Exception:  # the other parts still say what they can
            failed.append(name)
            line[name] = None
            say(f"FAILED {name}\n{traceback.format_exc()}")
        stamp(name)
        return line[name]

    for check in (check_draws, check_filters, check_windows):
        part(check.__name__, check)
    bandwidth = part("bandwidth", lambda: read_bandwidth(gpu())) or BANDWIDTH
    say(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    for rows in ROWS:
        part(f"{rows} rows", lambda rows=rows: time_rows(rows, bandwidth, options.rounds, failed))
    part("host", time_host)
    line["failed"] = failed
    write_json(options.json, line)
    say(json.dumps(line, separators=(",", ":")))
    return int(bool(failed))


# ---------------------------------------------------------------------- is it right


def check_draws() -> dict[str, int]:
    """64 rows at temperature 1 and the same rows greedy; rows alone."""
    inputs: dict[str, Any] = draw_tokens_inputs(64, VOCAB, str(gpu()))
    inputs["logits"] = inputs["logits"].bfloat16()
    ours, wanted = draw_tokens_triton(**inputs), draw_tokens_reference(**inputs)
    greedy = draw_tokens_triton(**(inputs | {"seeds": None}))
    expect(torch.equal(greedy, inputs["logits"].float().argmax(-1)), "greedy draws are the argmax")
    for i in (0, 1, 63):
        one = inputs | {name: inputs[name][i : i + 1] for name in ("logits", "slots", "positions")}
        expect(bool(draw_tokens_triton(**one)[0] == ours[i]), f"row {i} is the same alone")
    differ = int((ours != wanted).sum())
    say(f"  draws: {differ} of 64 differ from the reference's")
    expect(differ <= 1, "two values within 2e-6 of each other are one in thousands")
    return {"differ": differ}


def check_filters() -> dict[str, int]:
    """Every stage in use, and settings that make the search look beyond its first groups."""
    inputs: dict[str, Any] = process_logits_inputs(16, VOCAB, torch.bfloat16, str(gpu()))
    ours, wanted = process_logits_triton(**inputs), process_logits_reference(**inputs)
    differ = int((ours.isfinite() != wanted.isfinite()).sum())
    both = ours.isfinite() & wanted.isfinite()
    expect(torch.equal(ours[both], wanted[both]), "values that both keep have the same bits")
    kept = int(wanted.isfinite().sum())
    say(f"  filters: {differ} of {kept} kept tokens lie on the other side of a boundary")
    expect(differ <= 64 and differ <= kept / 1000, "boundaries agree but for roundings")
    alone = inputs | {name: inputs[name][5:6] for name in ("logits", "slots", "earlier")}
    expect(torch.equal(process_logits_triton(**alone)[0], ours[5]), "row 5 is the same alone")
    return {"differ": differ, "kept": kept}


def check_windows() -> dict[str, int]:
    """256 windows in 16 batches."""
    differ = accepted = 0
    for turn in range(16):
        inputs: dict[str, Any] = accept_drafts_inputs(16, K, VOCAB, str(gpu()))
        inputs["seeds"] = inputs["seeds"] + 1000 * turn
        ours, wanted = accept_drafts_triton(**inputs), accept_drafts_reference(**inputs)
        differ += int(((ours[0] != wanted[0]).any(-1) | (ours[1] != wanted[1])).sum())
        accepted += int(ours[1].sum())
    say(f"  windows: {differ} of 256 differ from the reference's; {accepted / 256:.2f} of {K} drafts accepted")
    expect(differ <= 2, "roundings decide one window in thousands")
    return {"differ": differ}


def expect(holds: bool, what: str) -> None:
    """RuntimeError with the claim if it does not hold."""
    if not holds:
        raise RuntimeError(f"does not hold: {what}")


# ---------------------------------------------------------------------- times


def ready(name: str, slots: int, spec_tokens: int) -> Sampler:
    """A sampler whose slots all have the setting, prepared for capture."""
    sampler = Sampler(VOCAB, slots, spec_tokens, "standard", str(gpu()))
    for slot in range(slots):
        sampler.assign(slot, SETTINGS[name], range(100, 200), range(200, 260))
    sampler.prepare(sampler.stages)
    return sampler


def time_rows(rows: int, bandwidth: float, rounds: int, failed: list[str]) -> dict[str, dict[str, float]]:
    """One table row for each case that has so many rows; sampling B = rows, windows B = rows / (k + 1)."""
    calls = max(8, int(ROTATED_BYTES / (rows * VOCAB * 2)))
    make = torch.Generator(gpu()).manual_seed(0)
    # 10 or so tokens of weight among many, as text has
    logits = torch.randn(calls, rows, VOCAB, generator=make, device=gpu(), dtype=torch.bfloat16).mul_(3)
    flat = logits.mul(0.01)
    slots = torch.arange(rows, device=gpu())
    windows = max(1, rows // (K + 1))
    drafts = torch.randint(VOCAB, (windows, K), generator=make, device=gpu())
    row_bytes = roofline_bytes.draw_tokens(rows, VOCAB)
    cases: dict[str, tuple[float, Callable[[], Callable[[int], object]]]] = {}

    def add(name: str, needed: float, build: Callable[[], Callable[[int], object]]) -> None:
        cases[name] = (needed, build)

    def sampling(name: str, source: Tensor) -> Callable[[], Callable[[int], object]]:
        def build() -> Callable[[int], object]:
            sampler = ready(name, rows, 0)
            return lambda i: sampler.sample(source[i], slots, slots)

        return build

    def accepting(name: str) -> Callable[[], Callable[[int], object]]:
        def build() -> Callable[[int], object]:
            sampler = ready(name, windows, K)
            mine = slots[:windows]
            return lambda i: sampler.accept(logits[i].view(windows, K + 1, VOCAB), drafts, mine, mine)

        return build

    def drafting() -> Callable[[int], object]:
        sampler = ready("temperature", windows, K)
        mine = slots[:windows]
        return lambda i: sampler.draft(logits[i, :windows], mine, mine, ())

    penalty_bytes = rows * VOCAB * 5
    for name in SETTINGS:
        add(f"sample, {name}", row_bytes + (penalty_bytes if name == "penalties" else 0), sampling(name, logits))
    add("sample, top_p 0.95, flat", row_bytes, sampling("top_p 0.95", flat))
    if rows > K:
        standard = roofline_bytes.accept_drafts(windows, K, VOCAB)
        add(f"accept k={K}, greedy", row_bytes, accepting("greedy"))
        add(f"accept k={K}, temperature", standard, accepting("temperature"))
        add(f"accept k={K}, top_k 20, top_p 0.95", standard, accepting("top_k 20, top_p 0.95"))
        kept = roofline_bytes.process_logits(windows, VOCAB)
        add(f"draft, temperature, {windows} rows", kept, drafting)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, (_, build) in cases.items():
        try:
            run = build()
            graphs[name] = load_and_capture(lambda run=run: [run(i) for i in range(calls)])
        except Exception:  # the other cases still get times
            failed.append(f"{name}, {rows} rows")
            say(f"FAILED {name}, {rows} rows\n{traceback.format_exc()}")
    found: dict[str, dict[str, float]] = {}
    say(f"\n{rows} rows{'':28}      us   MB      floor us   of floor")
    for name, us in medians_us(graphs, calls, rounds).items():
        needed = cases[name][0]
        floor = needed / bandwidth * 1e6
        say(f"  {name:36}{us:8.2f}{needed / 1e6:8.2f}{floor:10.2f}{floor / us:10.1%}")
        found[name] = {
            "us": round(us, 2),
            "bytes": needed,
            "floor_us": round(floor, 2),
            "of_floor": round(floor / us, 3),
        }
    return found


def time_host() -> dict[str, float]:
    """Microseconds that the host spends on one assignment and its release, the device being idle."""
    found: dict[str, float] = {}
    sampler = Sampler(VOCAB, 2, K, "standard", str(gpu()))
    for name, params in SETTINGS.items():
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            sampler.assign(0, params, range(1000))
            sampler.release(0)
            times.append(time.perf_counter() - start)
        found[name] = round(statistics.median(times) * 1e6, 1)
    say(f"host, us to assign and release: {found}")
    return found


if __name__ == "__main__":
    sys.exit(main())
