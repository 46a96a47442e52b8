"""Matrices of two formats that share an input, on one GPU: one launch beside one for each, right first.

    PYTHONPATH=src python3 -m benchmarks.pairs [--rows 1,4,16,64] [--formats fp8_channel,fp8_block] [--blocks 3,6,12]

What an FP8 release has: the delta net's b and a, the indexer, the router and the shared gate stay bf16. Times are of
CUDA-graph replays, weights rotated past the L2, medians; `--blocks` tries other shares of the grid too.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import (
    BANDWIDTH,
    capture,
    gpu,
    medians_us,
    multiprocessors,
    rotations,
    say,
)
from benchmarks.linear_plans import random_matrix
from stepfloor.formats.codec import PackedWeight
from stepfloor.formats.table import stored_bytes
from stepfloor.kernels._choose_form import plan_stream
from stepfloor.kernels._forms import MAX_ROWS
from stepfloor.kernels._pair import PairPlan, StreamedPair
from stepfloor.kernels._stream import outer_scales, pack_tape
from stepfloor.kernels._stream_product import StreamedWeight
from stepfloor.kernels.linear import linear, linear_join, linear_repack

K = 2560


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows in FP8, and bf16 rows whose columns lie before and behind theirs."""

    name: str
    middle: int
    before: int
    behind: int


SHAPES = (Shape("gdn_in", 16384, 0, 96), Shape("qsa_in", 13312, 0, 640), Shape("router_shared", 1280, 512, 1))


def main() -> int:
    """Check and time; 1 if a pair's bits are not those of its matrices alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--formats", default="fp8_channel,fp8_block,mxfp8")
    parser.add_argument("--blocks", default="", help="blocks for the bf16 rows to try too")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = [int(r) for r in options.rows.split(",")]
    blocks = [int(b) for b in options.blocks.split(",") if b]
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        for shape in SHAPES:
            for name in options.formats.split(","):
                wrong += bench(shape, name, rows, blocks, options.rounds, Path(directory))
    say("every bit is that of the matrix alone" if wrong == 0 else f"WRONG: {wrong} pairs")
    return int(wrong > 0)


def bench(shape: Shape, name: str, rows: Sequence[int], blocks: Sequence[int], rounds: int, cache_dir: Path) -> int:
    """One shape in one format; whether it was wrong."""
    device = gpu()
    counts = [(shape.before, "bf16"), (shape.middle, name), (shape.behind, "bf16")]
    stored = [random_matrix(n, K, form, device) for n, form in counts if n]
    (joined,) = linear_join(stored, device, cache_dir, MAX_ROWS)
    if not isinstance(joined, StreamedPair):
        raise RuntimeError(f"{shape} in {name} is no pair")
    nbytes = sum(stored_bytes(form, n, K) for n, form in counts if n)
    apart = [linear_repack(w, device, cache_dir, MAX_ROWS) for w in stored]
    x = torch.randn(max(rows), K, device=device).to(torch.bfloat16)
    second = linear(x, (joined.second,))
    alone = (second[:, : shape.before], linear(x, (joined.first,)), second[:, shape.before :])
    wanted = torch.cat(alone, 1)
    wrong = [r for r in (*range(1, 17), *rows) if not torch.equal(linear(x[:r], (joined,)), wanted[:r])]
    calls = rotations(nbytes)
    forms: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "apart": [of(copies) for copies in zip(*(rotated(w, calls) for w in apart), strict=True)],
        f"pair {joined.second.plan.blocks}": [of((w,)) for w in rotated_pair(joined, calls)],
    }
    for number in blocks:
        other = with_blocks(joined, number)
        if other is not None and other.second.plan.blocks != joined.second.plan.blocks:
            forms[f"pair {other.second.plan.blocks}"] = [of((w,)) for w in rotated_pair(other, calls)]
    for count in rows:
        graphs = {form: chain(run, x[:count]) for form, run in forms.items()}
        times = medians_us(graphs, calls, rounds)
        shown = ", ".join(f"{form} {us:.2f}" for form, us in times.items())
        say(f"{shape.name:14} {name:12} M={count:<3} us: {shown}; floor {nbytes / BANDWIDTH * 1e6:.2f}")
    if wrong:
        say(f"{shape.name} {name}: rows {wrong} have other bits than alone")
    return int(bool(wrong))


def of(weights: Sequence[PackedWeight | StreamedWeight | StreamedPair]) -> Callable[[Tensor], Tensor]:
    """The product as the model calls it."""
    return lambda x: linear(x, weights)


def chain(runs: list[Callable[[Tensor], Tensor]], x: Tensor) -> torch.cuda.CUDAGraph:
    """A graph of all calls, after one of them has loaded its kernels."""
    runs[0](x)
    torch.cuda.synchronize()

    def run() -> None:
        for call in runs:
            call(x)

    return capture(run)


def rotated(weight: PackedWeight | StreamedWeight, count: int) -> list[StreamedWeight]:
    """Copies of a matrix."""
    if not isinstance(weight, StreamedWeight):
        raise RuntimeError("a matrix is not streamed")
    return [StreamedWeight(weight.plan, weight.tape.clone(), weight.cache_dir, weight.scales) for _ in range(count)]


def rotated_pair(pair: StreamedPair, count: int) -> list[StreamedPair]:
    """Copies of both matrices."""
    both = zip(rotated(pair.first, count), rotated(pair.second, count), strict=True)
    return [StreamedPair(first, second, pair.before) for first, second in both]


def with_blocks(pair: StreamedPair, blocks: int) -> StreamedPair | None:
    """The pair with another share of the grid for its second matrix, or None where it would need several passes."""
    count = multiprocessors(gpu())
    second = plan_stream(*pair.second.shape, blocks)
    if second.passes > 1 or second.blocks >= count:
        return None
    first = plan_stream(*pair.first.shape, count - second.blocks, format_name=pair.first.plan.format)
    plans = PairPlan(first, second, pair.before)
    parts = (pair.first, plans.first), (pair.second, plans.second)
    made = [
        StreamedWeight(plan, pack_tape(w.unpack(), plan), w.cache_dir, outer_scales(w.unpack())) for w, plan in parts
    ]
    return StreamedPair(made[0], made[1], pair.before)


if __name__ == "__main__":
    raise SystemExit(main())
