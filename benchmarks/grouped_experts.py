"""Experts of any format and prompt chunks: what moe_gate_up and moe_down run beside Triton, right first, then timed.

Part of `benchmarks.experts`, which runs `decode` and `prefill` in a process each. Every case stands alone: what fails
is named and the next one runs. The last line is a JSON list of rows.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experts_plans import EXPERTS, TOPK, WIDTH, D
from benchmarks.harness import (
    beside_floor,
    elapsed_us,
    load_and_capture,
    medians_us,
    say,
)
from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._down_many import SLICES
from stepfloor.kernels._experts import FORMATS, TiledExperts, pack_experts
from stepfloor.kernels._grouped import Tiles
from stepfloor.kernels._grouped_down import DECODE as DOWN_DECODE
from stepfloor.kernels._grouped_down import PREFILL as DOWN_PREFILL
from stepfloor.kernels._grouped_down import down_grouped
from stepfloor.kernels._shared_expert import pack_shared
from stepfloor.kernels.moe_down import down_rows, moe_down
from stepfloor.kernels.moe_gate_up import DECODE as GATE_UP_DECODE
from stepfloor.kernels.moe_gate_up import PREFILL as GATE_UP_PREFILL
from stepfloor.kernels.moe_gate_up import WARPS, gate_up_grouped, gate_up_rows, moe_gate_up
from stepfloor.roofline import bytes as operator_bytes

PARTS = ("decode", "prefill")
DECODE_FORMATS = ("bf16", "fp8_channel", "fp8_block")
DECODE_ROWS = (1, 4, 16, 64)
PREFILL_FORMATS = ("nvfp4", "bf16")
PREFILL_ROWS = (512, 2048, 8192)
TARGET_SHARE, TARGET_MS = 0.7, 12.0  # bf16 at 1 and 4 rows; 8192 rows
CALLS = 6  # in a graph, each with choices of its own: ten experts of 9.8 MB are more than the L2 holds
PEAK_FLOPS = 989e12  # bf16, dense, of an H200
# neighbours of the constants, to be taken over where one is better
GATE_UP_TILES = {
    "default": GATE_UP_DECODE,
    "16x128/4": Tiles(16, 16, 128, 4, 4),
    "16x256/3": Tiles(16, 16, 256, 4, 3),
    "32x128/3": Tiles(16, 32, 128, 4, 3),
    "32x256/3": Tiles(16, 32, 256, 8, 3),
    "64x128/3": Tiles(16, 64, 128, 4, 3),
    "64x64/5": Tiles(16, 64, 64, 4, 5),
}
DOWN_TILES = {
    "default": DOWN_DECODE,
    "32x128/4": Tiles(16, 32, 128, 4, 4),
    "64x128/3": Tiles(16, 64, 128, 4, 3),
    "64x128/5": Tiles(16, 64, 128, 4, 5),
    "128x64/4": Tiles(16, 128, 64, 4, 4),
}
GATE_UP_CHUNKS = {
    "default": GATE_UP_PREFILL,
    "128x64/8/3": Tiles(128, 64, 64, 8, 3),
    "128x128/8/3": Tiles(128, 128, 64, 8, 3),
}
DOWN_CHUNKS = {"default": DOWN_PREFILL, "64x128/4/4": Tiles(64, 128, 64, 4, 4), "64x256/8/3": Tiles(64, 256, 64, 8, 3)}


def run_part(part: str, rounds: int, bandwidth: float, cache_dir: Path, device: torch.device) -> int:
    """Every case of a part; 1 if one failed."""
    formats, sizes = (DECODE_FORMATS, DECODE_ROWS) if part == "decode" else (PREFILL_FORMATS, PREFILL_ROWS)
    table: list[dict[str, object]] = []
    failed = False
    for name in formats:
        begin = time.perf_counter()
        try:
            bench = Bench(name, max(sizes), cache_dir, device)
        except Exception as error:
            say(f"{part} {name}: FAILED to set up: {type(error).__name__}: {str(error)[:300]}")
            failed = True
            continue
        for rows in sizes:
            label = f"{part} {name}, {rows} rows"
            try:
                wrong = bench.check(rows)
                if wrong:
                    say(f"{label}: WRONG: {'; '.join(wrong)}")
                    failed = True
                    continue
                found = bench.decode(rows, rounds) if part == "decode" else bench.prefill(rows, rounds)
                table += [bench.line(part, rows, kernel, us, bandwidth) for kernel, us in found.items()]
            except Exception as error:
                say(f"{label}: FAILED: {type(error).__name__}: {str(error)[:300]}")
                failed = True
        say(f"{part} {name}: {time.perf_counter() - begin:.1f} s")
        del bench
        torch.cuda.empty_cache()
    report(table)
    say(json.dumps(table, separators=(",", ":")))
    return int(failed)


def random_stack(name: str, n: int, k: int, device: torch.device) -> PackedWeight:
    """512 matrices whose products have the size of their input."""
    make = torch.Generator(device).manual_seed(n)
    shape = (EXPERTS, n, k)
    if name == "bf16":
        data = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return PackedWeight(name, (n, k), data.normal_(0.0, k**-0.5, generator=make))
    if name == "nvfp4":
        codes = torch.randint(0, 256, (EXPERTS, n, k // 2), generator=make, dtype=torch.uint8, device=device)
        scale = torch.randint(0x34, 0x3C, (EXPERTS, n, k // 16), generator=make, dtype=torch.uint8, device=device)
        factor = (0.5 + torch.rand(EXPERTS, generator=make, device=device)) * k**-0.5 / 3
        return PackedWeight(name, (n, k), codes, scale.view(torch.float8_e4m3fn), factor)
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    for expert in range(EXPERTS):
        data[expert] = (64 * torch.randn(n, k, generator=make, device=device)).clamp(-448, 448).to(data.dtype)
    size = (EXPERTS, n) if name == "fp8_channel" else (EXPERTS, -(-n // 128), -(-k // 128))
    factor = (0.5 + torch.rand(size, generator=make, device=device)) * k**-0.5 / 64
    return PackedWeight(name, (n, k), data, factor if name == "fp8_channel" else factor.to(torch.bfloat16))


class Bench:
    """One layer in one format, and choices and rows of which smaller cases take the first."""

    def __init__(self, name: str, most: int, cache_dir: Path, device: torch.device) -> None:
        """Draw weights and rows."""
        self.name, self.device = name, device
        self.stored = random_stack(name, 2 * WIDTH, D, device), random_stack(name, D, WIDTH, device)
        self.gate_up: PackedWeight | TiledExperts = self.stored[0]
        self.down: PackedWeight | TiledExperts = self.stored[1]
        if name in FORMATS:
            self.gate_up = pack_experts(self.stored[0], WARPS, True, cache_dir)
            self.down = pack_experts(self.stored[1], SLICES, False, cache_dir)
        make = torch.Generator(device).manual_seed(7)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, device=device).to(torch.bfloat16)

        self.shared_down = (PackedWeight("bf16", (D, WIDTH), rand(D, WIDTH) / WIDTH**0.5),)
        self.held_shared = tuple(pack_shared(w) for w in self.shared_down) if name in FORMATS else self.shared_down
        self.x, self.shared = rand(most, D), (rand(most, WIDTH), rand(most, 1).sigmoid())
        scores = torch.rand(CALLS, most, EXPERTS, generator=make, device=device)
        self.ids = [each.topk(TOPK).indices for each in scores]
        self.weights = rand(most, TOPK).softmax(-1)

    def both(self, rows: int, call: int = 0) -> tuple[Tensor, Tensor]:
        """The operators as the model calls them."""
        ids = self.ids[call][:rows]
        hidden = moe_gate_up(self.x[:rows], ids, self.gate_up)
        return hidden, self.second(moe_down, hidden, call, self.down, self.held_shared)

    def second(self, operator: Callable[..., Tensor], hidden: Tensor, call: int, *matrices: Any, **how: Any) -> Tensor:
        """moe_down, or what it queues."""
        rows = hidden.shape[0]
        shared, gate = self.shared[0][:rows], self.shared[1][:rows]
        down, shared_down = matrices
        return operator(hidden, self.ids[call][:rows], self.weights[:rows], down, shared, gate, shared_down, **how)

    def check(self, rows: int) -> list[str]:
        """What is wrong with some rows' values, and with the bits of the first of them beside fewer others."""
        wrong: list[str] = []
        hidden, out = self.both(rows)
        fewer = self.both(max(1, rows // 4) if rows <= 80 else max(rows // 2, 400))
        count = fewer[0].shape[0]
        if not (torch.equal(hidden[:count], fewer[0]) and torch.equal(out[:count], fewer[1])):
            wrong.append("a row's bits depend on the number of rows")
        some = slice(max(0, rows - 128), rows)
        ids, step = self.ids[0][some], 2.0**-8
        both, size = pair_products(self.x[some][:, None].expand(-1, TOPK, -1), ids, self.stored[0])
        (gate, up), (off, up_off) = both.chunk(2, -1), (size * D * 2.0**-23 + both.abs() * step).chunk(2, -1)
        exact, silu = F.silu(gate) * up, F.silu(gate).abs()
        # gate, up, silu and the product are each rounded to bf16; float32 sums; silu's slope is below 1.1
        bound = 1.1 * off * (up.abs() + up_off) + silu * up_off + 2.1 * step * exact.abs() + 1e-6
        wrong += outside("hidden", hidden[some], exact, bound)
        products, size = pair_products(hidden[some], ids, self.stored[1])
        weights, shared_gate = self.weights[some].double(), self.shared[1][some].double()
        matrix, rows_in = self.shared_down[0].data.double(), self.shared[0][some].double()
        exact = (products * weights[..., None]).sum(1) + shared_gate * (rows_in @ matrix.T)
        sizes = (size * weights[..., None]).sum(1) + shared_gate * (rows_in.abs() @ matrix.abs().T)
        # product, weighted product, sum, gated product and result: five roundings; float32 sums
        wrong += outside("y", out[some], exact, sizes * (WIDTH + TOPK) * 2.0**-23 + 5.1 * step * sizes)
        return wrong

    def decode(self, rows: int, rounds: int) -> dict[str, float]:
        """us of each half with every cut, and of both, in graphs of several calls."""
        hidden = [torch.randn(rows, TOPK, WIDTH, device=self.device).to(torch.bfloat16) for _ in range(CALLS)]

        def first(i: int, tiles: Tiles) -> object:
            return gate_up_grouped(self.x[:rows], self.ids[i][:rows], self.stored[0], tiles)

        def last(i: int, tiles: Tiles) -> object:
            return self.second(down_grouped, hidden[i], i, self.stored[1], self.shared_down, tiles=tiles)

        swept = rows <= 4 and self.name == "bf16"
        runs: dict[str, Callable[[int], object]] = {"pair": lambda i: self.both(rows, i)}
        if self.name in FORMATS:
            runs["gate_up streamed"] = lambda i: moe_gate_up(self.x[:rows], self.ids[i][:rows], self.gate_up)
            runs["down streamed"] = lambda i: self.second(moe_down, hidden[i], i, self.down, self.held_shared)
        for half, run, cuts in (("gate_up", first, GATE_UP_TILES), ("down", last, DOWN_TILES)):
            for name, tiles in cuts.items():
                if swept or name == "default":
                    runs[f"{half} {name}"] = lambda i, run=run, tiles=tiles: run(i, tiles)
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, run in runs.items():

            def every(run: Callable[[int], object] = run) -> None:
                for i in range(CALLS):
                    run(i)

            try:
                graphs[name] = load_and_capture(every)
            except Exception as error:
                say(f"{self.name}, {rows} rows, {name}: FAILED: {type(error).__name__}: {str(error)[:200]}")
        return medians_us(graphs, CALLS, rounds)

    def prefill(self, rows: int, rounds: int) -> dict[str, float]:
        """us of the layer and of its halves, launched one by one as a prompt chunk is."""
        x, ids = self.x[:rows], self.ids[0][:rows]
        hidden = moe_gate_up(x, ids, self.gate_up)
        runs: dict[str, Callable[[], object]] = {"layer": lambda: self.both(rows)}
        few = {name: tiles for name, tiles in GATE_UP_CHUNKS.items() if rows == max(PREFILL_ROWS) or name == "default"}
        for name, tiles in few.items():
            runs[f"gate_up {name}"] = lambda tiles=tiles: gate_up_grouped(x, ids, self.gate_up, tiles, True)
        few = {name: tiles for name, tiles in DOWN_CHUNKS.items() if rows == max(PREFILL_ROWS) or name == "default"}
        for name, tiles in few.items():
            runs[f"down {name}"] = lambda tiles=tiles: self.second(
                down_grouped, hidden, 0, self.down, self.shared_down, tiles=tiles, ordered=True
            )
        if isinstance(self.gate_up, TiledExperts) and isinstance(self.down, TiledExperts) and rows <= 512:
            gate_up, down = self.gate_up, self.down
            runs["streamed"] = lambda: down_rows(gate_up_rows(x, ids, gate_up), ids, self.weights[:rows], down, None)
        times: dict[str, float] = {}
        for name, run in runs.items():
            run()
            torch.cuda.synchronize()
            times[name] = statistics.median(elapsed_us(run) for _ in range(max(3, rounds // 2)))
        return times

    def line(self, part: str, rows: int, kernel: str, us: float, bandwidth: float) -> dict[str, object]:
        """A row of the table: bytes and operations of what was timed, and the least time they take."""
        distinct = len(set(self.ids[0][:rows].flatten().tolist()))
        sizes = (TOPK, D, WIDTH, self.name)
        half = {
            "gate_up": operator_bytes.moe_gate_up(rows, distinct, *sizes),
            "down": operator_bytes.moe_down(rows, distinct, *sizes, WIDTH, "bf16"),
        }
        flops = {"gate_up": rows * TOPK * 4 * WIDTH * D, "down": rows * (TOPK + 1) * 2 * WIDTH * D}
        which = [name for name in half if kernel.startswith(name)] or list(half)
        read, work = sum(half[name] for name in which), sum(flops[name] for name in which)
        floor = max(read / bandwidth, work / PEAK_FLOPS) * 1e6
        row: dict[str, object] = {
            "part": part,
            "format": self.name,
            "rows": rows,
            "experts": distinct,
            "kernel": kernel,
        }
        row |= beside_floor(us, floor) | {"bytes": read}
        return row | ({"tflops": round(work / us / 1e6, 1)} if part == "prefill" else {})


def pair_products(x: Tensor, ids: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """float64 products of pairs' rows x [T, topk, K] with their experts, and the sums of the magnitudes."""
    out = torch.zeros((*ids.shape, weight.shape[0]), dtype=torch.float64, device=x.device)
    size = torch.zeros_like(out)
    for expert in ids.unique().tolist():
        t, j = (ids == expert).nonzero(as_tuple=True)
        matrix = weight.expert(expert).dequantize().double()
        out[t, j] = x[t, j].double() @ matrix.T
        size[t, j] = x[t, j].double().abs() @ matrix.abs().T
    return out, size


def outside(label: str, ours: Tensor, exact: Tensor, bound: Tensor) -> list[str]:
    """How many values miss their bound, NaN included."""
    inside = (ours.double() - exact).abs() <= bound
    missed = int((~inside).sum())
    return [f"{missed} of {inside.numel()} values of {label} outside of their bound"] if missed else []


def report(table: list[dict[str, object]]) -> None:
    """Every row, and the targets."""
    names = f"{'part':<8} {'format':<12} {'rows':>5} {'experts':>7}  {'kernel':<20}"
    say(f"{names} {'us':>9} {'floor':>8} {'share':>6} TFLOP/s")
    for r in table:
        say(
            f"{r['part']:<8} {r['format']:<12} {r['rows']:>5} {r['experts']:>7}  {r['kernel']:<20} {r['us']:>9} "
            f"{r['floor_us']:>8} {r['fraction']:>6} {r.get('tflops', '')}"
        )
        if r["kernel"] == "pair" and r["format"] == "bf16" and r["rows"] in (1, 4):
            reached = float(str(r["fraction"])) >= TARGET_SHARE
            say(f"         target {TARGET_SHARE:.0%} of the floor: {'reached' if reached else 'MISSED'}")
        if r["kernel"] == "layer" and r["rows"] == 8192:
            reached = float(str(r["us"])) <= TARGET_MS * 1e3
            say(f"         target {TARGET_MS} ms: {'reached' if reached else 'MISSED'}")
