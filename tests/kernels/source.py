"""What flows between the modules of a random transformers model, so that an operator is compared at its own edges.

One pass over a tiny model is recorded; an operator's test feeds it what the source's modules were given and
compares with what they returned. Roundings elsewhere in the model then play no part in its tolerance.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen4ExpTextConfig

from stepfloor.formats.codec import PackedWeight
from tests.oracle import Oracle

# No width is a multiple of 8, streams are not four, the gate of the delta net is silu.
ODD: dict[str, Any] = {
    "hidden_size": 52,
    "head_dim": 24,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 18,
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "hc_count": 3,
    "hc_lowrank": 13,
    "ple_embed_dim": 48,
    "indexer_n_heads": 3,
    "indexer_head_dim": 12,
    "indexer_budget": 12,
    "output_gate_type": "silu",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
SHAPES: dict[str, dict[str, Any]] = {"tiny": {}, "odd": ODD}
EOS = 5
# longer than the indexer's budget of 16 and 12 tokens; end-of-text alone, doubled, and last
TOKENS = [7, 9, EOS, 11, 3, 12, EOS, EOS, 40, 41, 2, *range(50, 80), 17, 17, 17, EOS, 61, 8, EOS]


class Recording:
    """One pass of the text model over TOKENS: inputs and outputs of every module, batch axis removed."""

    def __init__(self, directory: Path, shape: str, dtype: torch.dtype) -> None:
        self.oracle = Oracle(directory, dtype=dtype, **SHAPES[shape])
        self.oracle.model.set_experts_implementation("eager")
        self.config: Qwen4ExpTextConfig = self.oracle.config
        self.model = self.oracle.model.model
        self.dtype = dtype
        self.tokens = torch.tensor(TOKENS)
        self.cos, self.sin = self.oracle.rope(len(TOKENS), dtype)
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        hooks = [module.register_forward_hook(self._keep(name)) for name, module in self.model.named_modules()]
        self.oracle.logits(TOKENS)
        for hook in hooks:
            hook.remove()

    def module(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def into(self, name: str) -> Tensor:
        """First argument of the module."""
        return _rows(self._inputs[name])

    def out(self, name: str, index: int = 0) -> Tensor:
        """What the module returned, or the index-th of several."""
        value = self._outputs[name]
        return _rows(value[index] if isinstance(value, tuple) else value)

    def weight(self, name: str) -> PackedWeight:
        """The matrix of a linear module as an operator reads it."""
        return as_stored(self.module(name).weight)

    def norm(self, name: str) -> Tensor:
        """Scale of a norm whose stored weight is centred on zero."""
        return 1.0 + self.module(name).weight.detach().float()

    def _keep(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            # clones: the source updates some results in place
            self._inputs[name] = inputs[0].clone() if inputs and isinstance(inputs[0], Tensor) else None
            self._outputs[name] = output

        return keep


def as_stored(weight: Tensor) -> PackedWeight:
    """A float matrix [.., N, K] in its own dtype."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[weight.dtype]
    return PackedWeight(name, (weight.shape[-2], weight.shape[-1]), weight.detach())


def _rows(value: Tensor) -> Tensor:
    return value.squeeze(0) if value.ndim > 2 and value.shape[0] == 1 else value
