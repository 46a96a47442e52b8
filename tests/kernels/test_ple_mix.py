"""The n-gram block: gates, the dilated convolution and its history across windows and rejections."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepfloor.kernels._torch import rms_norm
from stepfloor.kernels.ple_mix import launch_mix, ple_mix, ple_mix_inputs, ple_mix_reference
from tests.kernels.compare import UNIT, assert_rounded_alike, assert_same, assert_within, copied, groups
from tests.kernels.edges import DEVICE, REAL, empty_is_nan, fence_of, fenced
from tests.kernels.source import Recording

DTYPES = [torch.float32, torch.bfloat16]
PER_ROW = ("residual", "y", "y_weights")


def source_inputs(recording: Recording, rows: int) -> dict[str, Any]:
    """The recorded layer 1 as one window, or as the constants and the empty history of smaller ones."""
    prefix, count = "layers.1.ple", len(recording.tokens)
    projected = torch.cat([recording.out(f"{prefix}.{p}_proj") for p in ("key", "value")], -1)
    width = recording.config.hc_count * recording.config.hidden_size
    dilation = recording.config.ngram_size
    return {
        "residual": recording.into("layers.1"),
        "y": None,
        "y_weights": None,
        "key_value": projected[None],
        "conv_rows": torch.zeros(1, 3 * dilation + min(rows, count), width, dtype=recording.dtype),
        "slots": torch.tensor([0]),
        "rejected": torch.tensor([0]),
        "norm_key": recording.norm(f"{prefix}.norm_key"),
        "norm_query": recording.norm(f"{prefix}.norm_query"),
        "norm_conv": recording.norm(f"{prefix}.norm_conv"),
        "conv_weight": recording.module(f"{prefix}.conv1d").weight.detach().squeeze(1).float(),
        "dilation": dilation,
        "streams": recording.config.hc_count,
        "eps": recording.config.rms_norm_eps,
    }


def test_residual_is_the_sources(recording: Recording) -> None:
    inputs = source_inputs(recording, 4)
    ours, wanted = ple_mix(**inputs), recording.into("layers.1.attn_hyper_connection")
    prefix = "layers.1.ple"
    bound = residual_bound(
        *(recording.out(f"{prefix}.norm_{name}") for name in ("key", "query")),
        recording.out(f"{prefix}.value_proj"),
        recording.out(f"{prefix}.norm_conv"),
        inputs["conv_weight"],
        wanted,
        2 * UNIT[recording.dtype],
    )
    assert_within(ours, wanted, bound)
    assert_rounded_alike(ours, wanted)
    if recording.dtype == torch.float32:
        # the derivation holds the test honest: most values are bound to a few millionths
        assert bound.median() < 1e-4


def residual_bound(
    key: Tensor, query: Tensor, value: Tensor, normed: Tensor, conv_weight: Tensor, wanted: Tensor, step: float
) -> Tensor:
    """How far two implementations may be apart that round in the same places, each place up to a step aside."""
    width = value.shape[-1]
    key, query = (t.double().unflatten(-1, (-1, width)) for t in (key, query))
    # The score: a dot product of D float32 terms whose norms are D squares, and five places where a step may fall
    # aside (key, query, product, sum, quotient).
    score = (key * query).sum(-1, keepdim=True) / width**0.5
    moved = (4 * width * 2.0**-24 + 5 * step) * (key * query).abs().sum(-1, keepdim=True) / width**0.5
    # The gate: the root's slope at the smallest score it may be, then sigmoid's quarter; root and sigmoid are rounded.
    # Where the sign itself is in doubt the root may change by twice what it can reach.
    root = torch.where(
        score.abs() > moved,
        moved / (2 * (score.abs() - moved).clamp_min(1e-6).sqrt()),
        2 * (score.abs() + moved).clamp_min(1e-6).sqrt(),
    )
    gate = 0.25 * (root + step * score.abs().sqrt()) + step
    size = value.double().abs()[:, None]
    added = gate * size + 2 * step * size
    # The norm takes out what a stream's gate does to all its values (but for eps): three steps of single values and a
    # mean of D squares. Then four taps, silu with a slope of 1.1, and steps of sum, silu, addend and residual.
    largest = normed.double().abs().amax()
    taps = conv_weight.double().abs().sum(-1)
    convolved = 1.1 * taps * largest * (3 * step + (width + 8) * 2.0**-24) + 3 * step * largest * taps
    return added.flatten(1) + convolved + 2 * step * wanted.double().abs()


def test_history_is_the_convolutions_own_input(recording: Recording) -> None:
    """What is carried is normed rows, newest last; raw values or the sum with the residual would be another model."""
    inputs = source_inputs(recording, 4)
    ple_mix(**inputs)
    wanted = recording.out("layers.1.ple.norm_conv")
    kept = inputs["conv_rows"][0]
    # as above: three steps of single values and the mean of D squares, and the gate's error times eps over the square
    bound = (
        3 * 2 * UNIT[recording.dtype] + (recording.config.hidden_size + 8) * 2.0**-24
    ) * wanted.double().abs().amax()
    assert_within(kept, wanted[-len(kept) :], bound + 1e-6)
    assert_rounded_alike(kept, wanted[-len(kept) :])


def test_gate_by_hand() -> None:
    """One stream-pair of width 1 after norms of sign only: d = +-1 / sqrt(1); the gate is sigmoid(sign sqrt|d|).

    Zero residual gives d = 0, whose sign is 0: the gate is a half, although |d| is clamped to 1e-6.
    """
    inputs = ple_mix_inputs(1, 1, 1, torch.float32, "cpu")
    inputs |= {
        "residual": torch.tensor([[3.0, -2.0, 0.0, 5.0]]),
        "y": None,
        "y_weights": None,
        "key_value": torch.tensor([[[4.0, 4.0, 4.0, -4.0, 0.5]]]),
        "conv_weight": torch.zeros(4, 4),
        "eps": 0.0,
        **{name: torch.ones(4) for name in ("norm_key", "norm_query", "norm_conv")},
    }
    inputs["eps"] = 1e-30
    gates = [1 / (1 + math.exp(-d)) for d in (1.0, -1.0, 0.0, -1.0)]
    wanted = inputs["residual"] + 0.5 * torch.tensor([gates])
    # a handful of roundings of values up to 6
    assert_within(ple_mix(**inputs), wanted, 6 * 8 * 2.0**-24)


def test_taps_lie_three_tokens_apart() -> None:
    """An impulse at token 0 shows at tokens 0, 3, 6 and 9 with the last, third, second and first tap: dilation 3."""
    rows = 12
    inputs = ple_mix_inputs(1, rows, 1, torch.float32, "cpu")
    key_value = torch.zeros(1, rows, 5)
    key_value[0, 0] = 1.0
    inputs |= {
        "residual": torch.ones(rows, 4),
        "y": None,
        "y_weights": None,
        "key_value": key_value,
        "conv_rows": torch.zeros(2, 9 + rows, 4),
        "rejected": torch.tensor([0]),
        "conv_weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(4, 1),
        "norm_conv": torch.ones(4),
    }
    added = (ple_mix(**inputs) - 1.0)[:, 0]
    silu = [x / (1 + math.exp(-x)) for x in (4.0, 3.0, 2.0, 1.0)]
    assert [t for t in range(1, rows) if added[t] != 0] == [3, 6, 9]
    # eps moves the impulse's norm off one by 1e-6 over the gated value's square, above 0.05; slopes are 1.1 times 4
    assert_within(added[3::3], torch.tensor(silu[1:]), 1e-4)


def test_waiting_write_comes_first() -> None:
    for dtype in DTYPES:
        inputs = ple_mix_inputs(2, 3, 13, dtype, "cpu")
        written = inputs["residual"] + (inputs["y"][:, None] * inputs["y_weights"][..., None]).flatten(1)
        done = copied(inputs) | {"residual": written, "y": None, "y_weights": None}
        assert_same(ple_mix(**inputs), ple_mix(**done))
        assert_same(inputs["conv_rows"], done["conv_rows"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 13), min_size=1, max_size=5))
def test_any_chunking_gives_the_same_bits(dtype: torch.dtype, sizes: list[int]) -> None:
    """Chunks shorter and longer than the history of nine rows; the cache holds a window of three beside it."""
    inputs = ple_mix_inputs(1, 29, 7, dtype, "cpu")
    inputs["conv_rows"], inputs["rejected"] = inputs["conv_rows"][:, : 9 + 3], torch.tensor([0])
    whole, parts = copied(inputs), copied(inputs)
    together = ple_mix(**whole)
    outputs = []
    for rows in groups(29, sizes):
        part = {name: inputs[name][rows] for name in PER_ROW} | {"key_value": inputs["key_value"][:, rows]}
        outputs.append(ple_mix(**{**parts, **part}))
    assert_same(torch.cat(outputs), together)
    assert_same(parts["conv_rows"][1, -9:], whole["conv_rows"][1, -9:])


def rows_like(inputs: dict[str, Any], count: int, seed: int) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    width, dtype = inputs["residual"].shape[1], inputs["residual"].dtype
    sizes = {"residual": width, "y": width // 4, "y_weights": 4, "key_value": width + width // 4}
    return {name: torch.randn(count, size, generator=make).to(dtype) for name, size in sizes.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rejected_rows_leave_no_trace(dtype: torch.dtype, seed: int) -> None:
    """Windows of up to four rows, any number of them rejected, after a prompt: kept rows have plain running's bits."""
    draw, length = random.Random(seed), 40
    inputs = ple_mix_inputs(1, 1, 7, dtype, "cpu")
    inputs |= {"slots": torch.tensor([1]), "conv_rows": torch.zeros(2, 9 + 4, 28, dtype=dtype)}
    text = rows_like(inputs, length, seed)

    def run(cache: Tensor, rows: dict[str, Tensor], rejected: int) -> Tensor:
        part = {**rows, "key_value": rows["key_value"][None]}
        return ple_mix(**{**inputs, **part, "conv_rows": cache, "rejected": torch.tensor([rejected])})

    wanted = run(inputs["conv_rows"].clone(), text, 0)
    cache, at = inputs["conv_rows"].clone(), draw.randint(1, 12)
    run(cache, {name: rows[:at] for name, rows in text.items()}, 0)
    rejected = 0
    while at < length:
        good = draw.randint(0, min(4, length - at))
        junk = rows_like(inputs, draw.randint(max(good, 1), 4) - good, 100 + at)
        window = {name: torch.cat((rows[at : at + good], junk[name])) for name, rows in text.items()}
        assert_same(run(cache, window, rejected)[:good], wanted[at : at + good])
        rejected, at = len(window["y"]) - good, at + good
    assert_same(cache[0], torch.zeros_like(cache[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_together_equal_each_alone(dtype: torch.dtype) -> None:
    inputs = ple_mix_inputs(4, 3, 13, dtype, "cpu")
    inputs |= {"slots": torch.tensor([3, 1, 4, 2]), "rejected": torch.tensor([2, 0, 3, 1])}
    together = copied(inputs)
    output = ple_mix(**together).unflatten(0, (4, 3))
    for b in range(4):
        alone = copied(inputs)
        for name in PER_ROW:
            alone[name] = inputs[name][3 * b : 3 * b + 3]
        for name in ("key_value", "slots", "rejected"):
            alone[name] = inputs[name][b : b + 1]
        assert_same(ple_mix(**alone), output[b])
        slot = int(inputs["slots"][b])
        others = [s for s in range(5) if s != slot]
        assert_same(alone["conv_rows"][slot], together["conv_rows"][slot])
        assert_same(alone["conv_rows"][others], inputs["conv_rows"][others])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": torch.zeros(5, 32)}, r"residual \(5, 32\), key_value \(2, 3, 40\)"),
        ({"key_value": torch.zeros(2, 3, 32)}, r"key_value \(2, 3, 32\)"),
        ({"y": torch.zeros(1, 8)}, r"y \(1, 8\), weights \(6, 4\)"),  # would broadcast over all rows
        ({"y": None}, r"y None, weights \(6, 4\)"),
        ({"conv_rows": torch.zeros(3, 8, 32)}, "at least 9 convolution rows.*8 rows"),
    ],
)
def test_disagreeing_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ple_mix(**{**ple_mix_inputs(2, 3, 8, torch.float32, "cpu"), **change})


# exponentials, roots and quotients of a GPU are some units of the last place aside; in bf16 they are rounded away
KERNEL_STEP = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(
    ("b", "r", "d"),
    [
        (2, 3, 13),
        (1, 19, 40),
        (3, 1, 50),
        *(pytest.param(b, r, 2560, marks=REAL) for b, r in ((1, 1), (1, 4), (16, 5), (8, 8), (1, 17), (1, 1000))),
    ],
)
def test_kernels_are_the_reference(b: int, r: int, d: int, write: bool, dtype: torch.dtype) -> None:
    inputs = ple_mix_inputs(b, r, d, dtype, DEVICE)
    inputs["slots"] = inputs["slots"].flip(0)
    if not write:
        inputs |= {"y": None, "y_weights": None}
    theirs, ours = copied(inputs), {name: fenced(value) for name, value in inputs.items()}
    wanted = ple_mix_reference(**theirs)
    with empty_is_nan():
        output = launch_mix(**ours)
    key, value = inputs["key_value"].flatten(0, 1).split((4 * d, d), -1)
    written = inputs["residual"]
    if write:
        written = written + (inputs["y"].unsqueeze(-2) * inputs["y_weights"].unsqueeze(-1)).flatten(-2)
    query = rms_norm(written, inputs["norm_query"], inputs["eps"], 4)
    step = KERNEL_STEP[dtype]
    # what is new in the history are the convolution's inputs
    newest = theirs["conv_rows"][inputs["slots"], -r:].flatten(0, 1)
    bound = residual_bound(
        rms_norm(key, inputs["norm_key"], inputs["eps"], 4), query, value, newest, inputs["conv_weight"], wanted, step
    )
    assert_within(output, wanted, bound)
    assert_rounded_alike(output, wanted)
    # a step of a gated value, and of its norm; old rows are moved, not computed
    assert_within(ours["conv_rows"], theirs["conv_rows"], 3 * step * newest.double().abs().amax())
    assert_rounded_alike(ours["conv_rows"], theirs["conv_rows"])
    assert_same(ours["conv_rows"][:, :-r], theirs["conv_rows"][:, :-r])
    assert bool(fence_of(ours["conv_rows"]).isnan().all())


@pytest.mark.parametrize(("d", "length"), [(5, 18), pytest.param(2560, 100, marks=REAL)])
def test_kernel_bits_do_not_depend_on_chunks(d: int, length: int) -> None:
    """Up to 16 rows one kernel convolves and rewrites the history, beyond that another one rewrites it."""
    inputs = ple_mix_inputs(1, length, d, torch.bfloat16, DEVICE)
    inputs |= {"conv_rows": inputs["conv_rows"][:, :12].contiguous(), "rejected": torch.zeros_like(inputs["slots"])}
    whole = copied(inputs)
    together = launch_mix(**whole)
    for sizes in ((1,), (3, 5, 10), (17, 1)):
        parts, outputs = copied(inputs), []
        for rows in groups(length, sizes):
            part = {name: inputs[name][rows] for name in PER_ROW} | {"key_value": inputs["key_value"][:, rows]}
            outputs.append(launch_mix(**{**parts, **part}))
        assert_same(torch.cat(outputs), together)
        assert_same(parts["conv_rows"][1, -9:], whole["conv_rows"][1, -9:])


@pytest.mark.parametrize("d", [7, pytest.param(2560, marks=REAL)])
def test_kernel_sequences_together_equal_each_alone(d: int) -> None:
    """Every count of rejected rows, and rows of a window alone: fewer rows than the cache was made for."""
    inputs = ple_mix_inputs(4, 3, d, torch.bfloat16, DEVICE)
    inputs["slots"] = torch.tensor([3, 1, 4, 2], device=DEVICE)
    inputs["rejected"] = torch.tensor([2, 0, 3, 1], device=DEVICE)
    together = copied(inputs)
    output = launch_mix(**together).unflatten(0, (4, 3))
    for b in (0, 2):
        alone = copied(inputs)
        for name in PER_ROW:
            alone[name] = inputs[name][3 * b : 3 * b + 3]
        for name in ("key_value", "slots", "rejected"):
            alone[name] = inputs[name][b : b + 1]
        first = copied(alone)
        for name in PER_ROW:
            first[name] = alone[name][:1]
        first["key_value"] = alone["key_value"][:, :1]
        assert_same(launch_mix(**alone), output[b])
        assert_same(launch_mix(**first), output[b, :1])
        slot = int(inputs["slots"][b])
        others = [s for s in range(5) if s != slot]
        assert_same(alone["conv_rows"][slot], together["conv_rows"][slot])
        assert_same(alone["conv_rows"][others], inputs["conv_rows"][others])
        # rows that are new: history of the one-row window ends with the first of them
        assert_same(first["conv_rows"][slot, -1], together["conv_rows"][slot, -3])


def test_kernel_stays_in_bounds_for_any_count_of_rejected_rows() -> None:
    """A padding row's count is whatever was left in its slot."""
    inputs = ple_mix_inputs(3, 2, 13, torch.bfloat16, DEVICE)
    inputs["conv_rows"] = fenced(inputs["conv_rows"])
    inputs["rejected"] = torch.tensor([2**40, -5, -(2**62)], device=DEVICE)
    assert bool(torch.isfinite(launch_mix(**inputs)).all())
    assert bool(torch.isfinite(inputs["conv_rows"]).all())
