"""The delta net's decode kernels: which plans can be built, their cubins without a GPU, their results on one."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels import _delta_fused, _delta_split
from stepfloor.kernels._delta_fused import MOST_SHARED, Choice, DeltaPlan, choose_plan
from stepfloor.kernels._delta_split import SPLIT_FROM, SplitPlan, choose_split
from stepfloor.kernels._jit import compile_cuda, missing_for_cuda
from stepfloor.kernels.gdn_decode import gdn_decode, gdn_decode_inputs, gdn_decode_reference
from tests.kernels.compare import assert_rounded_alike, assert_same, assert_within, copied

MODEL = DeltaPlan(16, 48, 128, 128, rows=4, kept=4, silu=False)
SIZES = (16, 48, 128, 128)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NO_NVRTC = missing_for_cuda()


def test_plans_of_the_model() -> None:
    """They can be built, leave room for the next kernel, and have one number of columns: it decides the bits."""
    for rows in range(1, 9):
        chosen = {choose_plan(replace(MODEL, rows=rows, kept=8), b) for b in (1, 2, 4, 8, 16)}
        assert all(p.fits() and p.shared_bytes <= MOST_SHARED // 2 for p in chosen)
        assert {p.cols for p in chosen} == {MODEL.cols}


def test_plans_of_many_sequences() -> None:
    """The model's and the small model's windows all have the two kernels, on a GPU with less shared memory too."""
    small = replace(MODEL, key_heads=2, heads=4, key_dim=64, value_dim=64)
    for rows in range(1, 9):
        for base in (replace(MODEL, rows=rows, kept=rows), replace(small, rows=rows, kept=8)):
            for limit in (MOST_SHARED, 99 * 1024):
                split = choose_split(base, 16, True, limit)
                assert split is not None or (limit < MOST_SHARED and rows > 4)
                assert split is None or split.state_bytes <= limit
            assert choose_split(base, SPLIT_FROM - 1, True, MOST_SHARED) is None
    rings = {
        (b, r): choose_split(replace(MODEL, rows=r, kept=r), b, True, MOST_SHARED).ring
        for b in (2, 4, 16)
        for r in (1, 4)
    }
    assert rings == {(2, 1): 3, (2, 4): 3, (4, 1): 0, (4, 4): 0, (16, 1): 3, (16, 4): 0}
    # a head whose channels no load of a lane covers at once
    assert choose_split(replace(MODEL, key_dim=96), 16, True, MOST_SHARED) is None


@pytest.mark.parametrize(
    "change",
    [{"key_dim": 80}, {"value_dim": 40}, {"heads": 40}, {"rows": 17, "kept": 17}, {"parts": 16}],
    ids=str,
)
def test_sizes_that_have_no_kernel(change: dict[str, int]) -> None:
    assert not replace(MODEL, **change).fits()


@pytest.mark.skipif(NO_NVRTC is not None, reason=NO_NVRTC or "")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_compiles(arch: str, tmp_path: Path) -> None:
    wide = replace(MODEL, rows=8, kept=8, silu=True, parts=1, early=3)
    for plan in (MODEL, wide, replace(MODEL, cols=8, parts=2, early=3)):
        assert compile_cuda("gdn_decode.cu", plan.macros(), arch, tmp_path).startswith(b"\x7fELF")
    small = replace(MODEL, key_heads=2, heads=4, key_dim=64, value_dim=64, rows=1, kept=4)
    pairs = SplitPlan(MODEL, True), SplitPlan(wide, False, halves=2), SplitPlan(small, True)
    for split in (*pairs, SplitPlan(MODEL, True, 3), SplitPlan(wide, False, 2), SplitPlan(small, True, 1)):
        assert compile_cuda("gdn_rows.cu", split.macros(), arch, tmp_path).startswith(b"\x7fELF")
        stem = "gdn_state_ring" if split.ring else "gdn_state"
        assert compile_cuda(f"{stem}.cu", split.macros(), arch, tmp_path).startswith(b"\x7fELF")


def settled(inputs: dict[str, Any]) -> Tensor:
    """The operator alone on the device: nothing else is on its way."""
    torch.cuda.synchronize()
    output = gdn_decode(**inputs)
    torch.cuda.synchronize()
    return output


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows", range(1, 9))
def test_against_the_reference(rows: int, sequences: int, activation: str) -> None:
    inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *SIZES, torch.bfloat16, "cuda")
    inputs["constants"] = replace(inputs["constants"], activation=activation)
    wanted, ours = copied(inputs), copied(inputs)
    reference, output = gdn_decode_reference(**wanted), settled(ours)
    assert_same(ours["raw_rows"], wanted["raw_rows"])
    assert_same(ours["gate_rows"], wanted["gate_rows"])
    largest = float(wanted["state"].abs().max())
    # two orders of float32 sums, and three operands that may fall on the other side of a bf16 boundary
    assert_within(ours["state"], wanted["state"], (4 * rows * 264 * 2.0**-24 + 3 * 2.0**-7) * largest)
    reach = reference.double().unflatten(-1, (48, -1)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 128).flatten(2)
    # the same, and four roundings to bf16 that may each fall a step aside
    assert_within(output, reference, 7 * 2.0**-7 * reach)
    assert_rounded_alike(output, reference)
    last = {name: inputs[name][-1:].contiguous() for name in ("projected", "slots", "pending")}
    assert_same(settled(copied(inputs) | last), output[-1:])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    "choice",
    [
        Choice(1, parts=1, early=2),
        Choice(1, parts=1, early=3),
        Choice(1, parts=2, early=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 4])
def test_settled_calls_have_the_same_bits(rows: int, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps behind a plain kernel, in a graph: state read, replayed and written before the wait races with nobody."""
    inputs: dict[str, Any] = gdn_decode_inputs(3, rows, *SIZES, torch.bfloat16, "cuda")
    plain, held = copied(inputs), copied(inputs)
    wanted = [settled(plain) for _ in range(20)]
    monkeypatch.setattr(_delta_fused, "SETTLED_PLANS", (choice,))
    gdn_decode(**copied(inputs), settled=True)  # loads the kernel
    torch.cuda.synchronize()
    graph, copy = torch.cuda.CUDAGraph(), torch.empty_like(wanted[0])
    with torch.cuda.graph(graph):
        copy.fill_(torch.nan)
        output = gdn_decode(**held, settled=True)
        copy.copy_(output)
    for step in range(20):
        graph.replay()
        assert_same(copy, wanted[step])
    for name in ("state", "raw_rows", "gate_rows"):
        assert_same(held[name], plain[name])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("settled_call", [False, True])
@pytest.mark.parametrize("sequences", [4, 7, 16])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_two_kernels_have_the_bits_of_one(
    rows: int, sequences: int, settled_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in a graph: a text must not change when sequences come or go and the other form takes over."""
    inputs: dict[str, Any] = gdn_decode_inputs(sequences, rows, *SIZES, torch.bfloat16, "cuda")
    one, two = copied(inputs), copied(inputs)
    monkeypatch.setattr(_delta_split, "SPLIT_FROM", 1000)
    wanted = [settled(one) for _ in range(10)]
    monkeypatch.setattr(_delta_split, "SPLIT_FROM", 1)
    gdn_decode(**copied(inputs), settled=settled_call)  # loads the kernels
    torch.cuda.synchronize()
    graph, copy = torch.cuda.CUDAGraph(), torch.empty_like(wanted[0])
    with torch.cuda.graph(graph):
        copy.fill_(torch.nan)
        output = gdn_decode(**two, settled=settled_call)
        copy.copy_(output)
    for step in range(10):
        graph.replay()
        assert_same(copy, wanted[step])
    for name in ("state", "raw_rows", "gate_rows"):
        assert_same(two[name], one[name])


@pytest.mark.gpu
@GPU
def test_replay_equals_plain_decoding() -> None:
    """Windows of 4 with rejected tails beside one row at a time: speculation must not change a text."""
    draw, width = random.Random(0), 4
    inputs: dict[str, Any] = gdn_decode_inputs(1, width, *SIZES, torch.bfloat16, "cuda")
    inputs["pending"].zero_()
    plain = copied(inputs)
    text = torch.randn(1, 200, inputs["projected"].shape[2], device="cuda").to(torch.bfloat16)
    wanted = []
    for t in range(200):
        wanted.append(settled(plain | {"projected": text[:, t : t + 1].contiguous()}))
        plain["pending"].fill_(1)
    at = 0
    while at + width <= 200:
        good = draw.randint(1, width)
        window = torch.randn_like(inputs["projected"])
        window[:, :good] = text[:, at : at + good]
        output = settled(inputs | {"projected": window})
        assert_same(output[:, :good], torch.cat(wanted[at : at + good], 1))
        inputs["pending"].fill_(good)
        at += good


@pytest.mark.gpu
@GPU
def test_graph_replay_equals_eager() -> None:
    """Slots and accepted counts are read on the device, when the graph runs."""
    inputs: dict[str, Any] = gdn_decode_inputs(4, 4, *SIZES, torch.bfloat16, "cuda")
    other = copied(inputs)
    other["slots"], other["pending"] = inputs["slots"].flip(0), torch.tensor([4, 0, 1, 2], device="cuda")
    held = copied(inputs)
    settled(copied(inputs))  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = gdn_decode(**held)
    for values in (inputs, other):
        for name, value in values.items():
            if isinstance(value, Tensor):
                held[name].copy_(value)
        output.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = copied(values)
        assert_same(output, settled(expected))
        for name in ("state", "raw_rows", "gate_rows"):
            assert_same(held[name], expected[name])
