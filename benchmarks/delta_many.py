"""The gated delta net's decode step with many sequences on one GPU: two kernels beside the fused one.

    PYTHONPATH=src python3 -m benchmarks.delta_many [--json FILE]

Right first: every form has the fused kernel's bits (outputs, states, kept rows), settled and not, in a graph that
restores what a step rewrites and repeats it; and the fused kernel is as near to the reference as benchmarks.delta_net
wants it. Then times: what a form adds to the chain in-projection, delta net, out-projection of some layers, and a row
of calls. What differs from the fused kernel gets no times, and the exit status is 1.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.delta_net import streamed
from benchmarks.delta_net_checks import SIZES, copied, model_inputs, own_copies, packed_step, rule_bound
from benchmarks.harness import (
    BANDWIDTH,
    CACHE_DIR,
    capture,
    describe,
    give_up_after,
    gpu,
    load_and_capture,
    medians_us,
    say,
    stopwatch,
    write_json,
)
from stepfloor.kernels._delta_fused import DeltaPlan, choose_plan, launch_for
from stepfloor.kernels._delta_split import SplitPlan, pack_split_arguments, split_launches_for
from stepfloor.kernels._stream_product import StreamedWeight, stream_product
from stepfloor.kernels.gdn_decode import gdn_decode_inputs, gdn_decode_reference
from stepfloor.roofline import bytes as roofline_bytes

# sequences, new rows, pending rows
CHECKED = ((16, 1, 1), (16, 4, 4), (3, 4, 4))
TIMED = ((16, 1, 1), (16, 4, 3), (8, 1, 1), (8, 4, 3), (4, 1, 1), (4, 4, 3), (2, 1, 1), (2, 4, 3))
LAYERS = 6
COLUMNS, WIDTH = 16480, SIZES[1] * SIZES[3]
TENSORS = ("state", "raw_rows", "gate_rows")
Queue = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Form:
    """How a call is made; ring: that of the second of two kernels (see SplitPlan), None for the fused one."""

    ring: int | None = None
    settled: bool = True
    first_only: bool = False  # the kernel of the rows alone, for its time

    @property
    def name(self) -> str:
        """In the tables."""
        kernels = "fused" if self.ring is None else f"ring of {self.ring}" if self.ring else "two blocks"
        return kernels + ("" if self.settled else ", not settled") + (", rows only" if self.first_only else "")

    def split(self, rows: int, kept: int) -> SplitPlan | None:
        """The plan of the two kernels, if it is theirs."""
        return None if self.ring is None else SplitPlan(base_plan(rows, kept), self.settled, self.ring)

    def fits(self, rows: int, kept: int) -> bool:
        """Whether there is room for that many rows."""
        split = self.split(rows, kept)
        return split is None or split.fits()


FORMS = [Form(), *(Form(ring) for ring in (0, 3, 2))]
UNSETTLED = [Form(settled=False), Form(0, settled=False), Form(2, settled=False)]
ROWS_ONLY = Form(0, first_only=True)


def base_plan(rows: int, kept: int) -> DeltaPlan:
    """The model's sizes."""
    return DeltaPlan(*SIZES, rows=rows, kept=kept, silu=False)


def queue_of(form: Form, inputs: dict[str, Any], kept: int, out: Tensor, cache_dir: Path) -> Queue:
    """What queues a call on the inputs, in place."""
    sequences, rows, _ = inputs["projected"].shape
    split = form.split(rows, kept)
    if split is None:
        plan = choose_plan(base_plan(rows, kept), sequences, form.settled)
        launch = launch_for(plan, sequences, out.device, cache_dir)
        packed = packed_step(inputs, out)
        return lambda: launch(packed)
    scratch = torch.full((sum(split.scratch(sequences)),), torch.nan, device=out.device)
    launches = split_launches_for(split, sequences, out.device, cache_dir)[: 1 if form.first_only else 2]
    given: tuple[Any, ...] = (*inputs.values(), out, scratch)
    arguments = pack_split_arguments(split, *given)

    def queue(_alive: Tensor = scratch) -> None:
        for launch in launches:
            launch(arguments)

    return queue


def check_shape(sequences: int, rows: int, kept: int, cache_dir: Path, device: torch.device) -> list[str]:
    """What is wrong with any form at a shape."""
    found: list[str] = []
    inputs = model_inputs(sequences, rows, kept, device)
    wanted: list[Tensor] | None = None
    for form in (*FORMS, *UNSETTLED):
        if not form.fits(rows, kept):
            continue
        work = copied(inputs)
        out = inputs["projected"].new_empty((sequences, rows, WIDTH))
        queue = queue_of(form, work, kept, out, cache_dir)
        queue()
        torch.cuda.synchronize()

        def step(queue: Queue = queue, work: dict[str, Any] = work, out: Tensor = out) -> None:
            for name in TENSORS:
                work[name].copy_(inputs[name])
            out.fill_(torch.nan)
            queue()

        graph = capture(step)
        for _ in range(8):
            graph.replay()
            results = [tensor.clone().view(torch.int16) for tensor in (out, *(work[name] for name in TENSORS))]
            if wanted is None:
                wanted = results
                found += check_reference(inputs, out, work["state"])
            if not all(torch.equal(ours, first) for ours, first in zip(results, wanted, strict=True)):
                found.append(f"{form.name}, {sequences}x{rows}, {kept} pending at most: other bits than fused")
                break
    return found


def check_reference(inputs: dict[str, Any], out: Tensor, state: Tensor) -> list[str]:
    """What parts an output and a state from the reference's; the bounds are those of benchmarks.delta_net."""
    wanted = copied(inputs)
    reference = gdn_decode_reference(**wanted)
    largest = float(wanted["state"].abs().max())
    bound = rule_bound(inputs["projected"].shape[1] + inputs["gate_rows"].shape[1], largest)
    off = float((state - wanted["state"]).abs().max())
    share = float((out != reference).float().mean())
    good = off <= bound + 3 * 2.0**-7 * largest and share <= 0.05
    say(f"fused, {tuple(out.shape[:2])}: state off {off:.2g} of {largest:.2g}, {share:.2%} of outputs differ")
    return [] if good else [f"fused {tuple(out.shape[:2])} is not near the reference"]


def time_shape(
    sequences: int,
    rows: int,
    pending: int,
    products: list[tuple[StreamedWeight, StreamedWeight]],
    rounds: int,
    cache_dir: Path,
    device: torch.device,
) -> dict[str, float]:
    """Us a layer of each form between the layer's products, and of a call in a row of calls."""
    inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *SIZES, torch.bfloat16, str(device))
    inputs["pending"] = torch.full((sequences,), pending, device=device)
    layers = [own_copies(inputs) for _ in products]
    x = torch.randn(sequences * rows, 2560, device=device).to(torch.bfloat16)
    projected = inputs["projected"].view(-1, COLUMNS)
    mixed = x.new_empty((sequences * rows, WIDTH))

    def chain(queues: list[Queue] | None) -> None:
        for i, (into, back) in enumerate(products):
            stream_product(x, into, projected)
            if queues is not None:
                queues[i]()
            stream_product(projected[:, :WIDTH] if queues is None else mixed, back, x)

    graphs = {"without": load_and_capture(lambda: chain(None))}
    row_graphs: dict[str, torch.cuda.CUDAGraph] = {}
    alive: list[list[Queue]] = []  # with their scratch: a capture gives memory that nobody holds back to the driver
    for form in (*FORMS, *UNSETTLED, ROWS_ONLY):
        if not form.fits(rows, rows):
            continue
        queues = [queue_of(form, layer, rows, mixed, cache_dir) for layer in layers]
        alive.append(queues)
        graphs[form.name] = load_and_capture(lambda queues=queues: chain(queues))
        if form in FORMS:
            row_graphs[form.name] = capture(lambda queues=queues: [queue() for queue in queues])
    times = medians_us(graphs, len(products), rounds)
    without = times.pop("without")
    row_times = medians_us(row_graphs, len(products), rounds)
    return {name: us - without for name, us in times.items()} | {f"row of {n}": us for n, us in row_times.items()}


def main() -> int:
    """1 if a form has other bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH)
    parser.add_argument("--cache-dir", type=Path, default=CACHE_DIR)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=int, default=120, help="give up with a traceback after this long")
    options = parser.parse_args()
    give_up_after(options.limit_s)
    device, stamp = gpu(), stopwatch()
    say(describe(device))
    failed = [text for shape in CHECKED for text in check_shape(*shape, options.cache_dir, device)]
    stamp("; ".join(failed) or "all forms have the fused kernel's bits")
    if failed:
        return 1
    products = [
        (streamed(COLUMNS, 2560, device, options.cache_dir), streamed(2560, WIDTH, device, options.cache_dir))
        for _ in range(LAYERS)
    ]
    table: dict[str, dict[str, float]] = {}
    for sequences, rows, pending in TIMED:
        times = time_shape(sequences, rows, pending, products, options.rounds, options.cache_dir, device)
        floor = roofline_bytes.gdn_decode(sequences, rows, *SIZES, 4) / options.bandwidth * 1e6
        table[f"{sequences}x{rows}"] = {"floor": floor} | times
    stamp("us a layer more between its products; a call in a row of calls")
    say(f"{'sequences x rows':32}" + "".join(f"{shape:>8}" for shape in table))
    for name in dict.fromkeys(name for times in table.values() for name in times):
        cells = (f"{times[name]:8.2f}" if name in times else " " * 8 for times in table.values())
        say(f"{name:32}" + "".join(cells))
    line = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "us": table}
    write_json(options.json, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
