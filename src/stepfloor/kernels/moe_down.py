"""Second half of the experts: y = Σ_j w_j (h_j D_eᵀ) + shared gate * (shared hidden D_sᵀ).

Source: transformers 5.24, Qwen4ExpTextExperts and Qwen4ExpTextSparseMoeBlock. The source adds the experts in
ascending order into a bf16 sum; here each weighted product is rounded as there, but the sum runs in float32 in
order of falling weight and is rounded once, which is closer to the exact sum by up to one bf16 step an add.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._torch import expert_product, expert_tiles, product, sigmoid


def moe_down_reference(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: PackedWeight,
    shared_hidden: Tensor,
    shared_gate: Tensor,
    shared_down: Sequence[PackedWeight],
) -> Tensor:
    """Pairs sorted by expert, one product per tile of 8, the sum in the order of the choices."""
    count, topk, width = hidden.shape
    tiles = expert_tiles(ids, count * topk, per_pair=True)
    out = expert_product(hidden.reshape(-1, width), tiles, down)[tiles.place]  # [T, topk, D]
    weighted = (out * weights.unsqueeze(-1)).float()
    total = weighted[:, 0]
    for j in range(1, topk):
        total = total + weighted[:, j]
    return total.to(hidden.dtype) + shared_gate * product(shared_hidden, shared_down)


def moe_down(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: PackedWeight,
    shared_hidden: Tensor,
    shared_gate: Tensor,
    shared_down: Sequence[PackedWeight],
) -> Tensor:
    """Project the experts' hidden rows down, weigh and sum them, and add the shared expert.

    hidden         [T, topk, I]
    ids, weights   [T, topk] int64 and the dtype of hidden
    down           E matrices [D, I]
    shared_hidden  [T, Is]; shared_gate [T, 1]; shared_down  matrices [D, Is]
    Returns [T, D] in the dtype of hidden. Raises ValueError if the shapes disagree.
    """
    if ids.shape != hidden.shape[:2] or weights.shape != ids.shape or down.shape[1] != hidden.shape[2]:
        raise ValueError(
            f"moe_down wants hidden [T, topk, I], ids and weights [T, topk], matrices [D, I]; got "
            f"{tuple(hidden.shape)}, {tuple(ids.shape)}, {tuple(weights.shape)}, {down.shape}"
        )
    if (
        shared_hidden.shape[0] != hidden.shape[0]
        or shared_gate.shape != (hidden.shape[0], 1)
        or any(w.shape[1] != shared_hidden.shape[1] for w in shared_down)
        or sum(w.shape[0] for w in shared_down) != down.shape[0]
    ):
        raise ValueError(
            f"moe_down wants shared hidden [{hidden.shape[0]}, Is], shared gate [{hidden.shape[0]}, 1], matrices "
            f"[{down.shape[0]}, Is]; got {tuple(shared_hidden.shape)}, {tuple(shared_gate.shape)}, "
            f"{[w.shape for w in shared_down]}"
        )
    return moe_down_reference(hidden, ids, weights, down, shared_hidden, shared_gate, shared_down)


def moe_down_inputs(
    t: int, d: int, width: int, shared: int, experts: int, topk: int, format_name: str, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "hidden": rand(t, topk, width).to(dtype),
        "ids": torch.rand(t, experts, generator=make, device=device).argsort(-1)[:, :topk],
        "weights": rand(t, topk).softmax(-1).to(dtype),
        "down": quantize(rand(experts, d, width) / width**0.5, format_name),
        "shared_hidden": rand(t, shared).to(dtype),
        "shared_gate": sigmoid(rand(t, 1)).to(dtype),
        "shared_down": (quantize(rand(d, shared) / shared**0.5, "bf16"),),
    }
