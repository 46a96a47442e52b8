"""The gated delta net's prompt chunks: the state beside float64, then times by rows and plan, and by kernel.

The part `prefill` of `benchmarks.delta_net`.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch

from benchmarks.delta_net_checks import SIZES
from benchmarks.harness import (
    load_and_capture,
    medians_us,
    say,
)
from stepfloor.kernels._delta import prepare
from stepfloor.kernels.gdn_prefill import (
    PLAN,
    PrefillPlan,
    chunked_delta_rule,
    gdn_prefill_inputs,
    gdn_prefill_triton,
)
from stepfloor.roofline import bytes as roofline_bytes

PREFILL_ROWS = (512, 2048, 8192)
PREFILL_PLANS = [
    PLAN,
    replace(PLAN, stages=1),
    replace(PLAN, columns=64),
    replace(PLAN, columns=64, warps=8),
    replace(PLAN, segment_rows=1024),
    replace(PLAN, chunks=False),
]


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
    graph = load_and_capture(lambda: gdn_prefill_triton(**inputs, plan=plan))
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
