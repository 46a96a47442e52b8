"""Router, and the first half of the shared expert, which reads the same input.

    p = softmax(x gateᵀ) in float32;  (w, id) = top-k of p;  w = w / Σ w, then rounded
    shared hidden = silu(x G_sᵀ) * (x U_sᵀ);   shared gate = sigmoid(x s_gᵀ)

Source: transformers 5.24, Qwen4ExpTextTopKRouter and Qwen4ExpTextSparseMoeBlock. Among equal probabilities the
lower expert comes first; the source leaves that open.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
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
    probability = product(x, router).softmax(-1, dtype=torch.float32)
    ordered = torch.sort(probability, dim=-1, descending=True, stable=True)
    weights, ids = ordered.values[:, :topk], ordered.indices[:, :topk]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    gate, up = product(x, shared_gate_up).chunk(2, -1)
    return ids, weights.to(x.dtype), silu(gate) * up, sigmoid(product(x, shared_gate))


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
