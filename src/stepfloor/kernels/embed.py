"""Token embedding copied to every residual stream: R[t] = E[token], stream-major.

Source: transformers 5.24, Qwen4ExpTextModel.forward (embed_tokens, then repeat over hc_count).
"""

import torch
from torch import Tensor


def embed_reference(tokens: Tensor, table: Tensor, streams: int) -> Tensor:
    """Gather, then repeat."""
    return table[tokens].repeat(1, streams)


def embed(tokens: Tensor, table: Tensor, streams: int) -> Tensor:
    """Start the residual of each token.

    tokens  [T] int64; table  [vocabulary, D]; streams  residual streams S
    Returns [T, S * D] in the dtype of the table. Raises ValueError if tokens is not one-dimensional.
    """
    if tokens.ndim != 1:
        raise ValueError(f"embed wants tokens [T]; got {tuple(tokens.shape)}")
    return embed_reference(tokens, table, streams)


def embed_inputs(t: int, vocabulary: int, d: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    return {
        "tokens": torch.randint(0, vocabulary, (t,), generator=make, device=device),
        "table": torch.randn(vocabulary, d, generator=make, device=device).to(dtype),
        "streams": 4,
    }
