"""First half of the routed experts: h[t, j] = silu(x G_eᵀ) * (x U_eᵀ) for each chosen expert e = ids[t, j].

Source: transformers 5.24, Qwen4ExpTextExperts.forward.
"""

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._torch import expert_product, expert_tiles, silu


def moe_gate_up_reference(x: Tensor, ids: Tensor, gate_up: PackedWeight) -> Tensor:
    """Pairs sorted by expert, one product per tile of 8."""
    tiles = expert_tiles(ids, x.shape[0], per_pair=False)
    gate, up = expert_product(x, tiles, gate_up).chunk(2, -1)
    return (silu(gate) * up)[tiles.place]


def moe_gate_up(x: Tensor, ids: Tensor, gate_up: PackedWeight) -> Tensor:
    """Run each row through the gate and up projections of its experts.

    x        [T, D]
    ids      [T, topk] int64
    gate_up  E matrices [2 * I, D], gate rows first
    Returns [T, topk, I] in the dtype of x. Raises ValueError if the shapes disagree.
    """
    if ids.shape[0] != x.shape[0] or gate_up.shape[1] != x.shape[1]:
        raise ValueError(
            f"moe_gate_up wants x [T, D], ids [T, topk], matrices [2I, D]; got "
            f"{tuple(x.shape)}, {tuple(ids.shape)}, {gate_up.shape}"
        )
    return moe_gate_up_reference(x, ids, gate_up)


def moe_gate_up_inputs(
    t: int, d: int, width: int, experts: int, topk: int, format_name: str, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    scores = torch.rand(t, experts, generator=make, device=device)
    w = torch.randn(experts, 2 * width, d, generator=make, device=device) / d**0.5
    return {
        "x": torch.randn(t, d, generator=make, device=device).to(dtype),
        "ids": scores.argsort(-1)[:, :topk],
        "gate_up": quantize(w, format_name),
    }
