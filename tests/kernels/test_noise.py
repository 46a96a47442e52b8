"""The noise is Philox, is Gumbel, and depends on its four arguments alone."""

import math

import pytest
import torch
from scipy.stats import chi2

from stepfloor.kernels._noise import ACCEPT, DRAFT, TARGET, gumbel_noise, philox4x32, uniform_noise

# Random123, tests/kat_vectors, the lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: str, key: str, result: str) -> None:
    words = [[int(word, 16) for word in line.split()] for line in (counter, key, result)]
    c, k = ([torch.tensor([word]) for word in line] for line in words[:2])
    assert [word.item() for word in philox4x32(tuple(c), (k[0], k[1]))] == words[2]
    assert plain_philox(words[0], words[1]) == words[2]


def test_gumbel_of_a_token_is_the_word_of_its_block() -> None:
    # Negative and 64-bit seeds, and a position above 2**31, are where sign extension would show.
    cases = [(0, 0), (-1, 7), (2**63 - 1, 2**31 + 5), (-(2**63), 262143)]
    seeds = torch.tensor([seed for seed, _ in cases])
    positions = torch.tensor([position for _, position in cases])
    noise = gumbel_noise(seeds, positions, torch.full_like(seeds, DRAFT), 11)
    for row, (seed, position) in enumerate(cases):
        for token in range(11):
            key = [seed % 2**32, (seed >> 32) % 2**32]
            word = plain_philox([token // 4, position, DRAFT, 0], key)[token % 4]
            expected = -math.log(-math.log1p(-(word + 0.5) / 2**32))
            # u, log1p and log round once each, relative 2**-24; |g| is below 32, so its step is at most 2**-19.
            # u near 1 (above 1 - 2**-8 here) would magnify its rounding by 1 / ((1 - u) log(1 - u)); 100 covers that.
            assert noise[row, token].item() == pytest.approx(expected, abs=2**-19 + 100 * 2**-24)


def test_extreme_words_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of 0 or 2**32 - 1 must not make a logit infinite."""
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    monkeypatch.setattr("stepfloor.kernels._noise.philox4x32", lambda counter, key: (words[:, None],) * 4)
    zeros = torch.zeros(5, dtype=torch.int64)
    uniform = uniform_noise(zeros, zeros, ACCEPT)
    assert bool((uniform > 0).all())
    assert bool((uniform < 1).all())
    assert bool(torch.isfinite(gumbel_noise(zeros, zeros, zeros, 4)).all())


def test_gumbel_is_gumbel() -> None:
    """exp(-exp(-G)) is uniform: 64 cells, 400,000 numbers, false alarm once in 10**9."""
    noise = gumbel_noise(torch.tensor([1, 2, 3, 4]), torch.tensor([9, 9, 10, 11]), torch.zeros(4).long(), 100_000)
    uniform = torch.exp(-torch.exp(-noise.double()))
    counts = torch.histc(uniform.flatten(), bins=64, min=0.0, max=1.0)
    expected = uniform.numel() / 64
    assert counts.sum() == uniform.numel()
    assert ((counts - expected) ** 2 / expected).sum().item() < chi2.isf(1e-9, 63)


def test_neighbouring_arguments_are_uncorrelated() -> None:
    seeds = torch.tensor([5, 6, 5, 5])
    positions = torch.tensor([10, 10, 11, 10])
    streams = torch.tensor([TARGET, TARGET, TARGET, DRAFT])
    noise = gumbel_noise(seeds, positions, streams, 100_000).double()
    correlation = torch.corrcoef(noise) - torch.eye(4)
    # the correlation of independent numbers has standard deviation 1 / sqrt(n); six of them
    assert correlation.abs().max().item() < 6 / math.sqrt(100_000)


@pytest.mark.parametrize("vocab_size", [1, 3, 4999, 5000])
def test_noise_does_not_depend_on_the_batch(vocab_size: int) -> None:
    seeds = torch.arange(7) * 0x123456789
    positions = torch.arange(7) + 100
    streams = torch.arange(7) % 4
    together = gumbel_noise(seeds, positions, streams, vocab_size)
    for i in range(7):
        row = slice(i, i + 1)
        assert torch.equal(gumbel_noise(seeds[row], positions[row], streams[row], vocab_size)[0], together[i])
    # nor on the vocabulary, so that padding the head changes nothing
    assert torch.equal(gumbel_noise(seeds, positions, streams, vocab_size + 5)[:, :vocab_size], together)
