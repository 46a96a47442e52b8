"""The routed experts' sub-layer of few rows as a step runs it: the kernels in use beside what they replaced.

`benchmarks.experts --layer` runs it.
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.experts_checks import check_route
from benchmarks.experts_plans import (
    EXPERTS,
    TOPK,
    WIDTH,
    D,
    Layers,
    stand_ins,
)
from benchmarks.harness import (
    describe,
    load_and_capture,
    medians_us,
    multiprocessors,
    ratio_of,
    say,
    stopwatch,
)
from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._down_few import DownPlan, plan_down
from stepfloor.kernels._stream_product import StreamedWeight
from stepfloor.kernels.linear import linear, linear_repack
from stepfloor.kernels.moe_down import down_arguments, down_launch
from stepfloor.kernels.moe_gate_up import (
    GateUpPlan,
    gate_up_arguments,
    gate_up_launch,
    plan_gate_up,
)
from stepfloor.kernels.moe_route import route_arguments, route_launch


def layer_plans(rows: int, multiprocessors: int) -> dict[str, tuple[GateUpPlan, DownPlan]]:
    """The kernels in use, and what they replaced: clusters of four blocks in moe_down, too large to start early."""
    gate_up, down = stand_ins()
    now = plan_gate_up(gate_up, TOPK, rows), plan_down(down, WIDTH, TOPK, rows, multiprocessors)
    before = plan_down(down, WIDTH, TOPK, rows, multiprocessors, cluster=4, warps=8)
    if rows == 1:
        return {"before": (replace(now[0], slots=3), replace(before, slots=3, sharers=2)), "now": now}
    return {"before": (now[0], before), "now": now}


def compare_layers(options: argparse.Namespace, device: torch.device) -> int:
    """Product of the router's matrix, choices, gate/up and down of 6 layers in a graph; 1 if plans differ in a bit."""
    stamp = stopwatch()
    say(describe(device))
    count = multiprocessors(device)
    weights = Layers(EXPERTS, 6, device, options.cache_dir)
    routers = []
    for _ in range(weights.count):
        matrix = (torch.randn(EXPERTS + 2 * WIDTH + 1, D, device=device) / D**0.5).to(torch.bfloat16)
        routers.append(linear_repack(PackedWeight("bf16", (*matrix.shape,), matrix), device, options.cache_dir))
    errors = check_route(device)
    for rows in [rows for rows in dict.fromkeys(options.rows) if rows <= 4]:
        errors += time_layer(rows, layer_plans(rows, count), weights, routers, options, device)
        stamp(f"{rows} rows done")
    say(f"WRONG: {errors}" if errors else "choices are right; bits are the same")
    return int(bool(errors))


def time_layer(
    rows: int,
    plans: dict[str, tuple[GateUpPlan, DownPlan]],
    weights: Layers,
    routers: list[PackedWeight | StreamedWeight],
    options: argparse.Namespace,
    device: torch.device,
) -> list[str]:
    """Prints times of the whole and of its first parts; returns what is wrong."""
    layers, cache = range(weights.count), options.cache_dir
    bf16 = weights.shared[0].tape.new_empty
    x = [torch.randn(rows, D, device=device).to(torch.bfloat16) for _ in layers]
    hidden, out = [bf16((rows, TOPK, WIDTH)) for _ in layers], [bf16((rows, D)) for _ in layers]
    ids = torch.empty((rows, TOPK), dtype=torch.int64, device=device)
    choice, begun, gate = bf16((rows, TOPK)), bf16((rows, WIDTH)), bf16((rows, 1))
    route = route_launch(EXPERTS, TOPK, WIDTH, True, rows, device, cache)

    def graph_of(pair: tuple[GateUpPlan, DownPlan], kernels: int = 4) -> torch.cuda.CUDAGraph:
        first, second = gate_up_launch(pair[0], device, cache), down_launch(pair[1], device, cache)

        def run() -> None:
            for i in layers:
                products = linear(x[i], (routers[i],))
                shared = begun, gate, weights.shared[i]
                if kernels > 1:
                    route(route_arguments(products, ids, choice, begun, gate))
                if kernels > 2:
                    first(gate_up_arguments(x[i], ids, weights.gate_up[i], hidden[i]))
                if kernels > 3:
                    second(down_arguments(hidden[i], ids, choice, weights.down[i], shared, None, out[i]))

        return load_and_capture(run)

    graphs = {name: graph_of(pair) for name, pair in plans.items()}
    right: list[Tensor] = []
    errors = []
    for name, graph in graphs.items():
        for t in (*hidden, *out):
            t.fill_(torch.nan)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        right = right or [t.clone() for t in (*hidden, *out)]
        if not all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip((*hidden, *out), right, strict=True)):
            errors.append(f"{rows} rows, {name}: other bits, or not finite")
    parts = {"product": 1, "+ route": 2, "+ gate_up": 3}
    graphs |= {name: graph_of(plans["now"], kernels) for name, kernels in parts.items()}
    times = medians_us(graphs, weights.count, options.rounds)
    say(f"{rows} rows, us a layer: " + ", ".join(f"{name} {us:.2f}" for name, us in times.items()))
    say(f"{rows} rows, now / before: {ratio_of(graphs['before'], graphs['now'], 4 * options.rounds)}")
    return errors
