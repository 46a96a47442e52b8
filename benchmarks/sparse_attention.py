"""Sparse attention on one GPU: right first, then timed in chains of layers and as prompt chunks.

    PYTHONPATH=src python3 -m benchmarks.sparse_attention [--json FILE] [--part NAME ...]

Each part is a process of its own, so that one that fails, or hangs, does not keep the others from printing:
check   a few shapes against the references (tests/kernels/test_qsa_triton.py, marked gpu, is the full check)
decode  CUDA-graph replays of prepare, select, attend and of the three together, one call a layer, caches rotated
        past the L2, medians of rounds in alternating order; B sequences x R rows at several contexts
chunk   8192 rows of one sequence at the beginning of a text and behind 8192 others
plans   the three together by plans of attend's kernel, and with the two kernels it replaces
The page table holds 262144 tokens, as a server's does, but for the contexts marked "short table".
"""

import argparse
import json
import math
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    BANDWIDTH,
    ROTATED_BYTES,
    capture,
    describe,
    elapsed_us,
    follow,
    give_up_after,
    gpu,
    medians_us,
    say,
    start,
    stopwatch,
    write_json,
)
from stepfloor.kernels._attend import AttendPlan, choose_attend
from stepfloor.kernels._attend_triton import attend_triton
from stepfloor.kernels._stream import shared_limit
from stepfloor.kernels.qsa_attend import (
    attend_rows,
    qsa_attend,
    qsa_attend_inputs,
    qsa_attend_reference,
)
from stepfloor.kernels.qsa_prepare import (
    SparseCache,
    SparseNorms,
    SparseShape,
    qsa_prepare,
    qsa_prepare_inputs,
    qsa_prepare_reference,
)
from stepfloor.kernels.qsa_select import qsa_select, qsa_select_inputs, qsa_select_reference
from stepfloor.roofline import bytes as roofline_bytes

SHAPE = SparseShape(heads=24, kv_heads=2, head_dim=256, index_heads=4, index_dim=128, ratio=4, topk=512)
ATTENTION = (SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim)
INDEXER = (SHAPE.index_heads, SHAPE.index_dim, SHAPE.ratio)
ROTARY, PAGE, LONGEST = 64, 64, 262144
LAYERS = 12
CACHE_BYTES = 70e9
DECODE = [(1, 1), (4, 1), (16, 1), (1, 4), (4, 4), (16, 4)]
PLANNED = [
    (1, 1, 700),
    (4, 1, 700),
    (16, 1, 700),
    (1, 4, 1000),
    (4, 4, 1000),
    (16, 4, 1000),
    (1, 4, 8192),
    (16, 4, 8192),
]
CONTEXTS = [(700, 2048), (700, LONGEST), (8192, LONGEST), (131072, LONGEST)]  # tokens, tokens the table holds
PARTS = ("check", "decode", "chunk", "plans")
BF16 = torch.bfloat16


def main() -> int:
    """Run the parts one after the other; 1 if one fails."""
    options = parse()
    if options.run is not None:
        give_up_after(options.limit_s)
        say(json.dumps(RUN[options.run](options, gpu())))
        return 0
    stamp = stopwatch()
    say(describe(gpu()))
    results: dict[str, object] = {}
    for part in options.part:
        results[part] = run_part(part, options)
        stamp(f"{part} {'failed' if results[part] is None else 'done'}\n")
    failed = [part for part, result in results.items() if result is None]
    line = {"gpu": torch.cuda.get_device_name(gpu()), "torch": torch.__version__, "failed": failed, **results}
    write_json(options.json, line)
    say(json.dumps(line, separators=(",", ":")))
    return int(bool(failed))


def parse() -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit-s", type=int, default=90, help="give up a part with a traceback after this long")
    parser.add_argument("--run", choices=PARTS, help="run one part here")
    return parser.parse_args()


def run_part(part: str, options: argparse.Namespace) -> object:
    """Its result, the last line it prints; None if it fails. What it says is passed on line by line."""
    arguments = ["--run", part, "--rounds", str(options.rounds), "--bandwidth", str(options.bandwidth)]
    process = start("benchmarks.sparse_attention", *arguments, "--limit-s", str(options.limit_s))
    last = follow(process)
    if process.returncode == 0:
        return json.loads(last)
    say(last)
    return None


# ---------------------------------------------------------------------- is it right


def check(options: argparse.Namespace, device: torch.device) -> list[str]:
    """Names of the checks that hold; RuntimeError at the end if one does not."""
    checks = {
        "prepare 4 x 4 at 8189": lambda: check_prepare(4, 4, 8189, device),
        "prepare 1 x 3000 at 5": lambda: check_prepare(1, 3000, 5, device),
        "select 4 x 4 at 2045": lambda: check_select(4, 4, 2045, device),
        "select 2 x 4 at 131072": lambda: check_select(2, 4, 131072, device),
        "select 1 x 1 at 262143": lambda: check_select(1, 1, 262143, device),
        "select 1 x 600 at 9000": lambda: check_select(1, 600, 9000, device),
        "attend 4 x 4 at 700": lambda: check_attend(4, 4, 700, device),
        "attend 16 x 4 at 8192": lambda: check_attend(16, 4, 8192, device),
        "attend 1 x 300 at 1900": lambda: check_attend(1, 300, 1900, device),
    }
    passed = []
    for name, run in checks.items():
        try:
            problem = run()
        except Exception:  # the next check still says something
            problem = traceback.format_exc(limit=-3)
        say(f"{'ok    ' if not problem else 'FAILED'} {name}{': ' + problem if problem else ''}")
        if not problem:
            passed.append(name)
    if len(passed) < len(checks):
        raise RuntimeError(f"{len(checks) - len(passed)} of {len(checks)} checks failed")
    return passed


def differs(name: str, ours: Tensor, wanted: Tensor, share: float) -> str:
    """What is wrong if more than `share` of the values have other bits, or one is far away."""
    moved = float((ours != wanted).float().mean())
    far = float((ours.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    return (
        "" if moved <= share and far < 2.0**-6 else f"{name}: {moved:.2%} differ, by up to {far:.2g} of the largest; "
    )


def check_prepare(b: int, r: int, context: int, device: torch.device) -> str:
    """One value in a hundred may be rounded the other way: squares are summed in another order."""
    runs = []
    for operator in (qsa_prepare, qsa_prepare_reference):
        inputs: dict[str, Any] = qsa_prepare_inputs(b, r, context, SHAPE, BF16, str(device))
        outputs = operator(**inputs)
        cache = inputs["cache"]
        if not isinstance(cache, SparseCache):
            raise TypeError(f"qsa_prepare_inputs gave {type(cache)}")
        runs.append((*outputs, cache.keys, cache.values, cache.block_keys, cache.raw_keys))
    names = ("q", "gate", "index_q", "keys", "values", "block keys", "raw keys")
    return "".join(differs(n, a, b, 0.01) for n, a, b in zip(names, *runs, strict=True))


def check_select(b: int, r: int, context: int, device: torch.device) -> str:
    """A row in fifty may decide a near tie otherwise."""
    inputs: dict[str, Any] = qsa_select_inputs(b, r, context, *INDEXER, SHAPE.topk, BF16, str(device))
    rows = (qsa_select(**inputs) != qsa_select_reference(**inputs)).any(-1)
    return "" if float(rows.float().mean()) <= 0.02 else f"{int(rows.sum())} of {rows.numel()} rows differ"


def check_attend(b: int, r: int, context: int, device: torch.device) -> str:
    """Each side rounds weights, sum, gate and product once, by at most 2**-8, of which the mean square root is half."""
    inputs: dict[str, Any] = qsa_attend_inputs(b, r, context, *ATTENTION, SHAPE.ratio, SHAPE.topk, BF16, str(device))
    ours, wanted = qsa_attend(**inputs).double(), qsa_attend_reference(**inputs).double()
    off = float((ours - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    return "" if off <= 2.0**-7 else f"root mean square of the difference is {off:.2g} of the result's"


# ---------------------------------------------------------------------- decode


class Layers:
    """Distinct caches of a chain, and operands that all its layers share."""

    def __init__(self, b: int, r: int, context: int, table: int, layers: int, device: torch.device) -> None:
        make = torch.Generator(device).manual_seed(0)

        def rand(*size: int) -> Tensor:
            return torch.empty(size, dtype=BF16, device=device).normal_(generator=make)

        used, pages = -(-(context + r) // PAGE), -(-(table + r) // PAGE)
        order = 1 + torch.randperm(b * used, generator=make, device=device).reshape(b, used)
        page_table = torch.zeros((b + 1, pages), dtype=torch.int64, device=device)
        page_table[1:, :used] = order
        sizes = (SHAPE.head_dim, SHAPE.head_dim, SHAPE.index_dim, SHAPE.index_dim)
        self.norms = SparseNorms(*(torch.ones(n, device=device) for n in sizes))
        self.cos = torch.ones((context + r, ROTARY), dtype=BF16, device=device)
        self.sin = torch.zeros_like(self.cos)
        self.projected = rand(b, r, 2 * (SHAPE.heads + SHAPE.kv_heads) * SHAPE.head_dim + 5 * SHAPE.index_dim)
        self.slots = torch.arange(1, b + 1, device=device)
        self.first = torch.full((b,), context, device=device)
        self.caches = [
            SparseCache(
                rand(1 + b * used, PAGE, SHAPE.kv_heads, SHAPE.head_dim),
                rand(1 + b * used, PAGE, SHAPE.kv_heads, SHAPE.head_dim),
                rand(1 + b * used, PAGE // SHAPE.ratio, SHAPE.index_dim),
                rand(b + 1, SHAPE.ratio + 7, SHAPE.index_dim),
                page_table,
            )
            for _ in range(layers)
        ]

    def prepare(self, cache: SparseCache) -> tuple[Tensor, Tensor, Tensor]:
        return qsa_prepare(self.projected, self.slots, self.first, self.cos, self.sin, self.norms, cache, SHAPE, 1e-6)

    def select(self, index_q: Tensor, cache: SparseCache) -> Tensor:
        return qsa_select(index_q, self.slots, self.first, cache.block_keys, cache.page_table, SHAPE.ratio, SHAPE.topk)

    def attend(
        self,
        q: Tensor,
        gate: Tensor,
        selected: Tensor,
        cache: SparseCache,
        plan: AttendPlan | None = None,
        two: bool = False,
    ) -> Tensor:
        """By the operator's own choice, by a plan, or in two kernels."""
        operands = (q, gate, selected, self.slots, self.first, cache.keys, cache.values, cache.page_table)
        if plan is not None:
            return attend_rows(plan, *operands, SHAPE.ratio)
        return (attend_triton if two else qsa_attend)(*operands, SHAPE.ratio)

    def all(self, cache: SparseCache, plan: AttendPlan | None = None, two: bool = False) -> Tensor:
        q, gate, index_q = self.prepare(cache)
        return self.attend(q, gate, self.select(index_q, cache), cache, plan, two)


def chain_length(b: int, r: int, context: int) -> int:
    """Layers that a chain needs to read more than the L2 holds; whole models where they fit."""
    whole = (
        -(-(context + r) // PAGE)
        * PAGE
        * b
        * (2 * 2 * SHAPE.kv_heads * SHAPE.head_dim + 2 * SHAPE.index_dim // SHAPE.ratio)
    )
    read = roofline_bytes.qsa_attend(b, r, context, *ATTENTION, SHAPE.ratio, SHAPE.topk)
    wanted = LAYERS * math.ceil(ROTATED_BYTES / read / LAYERS)
    return max(1, min(wanted, int(CACHE_BYTES / whole)))


def floors_us(b: int, r: int, context: int, bandwidth: float) -> dict[str, tuple[int, float]]:
    """Bytes of a layer and the time they take, by operator."""
    counts = {
        "prepare": roofline_bytes.qsa_prepare(b * r, *ATTENTION, *INDEXER),
        # what need not be looked at is not counted: rows within the budget select everything
        "select": roofline_bytes.qsa_select(b, r, context, *INDEXER, SHAPE.topk)
        if context + r >= (SHAPE.topk + 1) * SHAPE.ratio
        else b * r * SHAPE.topk * 8,
        "attend": roofline_bytes.qsa_attend(b, r, context + r, *ATTENTION, SHAPE.ratio, SHAPE.topk),
    }
    counts["all"] = sum(counts.values())
    return {name: (count, count / bandwidth * 1e6) for name, count in counts.items()}


def decode(options: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    """A table of us a layer."""
    say(
        f"us a layer; bytes and floor of all three\n{'context':>20}{'B x R':>8}{'layers':>8}{'prepare':>9}{'select':>9}"
        f"{'attend':>9}{'all':>9}{'MB':>9}{'floor':>9}{'share':>7}"
    )
    rows: list[dict[str, object]] = []
    for context, table in CONTEXTS:
        for b, r in DECODE:
            try:
                rows.append(time_decode(b, r, context, table, options, device))
            except Exception:  # out of memory, or a shape without a kernel: the others are still timed
                say(f"{context} tokens, {b} x {r}: {traceback.format_exc(limit=-2)}")
            torch.cuda.empty_cache()
    return rows


def time_decode(
    b: int, r: int, context: int, table: int, options: argparse.Namespace, device: torch.device
) -> dict[str, object]:
    """One line of the table."""
    layers = Layers(b, r, context, table, chain_length(b, r, context), device)
    q, gate, index_q = layers.prepare(layers.caches[0])
    selected = layers.select(index_q, layers.caches[0])
    runs: dict[str, Callable[[SparseCache], object]] = {
        "prepare": layers.prepare,
        "select": lambda cache: layers.select(index_q, cache),
        "attend": lambda cache: layers.attend(q, gate, selected, cache),
        "all": layers.all,
    }
    graphs = {name: chain(run, layers.caches) for name, run in runs.items()}
    times = medians_us(graphs, len(layers.caches), options.rounds)
    floors = floors_us(b, r, context, options.bandwidth)
    short = table < LONGEST
    megabytes, floor = floors["all"][0] / 1e6, floors["all"][1]
    say(
        f"{f'{context} short table' if short else context:>20}{f'{b} x {r}':>8}{len(layers.caches):8}"
        + "".join(f"{times[name]:9.2f}" for name in runs)
        + f"{megabytes:9.2f}{floor:9.2f}{floor / times['all']:7.0%}"
    )
    return {
        "context": context,
        "short_table": short,
        "sequences": b,
        "rows": r,
        "us": {name: round(us, 2) for name, us in times.items()},
        "floor_us": {name: round(us, 2) for name, (_, us) in floors.items()},
    }


def chain(run: Callable[[SparseCache], object], caches: list[SparseCache]) -> torch.cuda.CUDAGraph:
    """A graph of one call for each cache, in a row."""
    run(caches[0])  # compiles
    torch.cuda.synchronize()

    def every() -> None:  # a result is freed when the next call is queued: all together they would fill the L2
        for cache in caches:
            run(cache)

    return capture(every)


# ---------------------------------------------------------------------- chunks and plans


def chunk(options: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    """8192 rows of one sequence, three layers in turn, launched from Python."""
    say(f"ms a layer, 8192 rows\n{'context':>20}{'prepare':>9}{'select':>9}{'attend':>9}{'all':>9}")
    lines: list[dict[str, object]] = []
    for context in (0, 8192):
        layers = Layers(1, 8192, context, LONGEST, 3, device)
        q, gate, index_q = layers.prepare(layers.caches[0])
        selected = layers.select(index_q, layers.caches[0])
        runs: dict[str, Callable[[SparseCache], object]] = {
            "prepare": layers.prepare,
            "select": lambda c, layers=layers, index_q=index_q: layers.select(index_q, c),
            "attend": lambda c, layers=layers, q=q, g=gate, s=selected: layers.attend(q, g, s, c),
            "all": layers.all,
        }
        times = {name: time_calls(run, layers.caches, options.rounds) for name, run in runs.items()}
        say(f"{context:>20}" + "".join(f"{ms:9.2f}" for ms in times.values()))
        lines.append({"context": context, "rows": 8192, "ms": {name: round(ms, 3) for name, ms in times.items()}})
    return lines


def time_calls(run: Callable[[SparseCache], object], caches: list[SparseCache], rounds: int) -> float:
    """Median ms of a call."""
    run(caches[0])
    torch.cuda.synchronize()

    def every() -> None:
        for cache in caches:
            run(cache)

    return statistics.median(elapsed_us(every) for _ in range(rounds)) / 1e3 / len(caches)


def plans(options: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    """A layer by the blocks of a cluster of attend's kernel, and in two kernels."""
    clusters = (4, 5, 6, 7, 8)
    say(
        f"us a layer, by blocks of a cluster\n{'context':>20}{'B x R':>8}{'two':>8}"
        + "".join(f"{c:>8}" for c in clusters)
    )
    lines: list[dict[str, object]] = []
    for b, r, context in PLANNED:
        layers = Layers(b, r, context, LONGEST, chain_length(b, r, context), device)
        q, *_ = layers.prepare(layers.caches[0])
        chosen = choose_attend(q, layers.caches[0].keys, SHAPE.ratio, SHAPE.topk, shared_limit(device))
        if chosen is None:
            raise RuntimeError("attend's kernel cannot be built here")
        runs: dict[str, Callable[[SparseCache], object]] = {
            "two": lambda cache, layers=layers: layers.all(cache, two=True)
        }
        for cluster in clusters:
            plan = replace(chosen, cluster=cluster)
            if plan.fits(shared_limit(device)):
                runs[str(cluster)] = lambda cache, layers=layers, plan=plan: layers.all(cache, plan)
        graphs = {name: chain(run, layers.caches) for name, run in runs.items()}
        times = medians_us(graphs, len(layers.caches), options.rounds)
        shown = (f"{times[name]:8.2f}" if name in times else f"{'':8}" for name in ("two", *map(str, clusters)))
        say(f"{context:>20}{f'{b} x {r}':>8}" + "".join(shown))
        lines.append({"context": context, "sequences": b, "rows": r, "us": {n: round(t, 2) for n, t in times.items()}})
        del graphs
        torch.cuda.empty_cache()
    return lines


RUN: dict[str, Callable[[argparse.Namespace, torch.device], object]] = {
    "check": check,
    "decode": decode,
    "chunk": chunk,
    "plans": plans,
}


if __name__ == "__main__":
    sys.exit(main())
