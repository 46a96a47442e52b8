"""A gated delta net layer for tests: the source's constants, and a state that carries over prefill and decode."""

from typing import Any

import torch
from torch import Tensor

from stepfloor.kernels._delta import DeltaConstants
from stepfloor.kernels.gdn_decode import gdn_decode
from stepfloor.kernels.gdn_prefill import gdn_prefill
from tests.kernels.source import Recording

PARTS = ("qkv", "z", "b", "a")


def constants_of(module: Any) -> DeltaConstants:
    """What a layer of the source implies."""
    return DeltaConstants(
        conv_weight=module.conv1d.weight.detach().squeeze(1).float(),
        a_log=module.A_log.detach().float(),
        dt_bias=module.dt_bias.detach().float(),
        norm_weight=module.norm.weight.detach(),
        key_heads=module.num_k_heads,
        key_dim=module.head_k_dim,
        eps=module.norm.variance_epsilon,
        activation=module.norm.activation,
    )


def projected_rows(recording: Recording, layer: int) -> Tensor:
    """q, k, v, z, b, a as the source's own products gave them."""
    return torch.cat([recording.out(f"layers.{layer}.linear_attn.in_proj_{part}") for part in PARTS], -1)


def rule_bound(rows: int, key_dim: int, largest: float) -> float:
    """How far a float32 run of the rule lies from the exact one, output or state.

    A row decays the state, adds K products to the prediction, writes and reads: at most 2 K + 8 roundings of numbers
    no larger than `largest`. With unit keys, decay and beta in [0, 1] the step contracts, so errors only add up.
    """
    return rows * (2 * key_dim + 8) * 2.0**-24 * largest


class DeltaNet:
    """One layer's slots: prefill a chunk of one, or run a window of several, as the model does."""

    def __init__(self, constants: DeltaConstants, slots: int, rows: int, dtype: torch.dtype) -> None:
        self.constants = constants
        self.history = constants.history
        self.state = torch.zeros(slots, constants.heads, constants.key_dim, constants.value_dim)
        # poisoned beyond the history: a stray read of a row nobody wrote is loud
        self.raw_rows = torch.full((slots, self.history + rows, constants.channels), torch.nan, dtype=dtype)
        self.raw_rows[:, : self.history] = 0
        self.gate_rows = torch.full((slots, rows, 2 * constants.heads), torch.nan, dtype=dtype)

    def prefill(self, slot: int, projected: Tensor) -> Tensor:
        return gdn_prefill(projected, self.state, self.raw_rows, torch.tensor([slot]), self.constants)

    def window(self, slots: list[int], projected: Tensor, pending: list[int]) -> Tensor:
        return gdn_decode(
            projected,
            self.state,
            self.raw_rows,
            self.gate_rows,
            torch.tensor(slots),
            torch.tensor(pending),
            self.constants,
        )
