"""Router, and the first half of the shared expert, from the products of the matrices that read the same input.

    p = softmax(router logits) in float32;  (w, id) = top-k of p;  w = w / Σ w, then rounded
    shared hidden = silu(gate) * up;   shared gate = sigmoid(its logit)

Source: transformers 5.24, Qwen4ExpTextTopKRouter and Qwen4ExpTextSparseMoeBlock. Among equal probabilities the
lower expert comes first; the source leaves that open.

On a GPU one kernel does it, with the source's roundings: `moe_route.cu` for the bf16 rows of a decode step, a Triton
kernel for everything else. A row's bits depend on that row and on which of the two ran.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.kernels._experts import MAX_ROWS, pack_pointers
from stepfloor.kernels._jit import (
    Launch,
    compile_cuda,
    default_cache_dir,
    dependent_launch,
    device_arch,
    missing_for_cuda,
    runs_triton,
    start,
    tl,
    triton,
)
from stepfloor.kernels._torch import sigmoid, silu

# of moe_route.cu: a lane keeps one choice; room for 32 candidates
MOST_CHOICES = 32
SHARED_BYTES = 256


def moe_route_reference(
    products: Tensor, experts: int, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The source's equations with the source's rounding."""
    logits, gate_up, shared_gate = products.split((experts, products.shape[-1] - experts - 1, 1), -1)
    probability = logits.softmax(-1, dtype=torch.float32)
    ordered = torch.sort(probability, dim=-1, descending=True, stable=True)
    weights, ids = ordered.values[:, :topk], ordered.indices[:, :topk]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = gate_up.chunk(2, -1)
    return ids, weights.to(products.dtype), silu(gate) * up, sigmoid(shared_gate)


def moe_route(products: Tensor, experts: int, topk: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose each row's experts and begin its shared expert.

    products  [T, E + 2 * I + 1]: router logits, gates and ups of the shared expert, the shared gate's logit
    experts   E; topk  experts per row; renormalize  whether the chosen weights are scaled to sum to one
    Returns ids [T, topk] int64 by falling weight, weights [T, topk], shared hidden [T, I], shared gate [T, 1], all but
    the ids in the dtype of products.
    Raises ValueError if topk exceeds the experts or the columns are not of that form.
    """
    channels = products.shape[-1] - experts - 1
    if topk > experts or channels < 0 or channels % 2:
        raise ValueError(
            f"moe_route wants products [T, E + 2I + 1] and topk at most E; got {tuple(products.shape)}, {experts} "
            f"experts, topk {topk}"
        )
    if _has_cuda_kernel(products, topk):
        return _route_cuda(products, experts, topk, renormalize)
    if runs_triton(products):
        return route_triton(products, experts, topk, renormalize)
    return moe_route_reference(products, experts, topk, renormalize)


def _has_cuda_kernel(products: Tensor, topk: int) -> bool:
    """A launch is kept for each number of rows, which prefill has too many of."""
    return products.is_cuda and products.shape[0] <= MAX_ROWS and routes_on_cuda(products.device, products.dtype, topk)


def routes_on_cuda(device: torch.device, dtype: torch.dtype, topk: int) -> bool:
    """Whether the rows of a decode step run the CUDA kernel on this GPU."""
    return (
        dtype == torch.bfloat16
        and topk <= MOST_CHOICES
        and missing_for_cuda() is None
        and torch.cuda.get_device_capability(device)[0] >= 9
    )


def _outputs(products: Tensor, topk: int, channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = products.shape[0]
    ids = torch.empty((rows, topk), dtype=torch.int64, device=products.device)
    return ids, products.new_empty((rows, topk)), products.new_empty((rows, channels)), products.new_empty((rows, 1))


def _route_cuda(products: Tensor, experts: int, topk: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    products = products if products.stride(-1) == 1 else products.contiguous()
    channels = (products.shape[1] - experts - 1) // 2
    found = _outputs(products, topk, channels)
    launch = route_launch(experts, topk, channels, renormalize, products.shape[0], products.device, default_cache_dir())
    launch(route_arguments(products, *found))
    return found


def route_arguments(products: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor, gate: Tensor) -> bytes:
    """struct Arguments of `moe_route.cu`."""
    return pack_pointers((products, ids, weights, hidden, gate), (products.stride(0),), products.shape[0])


def route_macros(experts: int, topk: int, channels: int, renormalize: bool) -> dict[str, int]:
    """The macros that specialise `moe_route.cu`."""
    return {"EXPERTS": experts, "TOPK": topk, "SHARED": channels, "RENORMALIZE": int(renormalize)}


@cache
def route_launch(
    experts: int, topk: int, channels: int, renormalize: bool, rows: int, device: torch.device, cache_dir: Path
) -> Launch:
    """The compiled kernel for a number of rows, once a process."""
    macros = route_macros(experts, topk, channels, renormalize)
    cubin = compile_cuda("moe_route.cu", macros, device_arch(device), cache_dir)
    return Launch(cubin, "moe_route_kernel", device, rows, 256, SHARED_BYTES)


def route_triton(products: Tensor, experts: int, topk: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queue the Triton kernel, a program for a row."""
    products = products if products.stride(-1) == 1 else products.contiguous()
    channels = (products.shape[1] - experts - 1) // 2
    found = _outputs(products, topk, channels)
    block = triton.next_power_of_2(experts)
    # one warp: the choices are a chain of reductions, and a barrier for each would cost more than the lanes save
    _route_kernel[(products.shape[0],)](
        products,
        products.stride(0),
        *found,
        EXPERTS=experts,
        TOPK=topk,
        CHANNELS=channels,
        RENORMALIZE=renormalize,
        BLOCK_E=block,
        BLOCK_J=triton.next_power_of_2(topk),
        BLOCK_C=256,
        num_warps=1 if block <= 1024 else 4,
        **dependent_launch(products),
    )
    return found


@triton.jit
def _route_kernel(
    products_ptr,
    stride,
    ids_ptr,
    weights_ptr,
    hidden_ptr,
    gate_ptr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    CHANNELS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    products_ptr += row * stride
    dtype = hidden_ptr.dtype.element_ty
    e = tl.arange(0, BLOCK_E)
    logits = tl.load(products_ptr + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    likely = tl.exp(logits - tl.max(logits, 0))
    likely = likely / tl.sum(likely, 0)
    # a row that is not finite still gets experts that exist, all different; its weights stay NaN
    left = tl.where(e < EXPERTS, tl.where(likely == likely, likely, 0.0), -1.0)
    j = tl.arange(0, BLOCK_J)
    ids = tl.zeros((BLOCK_J,), tl.int32)
    weights = tl.zeros((BLOCK_J,), tl.float32)
    for i in range(TOPK):
        chosen = tl.argmax(left, 0, tie_break_left=True)
        ids = tl.where(j == i, chosen, ids)
        weights = tl.where(j == i, tl.sum(tl.where(e == chosen, likely, 0.0), 0), weights)
        left = tl.where(e == chosen, -1.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    tl.store(ids_ptr + row * TOPK + j, ids.to(tl.int64), mask=j < TOPK)
    tl.store(weights_ptr + row * TOPK + j, weights.to(dtype), mask=j < TOPK)
    for first in range(0, CHANNELS, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        gate = tl.load(products_ptr + EXPERTS + c, mask=c < CHANNELS, other=0.0).to(tl.float32)
        up = tl.load(products_ptr + EXPERTS + CHANNELS + c, mask=c < CHANNELS, other=0.0).to(tl.float32)
        half = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        tl.store(hidden_ptr + row * CHANNELS + c, (half * up).to(dtype), mask=c < CHANNELS)
    gate = tl.load(products_ptr + EXPERTS + 2 * CHANNELS).to(tl.float32)
    tl.store(gate_ptr + row, (1.0 / (1.0 + tl.exp(-gate))).to(dtype))


def moe_route_inputs(
    t: int, experts: int, shared: int, topk: int, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    return {
        "products": torch.randn(t, experts + 2 * shared + 1, generator=make, device=device).to(dtype),
        "experts": experts,
        "topk": topk,
        "renormalize": True,
    }
