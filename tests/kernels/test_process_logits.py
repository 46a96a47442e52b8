"""Each stage against numbers worked out by hand, all stages against plain Python, rows against themselves."""

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from stepfloor.kernels.process_logits import Filters, Penalties, process_logits, process_logits_inputs
from tests.kernels.plain_logits import plain_row

NEVER = -math.inf
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def one_row(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    bias: dict[int, float] | None = None,
    forbidden: tuple[int, ...] = (),
    earlier: tuple[int, ...] = (),
) -> list[float]:
    """One row through the operator, every stage switched on."""
    v = len(logits)
    counts, in_prompt, added = torch.zeros(1, v, dtype=torch.int32), torch.zeros(1, v).bool(), torch.zeros(1, v)
    for token in output:
        counts[0, token] += 1
    in_prompt[0, list(prompt)] = True
    for token, value in (bias or {}).items():
        added[0, token] = value
    added[0, list(forbidden)] = NEVER
    processed = process_logits(
        torch.tensor([logits]),
        torch.tensor([0]),
        torch.tensor([temperature]),
        bias=added,
        penalties=Penalties(
            torch.tensor([repetition]), torch.tensor([frequency]), torch.tensor([presence]), counts, in_prompt
        ),
        filters=Filters(torch.tensor([min_p]), torch.tensor([top_k or v]), torch.tensor([top_p])),
        earlier=torch.tensor([earlier], dtype=torch.int64).view(1, -1),
    )
    return processed[0].tolist()


def kept(row: list[float]) -> list[int]:
    return [token for token, x in enumerate(row) if x > NEVER]


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    row = one_row([2.0, -2.0, 1.0, -1.0], repetition=2.0, prompt=(0,), output=(1,))
    assert row == [1.0, -4.0, 1.0, -1.0]


def test_frequency_and_presence_look_at_the_output_only() -> None:
    row = one_row([1.0, 1.0, 1.0, 1.0], frequency=0.5, presence=0.25, prompt=(0, 0), output=(1, 1, 1, 2))
    assert row == [1.0, 1.0 - 1.5 - 0.25, 1.0 - 0.5 - 0.25, 1.0]


def test_bias_comes_before_penalties() -> None:
    # the other order gives -1 * 2 + 2 = 0
    assert one_row([-1.0, 0.0], repetition=2.0, output=(0,), bias={0: 2.0}) == [0.5, 0.0]


def test_repetition_comes_before_frequency() -> None:
    # the other order gives (2 - 1) / 2 = 0.5
    assert one_row([2.0, 0.0], repetition=2.0, frequency=1.0, output=(0,)) == [0.0, 0.0]


def test_a_negative_penalty_does_not_revive_a_forbidden_token() -> None:
    row = one_row([1.0, 1.0], frequency=-2.0, presence=-2.0, repetition=0.5, output=(0,), forbidden=(0,))
    assert row == [NEVER, 1.0]


def test_earlier_drafts_count_as_output_and_padding_does_not() -> None:
    row = one_row([4.0, 4.0, 4.0], frequency=1.0, repetition=2.0, output=(1,), earlier=(1, 2, -1, -1))
    assert row == [4.0, 0.0, 1.0]


def test_temperature_scales_after_penalties() -> None:
    assert one_row([4.0, 2.0], temperature=0.5, presence=1.0, output=(0,)) == [6.0, 4.0]


def test_min_p_is_relative_to_the_best_token_after_temperature() -> None:
    # floor 0.6 * 0.5 = 0.3
    assert kept(one_row(logs(0.5, 0.31, 0.19), min_p=0.6)) == [0, 1]
    # squared and renormalised the second has 0.38 of the best
    assert kept(one_row(logs(0.5, 0.31, 0.19), min_p=0.6, temperature=0.5)) == [0]
    assert kept(one_row([1.0, 2.0, 2.0], min_p=1.0)) == [1, 2]


def test_top_k_keeps_ties_with_the_kth() -> None:
    assert kept(one_row([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2)) == [1, 2, 3]
    assert kept(one_row([1.0, 3.0, 2.0, 2.0, 0.0], top_k=1)) == [1]


def test_top_p_drops_while_the_cumulative_probability_is_at_most_1_minus_p() -> None:
    # ascending: 0.05 <= 0.1 goes, 0.20 > 0.1 stays
    assert kept(one_row(logs(0.5, 0.3, 0.15, 0.05), top_p=0.9)) == [0, 1, 2]
    # a cumulative probability of exactly 1 - p goes too; among equals the lower ids stay
    assert kept(one_row([0.0, 0.0, 0.0, 0.0], top_p=0.75)) == [0, 1, 2]


def test_top_p_always_keeps_the_best_token() -> None:
    assert kept(one_row(logs(0.3, 0.4, 0.3), top_p=1e-6)) == [1]
    assert kept(one_row([1.0, 2.0, 2.0], top_p=1e-6)) == [1]
    # fp32 probabilities may sum to less than 1 - p
    for case in range(20):
        row = torch.randn(50, generator=torch.Generator().manual_seed(case))
        assert kept(one_row(row.tolist(), top_p=1e-12)) == [row.argmax().item()]


def test_top_k_comes_first_and_top_p_sees_the_renormalised_survivors() -> None:
    # 0.4, 0.3 renormalise to 0.57, 0.43, and 0.43 <= 0.45 goes; top-p first would keep both
    assert kept(one_row(logs(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.55)) == [0]
    assert kept(one_row(logs(0.4, 0.3, 0.2, 0.1), top_p=0.55)) == [0, 1]


def test_min_p_comes_before_top_p() -> None:
    # min-p leaves 0.44, 0.33, 0.22, and 0.22 <= 0.23 goes; without it 0.1 goes and 0.1 + 0.2 > 0.23 stays
    assert kept(one_row(logs(0.4, 0.3, 0.2, 0.1), min_p=0.3, top_p=0.77)) == [0, 1]
    assert kept(one_row(logs(0.4, 0.3, 0.2, 0.1), top_p=0.77)) == [0, 1, 2]


def test_greedy_rows_are_neither_scaled_nor_filtered() -> None:
    row = one_row([4.0, 2.0, 0.0], temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, presence=3.0, output=(0,))
    assert row == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("case", range(40))
def test_all_stages_agree_with_plain_python(case: int) -> None:
    make = torch.Generator().manual_seed(case)

    def number(low: float, high: float) -> float:
        return low + (high - low) * torch.rand(1, generator=make).item()

    v = 23
    # coarse steps, as bf16 logits have, so that ties occur
    logits = (torch.randn(v, generator=make) * 4).round().div(2).tolist()
    tokens = torch.randint(v, (12,), generator=make).tolist()
    settings = {
        "temperature": number(0.3, 2.0),
        "top_k": int(number(0, v)),
        "top_p": number(0.3, 1.0),
        "min_p": number(0.0, 0.1),
        "repetition": number(0.5, 2.0),
        "frequency": number(-1.0, 1.0),
        "presence": number(-1.0, 1.0),
        "prompt": tuple(tokens[:5]),
        "output": tuple(tokens[5:9]),
        "bias": {tokens[9]: number(-3, 3), tokens[10]: number(-3, 3)},
        "forbidden": (tokens[11],),
    }
    ours, plain = one_row(logits, **settings), plain_row(logits, **settings)
    assert kept(ours) == kept(plain)
    # at most six fp32 roundings of values up to about 30
    assert ours == pytest.approx(plain, abs=6 * 30 * 2**-24)


def rows_of(inputs: dict[str, object], rows: Tensor) -> dict[str, object]:
    """The same call for some of its rows: settings are per slot and stay whole."""
    return {name: x[rows] if name in ("logits", "slots", "earlier") else x for name, x in inputs.items()}


@pytest.mark.parametrize(
    ("n", "vocab_size", "dtype"),
    [(7, 4999, torch.float32), (7, 5000, torch.bfloat16), (3, 248_320, torch.bfloat16)],
)
def test_a_row_alone_has_the_same_bits_as_among_others(n: int, vocab_size: int, dtype: torch.dtype) -> None:
    inputs = process_logits_inputs(n, vocab_size, dtype, DEVICE)
    together = process_logits(**inputs)
    for i in range(n):
        alone = process_logits(**rows_of(inputs, torch.tensor([i])))
        assert torch.equal(alone[0], together[i]), f"row {i}"


def test_stages_that_a_slot_does_not_use_leave_its_bits_alone() -> None:
    """A neighbour's penalties, bias or filters must not change this request's text."""
    inputs = process_logits_inputs(2, 5000, torch.bfloat16, DEVICE)
    inputs["logits"][1, 7] = -1e4  # underflows to probability 0, which top-p at 1 must not drop
    plain = process_logits(inputs["logits"], inputs["slots"], inputs["temperature"])
    for name, off in {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}.items():
        getattr(inputs["penalties"], name)[1] = off
    for name, off in {"min_p": 0.0, "top_k": 5000, "top_p": 1.0}.items():
        getattr(inputs["filters"], name)[1] = off
    inputs["bias"][1] = 0.0
    assert torch.equal(process_logits(**inputs)[1], plain[1])


@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf", "nan under a forbidden token", "all forbidden"])
def test_a_row_without_a_finite_maximum_is_nan_and_its_neighbours_are_untouched(bad: str) -> None:
    inputs = process_logits_inputs(3, 101, torch.float32, DEVICE)
    inputs["temperature"][1] = 0.0 if bad == "inf" else 1.0
    good = process_logits(**inputs)
    logits, bias = inputs["logits"], inputs["bias"]
    if bad == "nan":
        logits[1, 5] = math.nan
    elif bad == "inf":
        logits[1, 5] = math.inf
    elif bad == "all -inf":
        logits[1] = NEVER
    elif bad == "nan under a forbidden token":
        logits[1, 5], bias[1, 5] = math.nan, NEVER
    else:
        bias[1] = NEVER
    processed = process_logits(**inputs)
    assert bool(processed[1].isnan().all())
    assert torch.equal(processed[[0, 2]], good[[0, 2]])


def test_the_arguments_are_not_written() -> None:
    inputs = process_logits_inputs(3, 101, torch.float32, DEVICE)
    copies = process_logits_inputs(3, 101, torch.float32, DEVICE)
    process_logits(**inputs)
    for name, value in inputs.items():
        pairs = [(value, copies[name])] if isinstance(value, Tensor) else []
        if not pairs:
            pairs = [(getattr(value, f.name), getattr(copies[name], f.name)) for f in fields(value)]
        assert all(torch.equal(ours, copy) for ours, copy in pairs), name


def test_shapes_that_disagree_are_refused() -> None:
    inputs = process_logits_inputs(3, 101, torch.float32, DEVICE)
    with pytest.raises(ValueError, match=r"\(3, 101\) and \(2,\)"):
        process_logits(**(inputs | {"slots": inputs["slots"][:2]}))
    with pytest.raises(ValueError, match=r"\(3, 100\)"):
        process_logits(**(inputs | {"bias": inputs["bias"][:, 1:]}))
    with pytest.raises(ValueError, match=r"B = 3; got \(2, 3\)"):
        process_logits(**(inputs | {"earlier": inputs["earlier"][:2]}))
