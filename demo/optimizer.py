"""Muon for the matrices inside the network, AdamW for everything else, over float32 master weights.

Source: Jordan et al. 2024, Muon (momentum, then the nearest orthogonal matrix by a quintic Newton-Schulz
iteration); Liu et al. 2025, Muon is Scalable, for the factor 0.2 sqrt(longer side) that gives its updates the size
of AdamW's, so that one learning rate and one weight decay serve both.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from demo.weights import Weights

_MOMENTUM = 0.95
_OUTSIDE = ("embed_tokens", "lm_head", "ngram_embedding", "conv1d", "mlp.gate.", "shared_expert_gate", "inject")
_NO_DECAY = ("ngram_embedding", "conv1d", "A_log", "dt_bias", "norm")


class Optimizer:
    """Updates master weights in place.

    Matrices of one shape are orthogonalised together: a few large products in place of hundreds of small ones.
    """

    def __init__(self, master: Weights, rate: float, decay: float) -> None:
        self._rate, self._decay = rate, decay
        inside = [n for n, w in master.items() if w.ndim >= 2 and not any(word in n for word in _OUTSIDE)]
        self._groups: dict[torch.Size, list[Tensor]] = {}
        for name in inside:
            self._groups.setdefault(master[name].shape, []).append(master[name])
        self._momentum = {shape: torch.zeros_like(torch.stack(ws)) for shape, ws in self._groups.items()}
        outside = {n: w for n, w in master.items() if n not in set(inside)}
        plain = [w for n, w in outside.items() if w.ndim == 1 or any(word in n for word in _NO_DECAY)]
        decayed = [w for w in outside.values() if not any(w is p for p in plain)]
        groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": decay}]
        fused = next(iter(master.values())).is_cuda
        self._adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-10, fused=fused)
        self._all = list(master.values())

    @torch.no_grad()
    def step(self, used: Iterable[Tensor], factor: float) -> None:
        """Move the master weights by the gradients of the used weights at `factor` of the rate, and round them back.

        used  the weights the forward saw, in the order of the master weights; their gradients are cleared
        Gradients are scaled down to a joint norm of 1 where they exceed it; values that are not finite count as 0.
        """
        used = list(used)
        sizes = [w.numel() for w in used]
        flat = torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in used]).float()
        flat.nan_to_num_(0.0, 0.0, 0.0)
        flat *= (1 / (flat.norm() + 1e-6)).clamp(max=1.0)
        for weight, gradient in zip(self._all, flat.split(sizes), strict=True):
            weight.grad = gradient.view_as(weight)
        self._update(factor)
        torch._foreach_copy_(used, self._all)
        for weight in used:
            weight.grad = None

    def _update(self, factor: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = factor * self._rate
        self._adam.step()
        for shape, weights in self._groups.items():
            gradient = torch.stack([w.grad for w in weights if w.grad is not None])
            momentum = self._momentum[shape].lerp_(gradient, 1 - _MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, _MOMENTUM))
            rate = factor * self._rate
            torch._foreach_mul_(weights, 1 - rate * self._decay)
            scaled = update.mul_(0.2 * math.sqrt(max(shape[-2:])))
            torch._foreach_add_(weights, list(scaled.unbind()), alpha=-rate)


def orthogonal(m: Tensor) -> Tensor:
    """Roughly the nearest matrix with orthonormal rows or columns, for every matrix of m [.., R, C].

    Five steps leave singular values between about 0.7 and 1.2, which is near enough for an update.
    """
    x = m.bfloat16() if m.is_cuda else m.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return (x if wide else x.mT).float()
