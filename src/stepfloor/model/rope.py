"""Tables of cos and sin for text positions.

Source: transformers 5.24, Qwen4ExpTextRotaryEmbedding (compute_default_rope_parameters, forward) and
modeling_rope_utils._compute_yarn_parameters. For text the three position axes are equal and the embedding is the
ordinary one. Angles are formed in float32 from integer positions, then cos and sin are rounded to the model's dtype.
"""

import math

import torch
from torch import Tensor

from stepfloor.config import Rope


def rope_tables(rope: Rope, positions: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 .. positions - 1, each [positions, rope.dim]."""
    angle = torch.arange(positions).float()[:, None] * inverse_frequencies(rope)
    angle = torch.cat((angle, angle), -1)
    scale = 1.0 if rope.factor == 1.0 else 0.1 * math.log(rope.factor) + 1.0
    return (angle.cos() * scale).to(dtype).to(device), (angle.sin() * scale).to(dtype).to(device)


def inverse_frequencies(rope: Rope) -> Tensor:
    """[rope.dim / 2] float32, radians per token; YaRN keeps fast ones and divides slow ones by the factor."""
    powers = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.factor == 1.0:
        return 1.0 / powers
    low = max(math.floor(_index_of_turns(rope, 32.0)), 0)
    high = min(math.ceil(_index_of_turns(rope, 1.0)), rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    slow = ramp.clamp(0, 1)
    return (1.0 / (rope.factor * powers)) * slow + (1.0 / powers) * (1 - slow)


def _index_of_turns(rope: Rope, turns: float) -> float:
    """Which frequency makes `turns` full turns over the original context."""
    return rope.dim * math.log(rope.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
