"""The gated delta net over prompt chunks, row by row and in chunk form."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from stepfloor.kernels._delta import DeltaConstants
from stepfloor.kernels._torch import DeltaRows, delta_rule
from stepfloor.kernels.gdn_prefill import (
    CHUNK_ROWS,
    _gdn_prefill_chunked,
    chunked_delta_rule,
    gdn_prefill,
    gdn_prefill_inputs,
)
from tests.kernels.compare import UNIT, assert_rounded_alike, assert_same, assert_within, copied, groups
from tests.kernels.delta_net import DeltaNet, constants_of, projected_rows, rule_bound
from tests.kernels.source import Recording

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("layer", [0, 5])
def test_outputs_are_the_sources(recording: Recording, layer: int) -> None:
    prefix = f"layers.{layer}.linear_attn"
    net = DeltaNet(constants_of(recording.module(prefix)), 1, 1, recording.dtype)
    ours, wanted = net.prefill(0, projected_rows(recording, layer)), recording.into(f"{prefix}.out_proj")
    heads = net.state.shape[1]
    # The closing norm divides by the head's mean size, so errors count as shares of the largest value of a row's
    # head; float32: the rule's, on both sides, relative to outputs that are a tenth of the state at least.
    largest = wanted.double().abs().unflatten(-1, (heads, -1)).amax(-1, keepdim=True)
    share = 2 * 10 * rule_bound(len(recording.tokens), net.state.shape[2], 1.0)
    if recording.dtype == torch.bfloat16:
        # steps that may fall to the other side: convolution, silu, output of the rule, norm, weight, gate
        share += 6 * 2 * UNIT[torch.bfloat16]
    assert_within(ours, wanted, (share * largest).expand(-1, heads, wanted.shape[1] // heads).flatten(1))
    assert_rounded_alike(ours, wanted)


def test_state_and_history_are_the_sources(recording: Recording) -> None:
    module = recording.module("layers.0.linear_attn")
    net = DeltaNet(constants_of(module), 1, 1, recording.dtype)
    projected = projected_rows(recording, 0)
    net.prefill(0, projected)
    cache = DynamicCache(config=recording.config)
    with torch.no_grad():
        module(recording.into("layers.0.linear_attn")[None], cache=cache)
    wanted = cache.get_recurrent_state(0)[0].float()
    largest = wanted.abs().max().item()
    bound = 2 * rule_bound(len(recording.tokens), net.state.shape[2], 10 * largest)
    if recording.dtype == torch.bfloat16:
        # convolution and silu may each fall a step aside, in key and value
        bound += 4 * 2 * UNIT[torch.bfloat16] * largest
    assert_within(net.state[0], wanted, bound)
    # raw rows, before the convolution: the last three, oldest first
    channels = net.constants.channels
    assert_same(net.raw_rows[0, :3], projected[-3:, :channels])
    assert_same(net.raw_rows[0, :3], cache.get_conv_state(0)[0].T[-3:])


def test_rule_by_hand() -> None:
    """One head, K = 2, V = 1, two rows in plain Python: unit keys by the sum, 1 / sqrt(K) on the query alone.

    The second row's raw key is tiny, so the 1e-6 under its root counts.
    """
    conv = torch.zeros(5, 4)
    conv[:, 3] = 1.0  # the current row alone
    q, k, v = [[0.5, -1.0], [2.0, 1.0]], [[1.0, 2.0], [0.002, -0.001]], [[1.5], [-0.5]]
    z, b, a = [[0.3], [-0.2]], [[0.4], [1.2]], [[0.1], [-0.7]]
    a_log, dt_bias, w, eps = 0.2, 0.5, 1.3, 1e-6

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def unit(row: list[float]) -> list[float]:
        mixed = [x * sigmoid(x) for x in row]
        return [x / math.sqrt(sum(y * y for y in mixed) + 1e-6) for x in mixed]

    state, wanted = [0.0, 0.0], []
    for t in range(2):
        decay = math.exp(-math.exp(a_log) * math.log1p(math.exp(a[t][0] + dt_bias)))
        state = [m * decay for m in state]
        key, query = unit(k[t]), unit(q[t])
        value = v[t][0] * sigmoid(v[t][0])
        error = value - sum(m * x for m, x in zip(state, key, strict=True))
        state = [m + x * sigmoid(b[t][0]) * error for m, x in zip(state, key, strict=True)]
        out = sum(m * x for m, x in zip(state, query, strict=True)) / math.sqrt(2)
        wanted.append(w * out / math.sqrt(out * out + eps) * sigmoid(z[t][0]))
    ours_state = torch.zeros(1, 1, 2, 1)
    ours = gdn_prefill(
        torch.cat([torch.tensor(part) for part in (q, k, v, z, b, a)], 1),
        ours_state,
        torch.zeros(1, 3, 5),
        torch.zeros(1, dtype=torch.int64),
        DeltaConstants(
            conv, torch.tensor([a_log]), torch.tensor([dt_bias]), torch.tensor([w]), 1, 2, eps, activation="sigmoid"
        ),
    )
    # some twenty roundings of numbers below two
    assert_within(ours_state.flatten(), torch.tensor(state), 40 * 2.0**-24)
    assert_within(ours.flatten(), torch.tensor(wanted), 80 * 2.0**-24)


def test_closing_norms_weight_is_plain() -> None:
    """Zero stored weight gives zero output here; every other norm of the model would give the normed value."""
    inputs = gdn_prefill_inputs(3, 1, 2, 4, 6, torch.float32, "cpu")
    inputs["constants"] = replace(inputs["constants"], norm_weight=torch.zeros(6))
    assert_same(gdn_prefill(**inputs), torch.zeros(3, 12))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_chunking_gives_the_same_bits(dtype: torch.dtype, sizes: list[int]) -> None:
    """Chunks shorter than the convolution's history, and one-row chunks, are where history gets lost."""
    inputs = gdn_prefill_inputs(17, 2, 6, 5, 7, dtype, "cpu")
    whole, parts = copied(inputs), copied(inputs)
    together = gdn_prefill(**whole)
    outputs = [gdn_prefill(**{**parts, "projected": inputs["projected"][rows]}) for rows in groups(17, sizes)]
    assert_same(torch.cat(outputs), together)
    assert_same(parts["state"], whole["state"])
    assert_same(parts["raw_rows"], whole["raw_rows"])


def random_rows(t: int, heads: int, k: int, v: int, strongest: float, dtype: torch.dtype) -> tuple[DeltaRows, Tensor]:
    """Unit keys, queries over sqrt(K), decays down to exp(-strongest), and a state to begin with."""
    make = torch.Generator().manual_seed(t)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    log_decay = -strongest * torch.rand(t, heads, generator=make, dtype=torch.float64) ** 4
    rows = (unit(rand(t, heads, k)) / k**0.5, unit(rand(t, heads, k)), rand(t, heads, v), log_decay)
    beta = torch.rand(t, heads, generator=make, dtype=torch.float64)
    return DeltaRows(*(x.to(dtype) for x in (*rows, beta))), rand(heads, k, v).to(dtype)


def chunked(rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Time-major in and out, as delta_rule has it."""
    parts = (rows.query, rows.key, rows.value, rows.log_decay, rows.beta)
    output, after = chunked_delta_rule(*(part.transpose(0, 1) for part in parts), state)
    return output.transpose(0, 1), after


@pytest.mark.parametrize("t", [1, 7, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS - 20])
def test_chunk_form_is_the_recurrence(t: int) -> None:
    """In float64, where rounding is 2**-53, the two are one function: any wrong mask or decay shows."""
    rows, state = random_rows(t, 3, 6, 5, 2.0, torch.float64)
    output, after = chunked(rows, state)
    recurrent = state.clone()
    wanted = delta_rule(rows, recurrent, 0, rows.beta.shape[0])
    # the float32 derivation below, with float64's unit
    bound = 2.0**-29 * chunk_bound(rows, wanted, recurrent)
    assert_within(output, wanted, bound)
    assert_within(after, recurrent, bound)


def chunk_bound(rows: DeltaRows, *values: Tensor) -> float:
    """How far the chunk form in float32 lies from the exact rule.

    A chunk replaces sums over K by sums over K and its rows, so at most 2 (K + 64) + 8 roundings a row; the solve is
    the recurrence unrolled and contracts like it. Decays are exp of differences of running sums, each off by 64
    roundings of its largest, and that is their relative error.
    """
    t, key_dim = rows.key.shape[0], rows.key.shape[-1]
    largest = max(value.abs().max().item() for value in (*values, rows.value))
    sums = max(part.sum(0).abs().max().item() for part in rows.log_decay.split(CHUNK_ROWS))
    return (t * (2 * (key_dim + CHUNK_ROWS) + 8) + 2 * CHUNK_ROWS * sums) * 2.0**-24 * largest


@pytest.mark.parametrize("strongest", [0.0, 2.0, 200.0])
def test_chunk_form_in_float32_stays_within_its_bound(strongest: float) -> None:
    """A decay of exp(-200) is 0 in float32; its logarithm must not be taken back from it (it gave NaN)."""
    rows, state = random_rows(150, 3, 6, 5, strongest, torch.float32)
    output, after = chunked(rows, state)
    exact = DeltaRows(*(getattr(rows, name).double() for name in DeltaRows.__slots__))
    recurrent = state.double()
    wanted = delta_rule(exact, recurrent, 0, exact.beta.shape[0])
    bound = chunk_bound(rows, wanted, recurrent)
    assert_within(output.double(), wanted, bound)
    assert_within(after.double(), recurrent, bound)


@pytest.mark.parametrize("sizes", [(1,), (64,), (63, 2), (100, 50)])
def test_chunk_form_splits_anywhere(sizes: tuple[int, ...]) -> None:
    rows, state = random_rows(150, 3, 6, 5, 2.0, torch.float32)
    output, after = chunked(rows, state)
    parts, carried = [], state
    for part in groups(150, sizes):
        cut = DeltaRows(*(getattr(rows, name)[part] for name in DeltaRows.__slots__))
        one, carried = chunked(cut, carried)
        parts.append(one)
    bound = 2 * chunk_bound(rows, output, after)
    assert_within(torch.cat(parts), output, bound)
    assert_within(carried, after, bound)


@pytest.mark.parametrize("strength", [0.0, 6.0])
def test_chunked_operator_is_the_row_by_row_one(strength: float) -> None:
    """What devices other than the CPU run, history and state included; strong decays once gave NaN."""
    inputs = gdn_prefill_inputs(150, 2, 6, 5, 7, torch.float32, "cpu")
    inputs["constants"] = replace(inputs["constants"], a_log=torch.linspace(0, strength, 6))
    ours, wanted = copied(inputs), copied(inputs)
    output, reference = _gdn_prefill_chunked(**ours), gdn_prefill(**wanted)
    largest = max(wanted["state"].abs().max().item(), 5.0)
    # sums of log decays: 64 rows, exp(a_log) times a softplus below 6
    sums = 64 * math.exp(strength) * 6
    bound = (150 * (2 * (5 + 64) + 8) + 2 * 64 * sums) * 2.0**-24 * largest
    assert_within(ours["state"], wanted["state"], bound)
    assert_same(ours["raw_rows"], wanted["raw_rows"])
    # the closing norm divides by the head's mean size; a head that is all error is no test, so weigh by size
    assert bool(torch.isfinite(output).all())
    if strength == 0.0:
        assert_within(output, reference, 20 * bound)


def test_chunk_form_can_be_differentiated() -> None:
    rows, state = random_rows(5, 2, 3, 2, 1.0, torch.float64)
    parts = [getattr(rows, name).transpose(0, 1).contiguous().requires_grad_() for name in DeltaRows.__slots__]
    assert torch.autograd.gradcheck(lambda *t: chunked_delta_rule(*t), (*parts, state.requires_grad_()))


def test_gradients_of_strong_decays_are_finite() -> None:
    """exp of a positive difference above the diagonal overflows; masked afterwards, its gradient is NaN."""
    rows, state = random_rows(80, 2, 3, 2, 200.0, torch.float32)
    parts = [getattr(rows, name).transpose(0, 1).contiguous().requires_grad_() for name in DeltaRows.__slots__]
    output, after = chunked_delta_rule(*parts, state)
    (output.sum() + after.sum()).backward()
    for part in parts:
        assert part.grad is not None
        assert bool(torch.isfinite(part.grad).all())


@pytest.mark.parametrize("shape", [(3, 30), (1, 3, 56)])
def test_disagreeing_shapes_are_refused(shape: tuple[int, ...]) -> None:
    inputs: dict[str, Any] = gdn_prefill_inputs(3, 2, 4, 3, 5, torch.float32, "cpu")
    columns = inputs["projected"].shape[1]
    with pytest.raises(ValueError, match=rf"\[T, {columns}\], slots \[1\]; got \({', '.join(map(str, shape))}\)"):
        gdn_prefill(**{**inputs, "projected": torch.zeros(shape)})
