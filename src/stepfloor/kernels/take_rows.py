"""The drafter's row before each sequence's newest token, out of all that its first pass ran.

    residual[rows], hidden[rows]

Source: none, a gather; two of torch's were two launches that let nothing start early.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton

BLOCK = 2048


def take_rows_reference(residual: Tensor, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two indexings."""
    return residual[rows], hidden[rows]


def take_rows(residual: Tensor, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gather some rows of two tensors.

    residual  [T, S * D]; hidden [T, D] in the same dtype; rows int64 [B], 0 to T - 1
    Returns [B, S * D] and [B, D]. Raises ValueError if the shapes disagree.
    """
    if residual.ndim != 2 or hidden.ndim != 2 or rows.ndim != 1 or residual.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"take_rows wants residual [T, S * D], hidden [T, D], rows [B]; got {tuple(residual.shape)}, "
            f"{tuple(hidden.shape)}, {tuple(rows.shape)}"
        )
    return (launch_take if runs_triton(residual) else take_rows_reference)(residual, hidden, rows)


def launch_take(residual: Tensor, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Queue the kernel."""
    count, width, d = rows.shape[0], residual.shape[1], hidden.shape[1]
    taken, taken_hidden = residual.new_empty((count, width)), hidden.new_empty((count, d))
    blocks = -(-width // BLOCK)
    _take_rows_kernel[count, blocks + -(-d // BLOCK)](
        residual.contiguous(),
        hidden.contiguous(),
        rows,
        taken,
        taken_hidden,
        width,
        d,
        blocks,
        BLOCK=BLOCK,
        **dependent_launch(residual),
    )
    return taken, taken_hidden


@triton.jit(do_not_specialize=["blocks"])
def _take_rows_kernel(
    residual_ptr,
    hidden_ptr,
    rows_ptr,
    taken_ptr,
    taken_hidden_ptr,
    width,
    d,
    blocks,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program: a block of one row, of its residual or, behind those, of its mixed vector.
    start(PDL)
    to = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(rows_ptr + to)
    if block < blocks:
        _copy(residual_ptr + row * width, taken_ptr + to * width, block, width, BLOCK)
    else:
        _copy(hidden_ptr + row * d, taken_hidden_ptr + to * d, block - blocks, d, BLOCK)


@triton.jit
def _copy(from_ptr, to_ptr, block, size, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < size), mask=at < size)


def take_rows_inputs(b: int, r: int, d: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Inputs that the test and the bench share: a row of each of b windows of r rows; four streams."""
    make = torch.Generator(device).manual_seed(0)
    accepted = torch.randint(0, r, (b,), generator=make, device=device)
    return {
        "residual": torch.randn(b * r, 4 * d, generator=make, device=device).to(dtype),
        "hidden": torch.randn(b * r, d, generator=make, device=device).to(dtype),
        "rows": torch.arange(b, device=device) * r + accepted,
    }
