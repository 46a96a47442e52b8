"""The delta net's Triton kernels: beside the references, rows alone and together, replayed rows, cuts of a prompt.

Where there is no GPU the interpreter runs them, at small sizes; the model's sizes need one.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels._delta import DeltaConstants
from stepfloor.kernels._torch import DeltaRows, delta_rows, delta_rule
from stepfloor.kernels.gdn_decode import gdn_decode_inputs, gdn_decode_reference, gdn_decode_triton
from stepfloor.kernels.gdn_prefill import (
    CHUNK_ROWS,
    PLAN,
    gdn_prefill_inputs,
    gdn_prefill_reference,
    gdn_prefill_triton,
)
from tests.kernels.compare import assert_rounded_alike, assert_same, assert_within, copied
from tests.kernels.compiled import Case, assert_compiles
from tests.kernels.delta_net import rule_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = [torch.float32, torch.bfloat16]
MODEL = (16, 48, 128, 128)  # key heads, value heads, K, V
SMALL = [(1, 3, 5, 7), (1, 2, 10, 14)]
ON_GPU = [pytest.param(shape, marks=(pytest.mark.gpu, GPU)) for shape in (MODEL, (2, 4, 64, 64), (1, 2, 256, 256))]


def poisoned(inputs: dict[str, Any]) -> dict[str, Any]:
    """On the test's device, NaN in rows that nobody wrote and between projected rows."""
    inputs = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    projected = inputs["projected"]
    held = projected.new_full((*projected.shape[:-1], projected.shape[-1] + 11), torch.nan)
    inputs["projected"] = held[..., :-11].copy_(projected)
    history = inputs["constants"].history
    if "pending" in inputs:
        for slot, count in zip(inputs["slots"].tolist(), inputs["pending"].tolist(), strict=True):
            inputs["raw_rows"][slot, history + count :] = torch.nan
            inputs["gate_rows"][slot, count:] = torch.nan
    else:
        inputs["raw_rows"][:, history:] = torch.nan
    return inputs


def same_or_nan(ours: Tensor, wanted: Tensor) -> None:
    """Bit for bit; NaN equals NaN."""
    assert bool(((ours == wanted) | (ours.isnan() & wanted.isnan())).all())


def compare(output: Tensor, reference: Tensor, heads: int, share: float) -> None:
    """Within `share` of a head's largest output, by which the closing norm makes errors count, and rounded alike."""
    by_head = reference.double().unflatten(-1, (heads, -1)).abs()
    reach = by_head.amax(-1, keepdim=True).expand_as(by_head).flatten(-2)
    if output.dtype == torch.bfloat16:
        # output of the rule, norm, weight and gate may each fall a step aside; so may one key, query or value before
        share += 7 * 2.0**-7
    assert_within(output, reference, share * reach + 2.0**-30)
    assert_rounded_alike(output, reference)


def state_bound(rows: int, constants: DeltaConstants, state: Tensor) -> float:
    """Two float32 orders of the rule, and for exponentials of another library 3 operands a bf16 step aside."""
    largest = max(float(state.abs().max()), 1.0)
    moved = 3 * 2.0**-7 * largest if constants.norm_weight.dtype == torch.bfloat16 else 0.0
    return 2 * rule_bound(rows, constants.key_dim, largest) + moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SMALL, *ON_GPU], ids=str)
def test_decode_is_the_references(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Slots not in order, from none to all rows pending, rows beside NaN; other slots keep their bytes."""
    inputs: dict[str, Any] = gdn_decode_inputs(4, 3, *shape, dtype, DEVICE)
    inputs["slots"] = torch.tensor([4, 1, 3, 2])
    inputs["pending"] = torch.tensor([0, 3, 1, 2])
    if shape == SMALL[0]:
        inputs["constants"] = replace(inputs["constants"], activation="silu")
    inputs = poisoned(inputs)
    wanted, ours = copied(inputs), copied(inputs)
    reference, output = gdn_decode_reference(**wanted), gdn_decode_triton(**ours)
    same_or_nan(ours["raw_rows"], wanted["raw_rows"])
    same_or_nan(ours["gate_rows"], wanted["gate_rows"])
    assert_same(ours["state"][0], inputs["state"][0])
    assert_within(ours["state"], wanted["state"], state_bound(6, inputs["constants"], wanted["state"]))
    # outputs are a tenth of the largest at least; the rule's error counts ten times
    compare(output, reference, shape[1], 10 * rule_bound(6, shape[2], 1.0) + 2.0**-19)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SMALL[0], *ON_GPU], ids=str)
def test_a_decoded_row_is_alone(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Each sequence alone and each window's first row alone have the bits they have in company."""
    inputs: dict[str, Any] = gdn_decode_inputs(2, 3, *shape, dtype, DEVICE)
    inputs["pending"] = torch.tensor([0, 3], device=DEVICE)
    together = copied(inputs)
    output = gdn_decode_triton(**together)
    for b in range(2):
        alone = copied(inputs)
        for name in ("projected", "slots", "pending"):
            alone[name] = inputs[name][b : b + 1].clone()
        assert_same(gdn_decode_triton(**alone)[0], output[b])
        slot = int(inputs["slots"][b])
        assert_same(alone["state"][slot], together["state"][slot])
    first = copied(inputs) | {"projected": inputs["projected"][:, :1].contiguous()}
    assert_same(gdn_decode_triton(**first), output[:, :1])


@pytest.mark.parametrize("shape", [SMALL[1], *ON_GPU], ids=str)
def test_replay_equals_plain_decoding(shape: tuple[int, int, int, int]) -> None:
    """Windows of 3 with rejected tails beside one row at a time: speculation must not change a text."""
    draw, width, length = random.Random(0), 3, 12
    inputs: dict[str, Any] = gdn_decode_inputs(1, width, *shape, torch.bfloat16, DEVICE)
    inputs["pending"].zero_()
    plain = copied(inputs)
    make = torch.Generator().manual_seed(0)
    columns = inputs["projected"].shape[2]
    text = torch.randn(1, length, columns, generator=make).to(DEVICE, torch.bfloat16)
    wanted = []
    for t in range(length):
        wanted.append(gdn_decode_triton(**plain | {"projected": text[:, t : t + 1].contiguous()}))
        plain["pending"].fill_(1)
    at = 0
    while at + width <= length:
        good = draw.randint(1, width)
        window = torch.randn(1, width, columns, generator=make).to(DEVICE, torch.bfloat16)
        window[:, :good] = text[:, at : at + good]
        output = gdn_decode_triton(**inputs | {"projected": window})
        assert_same(output[:, :good], torch.cat(wanted[at : at + good], 1))
        inputs["pending"].fill_(good)
        at += good


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("shape", [*SMALL, *ON_GPU], ids=str)
def test_a_short_prompt_is_the_references(shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype) -> None:
    """Row by row; fewer rows than the convolution's history too."""
    prefill_beside_the_reference(shape, rows, dtype, 10 * rule_bound(rows, shape[2], 1.0) + 2.0**-19)


def prefill_beside_the_reference(
    shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype, share: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Kept rows bit for bit, other slots untouched, outputs and state close. Returns both sides' tensors."""
    inputs: dict[str, Any] = gdn_prefill_inputs(rows, *shape, dtype, DEVICE)
    if shape == SMALL[1]:
        inputs["constants"] = replace(inputs["constants"], activation="silu")
    inputs = poisoned(inputs)
    wanted, ours = copied(inputs), copied(inputs)
    reference, output = gdn_prefill_reference(**wanted), gdn_prefill_triton(**ours)
    same_or_nan(ours["raw_rows"], wanted["raw_rows"])
    assert_same(ours["state"][0], inputs["state"][0])
    assert_within(ours["state"], wanted["state"], state_bound(rows, inputs["constants"], wanted["state"]))
    compare(output, reference, shape[1], share)
    return ours, wanted


@pytest.mark.parametrize(
    ("shape", "rows", "dtype"),
    [
        (SMALL[0], CHUNK_ROWS, torch.float32),
        (SMALL[1], CHUNK_ROWS + PLAN.few_rows + 1, torch.bfloat16),
        (SMALL[0], CHUNK_ROWS + 3, torch.bfloat16),
        *(
            pytest.param(shape, rows, dtype, marks=(pytest.mark.gpu, GPU))
            for shape in (MODEL, (2, 4, 64, 64), (1, 2, 256, 256))
            for rows in (CHUNK_ROWS, 200, 2048 + 130)
            for dtype in DTYPES
        ),
    ],
    ids=str,
)
def test_a_long_prompt_is_the_references(shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype) -> None:
    """Whole chunks, a last chunk with dead rows, and a last part row by row.

    float32: `chunk_bound` of test_gdn_prefill. bf16 parts leave out 3 * 2**-16 of a product; that errors of outputs,
    a tenth of the largest at least, count ten times is allowed for.
    """
    chunk = rows * (2 * (shape[2] + CHUNK_ROWS) + 8) * 2.0**-24
    prefill_beside_the_reference(shape, rows, dtype, 10 * (chunk + 3 * 2.0**-16))


@pytest.mark.parametrize("shape", [SMALL[1], *ON_GPU[:2]], ids=str)
def test_chunks_stay_within_their_bound(shape: tuple[int, int, int, int]) -> None:
    """The bf16 chunk form beside float64 on the same rounded operands; without the low part of U it is past the bound.

    A row of U is off by 2**-16 of sum |T| |v| (T the inverse times beta, in two parts) and 3 * 2**-16 of sum |W| |M|;
    float32 sums of K + 64 terms add their roundings. It goes into the state by a unit key, decayed, with another 2**-16
    of itself; what was wrong with the state before decays too, and the rule does not amplify it. So much for the length
    of a column's error.
    """
    rows = 2 * CHUNK_ROWS
    inputs: dict[str, Any] = gdn_prefill_inputs(rows, *shape, torch.bfloat16, DEVICE)
    # some heads keep a state for hundreds of rows, some for a few
    inputs["constants"] = replace(inputs["constants"], a_log=torch.linspace(-6, 0, shape[1], device=DEVICE))
    ours = copied(inputs)
    gdn_prefill_triton(**ours)
    raw, _, gates = inputs["projected"].split(inputs["constants"].parts, -1)
    window = torch.cat((inputs["raw_rows"][1, : inputs["constants"].history], raw))
    operands = delta_rows(window, gates, inputs["constants"])
    exact = DeltaRows(*(getattr(operands, name).double() for name in DeltaRows.__slots__))
    state = inputs["state"][1].double()
    off = torch.zeros(shape[1], shape[3], dtype=torch.float64, device=DEVICE)
    for part in (slice(0, CHUNK_ROWS), slice(CHUNK_ROWS, rows)):
        key, value, beta = exact.key[part].transpose(0, 1), exact.value[part].transpose(0, 1), exact.beta[part].T
        c = exact.log_decay[part].cumsum(0).T
        lower = torch.ones(CHUNK_ROWS, CHUNK_ROWS, dtype=torch.bool, device=DEVICE).tril()
        g = (c[:, :, None] - c[:, None, :]).masked_fill(~lower, -torch.inf).exp()
        a = ((beta[..., None] * key) @ key.transpose(-1, -2) * g).tril(-1)
        inverse = torch.linalg.inv(a + torch.eye(CHUNK_ROWS, dtype=torch.float64, device=DEVICE))
        for_value = (inverse * beta[:, None, :]).abs()
        w = (inverse * (beta * c.exp())[:, None, :]) @ key
        part_off = 2.0**-16 + (shape[2] + CHUNK_ROWS) * 2.0**-24
        u = (inverse * beta[:, None, :]) @ value - w @ state
        u_off = part_off * (for_value @ value.abs() + 3 * w.abs() @ state.abs() + u.abs())
        last = c[:, -1:]
        off = last.exp() * off + ((last - c).exp()[..., None] * u_off).sum(1)
        delta_rule(exact, state, part.start, part.stop)
    # a key or a value whose exponential fell on the other side of a bf16 boundary is no error of the chunk form
    away = (ours["state"][1].double() - state).norm(dim=1)
    assert float((away > off).float().mean()) <= 0.05, float((away / off).max())
    assert bool((away <= off + 3 * 2.0**-7 * float(state.abs().max())).all())


@pytest.mark.parametrize("shape", [SMALL[1], *ON_GPU[:2]], ids=str)
def test_cuts_at_whole_chunks_do_not_show(shape: tuple[int, int, int, int]) -> None:
    """A prompt's bits may not depend on the company its chunks were scheduled with, if those are cut at 64 rows."""
    rows = 2 * CHUNK_ROWS + 5
    inputs: dict[str, Any] = gdn_prefill_inputs(rows, *shape, torch.bfloat16, DEVICE)
    whole, parts = copied(inputs), copied(inputs)
    output = gdn_prefill_triton(**whole)
    cut = [gdn_prefill_triton(**parts | {"projected": inputs["projected"][p]}) for p in (slice(0, 64), slice(64, rows))]
    assert_same(torch.cat(cut), output)
    assert_same(parts["state"], whole["state"])
    assert_same(parts["raw_rows"], whole["raw_rows"])


def test_a_prompt_then_steps() -> None:
    """History that a prefill leaves is what a step's convolution reads, with nothing pending."""
    prompt, width = 5, 2
    inputs: dict[str, Any] = gdn_prefill_inputs(prompt + 1, *SMALL[0], torch.bfloat16, DEVICE)
    whole = copied(inputs)
    wanted = gdn_prefill_triton(**whole)
    first = gdn_prefill_triton(**inputs | {"projected": inputs["projected"][:prompt]})
    assert_same(first, wanted[:prompt])
    gate_rows = inputs["raw_rows"].new_full((2, width, 6), torch.nan)
    step = gdn_decode_triton(
        inputs["projected"][None, prompt:],
        inputs["state"],
        inputs["raw_rows"],
        gate_rows,
        inputs["slots"],
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        inputs["constants"],
    )
    assert_same(step[0], wanted[prompt:])


def test_kernels_compile() -> None:
    """The interpreter accepts much that the compiler refuses."""
    pointers = dict.fromkeys(("projected_ptr", "raw_ptr", "gate_ptr", "mixed_ptr", "weight_ptr", "out_ptr"), "*bf16")
    pointers |= dict.fromkeys(("w_ptr", "u_ptr", "states_ptr"), "*bf16") | {"slots_ptr": "*i64", "pending_ptr": "*i64"}
    floats = ("conv_ptr", "a_log_ptr", "dt_bias_ptr", "scale_ptr", "log_decay_ptr", "beta_ptr", "state_ptr", "x_ptr")
    pointers |= dict.fromkeys((*floats, "running_ptr"), "*fp32")
    integers = ("projected_stride", "raw_rows", "rows", "kept", "first", "stop", "written", "begin", "chunks")
    signature = pointers | dict.fromkeys(integers, "i32") | {"root": "fp32", "eps": "fp32"}
    heads = {"KEY_HEADS": 16, "HEADS": 48, "K": 128, "V": 128, "PDL": True}
    # half as wide as the model's, which take three times as long to compile
    half = heads | {"K": 64, "V": 64}
    chunk = half | {"BLOCK_K": 64, "ROWS": CHUNK_ROWS, "SPLIT": True, "HALF": True}
    norm = {"HEADS": 48, "V": 128, "CHANNELS": 10240, "SILU": False, "BLOCK": 128, "TILE": 16, "PDL": True}
    rows = {"CHANNELS": 10240, "GATES": 16384, "GATE_COLUMNS": 96, "HISTORY": 3, "ROWS": 8, "BLOCK": 256, "PDL": True}
    shared, prefill = "stepfloor.kernels._delta", "stepfloor.kernels.gdn_prefill"
    tile = heads | {"TAPS": 4, "BLOCK": 128, "TILE": 16}
    cases = [
        Case(shared, "_prepare_kernel", signature, tile | {"REPLAY": True}),
        Case(shared, "_recur_kernel", signature, heads | {"BLOCK_K": 128, "BLOCK_V": 16, "REPLAY": True}, 1),
        Case(shared, "_close_kernel", signature, norm),
        Case(shared, "_keep_kernel", signature, rows | {"REPLAY": True}),
        Case(prefill, "_solve_kernel", signature, chunk | {"BLOCK_V": 64}),
        Case(prefill, "_scan_kernel", signature, chunk | {"BLOCK_V": 32, "STAGES": 2}),
        Case(prefill, "_read_kernel", signature, chunk | {"BLOCK_V": 64, "STEP": 64, "SILU": False}),
    ]
    assert_compiles(cases)
