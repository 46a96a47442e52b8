"""A matrix in streamed order on its device, and the launch that multiplies rows with it: `linear.cu`.

The kernel for a plan and a variant is compiled and loaded once a process; more rows than a variant takes are several
launches. Source: linear.py, which has the operator and its reference.
"""

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels._choose_form import choose_variant, has_warpgroups, with_clusters
from stepfloor.kernels._experts import contiguous_rows
from stepfloor.kernels._forms import Variant, block_threads, grid, kernel_macros, shared_bytes
from stepfloor.kernels._jit import Launch, compile_cuda, device_arch
from stepfloor.kernels._stream import StreamPlan, dense_matrix, unpack_tape


@dataclass(frozen=True, slots=True, eq=False)
class StreamedWeight:
    """A matrix [N, K] in the order `linear.cu` reads it. Make it with `linear_repack`.

    scales  float32, those that multiply sums, as `_stream.outer_scales` gives them; None where the format has none
    """

    plan: StreamPlan
    tape: Tensor
    cache_dir: Path
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K)."""
        return self.plan.n, self.plan.k

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tape.numel() + (0 if self.scales is None else 4 * self.scales.numel())

    def unpack(self) -> PackedWeight:
        """The matrix as it was stored, copied; scales of 16-bit floats come back as float32."""
        return unpack_tape(self.tape, self.plan, self.scales)

    def dense(self) -> Tensor:
        """bf16 [N, K], each weight rounded once: a temporary for the library."""
        if self.tape.is_cuda:
            return dense_matrix(self.tape, self.plan, self.scales, self.cache_dir)
        return self.unpack().dequantize().to(torch.bfloat16)


def stream_product(x: Tensor, weight: StreamedWeight, out: Tensor, variant: Variant | None = None) -> None:
    """Queue x [T, K] times a streamed matrix into out [T, N], both bf16 on the weight's device, rows contiguous."""
    plan = weight.plan
    x = contiguous_rows(x)
    if variant is None:
        variant = choose_variant(plan, x.shape[0], has_warpgroups(x.device))
    chosen = fit_variant(plan, variant, x.device, weight.cache_dir)
    launch = launch_for(plan, chosen, x.device, weight.cache_dir)
    for first in range(0, x.shape[0], chosen.max_rows):
        part, to = x[first : first + chosen.max_rows], out[first:]
        launch(pack_arguments(weight.tape, part, to, weight.scales))


def pack_arguments(tape: Tensor, x: Tensor, out: Tensor, scales: Tensor | None = None) -> bytes:
    """struct Arguments of `linear.cu`."""
    addresses = (tape.data_ptr(), 0 if scales is None else scales.data_ptr(), x.data_ptr(), out.data_ptr())
    return struct.pack("4Pqqi4x", *addresses, x.stride(0), out.stride(0), x.shape[0])


@cache
def fit_variant(plan: StreamPlan, variant: Variant, device: torch.device, cache_dir: Path) -> Variant:
    """The variant with no more clusters than the device runs at once: a second wave takes as long as the first.

    132 multiprocessors hold 16 clusters of 8 blocks, but an H200 runs 15: those of a cluster lie in one part of it.
    """
    blocks, cluster = grid(plan, variant)
    if variant.form < 2:
        return variant
    at_once = launch_for(plan, variant, device, cache_dir).clusters_at_once
    if at_once >= blocks // cluster:
        return variant
    return with_clusters(plan, variant, max(1, at_once))


@cache
def launch_for(
    plan: StreamPlan, variant: Variant, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Launch:
    """The compiled kernel, once a process: plans are few and modules are not unloaded."""
    cubin = compile_cuda("linear.cu", kernel_macros(plan, variant), device_arch(device), cache_dir)
    blocks, cluster = grid(plan, variant)
    shared = shared_bytes(plan, variant)
    return Launch(cubin, "linear_kernel", device, blocks, block_threads(variant), shared, cluster, dependent)
