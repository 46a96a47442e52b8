"""The sampling kernels against their references, under the interpreter or on a GPU.

Where they may differ: Gumbel numbers by what _noise.py says, exponentials by 2**-18 of themselves. A token may then be
another one only if the two were nearer than that; such places are printed.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels import _noise
from stepfloor.kernels._jit import start, tl, triton
from stepfloor.kernels._logits import log_softmax_reference, processed_reference, scale_reference
from stepfloor.kernels._noise import ACCEPT, RESIDUAL, TARGET, gumbel_noise, gumbel_tile, uniform_noise, uniform_number
from stepfloor.kernels.accept_drafts import (
    Proposals,
    accept_drafts_inputs,
    accept_drafts_reference,
    accept_drafts_triton,
)
from stepfloor.kernels.count_tokens import count_tokens_inputs, count_tokens_reference, count_tokens_triton
from stepfloor.kernels.draw_tokens import (
    DRAFT,
    Stages,
    draw_tokens,
    draw_tokens_inputs,
    draw_tokens_reference,
    draw_tokens_triton,
)
from stepfloor.kernels.match_drafts import match_drafts_inputs, match_drafts_reference, match_drafts_triton
from stepfloor.kernels.process_logits import (
    FEW_GROUPS,
    Filters,
    process_logits_inputs,
    process_logits_reference,
    process_logits_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = 248_320
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
BIG = [pytest.mark.gpu, GPU]
NOISE = 2.0**-20 + 2.0**-23 * 23
P_BOUND = 2.0**-17


def poisoned(rows: Tensor) -> Tensor:
    """The same rows, with NaN behind the last."""
    return torch.cat((rows, torch.full_like(rows[:1], torch.nan)))[: rows.shape[0]]


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, gumbel_ptr, uniform_ptr, stream, COUNT: tl.constexpr, PDL: tl.constexpr):
    start(PDL)
    row = tl.program_id(0)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    for part in tl.static_range(2):
        noise = gumbel_tile(seed, position, stream, part * COUNT, COUNT)
        tl.store(gumbel_ptr + (row * 2 + part) * COUNT + tl.arange(0, COUNT), noise)
    tl.store(uniform_ptr + row + tl.arange(0, 1), uniform_number(seed, position, stream))


def test_noise_is_the_references() -> None:
    """Uniform numbers to the bit, Gumbel numbers within the bound, for seeds and positions that sign-extend."""
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0x123456789ABC], device=DEVICE)
    positions = torch.tensor([0, 7, 2**31 + 5, 262_143, 2**32 - 1], device=DEVICE)
    gumbel = torch.empty(5, 2048, device=DEVICE)
    uniform = torch.empty(5, device=DEVICE)
    for stream in (TARGET, DRAFT, ACCEPT, RESIDUAL):
        _noise_kernel[(5,)](seeds, positions, gumbel, uniform, stream, COUNT=1024, PDL=False, enable_fp_fusion=False)
        assert torch.equal(uniform, uniform_noise(seeds, positions, stream))
        wanted = gumbel_noise(seeds, positions, torch.full_like(seeds, stream), 2048)
        assert bool(((gumbel - wanted).abs() <= 2.0**-20 + 2.0**-23 * wanted.abs()).all())


def test_noise_of_the_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula without log1p, where u is next to 0 and to 1."""
    words = torch.tensor([0, 1, 2, 2**12, 2**31, 2**32 - 2**9, 2**32 - 2, 2**32 - 1])
    u = _noise._open_unit(words)
    rest = 1 - u
    ours = torch.where(rest == 1, u, -torch.log(rest) * (u / torch.where(rest == 1, 1, 1 - rest)))
    wanted = -torch.log1p(-u.double())
    assert bool(((ours - wanted).abs() <= 6 * 2.0**-24 * wanted).all())


# ---------------------------------------------------------------------- process_logits


def assert_processed(ours: Tensor, inputs: dict[str, Any]) -> None:
    """The same bits, but for tokens whose cumulative probability is next to 1 - p."""
    wanted = process_logits_reference(**inputs)
    kept = torch.isfinite(ours) | ours.isnan()
    disagree = kept != (torch.isfinite(wanted) | wanted.isnan())
    assert torch.equal(ours[~disagree].nan_to_num(nan=7.0), wanted[~disagree].nan_to_num(nan=7.0))
    if not bool(disagree.any()):
        return
    plain = {name: value for name, value in inputs.items() if name != "filters"}
    for row in disagree.any(-1).nonzero().flatten().tolist():
        filters = inputs["filters"]
        everything = process_logits_reference(**plain, filters=replace(filters, top_p=torch.ones_like(filters.top_p)))[
            row
        ]
        p = torch.softmax(everything.double(), -1)
        order = torch.sort(everything, descending=True, stable=True).indices
        mass = torch.empty_like(p)
        mass[order] = p[order].flip(0).cumsum(0).flip(0)
        gaps = (mass - (1 - filters.top_p.double()[row]))[disagree[row]].abs()
        print(f"row {row}: {gaps.numel()} tokens on the other side, up to {float(gaps.max()):.3g} from 1 - p")
        assert float(gaps.max()) <= P_BOUND


PROCESSED = [
    (5, 101, torch.float32),
    (3, 4999, torch.bfloat16),
    (2, 9001, torch.float32),
    *(pytest.param(n, REAL, dtype, marks=BIG) for n in (1, 5, 80) for dtype in (torch.bfloat16, torch.float32)),
    pytest.param(64, 3072, torch.bfloat16, marks=BIG),
]


@pytest.mark.parametrize(("n", "vocab_size", "dtype"), PROCESSED)
def test_processed_rows_are_the_references(n: int, vocab_size: int, dtype: torch.dtype) -> None:
    inputs = process_logits_inputs(n, vocab_size, dtype, DEVICE)
    inputs["logits"] = poisoned(inputs["logits"])
    together = process_logits_triton(**inputs)
    assert_processed(together, inputs)
    without = inputs | {"filters": None}
    assert torch.equal(process_logits_triton(**without), process_logits_reference(**without))
    i = n - 1
    alone = inputs | {name: inputs[name][i:] for name in ("logits", "slots", "earlier")}
    assert torch.equal(process_logits_triton(**alone)[0], together[i])


def setting(vocab_size: int, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> tuple[float, int, float]:
    return min_p, top_k or vocab_size, top_p


def filtered_inputs(shape: str, vocab_size: int, settings: list[tuple[float, int, float]]) -> dict[str, Any]:
    """The same logits with one setting after the other: min_p, top_k (0: all), top_p."""
    make = torch.Generator(DEVICE).manual_seed(3)
    base = torch.randn(vocab_size, generator=make, device=DEVICE)
    logits = {
        "peaked": 4 * base,
        "coarse": (2 * base).round().div(2),
        "flat": 1e-3 * base,
        "equal": torch.zeros_like(base),
    }[shape]
    n = len(settings)
    min_p, top_k, top_p = zip(*settings, strict=True)
    return {
        "logits": logits.expand(n, -1).contiguous(),
        "slots": torch.arange(n, device=DEVICE),
        "temperature": torch.full((n,), 0.7, device=DEVICE),
        "filters": Filters(
            torch.tensor(min_p, device=DEVICE),
            torch.tensor([k or vocab_size for k in top_k], device=DEVICE),
            torch.tensor(top_p, device=DEVICE),
        ),
    }


@pytest.mark.parametrize(("vocab_size", "few"), [(600, 16), pytest.param(REAL, FEW_GROUPS, marks=BIG)])
@pytest.mark.parametrize("shape", ["peaked", "coarse", "flat", "equal"])
def test_every_way_to_a_boundary(shape: str, vocab_size: int, few: int) -> None:
    """Ties at the k-th and at the boundary; nothing to do; the best alone; top-p alone, which needs the whole sum."""
    third = vocab_size // 3
    top_k = [(0.0, 20, 0.95), (0.0, 1, 1.0), (0.0, third, 1.0), (0.0, third, 0.8)]
    top_p = [(0.0, 0, 0.95), (0.0, 0, 0.3), (0.0, 0, 1e-7)]
    min_p = [(0.0, 0, 1.0), (0.3, 0, 1.0), (0.02, 0, 0.9), (1.0, 5, 0.5)]
    inputs = filtered_inputs(shape, vocab_size, [*top_k, *top_p, *min_p])
    assert_processed(process_logits_triton(**inputs, few=few), inputs)


@pytest.mark.slow
def test_a_boundary_that_the_first_looks_miss() -> None:
    """79 groups, looked at 8, 64, then all at a time."""
    inputs = filtered_inputs("flat", 2500, [(0.0, 1000, 0.9)])
    assert_processed(process_logits_triton(**inputs, few=8), inputs)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_finite_maximum_is_nan(bad: float) -> None:
    inputs = process_logits_inputs(3, 2500, torch.float32, DEVICE)
    inputs["logits"][1, slice(None) if bad < 0 else 2499] = bad
    assert_processed(process_logits_triton(**inputs), inputs)
    drawn = draw_tokens_triton(inputs["logits"], inputs["slots"], inputs["slots"], inputs["temperature"], None, TARGET)
    assert drawn[1] == -1


# ---------------------------------------------------------------------- draw_tokens


def assert_drawn(ours: Tensor, inputs: dict[str, Any]) -> None:
    """The reference's tokens, or ones whose value is as high but for the error of the noise."""
    wanted = draw_tokens_reference(**inputs)
    rows = inputs["logits"].shape[0] // inputs["slots"].shape[0]
    for row in (ours != wanted).nonzero().flatten().tolist():
        window = row // rows
        x = inputs["logits"].float()
        if inputs.get("stages") is not None:
            x = processed_reference(inputs["logits"], inputs["slots"], inputs["temperature"], inputs["stages"])
        slot = inputs["slots"][window : window + 1]
        position = inputs["positions"][window : window + 1] + row - window * rows
        stream = torch.full_like(slot, inputs["stream"])
        values = x[row] + gumbel_noise(inputs["seeds"][slot], position, stream, x.shape[1])[0]
        gap = float(values[wanted[row]] - values[ours[row]])
        print(f"row {row}: {int(ours[row])} for {int(wanted[row])}, gap {gap:.3g}")
        assert gap <= 2 * (NOISE + 2.0**-24 * float(values[wanted[row]].abs()))


DRAWN = [(5, 301), (16, 4101), pytest.param(1, REAL, marks=BIG), pytest.param(80, REAL, marks=BIG)]


@pytest.mark.parametrize(("n", "vocab_size"), DRAWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_the_references(n: int, vocab_size: int, dtype: torch.dtype) -> None:
    inputs: dict[str, Any] = draw_tokens_inputs(n, vocab_size, DEVICE)
    inputs["logits"] = poisoned(inputs["logits"].to(dtype))
    drawn = draw_tokens_triton(**inputs)
    assert_drawn(drawn, inputs)
    greedy = draw_tokens_triton(**(inputs | {"seeds": None}))
    assert torch.equal(greedy, inputs["logits"].float().argmax(-1))
    last = inputs | {name: inputs[name][n - 1 :] for name in ("logits", "slots", "positions")}
    assert draw_tokens_triton(**last)[0] == drawn[n - 1]


def window_inputs(b: int, rows: int, vocab_size: int) -> dict[str, Any]:
    """Raw rows of several windows with bias, penalties and earlier drafts."""
    inputs = process_logits_inputs(b, vocab_size, torch.bfloat16, DEVICE)
    make = torch.Generator(DEVICE).manual_seed(1)
    logits = (8 * torch.randn(b * rows, vocab_size, generator=make, device=DEVICE)).to(torch.bfloat16)
    stages = Stages(inputs["bias"], inputs["penalties"], inputs["earlier"][:, : rows - 1] if rows > 1 else None)
    return {
        "logits": logits,
        "slots": inputs["slots"],
        "positions": 100 + inputs["slots"],
        "temperature": inputs["temperature"],
        "seeds": inputs["slots"] * 0x1234567890AB,
        "stages": stages,
    }


@pytest.mark.parametrize(("b", "vocab_size"), [(3, 2100), pytest.param(16, REAL, marks=BIG)])
def test_a_window_counts_the_drafts_before_each_row(b: int, vocab_size: int) -> None:
    inputs = window_inputs(b, 4, vocab_size) | {"stream": TARGET}
    assert_drawn(draw_tokens_triton(**inputs), inputs)
    stages = inputs["stages"]
    rows = process_logits_triton(
        inputs["logits"], inputs["slots"], inputs["temperature"], stages.bias, stages.penalties, None, stages.earlier
    )
    assert torch.equal(rows, processed_reference(inputs["logits"], inputs["slots"], inputs["temperature"], stages))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 9000, device=DEVICE)
    logits[0, [7000, 5, 699]] = 1.0
    logits[1, [8999, 4000]] = 1.0
    logits[2, :] = -0.0
    logits[2, 4500:] = 0.0
    slots = torch.arange(3, device=DEVICE)
    assert draw_tokens_triton(logits, slots, slots, torch.zeros(3, device=DEVICE), None, TARGET).tolist() == [
        5,
        4000,
        0,
    ]


@pytest.mark.parametrize("vocab_size", [4999, pytest.param(REAL, marks=BIG)])
def test_what_drafts_were_drawn_from_is_kept(vocab_size: int) -> None:
    inputs = window_inputs(3, 1, vocab_size) | {"stream": DRAFT, "column": 1}
    kept = []
    for draw in (draw_tokens_triton, draw_tokens_reference):
        proposals = Proposals(
            torch.full((3, 2, vocab_size), torch.nan, device=DEVICE), torch.full((3, 2, 2), torch.nan, device=DEVICE)
        )
        draw(**inputs, proposals=proposals)
        kept.append(proposals)
    ours, wanted = kept
    assert bool(ours.logits[:, 0].isnan().all())
    assert bool(ours.scale[:, 0].isnan().all())
    assert torch.equal(ours.logits[1:, 1], wanted.logits[1:, 1])  # slot 0 is greedy
    assert torch.equal(ours.scale[1:, 1, 0], wanted.scale[1:, 1, 0])
    assert bool(((ours.scale - wanted.scale)[1:, 1, 1].abs() <= 2.0**-17).all())


def test_drafts_are_kept_by_slot() -> None:
    """In their own column, whatever the others hold; a row without a finite maximum leaves -1."""
    inputs: dict[str, Any] = draw_tokens_inputs(3, 57, DEVICE)
    inputs["logits"][1, 5] = torch.nan
    inputs["slots"] = torch.tensor([3, 0, 2], device=DEVICE)
    inputs |= {"temperature": torch.zeros(4, device=DEVICE), "seeds": None, "column": 1}
    for draw in (draw_tokens_triton, draw_tokens_reference):
        table = torch.full((4, 3), 99, device=DEVICE)
        tokens = draw(**inputs, drafts=table)
        assert tokens[1] == -1
        assert torch.equal(table[inputs["slots"], 1], tokens)
        assert int((table == 99).sum()) == 9


def test_only_one_row_a_window_is_kept() -> None:
    inputs: dict[str, Any] = draw_tokens_inputs(4, 57, "cpu")
    inputs |= {"slots": inputs["slots"][:2], "positions": inputs["positions"][:2]}
    with pytest.raises(ValueError, match=r"got 2 rows and \(4, 3\)"):
        draw_tokens(**inputs, drafts=torch.zeros(4, 3, dtype=torch.int64))


# ---------------------------------------------------------------------- accept_drafts


def assert_accepted(ours: tuple[Tensor, Tensor], inputs: dict[str, Any]) -> None:
    """The reference's windows, or ones where a rounding may have decided."""
    emitted, accepted = accept_drafts_reference(**inputs)
    differ = (ours[0] != emitted).any(-1) | (ours[1] != accepted)
    x = inputs["logits"].float()
    if inputs.get("stages") is not None:
        flat = processed_reference(x.flatten(0, 1), inputs["slots"], inputs["temperature"], inputs["stages"])
        x = flat.view(x.shape)
    for b in differ.nonzero().flatten().tolist():
        slot = inputs["slots"][b : b + 1]
        seed, position = inputs["seeds"][slot], inputs["positions"][b : b + 1]
        j = int(torch.minimum(ours[1][b], accepted[b]))
        log_p = log_softmax_reference(x[b, j], scale_reference(x[b, j]))
        q = min(j, inputs["drafts"].shape[1] - 1)
        log_q = log_softmax_reference(inputs["proposals"].logits[slot, q], inputs["proposals"].scale[slot, q])[0]
        if ours[1][b] != accepted[b]:
            draft = inputs["drafts"][b, j]
            gap = float(log_p[draft] - log_q[draft] - torch.log(uniform_noise(seed, position + j, ACCEPT)))
            print(f"window {b}: draft {j} judged otherwise, gap {gap:.3g}")
            # two logarithms of sums, and roundings of numbers up to 64
            assert abs(gap) <= 2 * 2.0**-17 + 4 * 2.0**-18
            continue
        refused = j < inputs["drafts"].shape[1] and int(inputs["drafts"][b, j]) >= 0
        stream = torch.full_like(slot, RESIDUAL if refused else TARGET)
        difference = (log_q - log_p).double()
        residual = log_p + torch.log(-torch.expm1(difference))
        values = (residual if refused else x[b, j]) + gumbel_noise(seed, position + j, stream, x.shape[2])[0]
        mine, theirs = int(ours[0][b, j]), int(emitted[b, j])
        gap = float(values[theirs] - values[mine])
        print(f"window {b}: {mine} for {theirs}, gap {gap:.3g}")
        # where p is near q the residual magnifies the errors of both
        near = float(difference[[mine, theirs]].abs().min()) if refused else 1.0
        assert gap <= 2 * NOISE + 2.0**-18 + 6 * 2.0**-18 / near


@pytest.mark.parametrize(
    ("b", "k", "vocab_size"),
    [(6, 3, 57), (4, 2, 4999), (3, 1, 2048), *(pytest.param(b, 3, REAL, marks=BIG) for b in (1, 4, 16))],
)
def test_windows_are_the_references(b: int, k: int, vocab_size: int) -> None:
    inputs: dict[str, Any] = accept_drafts_inputs(b, k, vocab_size, DEVICE)
    inputs["drafts"][::7, -1] = -1
    together = accept_drafts_triton(**inputs)
    assert_accepted(together, inputs)
    per_window = ("logits", "drafts", "slots", "positions")
    alone = accept_drafts_triton(**{name: x[b - 1 :] if name in per_window else x for name, x in inputs.items()})
    assert torch.equal(alone[0][0], together[0][b - 1])
    assert alone[1][0] == together[1][b - 1]


def test_slots_may_hold_more_drafts_than_are_judged() -> None:
    """Of slots that hold four, a step that verifies two reads the first two, not every other slot."""
    inputs: dict[str, Any] = accept_drafts_inputs(5, 2, 211, DEVICE)
    wanted = accept_drafts_triton(**inputs)
    few = inputs["proposals"]
    inputs["proposals"] = Proposals(
        *(torch.cat((t, t.new_full(t.shape, float("nan"))), 1) for t in (few.logits, few.scale))
    )
    for ours, reference, wanted_part in zip(
        accept_drafts_triton(**inputs), accept_drafts_reference(**inputs), wanted, strict=True
    ):
        assert torch.equal(ours, wanted_part)
        assert torch.equal(reference, wanted_part)


@pytest.mark.parametrize(("b", "vocab_size"), [(4, 2100), pytest.param(16, REAL, marks=BIG)])
def test_raw_windows_are_the_references(b: int, vocab_size: int) -> None:
    inputs = window_inputs(b, 3, vocab_size)
    x = processed_reference(inputs["logits"], inputs["slots"], inputs["temperature"], inputs["stages"])
    drafter = x.view(b, 3, -1)[:, :2] + torch.randn(b, 2, vocab_size, device=DEVICE)
    inputs["proposals"] = Proposals(drafter, scale_reference(drafter))
    inputs["drafts"] = inputs["stages"].earlier
    inputs["logits"] = inputs["logits"].view(b, 3, -1)
    assert_accepted(accept_drafts_triton(**inputs), inputs)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_ends_its_window(row: int, bad: float) -> None:
    inputs: dict[str, Any] = accept_drafts_inputs(3, 2, 11, DEVICE)
    inputs["logits"][1, row] = bad
    assert_accepted(accept_drafts_triton(**inputs), inputs)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    inputs: dict[str, Any] = accept_drafts_inputs(12, 1, 40, DEVICE)
    same = inputs["logits"][:, :1].clone()
    scale = scale_reference(same)
    scale[..., 1] -= 2.0  # q above p everywhere
    inputs["proposals"] = Proposals(same, scale)
    ours = accept_drafts_triton(**inputs)
    assert bool((ours[1] == 0).any())
    assert bool((ours[0][:, 0] >= 0).all())
    assert_accepted(ours, inputs)


# ---------------------------------------------------------------------- match_drafts, count_tokens


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("forced", [None, 0, 1])
def test_matches_are_the_references(k: int, forced: int | None) -> None:
    inputs = match_drafts_inputs(17, k, DEVICE)
    inputs["drafts"][::5, k // 2 :] = -1
    inputs["drawn"][::6] = -1
    for ours, wanted in zip(
        match_drafts_triton(**inputs, forced=forced), match_drafts_reference(**inputs, forced=forced), strict=True
    ):
        assert torch.equal(ours, wanted)


def test_counts_are_the_references() -> None:
    for b, r, vocab_size in ((4, 1, 7), (5, 4, 11), (2, 300, 50)):
        inputs = count_tokens_inputs(b, r, vocab_size, DEVICE)
        inputs["slots"][0] = inputs["slots"][-1]  # as rows that pad a batch do
        wanted = inputs["counts"].clone()
        count_tokens_triton(**inputs)
        count_tokens_reference(wanted, inputs["slots"], inputs["emitted"])
        assert torch.equal(inputs["counts"], wanted)
