"""Count emitted tokens, for the penalties of later rows.

Source: vLLM model_executor/layers/utils.py, get_token_bin_counts_and_mask, kept up to date instead of counted anew.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, runs_triton, start, tl, triton


def count_tokens_reference(counts: Tensor, slots: Tensor, emitted: Tensor) -> None:
    """Integers, so no order matters."""
    cells = slots[:, None] * counts.shape[1] + emitted.clamp(min=0)
    counts.view(-1).scatter_add_(0, cells.flatten(), (emitted >= 0).int().flatten())


def count_tokens(counts: Tensor, slots: Tensor, emitted: Tensor) -> None:
    """Add one to counts[slots[b], emitted[b, j]] for every j, in place.

    counts   int32 [slots, V], contiguous
    slots    int64 [B]; emitted  int64 [B, R], -1 is no token
    Raises ValueError if shapes disagree.
    """
    if counts.ndim != 2 or emitted.ndim != 2 or slots.shape != emitted.shape[:1]:
        raise ValueError(
            f"count_tokens wants counts [slots, V], slots [B], emitted [B, R]; got {tuple(counts.shape)}, "
            f"{tuple(slots.shape)}, {tuple(emitted.shape)}"
        )
    count = count_tokens_triton if runs_triton(counts) else count_tokens_reference
    count(counts, slots, emitted)


def count_tokens_triton(counts: Tensor, slots: Tensor, emitted: Tensor) -> None:
    """One launch, a program a slot."""
    b, width = emitted.shape
    _count_kernel[(b,)](
        counts,
        slots.contiguous(),
        emitted.contiguous(),
        counts.shape[1],
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        num_warps=1,
        **dependent_launch(counts),
    )


@triton.jit
def _count_kernel(
    counts_ptr, slots_ptr, emitted_ptr, vocab, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    # A window may hold a token twice, and rows that pad a batch share a slot: atomic.
    start(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    token = tl.load(emitted_ptr + row * WIDTH + column, mask=column < WIDTH, other=-1)
    cell = tl.load(slots_ptr + row) * vocab + token
    tl.atomic_add(counts_ptr + cell, tl.full([COLUMNS], 1, tl.int32), mask=token >= 0, sem="relaxed")


def count_tokens_inputs(b: int, r: int, vocab_size: int, device: str) -> dict[str, Tensor]:
    """Windows of a few tokens, some of them twice, some cut short; one more slot than windows."""
    make = torch.Generator(device).manual_seed(0)
    emitted = torch.randint(vocab_size, (b, r), generator=make, device=device)
    emitted[:, -1] = emitted[:, 0]
    emitted[1::2, 1:] = -1
    return {
        "counts": torch.randint(3, (b + 1, vocab_size), generator=make, device=device, dtype=torch.int32),
        "slots": torch.arange(b, device=device).flip(0),
        "emitted": emitted,
    }
