"""Token embedding copied to every residual stream: R[t] = E[token], stream-major.

Source: transformers 5.24, Qwen4ExpTextModel.forward (embed_tokens, then repeat over hc_count).
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start_in_turn, tl, triton

BLOCK = 1024


def embed_reference(tokens: Tensor, table: Tensor, streams: int) -> Tensor:
    """Gather, then repeat."""
    return table[tokens].repeat(1, streams)


def embed(tokens: Tensor, table: Tensor, streams: int) -> Tensor:
    """Start the residual of each token.

    tokens  [T] int64; table  [vocabulary, D]; streams  residual streams S
    Returns [T, S * D] in the dtype of the table. On a GPU an id outside of the vocabulary reads its first or last row.
    Raises ValueError if tokens is not one-dimensional.
    """
    if tokens.ndim != 1:
        raise ValueError(f"embed wants tokens [T]; got {tuple(tokens.shape)}")
    return (launch_embed if runs_triton(tokens) else embed_reference)(tokens, table, streams)


def launch_embed(tokens: Tensor, table: Tensor, streams: int) -> Tensor:
    """Queue the kernel."""
    vocabulary, d = table.shape
    out = table.new_empty((tokens.shape[0], streams * d))
    grid = (tokens.shape[0], -(-d // BLOCK))
    _embed_kernel[grid](tokens, table, out, vocabulary, d, STREAMS=streams, BLOCK=BLOCK, **dependent_launch(tokens))
    return out


@triton.jit
def _embed_kernel(
    tokens_ptr, table_ptr, out_ptr, vocabulary, d, STREAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    # One program: one row, BLOCK channels of every stream.
    # a step's first kernel after begin_rows: what that gathers is settled for all that follow
    start_in_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # rows that pad a captured step may hold anything
    token = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), vocabulary - 1)
    value = tl.load(table_ptr + token * d + channel, mask=channel < d)
    for stream in tl.static_range(STREAMS):
        tl.store(out_ptr + (row * STREAMS + stream) * d + channel, value, mask=channel < d)


def embed_inputs(t: int, vocabulary: int, d: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share."""
    make = torch.Generator(device).manual_seed(0)
    return {
        "tokens": torch.randint(0, vocabulary, (t,), generator=make, device=device),
        "table": torch.randn(vocabulary, d, generator=make, device=device).to(dtype),
        "streams": 4,
    }
