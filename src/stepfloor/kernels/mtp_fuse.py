"""How the drafter joins what the target knew at a position with the token that followed.

    R_in[s] = h[s] + e     h: the normalised streams, e: the normalised token, each through its matrix

Norms and products come before: `mtp_norm`, then `linear` with fc_hidden and fc_embedding.

Source: vLLM 0.33, the qwen4_exp multi-token predictor; transformers has no module for it.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton

BLOCK = 1024


def mtp_fuse_reference(hidden: Tensor, token: Tensor) -> Tensor:
    """The equation above, rounded to the dtype of the streams."""
    return (hidden + token.unsqueeze(-2)).flatten(-2)


def mtp_fuse(hidden: Tensor, token: Tensor) -> Tensor:
    """Build the drafter's residual for T rows.

    hidden  [T, S, D]; token [T, D]
    Returns [T, S * D]. Raises ValueError if the rows disagree.
    """
    if hidden.ndim != 3 or token.shape != (hidden.shape[0], hidden.shape[2]):
        raise ValueError(
            f"mtp_fuse wants hidden [T, S, D] and token [T, D]; got {tuple(hidden.shape)}, {tuple(token.shape)}"
        )
    return (launch_fuse if runs_triton(hidden) else mtp_fuse_reference)(hidden, token)


def launch_fuse(hidden: Tensor, token: Tensor) -> Tensor:
    """Queue the kernel."""
    count, streams, d = hidden.shape
    out = hidden.new_empty((count, streams * d))
    grid = (count, -(-d // BLOCK))
    _mtp_fuse_kernel[grid](
        hidden.contiguous(), token.contiguous(), out, d, STREAMS=streams, BLOCK=BLOCK, **dependent_launch(hidden)
    )
    return out


@triton.jit
def _mtp_fuse_kernel(hidden_ptr, token_ptr, out_ptr, d, STREAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # One program: BLOCK channels of every stream of one row.
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row * d + channel, mask=channel < d, other=0).to(tl.float32)
    for stream in tl.static_range(STREAMS):
        at = (row * STREAMS + stream) * d + channel
        hidden = tl.load(hidden_ptr + at, mask=channel < d, other=0).to(tl.float32)
        tl.store(out_ptr + at, (hidden + token).to(out_ptr.dtype.element_ty), mask=channel < d)


def mtp_fuse_inputs(t: int, d: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Inputs that the test, the tuner and the bench share; four streams."""
    make = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(t, 4, d, generator=make, device=device).to(dtype)
    return {"hidden": hidden, "token": torch.randn(t, d, generator=make, device=device).to(dtype)}
