"""Router, and the first half of the shared expert, which reads the same input.

    p = softmax(x gateᵀ) in float32;  (w, id) = top-k of p;  w = w / Σ w, then rounded
    shared hidden = silu(x G_sᵀ) * (x U_sᵀ);   shared gate = sigmoid(x s_gᵀ)

Source: transformers 5.24, Qwen4ExpTextTopKRouter and Qwen4ExpTextSparseMoeBlock. Among equal probabilities the
lower expert comes first; the source leaves that open.

`moe_route_products` is what follows the three products, which one streamed matrix can give side by side; on a GPU it is
`moe_route.cu`, with the source's roundings.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._experts import pack_pointers
from stepfloor.kernels._jit import Launch, compile_cuda, default_cache_dir, device_arch, missing_for_cuda
from stepfloor.kernels._torch import product, sigmoid, silu


def moe_route_reference(
    x: Tensor,
    router: Sequence[PackedWeight],
    shared_gate_up: Sequence[PackedWeight],
    shared_gate: Sequence[PackedWeight],
    topk: int,
    renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The source's equations with the source's rounding."""
    products = [product(x, weights) for weights in (router, shared_gate_up, shared_gate)]
    return moe_route_products_reference(torch.cat(products, -1), products[0].shape[-1], topk, renormalize)


def moe_route_products_reference(
    products: Tensor, experts: int, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What follows the products."""
    logits, gate_up, shared_gate = products.split((experts, products.shape[-1] - experts - 1, 1), -1)
    probability = logits.softmax(-1, dtype=torch.float32)
    ordered = torch.sort(probability, dim=-1, descending=True, stable=True)
    weights, ids = ordered.values[:, :topk], ordered.indices[:, :topk]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = gate_up.chunk(2, -1)
    return ids, weights.to(products.dtype), silu(gate) * up, sigmoid(shared_gate)


def moe_route_products(
    products: Tensor, experts: int, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose each row's experts and begin its shared expert, given the products.

    products  [T, E + 2 * I + 1]: router logits, gates and ups of the shared expert, the shared gate
    experts   E; topk, renormalize and what comes back as in `moe_route`
    Raises ValueError if topk exceeds the experts or the columns are not of that form.
    """
    channels = products.shape[-1] - experts - 1
    if topk > experts or channels < 0 or channels % 2:
        raise ValueError(
            f"moe_route_products wants [T, E + 2I + 1] and topk at most E; got {tuple(products.shape)}, {experts} "
            f"experts, topk {topk}"
        )
    if not products.is_cuda or products.dtype != torch.bfloat16 or topk > 32 or missing_for_cuda() is not None:
        return moe_route_products_reference(products, experts, topk, renormalize)
    rows, device = products.shape[0], products.device
    products = products if products.stride(-1) == 1 else products.contiguous()
    ids = torch.empty((rows, topk), dtype=torch.int64, device=device)
    weights, hidden, gate = (products.new_empty((rows, n)) for n in (topk, channels // 2, 1))
    launch = route_launch(experts, topk, channels // 2, renormalize, rows, device, default_cache_dir())
    launch(route_arguments(products, ids, weights, hidden, gate))
    return ids, weights, hidden, gate


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
    return Launch(cubin, "moe_route_kernel", device, rows, 256, 0)


def moe_route(
    x: Tensor,
    router: Sequence[PackedWeight],
    shared_gate_up: Sequence[PackedWeight],
    shared_gate: Sequence[PackedWeight],
    topk: int,
    renormalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose each row's experts and begin its shared expert.

    x               [T, D]
    router          matrices [E, D]; shared_gate_up  matrices [2 * I, D], gate rows first; shared_gate  [1, D]
    topk            experts per row; renormalize  whether the chosen weights are scaled to sum to one
    Returns ids [T, topk] int64 by falling weight, weights [T, topk], shared hidden [T, I], shared gate [T, 1].
    Raises ValueError if topk exceeds the experts or the shapes disagree.
    """
    experts = sum(w.shape[0] for w in router)
    if topk > experts:
        raise ValueError(f"moe_route wants topk at most the number of experts; got {topk} of {experts}")
    matrices = [w.shape for weights in (router, shared_gate_up, shared_gate) for w in weights]
    if any(k != x.shape[-1] for _, k in matrices) or sum(w.shape[0] for w in shared_gate) != 1:
        raise ValueError(
            f"moe_route wants x [T, D], matrices [E, D], [2I, D], one row [1, D]; got {tuple(x.shape)}, {matrices}"
        )
    return moe_route_reference(x, router, shared_gate_up, shared_gate, topk, renormalize)


def moe_route_inputs(
    t: int, d: int, experts: int, shared: int, topk: int, format_name: str, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; router and shared gate stay bf16 as in every release."""
    make = torch.Generator(device).manual_seed(0)

    def weight(n: int, name: str) -> tuple[PackedWeight, ...]:
        return (quantize(torch.randn(n, d, generator=make, device=device) / d**0.5, name),)

    return {
        "x": torch.randn(t, d, generator=make, device=device).to(dtype),
        "router": weight(experts, "bf16"),
        "shared_gate_up": weight(2 * shared, format_name),
        "shared_gate": weight(1, "bf16"),
        "topk": topk,
        "renormalize": True,
    }
