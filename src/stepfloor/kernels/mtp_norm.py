"""The drafter's two norms: what the target knew at a position, and the vector of the token that followed.

    n = norm(R)                  one mean over all streams together
    t = norm(E[next token])

`linear` projects each through a matrix of its own, then `mtp_fuse` adds them.

Source: vLLM 0.33, the qwen4_exp multi-token predictor; transformers has no module for it.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import dependent_launch, let_successor_in, runs_triton, tl, triton, wait
from stepfloor.kernels._torch import rms_norm

# Up to so many rows, each stream has a program, which sums the squares of the whole row and writes its own part: with
# the tokens' five a row. A multiprocessor holds one at a time (512 threads of 80 registers), and an H200 has 132.
FEW_ROWS = 24


def mtp_norm_reference(
    residual: Tensor,
    embedding: Tensor,
    tokens: Tensor | None,
    norm_hidden: Tensor,
    norm_embedding: Tensor,
    streams: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Two norms, each rounded once."""
    vectors = embedding if tokens is None else embedding[tokens.clamp(0, embedding.shape[0] - 1)]
    hidden = rms_norm(residual, norm_hidden, eps).unflatten(-1, (streams, -1))
    return hidden, rms_norm(vectors, norm_embedding, eps)


def mtp_norm(
    residual: Tensor,
    embedding: Tensor,
    tokens: Tensor | None,
    norm_hidden: Tensor,
    norm_embedding: Tensor,
    streams: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalise what the drafter reads for T rows.

    residual        [T, S * D], the target's streams before its final mixer, or the drafter's own
    embedding       [vocabulary, D] with tokens [T] int64, the token after each row; or without tokens (None) their
                    vectors [T, D]
    norm_hidden     [S * D] float32, norm_embedding [D] float32, 1 already added
    Returns the streams [T, S, D] and the tokens' vectors [T, D]. An id outside of the vocabulary reads its first or
    last row. Raises ValueError if the shapes disagree.
    """
    count, width = residual.shape
    rows = embedding.shape[0] if tokens is None else tokens.numel()
    if rows != count or width != streams * embedding.shape[1] or (tokens is not None and tokens.ndim != 1):
        raise ValueError(
            f"mtp_norm wants residual [T, {streams} * D] and embedding [T, D], or [vocabulary, D] with tokens [T]; got "
            f"{tuple(residual.shape)}, {tuple(embedding.shape)}, {None if tokens is None else tuple(tokens.shape)}"
        )
    run = launch_norms if runs_triton(residual) else mtp_norm_reference
    return run(residual, embedding, tokens, norm_hidden, norm_embedding, streams, eps)


def launch_norms(
    residual: Tensor,
    embedding: Tensor,
    tokens: Tensor | None,
    norm_hidden: Tensor,
    norm_embedding: Tensor,
    streams: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queue the kernel."""
    count, width = residual.shape
    vocabulary, d = embedding.shape
    hidden, vectors = residual.new_empty((count, streams, d)), residual.new_empty((count, d))
    parts = streams if count <= FEW_ROWS else 1
    _mtp_norm_kernel[count, parts + 1](
        residual.contiguous(),
        embedding.contiguous(),
        tokens,
        norm_hidden,
        norm_embedding,
        hidden,
        vectors,
        vocabulary,
        width,
        width // parts,
        d,
        eps,
        GATHER=tokens is not None,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        BLOCK=triton.next_power_of_2(d),
        num_warps=16,
        **dependent_launch(residual),
    )
    return hidden, vectors


@triton.jit
def _mtp_norm_kernel(
    residual_ptr,
    embedding_ptr,
    tokens_ptr,
    norm_hidden_ptr,
    norm_embedding_ptr,
    hidden_ptr,
    vectors_ptr,
    vocabulary,
    width,
    part_width,
    d,
    eps,
    GATHER: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # A program for each part of a row's streams, and one for its token. Scales do not depend on the kernel before.
    let_successor_in(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < tl.num_programs(1) - 1:
        at = tl.arange(0, BLOCK_WIDTH)
        mine = (at >= part * part_width) & (at < (part + 1) * part_width)
        scale = tl.load(norm_hidden_ptr + at, mask=mine, other=0)
        wait(PDL)
        x = tl.load(residual_ptr + row * width + at, mask=at < width, other=0).to(tl.float32)
        _store_normed(hidden_ptr + row * width + at, x, scale, mine, width, eps)
    else:
        channel = tl.arange(0, BLOCK)
        live = channel < d
        token_scale = tl.load(norm_embedding_ptr + channel, mask=live, other=0)
        wait(PDL)
        place = row
        if GATHER:
            # rows that pad a captured step may hold anything
            place = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), vocabulary - 1)
        token = tl.load(embedding_ptr + place * d + channel, mask=live, other=0).to(tl.float32)
        _store_normed(vectors_ptr + row * d + channel, token, token_scale, live, d, eps)


@triton.jit
def _store_normed(to_ptr, x, scale, live, width, eps):
    rms = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(to_ptr, (x * rms * scale).to(to_ptr.dtype.element_ty), mask=live)


def mtp_norm_inputs(t: int, d: int, vocabulary: int, dtype: torch.dtype, device: str) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; four streams."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    return {
        "residual": rand(t, 4 * d).to(dtype),
        "embedding": rand(vocabulary, d).to(dtype),
        "tokens": torch.randint(0, vocabulary, (t,), generator=make, device=device),
        "norm_hidden": 1 + 0.1 * rand(4 * d),
        "norm_embedding": 1 + 0.1 * rand(d),
        "streams": 4,
        "eps": 1e-6,
    }
