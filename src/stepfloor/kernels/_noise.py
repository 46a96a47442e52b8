"""Counter-based noise: Philox4x32-10 words, and the uniform and Gumbel numbers made of them.

A number depends on (seed, position, stream, token id) and on nothing else: not on the row it is used in, the batch,
the number of drafts or the order of calls. That is what makes sampled text reproducible.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3 (the
multipliers, the key increments and the ten rounds). Gumbel-max: Gumbel 1954; argmax(log p + G) is distributed as p.
"""

import torch
from torch import Tensor

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
