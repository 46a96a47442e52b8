"""A linear layer of any stored format: y = x Wᵀ, several matrices that share an input side by side.

Source: torch.nn.Linear without bias; formats in formats.table. Activations are never quantized.

On a GPU a matrix is repacked once, at load, into the order in which `linear.cu` streams it (`linear_repack`); its bytes
stay as many. How a value is summed depends on N, K and the format alone, never on the number of rows: K is cut into
`split * slices` equal slices, summed in 32-column steps, and the slices are added in order. Codes are exact in bf16;
float32 scales multiply sums, so up to MAX_ROWS rows differ from the reference by the order of sums only. More rows
(prefill) go through the library with each weight rounded once to bf16.

Matrices of two formats that share an input, as an FP8 release has them, are one launch too (`linear_join`).
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._choose_form import choose_variant, has_warpgroups, plan_stream
from stepfloor.kernels._forms import MAX_ROWS, shared_bytes
from stepfloor.kernels._jit import default_cache_dir, missing_for_cuda, runs_triton
from stepfloor.kernels._pair import (
    StreamedPair,
    pair_bytes,
    pair_launch,
    pair_parts,
    pair_product,
    pair_variant,
    plan_pair,
)
from stepfloor.kernels._product import dense_product, packed_product
from stepfloor.kernels._stream import (
    StreamPlan,
    dense_launch,
    outer_scales,
    pack_tape,
    say_once,
    shared_limit,
    why_not_streamed,
)
from stepfloor.kernels._stream_product import StreamedWeight, fit_variant, launch_for, stream_product
from stepfloor.kernels._torch import product

logger = logging.getLogger(__name__)


def linear_reference(x: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
    """float32 products of the dequantized weights, rounded once to the dtype of x."""
    return product(x, weights)


def linear(x: Tensor, weights: Sequence[PackedWeight | StreamedWeight | StreamedPair]) -> Tensor:
    """Project rows through one or more matrices that share their input.

    x        [T, K]
    weights  matrices [N_i, K], each in its own format; streamed ones on the device of x
    Returns [T, sum of N_i] in the dtype of x. Raises ValueError if a K disagrees.
    """
    if any(w.shape[1] != x.shape[-1] for w in weights):
        raise ValueError(
            f"linear wants x [T, K] and weights [N, K]; got {tuple(x.shape)}, {[w.shape for w in weights]}"
        )
    plain = packed_product if runs_triton(x) else linear_reference
    stored = [w for w in weights if isinstance(w, PackedWeight)]
    if len(stored) == len(weights):
        return plain(x, stored)
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty((rows.shape[0], sum(w.shape[0] for w in weights)))
    for w, columns in zip(weights, out.split([w.shape[0] for w in weights], 1), strict=True):
        if isinstance(w, PackedWeight):
            columns.copy_(plain(rows, (w,)))
        elif isinstance(w, StreamedWeight):
            _multiply(rows, w, columns)
        else:
            _multiply_pair(rows, w, columns)
    return out.reshape(*x.shape[:-1], out.shape[1])


def _multiply(rows: Tensor, weight: StreamedWeight, out: Tensor) -> None:
    if rows.dtype != torch.bfloat16 or not rows.is_cuda:
        out.copy_(linear_reference(rows, (weight.unpack(),)))
    elif rows.shape[0] > MAX_ROWS:
        # prefill: the library multiplies, the copy of the matrix is a small part of so many rows
        dense_product(rows, weight.dense(), out)
    elif rows.shape[0] > 0:
        stream_product(rows, weight, out)


def _multiply_pair(rows: Tensor, pair: StreamedPair, out: Tensor) -> None:
    before, end = pair.before, pair.before + pair.first.shape[0]
    streamed = rows.dtype == torch.bfloat16 and rows.is_cuda and 0 < rows.shape[0] <= MAX_ROWS
    if streamed and (before or pair_variant(pair.plans, rows.shape[0]).max_rows >= rows.shape[0]):
        pair_product(rows, pair, out)
        return
    # many rows of a large matrix have forms that the pair has not
    _multiply(rows, pair.first, out[:, before:end])
    if before == 0:
        _multiply(rows, pair.second, out[:, end:])
    else:
        apart = rows.new_empty((rows.shape[0], pair.second.shape[0]))
        _multiply(rows, pair.second, apart)
        out[:, :before].copy_(apart[:, :before])
        out[:, end:].copy_(apart[:, before:])


def linear_repack(
    weight: PackedWeight, device: str | torch.device, cache_dir: Path | None = None, max_rows: int = 16
) -> PackedWeight | StreamedWeight:
    """Move a matrix to a device in the form `linear` is fastest with there; once, at load.

    cache_dir  where compiled kernels are kept; the user's cache directory where None
    max_rows   kernels for up to this many rows are loaded now; others at their first call, which no graph may be
    Returns a StreamedWeight, its decode kernels compiled, or the weight unchanged on the device; why is logged once
    for all weights with the same reason.
    """
    target = _indexed(device)
    weight = weight.to(target)
    reason = _why_not_streamed(weight, target)
    if reason is not None:
        say_once(logger, f"linear in {weight.format} stays with torch: {reason}")
        return weight
    count = torch.cuda.get_device_properties(target).multi_processor_count
    plan = plan_stream(*weight.shape, count, format_name=weight.format)
    streamed = _streamed(weight, plan, cache_dir or default_cache_dir())
    _load_kernels(streamed, max_rows)
    # kernels request weights before they wait for their predecessor, which the repacking must not be
    torch.cuda.synchronize(target)
    return streamed


def linear_join(
    weights: Sequence[PackedWeight], device: str | torch.device, cache_dir: Path | None = None, max_rows: int = 16
) -> tuple[PackedWeight | StreamedWeight | StreamedPair, ...]:
    """The same for matrices that share an input: two formats become one launch where `linear_pair.cu` takes them.

    weights  in the order of their columns; what can be stacked with its neighbour is (see `linear_repack`)
    """
    target = _indexed(device)
    if 1 < len(weights) <= 3 and target.type == "cuda":
        held = [w.to(target) for w in weights]
        pair = _pair_of(held, target, cache_dir or default_cache_dir())
        if pair is not None:
            for rows in (8, *range(16, min(max_rows, MAX_ROWS) + 16, 16)):
                pair_launch(pair.plans, pair_variant(pair.plans, rows), target, pair.first.cache_dir)
            for streamed in (pair.first, pair.second):
                _load_kernels(streamed, max_rows)
            torch.cuda.synchronize(target)
            return (pair,)
    return tuple(linear_repack(w, target, cache_dir, max_rows) for w in weights)


def _indexed(device: str | torch.device) -> torch.device:
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


def _streamed(weight: PackedWeight, plan: StreamPlan, cache_dir: Path) -> StreamedWeight:
    return StreamedWeight(plan, pack_tape(weight, plan), cache_dir, outer_scales(weight))


def _load_kernels(weight: StreamedWeight, max_rows: int) -> None:
    plan, device = weight.plan, weight.tape.device
    dense_launch(plan, (1, plan.n, plan.n), device, weight.cache_dir)
    for rows in (8, *range(16, min(max_rows, MAX_ROWS) + 16, 16)):
        variant = choose_variant(plan, rows, has_warpgroups(device))
        launch_for(plan, fit_variant(plan, variant, device, weight.cache_dir), device, weight.cache_dir)


def _pair_of(weights: Sequence[PackedWeight], device: torch.device, cache_dir: Path) -> StreamedPair | None:
    """The matrices as a pair on their device, or None where they cannot be one."""
    if any(_why_not_streamed(w, device) is not None for w in weights):
        return None
    found = pair_parts(weights)
    if found is None:
        return None
    first, second, before = found
    count = torch.cuda.get_device_properties(device).multi_processor_count
    (n, k), rest = first.shape, second.shape[0]
    plans = plan_pair(n, rest, k, before, count, first.format, second.format)
    if plans is None:
        return None
    if max(pair_bytes(plans, pair_variant(plans, rows)) for rows in (8, 16, MAX_ROWS)) > shared_limit(device):
        return None
    return StreamedPair(_streamed(first, plans.first, cache_dir), _streamed(second, plans.second, cache_dir), before)


def _why_not_streamed(weight: PackedWeight, device: torch.device) -> str | None:
    n, k = weight.shape
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    if k % 16:
        return f"K {k} is not a multiple of 16"
    missing = missing_for_cuda()
    if missing is not None:
        return missing
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "the kernel needs compute capability 9.0 (bulk copies)"
    reason = why_not_streamed(weight)
    if reason is not None:
        return reason
    properties = torch.cuda.get_device_properties(device)
    plan = plan_stream(n, k, properties.multi_processor_count, format_name=weight.format)
    variants = [choose_variant(plan, rows, has_warpgroups(device)) for rows in (8, 16, 32, 48, 64, MAX_ROWS)]
    wanted = max(shared_bytes(plan, variant) for variant in variants)
    if wanted > properties.shared_memory_per_multiprocessor - 1024:  # 1 KB of every block is the system's
        return f"its kernels want {wanted} bytes of shared memory, more than {properties.name} has"
    return None


def linear_inputs(t: int, n: int, k: int, format_name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    x = torch.randn(t, k, generator=make, device=device).to(dtype)
    w = torch.randn(n, k, generator=make, device=device) / k**0.5
    return {"x": x, "weights": (quantize(w, format_name),)}
