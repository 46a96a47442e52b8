"""The long run's comparison with float64: it holds here, and it sees a state that is not what the rows make of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from benchmarks.soak import (
    SHIPPED,
    Operands,
    Recording,
    compare,
    drawn,
    long_checkpoint,
    look,
    operands_of,
    probe,
    record,
    soak,
    watched,
)
from stepfloor.model.load import load_model


@cache
def short() -> tuple[Recording, Operands]:
    found, _, facts = record(long_checkpoint(40), 40, 2, "cpu", 5, 2, lambda _: None)
    assert facts["tokens"] == 40
    assert found.looks >= 3
    assert int(found.bad) == 0
    return found, operands_of(found)


def changed(change: Callable[[Tensor], Tensor]) -> Recording:
    found, _ = short()
    return replace(found, states=[(steps, change(state.clone())) for steps, state in found.states])


def test_the_state_is_that_of_float64() -> None:
    found, operands = short()
    results = compare(found, operands, lambda _: None)
    assert len(results) == len(found.states)
    # far below: worst cases of every sum do not come together
    assert all(0 < r.ratio < 0.2 for r in results)


def test_operands_are_the_kernels() -> None:
    probed, other = probe(*short())
    assert probed > 0
    assert other == 0


def bf16_state(state: Tensor) -> Tensor:
    return state.to(torch.bfloat16).float()


def one_value(state: Tensor) -> Tensor:
    state[3, 1, 7, 9] += 1e-3 * state[3, 1, :, 9].norm()
    return state


@pytest.mark.parametrize("change", [bf16_state, one_value])
def test_a_wrong_state_shows(change: Callable[[Tensor], Tensor]) -> None:
    _, operands = short()
    assert all(r.ratio > 1 for r in compare(changed(change), operands, lambda _: None))


def test_a_row_too_few_shows() -> None:
    found, operands = short()
    late = replace(found, states=[(steps - 1, state) for steps, state in found.states])
    assert all(r.ratio > 1 for r in compare(late, operands, lambda _: None))


def test_what_is_not_finite_is_counted() -> None:
    found, _ = short()
    _, engine, _ = record(long_checkpoint(8), 8, 0, "cpu", 100, 1, lambda _: None)
    engine.step.cache.state[2][0, 0, 0, 0] = float("nan")
    engine.step.cache.ngram_rows[0, 0, 0] = float("inf")
    looked = replace(found, bad=torch.zeros((), dtype=torch.int64))
    look(looked, engine)
    assert int(looked.bad) == 2


def test_logits_that_are_not_finite_are_counted() -> None:
    checkpoint = long_checkpoint(8)
    model = load_model(checkpoint, 80, "cpu")
    bad = torch.zeros((), dtype=torch.int64)
    hidden = torch.ones(2, model.config.hidden_size, dtype=torch.bfloat16)
    counting = watched(model, bad)
    assert torch.equal(counting.logits(hidden), model.logits(hidden))
    assert int(bad) == 0
    hidden[1, 0] = float("nan")
    counting.logits(hidden)
    assert int(bad) == model.config.vocab_size


def test_a_random_model_is_held_to_the_same() -> None:
    checkpoint, model = drawn(SHIPPED / "config.json", 4, 12, 2, "cpu")
    for k in (2, 0):
        assert soak(checkpoint, 12, k, "cpu", every=4, snapshots=1, model=model).passed


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 3])
def test_two_thousand_tokens(k: int) -> None:
    result = soak(long_checkpoint(2000), 2000, k, "cpu")
    print("\n".join(result.lines()))
    assert result.passed
    assert result.other == 0
