"""How the drafter joins what the target knew at a position with the token that followed.

    e       = fc_embedding(norm(E[next token]))
    R_in[s] = fc_hidden(norm(R)[s]) + e         norm(R): one mean over all streams together

Source: vLLM 0.33, the qwen4_exp multi-token predictor; transformers has no module for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels._torch import product, rms_norm


def mtp_fuse_reference(
    residual: Tensor,
    embedding: Tensor,
    norm_hidden: Tensor,
    norm_embedding: Tensor,
    fc_hidden: Sequence[PackedWeight],
    fc_embedding: Sequence[PackedWeight],
    streams: int,
    eps: float,
) -> Tensor:
    """The equations above, every product and sum rounded to the dtype of the residual."""
    e = product(rms_norm(embedding, norm_embedding, eps), fc_embedding)
    hidden = product(rms_norm(residual, norm_hidden, eps).unflatten(-1, (streams, -1)), fc_hidden)
    return (hidden + e.unsqueeze(-2)).flatten(-2)


def mtp_fuse(
    residual: Tensor,
    embedding: Tensor,
    norm_hidden: Tensor,
    norm_embedding: Tensor,
    fc_hidden: Sequence[PackedWeight],
    fc_embedding: Sequence[PackedWeight],
    streams: int,
    eps: float,
) -> Tensor:
    """Build the drafter's residual for T rows.

    residual        [T, S * D], the target's streams before its final mixer, or the drafter's own
    embedding       [T, D] of the token after each row
    norm_hidden     [S * D] float32, norm_embedding [D] float32, 1 already added
    fc_hidden, fc_embedding  matrices [D, D]
    Returns [T, S * D]. Raises ValueError if the rows disagree.
    """
    if residual.shape[0] != embedding.shape[0] or residual.shape[1] != streams * embedding.shape[1]:
        raise ValueError(
            f"mtp_fuse wants residual [T, {streams} * D] and embedding [T, D]; got "
            f"{tuple(residual.shape)}, {tuple(embedding.shape)}"
        )
    return mtp_fuse_reference(residual, embedding, norm_hidden, norm_embedding, fc_hidden, fc_embedding, streams, eps)


def mtp_fuse_inputs(t: int, d: int, format_name: str, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; four streams."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "residual": rand(t, 4 * d).to(dtype),
        "embedding": rand(t, d).to(dtype),
        "norm_hidden": 1 + 0.1 * rand(4 * d),
        "norm_embedding": 1 + 0.1 * rand(d),
        "fc_hidden": (quantize(rand(d, d) / d**0.5, format_name),),
        "fc_embedding": (quantize(rand(d, d) / d**0.5, format_name),),
        "streams": 4,
        "eps": 1e-6,
    }
