"""Counter-based noise: Philox4x32-10 words, and the uniform and Gumbel numbers made of them.

A number depends on (seed, position, stream, token id) and on nothing else: not on the row it is used in, the batch,
the number of drafts or the order of calls. That is what makes sampled text reproducible.

Words and uniform numbers have the same bits everywhere: integers, one conversion, one sum and one product, each rounded
to nearest. Gumbel numbers go through logarithms, whose last bits belong to the library. On one device all kernels use
one formula (`gumbel_tile`), so they agree with each other to the bit; with the functions here, or with another device,
they agree within 2**-20 + 2**-23 |g|: the exponential number -log1p(-u) is right within 6 units of 2**-24 on either
side, which moves its logarithm by as much, and the result is rounded once more.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3 (the
multipliers, the key increments and the ten rounds). Gumbel-max: Gumbel 1954; argmax(log p + G) is distributed as p.
"""

import torch
from torch import Tensor

from stepfloor.kernels._jit import tl, triton

# Third counter word: what a number is used for. Two uses at one position never share a number by accident.
TARGET = 0  # the target's own draw at a position
DRAFT = 1  # the drafter's draw, where it must be independent of the target's
ACCEPT = 2  # the uniform number that a draft's acceptance is decided with
RESIDUAL = 3  # the draw that replaces a rejected draft

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each counter and key.

    counter, key  four and two int64 tensors holding values 0 to 2**32 - 1; they broadcast
    Returns four int64 tensors of values 0 to 2**32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit words wraps in int64, but its 64 bits are right: the shift only has to be masked.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _WORD) ^ c1 ^ k0,
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform_noise(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """One fp32 number in (0, 1) for each seed and position, both int64 [...] of one shape."""
    zero = torch.zeros_like(positions)
    words = philox4x32((zero, positions & _WORD, zero + stream, zero), _key(seeds))
    return _open_unit(words[0])


def gumbel_noise(seeds: Tensor, positions: Tensor, streams: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel numbers, fp32 [N, vocab_size]; seeds, positions and streams are int64 [N].

    Token id v takes word v % 4 of block v // 4.
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds.device)  # [V / 4]
    counter = (blocks[None], (positions & _WORD)[:, None], streams[:, None], torch.zeros_like(blocks)[None])
    low, high = _key(seeds)
    words = philox4x32(counter, (low[:, None], high[:, None]))
    uniform = _open_unit(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])
    # The winner is a large number, which a uniform near 0 must make: log1p keeps its precision there (the largest
    # is 22.9), where -log(-log(u)) would run out of fp32 steps at 16.6 and tie.
    return -torch.log(-torch.log1p(-uniform))


def _key(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & _WORD, (seeds >> 32) & _WORD


def _open_unit(words: Tensor) -> Tensor:
    # Words near 2**32 round to 1 in fp32; the largest number below 1 stands in for them.
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)


# ---------------------------------------------------------------------- the same in Triton

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_STEP0 = tl.constexpr(0x9E3779B9)
_STEP1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox_words(c0, c1, c2, k0, k1):
    """`philox4x32` for counters (c0, c1, c2, 0); c0 uint32 of any shape, the others uint32 scalars or of that shape."""
    c1 = c1 + c0 * 0
    c2 = c2 + c0 * 0
    c3 = c0 * 0
    m0 = tl.cast(_M0, tl.uint32)
    m1 = tl.cast(_M1, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.cast(_STEP0, tl.uint32)
        k1 = k1 + tl.cast(_STEP1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def open_unit(word):
    """`_open_unit` of uint32 words."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def uniform_number(seed, position, stream):
    """`uniform_noise` of one int64 seed and one int64 position; float32 [1]."""
    zero = tl.full([1], 0, tl.uint32)
    word, _, _, _ = philox_words(
        zero,
        position.to(tl.uint32),
        tl.cast(stream, tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    return open_unit(word)


@triton.jit
def gumbel_tile(seed, position, stream, first, COUNT: tl.constexpr):
    """`gumbel_noise` of the ids first to first + COUNT - 1, of one int64 seed and position; first a multiple of 4."""
    block = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(
        block,
        position.to(tl.uint32),
        tl.cast(stream, tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [block, w // 2, w % 2]
    u = open_unit(tl.reshape(words, [COUNT]))
    # log1p(-u) from log alone: dividing by the 1 - u that was rounded cancels that rounding (Kahan)
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)
