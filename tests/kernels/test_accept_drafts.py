"""The rejection rule: emitted tokens follow the target for bad drafters, and windows end where they must.

Statistical tests draw 200,000 windows at once, a seed each, and fail by chance once in 10**9.
"""

import math
from typing import Any

import pytest
import torch
from scipy.stats import chi2, norm
from torch import Tensor

from stepfloor.kernels._noise import ACCEPT, RESIDUAL, TARGET, gumbel_noise, uniform_noise
from stepfloor.kernels.accept_drafts import Proposals, accept_drafts, accept_drafts_inputs
from stepfloor.kernels.draw_tokens import DRAFT, draw_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 200_000
# Row 0 of the window, then row 1 after each possible first token, then row 2.
FIRST = torch.tensor([0.6, 0.3, 0.1])
SECOND = torch.tensor([[0.2, 0.3, 0.5], [0.7, 0.2, 0.1], [0.05, 0.05, 0.9]])
BONUS = torch.tensor([0.1, 0.1, 0.8])
BAD_DRAFTER = torch.tensor([[0.1, 0.2, 0.7], [0.01, 0.98, 0.01]])  # of the first and the second draft


def check_distribution(tokens: Tensor, probabilities: Tensor) -> None:
    counts = torch.bincount(tokens, minlength=len(probabilities))
    expected = probabilities * len(tokens)
    impossible = probabilities == 0
    assert counts[impossible].sum() == 0
    statistic = ((counts - expected) ** 2 / expected)[~impossible].sum().item()
    assert statistic < chi2.isf(1e-9, int((~impossible).sum()) - 1)


def windows(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts drawn from q [2, 3], and the target's logits after them."""
    seeds, rows = torch.arange(N), torch.arange(N)
    log_q = torch.log(q).expand(N, 2, 3)
    drafts = torch.stack(
        [draw_tokens(log_q[:, j], rows, torch.full((N,), 5 + j), torch.ones(N), seeds, DRAFT) for j in (0, 1)], dim=1
    )
    target = torch.stack([FIRST.expand(N, 3), SECOND[drafts[:, 0]], BONUS.expand(N, 3)], dim=1)
    return drafts, log_q, torch.log(target)


def kept(log_q: Tensor) -> Proposals:
    """Probabilities that are normalised already."""
    return Proposals(log_q, torch.zeros(*log_q.shape[:2], 2, device=log_q.device))


def judge(logits: Tensor, drafts: Tensor, log_q: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    n = drafts.shape[0]
    rows = torch.arange(n)
    return accept_drafts(
        logits, drafts, kept(log_q), rows, torch.full((n,), 5), torch.full((n,), temperature), torch.arange(n)
    )


@pytest.mark.parametrize("q", [BAD_DRAFTER, torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])], ids=["bad", "argmax"])
def test_every_position_follows_the_target(q: Tensor) -> None:
    """An argmax drafter is the one-hot q: acceptance with probability p(x), not on argmax equality."""
    drafts, log_q, logits = windows(q)
    emitted, accepted = judge(logits, drafts, log_q)
    check_distribution(emitted[:, 0], FIRST)
    for first in range(3):
        went_on = (accepted >= 1) & (emitted[:, 0] == first)
        if went_on.any():
            check_distribution(emitted[went_on, 1], SECOND[first])
    check_distribution(emitted[accepted == 2, 2], BONUS)

    # the acceptance rate of the first draft is the overlap of p and q
    overlap = torch.minimum(FIRST, q[0]).sum().item()
    deviation = math.sqrt(overlap * (1 - overlap) / N)
    assert abs((accepted >= 1).double().mean().item() - overlap) < norm.isf(5e-10) * deviation


def test_two_steps_in_a_row_follow_the_target_although_drafting_repeats_its_noise() -> None:
    """A second draft that fell with the first is drafted again from the same numbers; they must have decided nothing.

    Drafter and target ignore the prefix here, so the second token must follow SECOND[0] and be independent of the
    first, whether it came from the first window or from the next.
    """
    drafts, log_q, _ = windows(BAD_DRAFTER)
    logits = torch.log(torch.stack([FIRST, SECOND[0], BONUS])).expand(N, 3, 3)
    emitted, accepted = judge(logits, drafts, log_q)
    rows = torch.arange(N)
    again = draw_tokens(log_q[:, 1], rows, torch.full((N,), 6), torch.ones(N), rows, DRAFT)
    assert torch.equal(again, drafts[:, 1])
    second_step, _ = accept_drafts(
        logits[:, 1:], again[:, None], kept(log_q[:, 1:]), rows, torch.full((N,), 6), torch.ones(N), rows
    )
    second = torch.where(accepted >= 1, emitted[:, 1], second_step[:, 0])
    check_distribution(emitted[:, 0] * 3 + second, torch.outer(FIRST, SECOND[0]).flatten())


def test_a_perfect_drafter_is_never_refused() -> None:
    drafts, log_q, _ = windows(torch.stack([FIRST, SECOND[0]]))
    logits = torch.cat([log_q, torch.log(BONUS).expand(N, 1, 3)], dim=1)
    # an offset of the logits changes no probability; log_softmax takes both to the same bits
    log_q = torch.log_softmax(log_q + 3.0, dim=-1)
    emitted, accepted = judge(logits + 3.0, drafts, log_q)
    assert bool((accepted == 2).all())
    assert torch.equal(emitted[:, :2], drafts)


def test_the_replacement_is_where_the_target_has_more() -> None:
    drafts, log_q, logits = windows(BAD_DRAFTER)
    emitted, accepted = judge(logits, drafts, log_q)
    refused = emitted[accepted == 0, 0]
    # only 0 and 1 have p above q
    check_distribution(refused, torch.tensor([0.5, 0.1, 0.0]) / 0.6)


def test_filtered_tokens_are_neither_accepted_nor_emitted() -> None:
    drafts, log_q, logits = windows(BAD_DRAFTER)
    logits[:, 0, 2] = -math.inf  # what 70% of the drafts are
    emitted, accepted = judge(logits, drafts, log_q)
    assert bool((accepted[drafts[:, 0] == 2] == 0).all())
    check_distribution(emitted[:, 0], torch.tensor([2 / 3, 1 / 3, 0.0]))


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """q above p everywhere by a rounding: the draft may fall, and something must be emitted."""
    n = 2000
    logits = torch.log(FIRST).expand(n, 2, 3)
    log_q = torch.log_softmax(logits[:, :1], dim=-1) + 2.0
    emitted, accepted = judge(logits, torch.zeros(n, 1).long(), log_q)
    assert 0 < (accepted == 0).sum() < n
    assert bool((emitted[:, 0] >= 0).all())
    assert set(emitted[accepted == 0, 0].tolist()) == {0, 1, 2}


def test_a_missing_draft_ends_the_window_with_the_targets_own_draw() -> None:
    n = 2000
    drafts = torch.tensor([[0, -1, 0]]).expand(n, 3)
    logits = torch.log(torch.stack([FIRST, SECOND[0], BONUS, BONUS])).expand(n, 4, 3)
    emitted, accepted = judge(logits, drafts, torch.log(FIRST).expand(n, 3, 3))
    assert bool((accepted == 1).all())  # p equals q at the first draft
    rows = torch.arange(n)
    own = draw_tokens(logits[:, 1], rows, torch.full((n,), 6), torch.ones(n), rows, TARGET)
    assert torch.equal(emitted[:, 1], own)
    assert bool((emitted[:, 2:] == -1).all())


def best_first(*tokens: int) -> Tensor:
    logits = torch.zeros(1, len(tokens), 6)
    logits[0, range(len(tokens)), list(tokens)] = 1.0
    return logits


@pytest.mark.parametrize(
    ("best", "drafts", "emitted", "accepted"),
    [
        ([1, 2, 3], [1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 5], [1, 2, -1], 1),
        ([1, 2, 3], [5, 2], [1, -1, -1], 0),
        ([1, 2, 3], [1, -1], [1, 2, -1], 1),
    ],
)
def test_greedy_windows_worked_out_by_hand(
    best: list[int], drafts: list[int], emitted: list[int], accepted: int
) -> None:
    log_q = torch.log_softmax(torch.zeros(1, 2, 6), dim=-1)
    ours = judge(best_first(*best), torch.tensor([drafts]), log_q, temperature=0.0)
    assert ours[0].tolist() == [emitted]
    assert ours[1].tolist() == [accepted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_that_is_not_finite_ends_the_window_without_a_token(row: int, bad: float, temperature: float) -> None:
    """C-H-01: and the windows beside it are not disturbed."""
    inputs = accept_drafts_inputs(3, 2, 11, DEVICE)
    inputs["temperature"][:] = temperature
    best = inputs["logits"].argmax(-1)
    inputs["drafts"][:] = best[:, :2]
    log_q = torch.full_like(inputs["proposals"].logits, -math.inf)
    inputs["proposals"] = kept(
        log_q.scatter_(2, best[:, :2, None], -20.0)
    )  # p is far above q: random windows accept too
    good = accept_drafts(**inputs)
    assert good[1].tolist() == [2, 2, 2]
    inputs["logits"][1, row] = bad
    emitted, accepted = accept_drafts(**inputs)
    assert accepted.tolist() == [2, row, 2]
    assert emitted[1].tolist() == best[1, :row].tolist() + [-1] * (3 - row)
    assert torch.equal(emitted[[0, 2]], good[0][[0, 2]])


def plain_window(inputs: dict[str, Any], b: int) -> tuple[list[int], int]:
    """The rule for one window, a token at a time, in double."""
    k, v = inputs["proposals"].logits.shape[1:]
    slot = inputs["slots"][b : b + 1]
    seed, start = inputs["seeds"][slot], inputs["positions"][b : b + 1]
    greedy = inputs["temperature"][slot].item() == 0
    emitted: list[int] = []
    for j in range(k + 1):
        p = torch.softmax(inputs["logits"][b, j].double(), dim=-1)
        draft = int(inputs["drafts"][b, j]) if j < k else -1
        weights, stream = p, TARGET
        if greedy:
            if draft == int(p.argmax()):
                emitted.append(draft)
                continue
            return [*emitted, int(p.argmax())], j
        if draft >= 0:
            q = torch.softmax(inputs["proposals"].logits[b, j].double(), dim=-1)
            if p[draft] > uniform_noise(seed, start + j, ACCEPT).double() * q[draft]:
                emitted.append(draft)
                continue
            weights, stream = (p - q).clamp(min=0), RESIDUAL
        noise = gumbel_noise(seed, start + j, torch.tensor([stream]), v)[0]
        return [*emitted, int((torch.log(weights) + noise).argmax())], j
    raise RuntimeError(f"window {b} did not end")


def test_windows_agree_with_plain_python() -> None:
    inputs = accept_drafts_inputs(200, 3, 57, DEVICE)
    inputs["drafts"][::7, 1] = -1
    emitted, accepted = accept_drafts(**inputs)
    for b in range(200):
        tokens, count = plain_window(inputs, b)
        assert emitted[b].tolist() == tokens + [-1] * (4 - len(tokens))
        assert accepted[b] == count
    assert set(accepted.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(("b", "vocab_size"), [(9, 4999), (3, 248_320)])
def test_a_window_does_not_depend_on_the_batch(b: int, vocab_size: int) -> None:
    inputs = accept_drafts_inputs(b, 2, vocab_size, DEVICE)
    emitted, accepted = accept_drafts(**inputs)
    per_window = ("logits", "drafts", "slots", "positions")
    for i in range(b):
        alone = accept_drafts(**{name: x[i : i + 1] if name in per_window else x for name, x in inputs.items()})
        assert torch.equal(alone[0][0], emitted[i])
        assert alone[1][0] == accepted[i]


def test_shapes_that_disagree_are_refused() -> None:
    inputs = accept_drafts_inputs(3, 2, 11, DEVICE)
    with pytest.raises(ValueError, match=r"\(3, 2, 11\), \(3, 2\), \(3, 2, 11\)"):
        accept_drafts(**(inputs | {"logits": inputs["logits"][:, 1:]}))
    with pytest.raises(ValueError, match=r"k at least 1"):
        accept_drafts(**(inputs | {"drafts": inputs["drafts"][:, :0]}))
    with pytest.raises(ValueError, match=r"B = 3; got \(2,\) and \(3,\)"):
        accept_drafts(**(inputs | {"slots": inputs["slots"][:2]}))
