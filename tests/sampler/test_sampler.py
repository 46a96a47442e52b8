"""The sampler as a step uses it: text that does not depend on batch or k, penalties inside a window, clean slots."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stepfloor.kernels.accept_drafts import Proposals
from stepfloor.request import SamplingParams
from stepfloor.sampler.sampler import Sampler
from tests.kernels.plain_logits import plain_row, plain_softmax

V = 40
REQUESTS = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=-(2**40)),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01, seed=2**64 - 3),
    SamplingParams(temperature=0.0, presence_penalty=0.7, repetition_penalty=1.3, forbidden_ids=(0, 1), seed=4),
    SamplingParams(temperature=1.2, frequency_penalty=0.5, logit_bias=((5, 1.5), (6, -1.5)), top_k=20, seed=5),
]
PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8), (9, 9, 9), (10, 11)]


def model_row(prefix: Sequence[int]) -> Tensor:
    """A fake target: random logits that are a function of the prefix."""
    return 2.5 * torch.randn(V, generator=torch.Generator().manual_seed(hash(tuple(prefix)) % 2**31))


def drafter_row(prefix: Sequence[int], params: SamplingParams) -> Tensor:
    """A fake drafter: the target, blurred."""
    return model_row(prefix) + 0.8 * torch.randn(V, generator=torch.Generator().manual_seed(len(prefix)))


def write(
    requests: list[SamplingParams],
    prompts: list[tuple[int, ...]],
    k: int,
    acceptance: str,
    length: int = 40,
    forced_accept: int | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Texts of some requests decoded together with k drafts, and the accepted count of every window."""
    b = len(requests)
    sampler = Sampler(V, b, k, acceptance, "cpu", forced_accept)
    slots = torch.arange(b)
    texts = [list(prompt) for prompt in prompts]
    for slot, params in enumerate(requests):
        sampler.assign(slot, params, prompts[slot])
    history: list[int] = []

    def positions() -> Tensor:
        return torch.tensor([len(text) for text in texts])

    first = sampler.sample(torch.stack([model_row(text) for text in texts]), slots, positions())
    sampler.commit(slots, first)
    for text, token in zip(texts, first.tolist(), strict=True):
        text.append(token)

    while min(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)) < length:
        drafts = torch.empty(b, 0, dtype=torch.int64)
        for j in range(k):
            rows = [drafter_row([*text, *drafts[i].tolist()], requests[i]) for i, text in enumerate(texts)]
            tokens = sampler.draft(torch.stack(rows), slots, positions() + j, drafts.unbind(1))
            drafts = torch.cat([drafts, tokens[:, None]], dim=1)
        window = [
            torch.stack([model_row([*text, *drafts[i, :j].tolist()]) for j in range(k + 1)])
            for i, text in enumerate(texts)
        ]
        emitted, accepted = sampler.accept(torch.stack(window), drafts, slots, positions())
        sampler.commit(slots, emitted)
        history += accepted.tolist()
        for i, text in enumerate(texts):
            count = int(accepted[i]) + 1
            assert bool((emitted[i, :count] >= 0).all())
            assert bool((emitted[i, count:] == -1).all())
            text += emitted[i, :count].tolist()
    return [text[len(prompt) : len(prompt) + length] for text, prompt in zip(texts, prompts, strict=True)], history


def kept(sampler: Sampler) -> Proposals:
    """What drafts were drawn from; it must be there."""
    assert sampler.proposals is not None
    return sampler.proposals


@pytest.fixture(scope="module")
def undrafted() -> list[list[int]]:
    return write(REQUESTS, PROMPTS, 0, "coupled")[0]


@pytest.mark.parametrize("k", [1, 3, 7])
def test_coupled_text_does_not_depend_on_k(k: int, undrafted: list[list[int]]) -> None:
    texts, accepted = write(REQUESTS, PROMPTS, k, "coupled")
    assert texts == undrafted
    # the drafter is good enough that drafts are accepted and refused, so the equality is about both
    assert {0, k} <= set(accepted)


@pytest.mark.parametrize("acceptance", ["standard", "coupled"])
@pytest.mark.parametrize("k", [0, 2])
def test_text_does_not_depend_on_the_batch(k: int, acceptance: str) -> None:
    """Alone, a request also runs without the stages that only its neighbours use."""
    together = write(REQUESTS, PROMPTS, k, acceptance)[0]
    for i, request in enumerate(REQUESTS):
        assert write([request], [PROMPTS[i]], k, acceptance)[0] == [together[i]]


def test_greedy_text_does_not_depend_on_k_in_standard_mode(undrafted: list[list[int]]) -> None:
    for i in (0, 3):
        for requests in ([REQUESTS[i]], [REQUESTS[i], REQUESTS[1]]):  # alone without noise, beside a random one with
            texts, _ = write(requests, [PROMPTS[i], PROMPTS[1]][: len(requests)], 3, "standard")
            assert texts[0] == undrafted[i]


def test_a_random_request_may_join_while_greedy_drafts_wait_to_be_judged() -> None:
    """The drafts were made when nobody kept what they were drawn from; the next step must not look for it."""
    sampler = Sampler(V, 2, 2, "standard", "cpu")
    sampler.assign(0, REQUESTS[0], PROMPTS[0])
    slot, position = torch.tensor([0]), torch.tensor([5])
    logits = torch.randn(1, 3, V, generator=torch.Generator().manual_seed(0))
    drafts = logits[:, :2].argmax(-1)
    sampler.assign(1, REQUESTS[1], PROMPTS[1])
    for prepared in (False, True):
        if prepared:  # nor at what the table happens to hold
            sampler.prepare(sampler.stages)
            kept(sampler).logits.fill_(math.nan)
        emitted, accepted = sampler.accept(logits, drafts, slot, position)
        assert (emitted.tolist(), accepted.tolist()) == (logits.argmax(-1).tolist(), [2])


def test_both_modes_write_the_same_text_without_drafts(undrafted: list[list[int]]) -> None:
    assert write(REQUESTS, PROMPTS, 0, "standard")[0] == undrafted


def test_a_seed_is_a_text() -> None:
    params = [SamplingParams(seed=seed) for seed in (3, 3, 4)]
    texts, _ = write(params, [(1, 2)] * 3, 2, "standard")
    assert texts[0] == texts[1] != texts[2]


def test_drafts_share_the_targets_noise_in_coupled_mode_only() -> None:
    n = 500
    logits = torch.zeros(n, V)
    slots, positions = torch.zeros(n).long(), torch.arange(n)
    agreeing = {}
    for acceptance in ("standard", "coupled"):
        sampler = Sampler(V, 1, 1, acceptance, "cpu")
        sampler.assign(0, SamplingParams(seed=3), ())
        drafts = sampler.draft(logits, slots, positions, ())
        assert (sampler.proposals is None) == (acceptance == "coupled")
        agreeing[acceptance] = int((drafts == sampler.sample(logits, slots, positions)).sum())
    assert agreeing["coupled"] == n
    # independent draws of 40 equal tokens agree in 1 of 40: 12.5 of 500, and above 50 less than once in 10**14
    assert agreeing["standard"] <= 50


@pytest.mark.parametrize("acceptance", ["standard", "coupled"])
def test_a_step_asks_the_device_for_no_value(acceptance: str) -> None:
    """Fake tensors hold no data, so a branch or a shape that depends on a value raises here, as in a graph."""
    sampler = Sampler(V, len(REQUESTS), 2, acceptance, "cpu")
    for slot, params in enumerate(REQUESTS):
        sampler.assign(slot, params, PROMPTS[slot])
    sampler.prepare(sampler.stages)
    b = len(REQUESTS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        slots, positions = torch.arange(b), torch.arange(b)
        drafts = torch.empty(b, 0, dtype=torch.int64)
        for j in range(2):
            tokens = sampler.draft(torch.zeros(b, V), slots, positions + j, drafts.unbind(1))
            drafts = torch.cat([drafts, tokens[:, None]], dim=1)
        emitted, accepted = sampler.accept(torch.zeros(b, 3, V), drafts, slots, positions)
        sampler.commit(slots, emitted)
        assert (emitted.shape, accepted.shape) == ((b, 3), (b,))
        with pytest.raises(DataDependentOutputException):
            accepted[0].item()


@pytest.mark.parametrize("forced", [0, 1, 3])
@pytest.mark.parametrize("acceptance", ["standard", "coupled"])
def test_forced_acceptance_takes_that_many_drafts(forced: int, acceptance: str) -> None:
    _, accepted = write(REQUESTS, PROMPTS, 3, acceptance, forced_accept=forced)
    assert set(accepted) == {forced}


# The distribution of one window. One slot, 200,000 windows at positions of their own: as independent as seeds.
SETTINGS = SamplingParams(
    temperature=0.7, top_k=3, frequency_penalty=0.6, presence_penalty=0.3, repetition_penalty=1.2, seed=11
)
TARGET_LOGITS = [[1.0, 1.2, 0.3, 0.9], [0.2, 1.1, 1.0, 0.8]]
DRAFTER_LOGITS = [0.1, 0.2, 1.5, 1.0]
PROMPT, OUTPUT = (0,), (1, 3, 3)


@pytest.mark.parametrize("drafter", ["sampled", "argmax"])
def test_windows_follow_the_target_with_filters_and_penalties(drafter: str) -> None:
    n = 200_000
    sampler = Sampler(4, 1, 1, "standard", "cpu")
    sampler.assign(0, SETTINGS, PROMPT)
    slot = torch.zeros(1, dtype=torch.int64)
    sampler.commit(slot, torch.tensor([OUTPUT]))
    slots, positions = slot.expand(n), torch.arange(n) * 2 + 4
    drafts = sampler.draft(torch.tensor(DRAFTER_LOGITS).expand(n, 4), slots, positions, ())
    if drafter == "argmax":
        drafts = kept(sampler).logits[0, 0].argmax().expand(n)
        kept(sampler).logits[0, 0].fill_(-math.inf)[drafts[0]] = 0.0
        kept(sampler).scale.zero_()
    logits = torch.tensor(TARGET_LOGITS).expand(n, 2, 4)
    emitted, accepted = sampler.accept(logits, drafts[:, None], slots, positions)

    def probabilities(row: int, output: tuple[int, ...]) -> list[float]:
        s = SETTINGS
        return plain_softmax(
            plain_row(
                TARGET_LOGITS[row],
                s.temperature,
                s.top_k,
                repetition=s.repetition_penalty,
                frequency=s.frequency_penalty,
                presence=s.presence_penalty,
                prompt=PROMPT,
                output=output,
            )
        )

    check_distribution(emitted[:, 0], probabilities(0, OUTPUT))
    for first in range(4):
        went_on = (accepted == 1) & (emitted[:, 0] == first)
        if went_on.any():
            # the second row counts the draft before it as if it had been emitted
            check_distribution(emitted[went_on, 1], probabilities(1, (*OUTPUT, first)))


def check_distribution(tokens: Tensor, probabilities: list[float]) -> None:
    """Chi-square; false alarm once in 10**9."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    pairs = [(count, p * len(tokens)) for count, p in zip(counts, probabilities, strict=True)]
    assert sum(count for count, expected in pairs if expected == 0) == 0
    possible = [(count, expected) for count, expected in pairs if expected > 0]
    statistic = sum((count - expected) ** 2 / expected for count, expected in possible)
    assert statistic < chi2.isf(1e-9, len(possible) - 1)


def test_drafts_and_target_rows_count_the_drafts_before_them() -> None:
    """Greedy on equal logits with a presence penalty: each token pushes the next one along."""
    sampler = Sampler(5, 1, 3, "standard", "cpu")
    sampler.assign(0, SamplingParams(temperature=0.0, presence_penalty=1.0, seed=0), ())
    slot, position = torch.tensor([0]), torch.tensor([0])
    first = sampler.sample(torch.zeros(1, 5), slot, position)
    sampler.commit(slot, first)
    drafts = torch.empty(1, 0, dtype=torch.int64)
    for j in range(3):
        token = sampler.draft(torch.zeros(1, 5), slot, position + 1 + j, drafts.unbind(1))
        assert sampler.proposals is None
        drafts = torch.cat([drafts, token[:, None]], dim=1)
    assert (first.tolist(), drafts.tolist()) == ([0], [[1, 2, 3]])
    emitted, accepted = sampler.accept(torch.zeros(1, 4, 5), drafts, slot, position + 1)
    assert (emitted.tolist(), accepted.tolist()) == ([[1, 2, 3, 4]], [3])


def test_commit_counts_what_was_emitted_and_skips_padding() -> None:
    sampler = Sampler(5, 3, 3, "standard", "cpu")
    for slot in range(3):
        sampler.assign(slot, SamplingParams(temperature=0.0, frequency_penalty=1.0, seed=0), ())
    sampler.commit(torch.tensor([2, 0]), torch.tensor([[1, 1, 4, -1], [0, -1, -1, -1]]))
    drawn = sampler.sample(torch.tensor([[0.5, 0.0, 0.0, -9.0, 0.0]] * 3), torch.arange(3), torch.arange(3))
    # slot 0 lost its best token once, slot 1 nothing; slot 2 kept 0 and lost 1 and 4
    assert drawn.tolist() == [1, 0, 0]
    drawn = sampler.sample(torch.tensor([[-9.0, 2.0, 0.5, 0.25, 1.0]] * 3), torch.arange(3), torch.arange(3))
    # slot 2 counted 1 twice: 2 - 2 is below 0.5, and 4 once: 1 - 1 is too
    assert drawn.tolist() == [1, 1, 2]


def test_a_resumed_request_goes_on_as_if_it_had_stayed() -> None:
    params = replace(REQUESTS[4], repetition_penalty=1.5)
    stayed, resumed = Sampler(V, 1, 0, "standard", "cpu"), Sampler(V, 2, 0, "standard", "cpu")
    stayed.assign(0, params, (7, 8))
    stayed.commit(torch.tensor([0]), torch.tensor([[3, 3, 5, -1]]))
    resumed.assign(1, params, (7, 8), output_ids=(3, 3, 5))
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).expand(50, V)
    positions = torch.arange(50)
    assert torch.equal(
        stayed.sample(logits, torch.zeros(50).long(), positions),
        resumed.sample(logits, torch.ones(50).long(), positions),
    )


@pytest.mark.parametrize("before", REQUESTS)
@pytest.mark.parametrize(
    "after", [SamplingParams(seed=8), SamplingParams(temperature=0.9, repetition_penalty=1.9, seed=8)]
)
def test_a_slot_keeps_nothing_of_its_last_request(before: SamplingParams, after: SamplingParams) -> None:
    used, fresh = Sampler(V, 2, 0, "standard", "cpu"), Sampler(V, 2, 0, "standard", "cpu")
    # a neighbour keeps every stage on
    for sampler in (used, fresh):
        sampler.assign(1, REQUESTS[4], (1,))
    used.assign(0, before, (2, 3))
    used.commit(torch.tensor([0]), torch.tensor([[4, 5, 6]]))
    used.release(0)
    for sampler in (used, fresh):
        sampler.assign(0, after, (9,))
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).expand(200, V)
    slots, positions = torch.zeros(200).long(), torch.arange(200)
    assert torch.equal(used.sample(logits, slots, positions), fresh.sample(logits, slots, positions))


def test_a_bad_row_ends_its_own_window_only() -> None:
    """C-H-01 through the sampler: drafts and verdicts of the neighbours are the same bits as without it."""
    logits = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(0))
    results = []
    for bad in (False, True):
        sampler = Sampler(V, 2, 2, "standard", "cpu")
        for slot in range(2):
            sampler.assign(slot, REQUESTS[2], PROMPTS[slot])
        slots, positions = torch.arange(2), torch.tensor([7, 9])
        drafter = logits[:, 0].clone()
        if bad:
            drafter[0, 3] = math.nan
            logits[0, 0, 3] = math.nan
        drafts = sampler.draft(drafter, slots, positions, ())
        for table in (kept(sampler).logits, kept(sampler).scale):
            table[:, 1] = table[:, 0]
        emitted, accepted = sampler.accept(logits, torch.stack([drafts, drafts], dim=1), slots, positions)
        sampler.commit(slots, emitted)
        results.append((drafts, emitted, accepted))
    (good_drafts, good_emitted, good_accepted), (drafts, emitted, accepted) = results
    assert drafts.tolist() == [-1, good_drafts[1].item()]
    assert (emitted[0].tolist(), accepted[0].item()) == ([-1, -1, -1], 0)
    assert torch.equal(emitted[1], good_emitted[1])
    assert accepted[1] == good_accepted[1]


def test_rows_that_pad_a_batch_change_nothing() -> None:
    sampler = Sampler(V, 2, 0, "coupled", "cpu")
    sampler.assign(0, REQUESTS[4], PROMPTS[4])
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    alone = sampler.sample(logits, torch.tensor([0]), torch.tensor([3]))
    slots = torch.tensor([0, sampler.padding_slot, sampler.padding_slot])
    padded = sampler.sample(torch.cat([logits, torch.full((2, V), math.nan)]), slots, torch.tensor([3, 0, 0]))
    assert padded.tolist() == [alone.item(), -1, -1]
    sampler.commit(slots, padded)
    assert sampler.sample(logits, torch.tensor([0]), torch.tensor([3])).shape == (1,)


def test_stages_name_what_assigned_slots_need() -> None:
    sampler = Sampler(V, 5, 0, "standard", "cpu")
    assert sampler.stages == frozenset()
    for slot, (params, stages) in enumerate(
        [
            (SamplingParams(temperature=0.0, top_k=5, seed=0), set()),  # a greedy row is not filtered
            (SamplingParams(temperature=1e-6, seed=0), set()),  # and this is greedy, as in vLLM
            (SamplingParams(top_k=V, seed=0), {"noise"}),
            (SamplingParams(temperature=0.0, forbidden_ids=(1,), seed=0), {"noise", "bias"}),
            (SamplingParams(min_p=0.1, presence_penalty=1.0, seed=0), {"noise", "bias", "penalties", "filters"}),
        ]
    ):
        sampler.assign(slot, params, ())
        assert sampler.stages == stages
    sampler.release(4)
    assert sampler.stages == {"noise", "bias"}


def test_mistakes_are_refused_with_both_values() -> None:
    params = SamplingParams(seed=0)
    sampler = Sampler(V, 2, 2, "standard", "cpu")
    with pytest.raises(ValueError, match="0 to 1; got 2"):
        sampler.assign(2, params, ())
    with pytest.raises(ValueError, match="slot 1 got None"):
        sampler.assign(1, SamplingParams(), ())
    sampler.assign(1, params, ())
    with pytest.raises(ValueError, match="slot 1 is taken"):
        sampler.assign(1, params, ())
    with pytest.raises(ValueError, match=r"slot 0 is not assigned; assigned are \[1\]"):
        sampler.release(0)
    slot = torch.tensor([1])
    with pytest.raises(ValueError, match=r"got \(1, 2, 40\) and \(1, 2\)"):
        sampler.accept(torch.zeros(1, 2, V), torch.zeros(1, 2).long(), slot, slot)
    with pytest.raises(ValueError, match="got 'block'"):
        Sampler(V, 2, 2, "block", "cpu")
    with pytest.raises(ValueError, match="spec_tokens = 2; got 3"):
        Sampler(V, 2, 2, "standard", "cpu", forced_accept=3)
