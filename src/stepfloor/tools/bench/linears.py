"""bench step --linears: every matrix product of a model beside torch's, cold, right first.

On a GPU a measurement is one captured graph of calls over copies of the weights, more bytes than any L2 holds; the two
that are compared take turns, the other one first in every second round, and their ratio is taken round by round. torch
multiplies the bf16 matrix (cuBLAS), whatever the format; beside one scale a row in FP8 it is `torch._scaled_mm`, whose
quantization of x is left out. Fractions are of the read bandwidth measured in the same run. On the CPU, calls are timed
one after the other and weights may be warm: that run checks the command, not the kernels.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.config import SPARSE, ModelConfig
from stepfloor.errors import UserError
from stepfloor.formats.codec import E4M3_MAX, PackedWeight, quantize
from stepfloor.formats.table import FORMATS
from stepfloor.kernels.linear import StreamedWeight, linear, linear_reference, linear_repack
from stepfloor.roofline import bytes as moved
from stepfloor.step.bandwidth import read_bandwidth_gbps
from stepfloor.weights.expected import expected_weights

Weight = PackedWeight | StreamedWeight

TIMED_FORMATS = ("bf16", "fp8_channel", "fp8_block", "mxfp8", "nvfp4")
ROWS = (1, 4, 8, 16, 64)
MARKED_ROWS = 16  # marks are for up to this many
COLD_BYTES = 120e6  # two L2s of an H200
ROUNDS = 7
GRAPH_S = 4e-4  # long beside the launch of a graph, 5 to 10 us
BIG_BYTES, BIG_FRACTION = 60e6, 0.85
OUT_SHAPE, OUT_FRACTION = (2560, 6144), 0.75
MOST_SECONDS = 240.0  # then what is left is named and not measured


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix [n, k] of the model; fused: the model multiplies it inside another kernel, with more work."""

    name: str
    n: int
    k: int
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """One product in one format and number of rows.

    rival         cuBLAS (torch.mm in bf16) or _scaled_mm; torch on the CPU, where no mark is asked for
    us, rival_us  of one call, medians; ratio  ours over the rival's, median of the rounds, low and high its extremes
    fraction      of the bandwidth; wanted  the least it should be, None where nothing was asked for
    """

    name: str
    n: int
    k: int
    fused: bool
    format: str
    rows: int
    us: float
    rival: str
    rival_us: float
    ratio: float
    low: float
    high: float
    weight_bytes: int
    fraction: float
    wanted: float | None
    worst: float

    @property
    def verdicts(self) -> tuple[str, ...]:
        """What was asked of it: met, missed, or unresolved where the rounds disagree."""
        if self.rows > MARKED_ROWS or self.rival == "torch":
            return ()
        faster = "met" if self.high <= 1 else "missed" if self.low > 1 else "unresolved"
        found = [f"against {self.rival} {faster}"]
        if self.wanted is not None:
            found.append(f"{100 * self.wanted:.0f} % {'met' if self.fraction >= self.wanted else 'missed'}")
        return tuple(found)

    def line(self) -> str:
        """One row of the table."""
        name = self.name + (" (fused)" if self.fused else "")
        return (
            f"{name:>22} {self.n:6} x {self.k:<5} {self.format:>11} {self.rows:3} {self.us:9.2f} {self.rival_us:9.2f} "
            f"{self.ratio:6.3f} ({self.low:.3f} to {self.high:.3f}) {self.weight_bytes / 1e6:8.1f} "
            f"{100 * self.fraction:6.1f} %  {'; '.join(self.verdicts)}"
        )


HEADER = (
    "               product      N x K          format   M   ours us  torch us  ratio (rounds)               MB"
    "  of floor  marks"
)


def products(config: ModelConfig) -> tuple[Product, ...]:
    """The matrices of a decode step, those that share an input joined as the model joins them."""
    shapes = {name: e.shape for name, e in expected_weights(config, config.has_drafter).items()}
    kinds = config.layer_types
    delta = f"layers.{config.linear_layers[0]}"
    sparse = f"layers.{kinds.index(SPARSE)}" if SPARSE in kinds else None

    def joined(name: str, *parts: str, fused: bool = False) -> Product:
        return Product(name, sum(shapes[part][0] for part in parts), shapes[parts[0]][1], fused)

    mlp, hc, ple = f"{delta}.mlp", f"{delta}.attn_hyper_connection", f"layers.{config.ple_layer}.ple"
    found = [
        joined("head", "lm_head"),
        joined("delta net in", *(f"{delta}.linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
        joined("delta net out", f"{delta}.linear_attn.out_proj"),
    ]
    if sparse is not None:
        parts = ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj")
        found.append(joined("attention in", *(f"{sparse}.self_attn.{part}" for part in parts)))
        found.append(joined("attention out", f"{sparse}.self_attn.o_proj"))
    gates = ("gate", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate")
    found += [
        joined("router and shared", *(f"{mlp}.{part}" for part in gates)),
        joined("n-gram key, value", f"{ple}.key_proj", f"{ple}.value_proj"),
    ]
    if config.has_drafter:
        found.append(joined("drafter in", "mtp.fc_hidden"))
    found += [
        joined("shared down", f"{mlp}.shared_expert.down_proj", fused=True),
        joined("hc down", f"{hc}.input_mix_weight_down", f"{hc}.block_inject_weight", fused=True),
        joined("hc up", f"{hc}.input_mix_weight_up", fused=True),
    ]
    unique: dict[tuple[int, int], Product] = {}
    for product in found:
        unique.setdefault((product.n, product.k), product)
    return tuple(unique.values())


def bench_linears(
    config: ModelConfig, device: str, say: Callable[[str], None], measured: Callable[[list[Timed], list[str]], None]
) -> tuple[list[Timed], list[str]]:
    """Check and time every product in every format that can store it; also what failed, a sentence each.

    measured  called with all there is so far, whenever a product has been timed in a format
    A product that is wrong, or whose kernel fails, has no times; the others go on.
    """
    bandwidth = read_bandwidth_gbps(device)
    say(f"reads {bandwidth:.0f} GB/s")
    begin = time.perf_counter()
    wanted = [(p, f) for p in products(config) for f in TIMED_FORMATS if _stores(f, p.k)]

    def make(pair: tuple[Product, str]) -> tuple[PackedWeight, Weight]:
        return _made(*pair, device)

    # kernels compile side by side: NVRTC runs without Python's lock
    with ThreadPoolExecutor(1 if device == "cpu" else 6) as pool:
        made = dict(zip(wanted, pool.map(make, wanted), strict=True))
    say(f"{len(wanted)} matrices and their kernels in {time.perf_counter() - begin:.1f} s")
    results: list[Timed] = []
    failed: list[str] = []
    for (product, format_name), (packed, weight) in made.items():
        try:
            if time.perf_counter() - begin > MOST_SECONDS:
                raise RuntimeError(f"not measured, {MOST_SECONDS:.0f} s are over")
            results += _time_product(product, packed, weight, device, bandwidth, say)
        except RuntimeError as error:
            failed.append(f"{product.name} in {format_name}: {str(error).splitlines()[0]}")
            say(failed[-1])
        measured(results, failed)
    return results, failed


def _stores(format_name: str, k: int) -> bool:
    group = FORMATS[format_name].group
    return group is None or group[0] > 1 or k % group[1] == 0


def _made(product: Product, format_name: str, device: str) -> tuple[PackedWeight, Weight]:
    make = torch.Generator(device).manual_seed(product.n * 65537 + product.k)
    w = torch.randn(product.n, product.k, generator=make, device=device) * product.k**-0.5
    packed = quantize(w, format_name)
    del w
    return packed, packed if device == "cpu" else linear_repack(packed, device, max_rows=max(ROWS))


@torch.inference_mode()
def _time_product(
    product: Product, packed: PackedWeight, weight: Weight, device: str, bandwidth: float, say: Callable[[str], None]
) -> list[Timed]:
    n, k = product.n, product.k
    results: list[Timed] = []
    ours = _copies(weight, packed.num_bytes, device)
    dense = _dense_copies(packed.dequantize().to(torch.bfloat16), device)
    scaled = device != "cpu" and packed.format == "fp8_channel" and n % 16 == k % 16 == 0
    codes = _dense_copies(packed.data, device) if scaled else []
    for rows in ROWS:
        make = torch.Generator(device).manual_seed(rows)
        x = torch.randn(rows, k, generator=make, device=device).to(torch.bfloat16)
        worst = _check(product, x, packed, weight)
        rival, multiply, rivals = "torch" if device == "cpu" else "cuBLAS", _plain(x, dense), dense
        if scaled:
            try:
                multiply_codes = _scaled(x, codes, packed.scale)
                multiply_codes(0)
                rival, multiply, rivals = "_scaled_mm", multiply_codes, codes
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                say(f"{product.name}, {rows} rows: _scaled_mm refuses, cuBLAS in its place: {reason}")
        a = _Graph(_streamed(x, ours), _calls(packed.num_bytes, len(ours), device), device)
        b = _Graph(multiply, _calls(rivals[0].nbytes, len(rivals), device), device)
        pairs = [_pair(a, b, turn % 2 == 1) for turn in range(ROUNDS)]
        ratios = [one / other for one, other in pairs]
        us, rival_us = (statistics.median(times) for times in zip(*pairs, strict=True))
        floor_us = moved.linear(rows, n, k, packed.format) / (bandwidth * 1e9) * 1e6
        results.append(
            Timed(
                product.name,
                n,
                k,
                product.fused,
                packed.format,
                rows,
                us,
                rival,
                rival_us,
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                packed.num_bytes,
                floor_us / us,
                _least_fraction(n, k, packed.num_bytes) if rows <= MARKED_ROWS else None,
                worst,
            )
        )
    return results


def _least_fraction(n: int, k: int, weight_bytes: int) -> float | None:
    if weight_bytes > BIG_BYTES:
        return BIG_FRACTION
    return OUT_FRACTION if (n, k) == OUT_SHAPE else None


def _check(product: Product, x: Tensor, packed: PackedWeight, weight: Weight) -> float:
    """The largest error over its bound. Two orders of K float32 products differ by 2 K 2**-24 of the sum of their
    magnitudes at most, and the result is rounded to bf16 on both sides: 2 * 2**-8 of it."""
    ours = linear(x, (weight,)).float()
    wanted = linear_reference(x, (packed,)).float()
    magnitudes = x.float().abs() @ packed.dequantize().abs().T
    bound = 2 * product.k * 2.0**-24 * magnitudes + 2 * 2.0**-8 * wanted.abs()
    worst = float(((ours - wanted).abs() / bound.clamp(min=1e-30)).max())
    if not worst <= 1:
        raise RuntimeError(
            f"{product.name} [{product.n}, {product.k}] in {packed.format}, {x.shape[0]} rows: {worst:.2f} times the "
            "bound away from the reference"
        )
    return worst


def _copies(weight: Weight, num_bytes: int, device: str) -> list[Weight]:
    copies: list[Weight] = [weight]
    for _ in range(_count(num_bytes, device) - 1):
        if isinstance(weight, StreamedWeight):
            scales = None if weight.scales is None else weight.scales.clone()
            copies.append(replace(weight, tape=weight.tape.clone(), scales=scales))
        else:
            copies.append(replace(weight, data=weight.data.clone()))
    return copies


def _dense_copies(matrix: Tensor, device: str) -> list[Tensor]:
    return [matrix, *(matrix.clone() for _ in range(_count(matrix.nbytes, device) - 1))]


def _count(num_bytes: int, device: str) -> int:
    return 1 if device == "cpu" else max(1, -int(-COLD_BYTES // num_bytes))


def _calls(num_bytes: int, copies: int, device: str) -> int:
    """Calls of a graph: as many as take GRAPH_S if they ran at bandwidth, and every copy."""
    return 1 if device == "cpu" else max(copies, int(GRAPH_S / (num_bytes / 4e12 + 2e-6)), 2)


def _streamed(x: Tensor, weights: Sequence[Weight]) -> Callable[[int], Tensor]:
    return lambda i: linear(x, (weights[i % len(weights)],))


def _plain(x: Tensor, matrices: Sequence[Tensor]) -> Callable[[int], Tensor]:
    return lambda i: torch.mm(x, matrices[i % len(matrices)].T)


def _scaled(x: Tensor, matrices: Sequence[Tensor], scale: Tensor | None) -> Callable[[int], Tensor]:
    if scale is None:
        raise RuntimeError("FP8 with one scale a row has no scales")
    amax = x.float().abs().amax(1, keepdim=True)
    codes = (x.float() * (E4M3_MAX / amax)).to(torch.float8_e4m3fn)
    of_x, of_w = amax / E4M3_MAX, scale.float().reshape(1, -1).contiguous()
    return lambda i: torch._scaled_mm(codes, matrices[i % len(matrices)].T, of_x, of_w, out_dtype=torch.bfloat16)


class _Graph:
    """Calls 0, 1, 2, ... as one captured graph; on the CPU a loop."""

    def __init__(self, call: Callable[[int], Tensor], count: int, device: str) -> None:
        self._call, self._count = call, count
        self._graph: torch.cuda.CUDAGraph | None = None
        call(0)  # kernels are loaded, libraries make their workspaces
        if device != "cpu":
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                for i in range(count):
                    call(i)
            self._graph.replay()

    def us(self) -> float:
        """Of one call."""
        if self._graph is None:
            begin = time.perf_counter()
            for i in range(self._count):
                self._call(i)
            return (time.perf_counter() - begin) / self._count * 1e6
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        self._graph.replay()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3 / self._count


def _pair(a: _Graph, b: _Graph, reversed_order: bool) -> tuple[float, float]:
    if reversed_order:
        second = b.us()
        return a.us(), second
    return a.us(), b.us()


def run_and_report_linears(config: ModelConfig, device: str, commit: str, output: Path | None) -> None:
    """Measure and print: a row of the table as it comes, then what was met, then one JSON line, or that into `output`.

    Raises UserError at the end where a product failed.
    """
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    head = {"device": name, "torch": torch.__version__, "commit": commit}
    printed = 0

    def line(results: list[Timed], failed: list[str]) -> str:
        rows = [asdict(r) | {"verdicts": r.verdicts} for r in results]
        return json.dumps(head | {"failed": failed, "linears": rows}, separators=(",", ":"))

    def measured(results: list[Timed], failed: list[str]) -> None:
        nonlocal printed
        for result in results[printed:]:
            print(result.line(), flush=True)
        printed = len(results)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(line(results, failed) + "\n")

    print(HEADER, flush=True)
    results, failed = bench_linears(config, device, lambda text: print(text, flush=True), measured)
    print(summary(results))
    if output is None:
        print(line(results, failed))
    if failed:
        raise UserError(f"{len(failed)} products have no times: {'; '.join(failed)}")


def summary(results: Sequence[Timed]) -> str:
    """How many marks were met, and which were not."""
    every = [(r, verdict) for r in results for verdict in r.verdicts]
    lines = [f"{sum(v.endswith(' met') for _, v in every)} of {len(every)} marks met"]
    for result, verdict in every:
        if not verdict.endswith(" met"):
            lines.append(
                f"  {verdict}: {result.name} in {result.format} at {result.rows} rows, {result.ratio:.3f} of the time, "
                f"{100 * result.fraction:.1f} % of bandwidth"
            )
    return "\n".join(lines)
