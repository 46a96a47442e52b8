"""What tests of products grouped by expert share: crowded choices, inputs on a device, new tensors full of NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight


def crowded(rows: int, experts: int, topk: int) -> Tensor:
    """Distinct experts of each row; the second-last is everybody's, the last nobody's."""
    make = torch.Generator().manual_seed(experts)
    others = torch.rand(rows, experts - 2, generator=make).argsort(-1)[:, : topk - 1]
    both = torch.cat((others, torch.full((rows, 1), experts - 2)), -1)
    order = torch.rand(rows, topk, generator=make).argsort(-1)
    return both.gather(-1, order)


def moved(inputs: dict[str, Any], device: str) -> dict[str, Any]:
    """Inputs on a device."""

    def to(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(to(v) for v in value)
        return value.to(device) if isinstance(value, Tensor | PackedWeight) else value

    return {name: to(value) for name, value in inputs.items()}


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is NaN: a result that is left out, or a read of one, shows."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
