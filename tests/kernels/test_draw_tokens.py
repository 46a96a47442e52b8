"""Draws follow the softmax, depend on seed and position alone, and are -1 where there is nothing to draw from."""

import math

import pytest
import torch
from scipy.stats import chi2

from stepfloor.kernels._noise import gumbel_noise
from stepfloor.kernels.draw_tokens import DRAFT, TARGET, draw_tokens, draw_tokens_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_draw_is_the_argmax_of_logits_plus_noise() -> None:
    inputs = draw_tokens_inputs(5, 301, DEVICE)
    streams = torch.full_like(inputs["positions"], TARGET)
    noise = gumbel_noise(inputs["seeds"], inputs["positions"], streams, 301)
    expected = (inputs["logits"] + noise).argmax(-1)
    expected[0] = inputs["logits"][0].argmax()
    assert torch.equal(draw_tokens(**inputs), expected)
    assert not torch.equal(draw_tokens(**(inputs | {"stream": DRAFT})), expected)


@pytest.mark.parametrize("seeds", [None, torch.zeros(3, dtype=torch.int64)])
def test_greedy_ties_go_to_the_lowest_id(seeds: torch.Tensor | None) -> None:
    logits = torch.zeros(3, 70_000)
    logits[0, [60_000, 5, 699]] = 1.0
    logits[1, [69_999, 40_000]] = 1.0
    slots = torch.arange(3)
    for rows in (slice(0, 3), slice(1, 2)):
        drawn = draw_tokens(logits[rows], slots[rows], slots[rows], torch.zeros(3), seeds, TARGET)
        assert drawn.tolist() == [5, 40_000, 0][rows]


def test_draws_are_distributed_as_the_softmax() -> None:
    """Four tokens, 200,000 seeds; false alarm once in 10**9."""
    n = 200_000
    probabilities = torch.tensor([0.5, 0.3, 0.199, 0.001])
    logits = torch.log(probabilities).expand(n, 4) + 3.0
    seeds = torch.arange(n)
    drawn = draw_tokens(logits, torch.arange(n), torch.full((n,), 17), torch.ones(n), seeds, TARGET)
    counts, expected = torch.bincount(drawn, minlength=4), probabilities * n
    assert ((counts - expected) ** 2 / expected).sum().item() < chi2.isf(1e-9, 3)


@pytest.mark.parametrize(("n", "vocab_size"), [(9, 4999), (3, 248_320)])
def test_a_draw_does_not_depend_on_its_row_or_batch(n: int, vocab_size: int) -> None:
    inputs = draw_tokens_inputs(n, vocab_size, DEVICE)
    together = draw_tokens(**inputs)
    order = torch.arange(n).flip(0)
    per_row = {name: inputs[name] for name in ("logits", "slots", "positions")}
    reversed_rows = draw_tokens(**(inputs | {name: x[order] for name, x in per_row.items()}))
    assert torch.equal(reversed_rows, together[order])
    for i in range(n):
        alone = draw_tokens(**(inputs | {name: x[i : i + 1] for name, x in per_row.items()}))
        assert alone[0] == together[i]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_gives_minus_1_and_its_neighbours_draw_on(
    bad: float, temperature: float
) -> None:
    """C-H-01: such a row must not become token 0."""
    inputs = draw_tokens_inputs(3, 101, DEVICE)
    inputs["temperature"][:] = temperature
    good = draw_tokens(**inputs)
    if bad == -math.inf:
        inputs["logits"][1] = bad
    else:
        inputs["logits"][1, 50] = bad
    drawn = draw_tokens(**inputs)
    assert drawn.tolist() == [good[0].item(), -1, good[2].item()]


def test_a_token_at_minus_infinity_is_never_drawn() -> None:
    n = 1000
    logits = torch.full((n, 40), -math.inf)
    logits[:, 39] = -50.0
    rows = torch.arange(n)
    assert bool((draw_tokens(logits, rows, rows, torch.ones(n), rows, TARGET) == 39).all())


def test_shapes_that_disagree_are_refused() -> None:
    inputs = draw_tokens_inputs(3, 11, DEVICE)
    with pytest.raises(ValueError, match=r"\(3, 11\), \(3,\), \(2,\)"):
        draw_tokens(**(inputs | {"positions": inputs["positions"][:2]}))
