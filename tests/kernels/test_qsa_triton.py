"""The Triton kernels of sparse attention: under the interpreter at small odd shapes, on a GPU at the model's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.kernels import _attend_triton
from stepfloor.kernels._attend_triton import attend_triton
from stepfloor.kernels.qsa_attend import (
    kept_positions,
    qsa_attend,
    qsa_attend_inputs,
    qsa_attend_reference,
)
from stepfloor.kernels.qsa_prepare import (
    SparseCache,
    SparseShape,
    qsa_prepare,
    qsa_prepare_inputs,
    qsa_prepare_reference,
    qsa_prepare_triton,
)
from stepfloor.kernels.qsa_select import qsa_select, qsa_select_inputs, qsa_select_reference, qsa_select_triton
from tests.kernels.compare import UNIT, assert_same, assert_within, copied
from tests.kernels.compiled import Case, assert_compiles
from tests.kernels.sparse_layer import assert_attended

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DTYPES = [FP32, BF16]
# two of everything but for odd sizes: the interpreter takes 20 ms a program
ODD = SparseShape(heads=4, kv_heads=2, head_dim=10, index_heads=3, index_dim=12, ratio=4, topk=3)
MODEL = SparseShape(heads=24, kv_heads=2, head_dim=256, index_heads=4, index_dim=128, ratio=4, topk=512)
SMALL = SparseShape(heads=4, kv_heads=2, head_dim=64, index_heads=2, index_dim=32, ratio=4, topk=128)
CACHES = ("keys", "values", "block_keys", "raw_keys")


@contextmanager
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.empty gives is full of NaN (or of a number far out of range), and nobody writes behind its end."""
    plain, margin, held = torch.empty, 64, []

    def empty(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        poison = torch.nan if dtype.is_floating_point else 2**30
        memory = plain(torch.Size(size).numel() + margin, dtype=dtype, device=device).fill_(poison)
        held.append((memory, poison))
        return memory[:-margin].view(size)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    for memory, poison in held:
        tail = memory[-margin:]
        assert bool((tail.isnan() if memory.dtype.is_floating_point else tail == poison).all())


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN equals NaN and float8 can be compared."""
    return tensor.contiguous().view(torch.uint8)


# ---------------------------------------------------------------------- prepare


def prepare_inputs(b: int, r: int, context: int, shape: SparseShape, dtype: torch.dtype, kv: torch.dtype) -> Any:
    inputs: dict[str, Any] = qsa_prepare_inputs(b, r, context, shape, dtype, DEVICE)
    cache = inputs["cache"]
    inputs["cache"] = replace(cache, keys=cache.keys.to(kv), values=cache.values.to(kv))
    # sequences of unequal length
    inputs["first"] = inputs["first"] - torch.arange(b, device=DEVICE).clamp(max=context)
    return inputs


def assert_prepared_alike(ours: Any, wanted: Any, caches: tuple[SparseCache, SparseCache], shape: SparseShape) -> None:
    """Two orders of a head's sum of squares; then, as derived in test_qsa_prepare, four roundings a step aside each.

    Every rounding is at the same place, so in bf16 few values move. A float8 is one step of 2**-3 further off.
    """

    def bound(value: Tensor, head: int) -> Tensor:
        largest = 1.5 * value.double().abs().nan_to_num().amax(-1, keepdim=True)
        return ((head * 2.0**-24 + 8 * UNIT[ours[0].dtype]) * largest).expand_as(value)

    for one, other in ((ours[0], wanted[0]), (ours[2], wanted[2])):
        assert_within(one, other, bound(other, one.shape[-1]))
        if one.dtype == BF16:
            assert (one != other).float().mean() < 0.01
    assert_same(ours[1], wanted[1])
    mine, theirs = caches
    assert_same(bits(mine.values), bits(theirs.values))
    assert_same(bits(mine.raw_keys), bits(theirs.raw_keys))
    for name in ("keys", "block_keys"):
        one, other = getattr(mine, name).float(), getattr(theirs, name).float()
        step = 2.0**-3 * other.double().abs() if getattr(mine, name).dtype == FP8 else 0.0
        assert_within(one, other, bound(other, one.shape[-1]) + step)
        assert (bits(getattr(mine, name)) != bits(getattr(theirs, name))).float().mean() < (
            0.01 if ours[0].dtype == BF16 else 1.0
        )


@pytest.mark.parametrize(("dtype", "kv"), [(FP32, FP32), (BF16, BF16), (BF16, FP8), (FP32, FP8)], ids=str)
@pytest.mark.parametrize(("rows", "context"), [(3, 6), (1, 7), (14, 5)], ids=str)
def test_prepared_rows_are_the_references(
    rows: int, context: int, dtype: torch.dtype, kv: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks completed by old and new rows, by one row, and by more rows than the ring of raw keys holds."""
    inputs = prepare_inputs(1 if rows == 14 else 2, rows, context, ODD, dtype, kv)
    if rows == 14:
        inputs["cache"] = replace(inputs["cache"], raw_keys=inputs["cache"].raw_keys[:, :4].contiguous())
    wanted, ours = copied(inputs), copied(inputs)
    reference = qsa_prepare_reference(**wanted)
    with poisoned_memory(monkeypatch):
        output = qsa_prepare_triton(**ours)
    assert_prepared_alike(output, reference, (ours["cache"], wanted["cache"]), ODD)


@pytest.mark.parametrize("operator", [qsa_prepare, qsa_prepare_triton])
def test_float8_caches_saturate(operator: Any) -> None:
    """A cast that does not saturate gives NaN above 448, and one NaN in a page ends a text."""
    inputs = prepare_inputs(1, 1, 0, ODD, BF16, FP8)
    values = slice(2 * ODD.heads * ODD.head_dim + ODD.kv_heads * ODD.head_dim, None)
    inputs["projected"][0, 0, values][:3] = torch.tensor([1000.0, -1e6, 450.0])
    operator(**inputs)
    page = inputs["cache"].page_table[1, 0]
    assert inputs["cache"].values[page, 0, 0, :3].float().tolist() == [448.0, -448.0, 448.0]


def test_a_prepared_rows_bits_are_its_own() -> None:
    """Alone and beside others, in a window and one by one; and a padding row at the scratch slot disturbs nobody."""
    inputs = prepare_inputs(3, 2, 6, ODD, BF16, BF16)
    inputs["slots"][2] = 0
    inputs["cache"].page_table[0] = 0
    for name in CACHES:
        getattr(inputs["cache"], name)[0] = torch.nan
    together, alone = copied(inputs), copied(inputs)
    outputs = qsa_prepare_triton(**together)
    for b in range(2):
        for r in range(2):
            row = {
                "projected": inputs["projected"][b : b + 1, r : r + 1],
                "slots": inputs["slots"][b : b + 1],
                "first": inputs["first"][b : b + 1] + r,
            }
            one = qsa_prepare_triton(**{**alone, **row})
            assert_same(tuple(t[0, 0] for t in one), tuple(t[b, r] for t in outputs))
    for name in CACHES:
        assert_same(getattr(together["cache"], name)[1:], getattr(alone["cache"], name)[1:])


def test_caches_that_are_written_must_be_contiguous() -> None:
    inputs = prepare_inputs(1, 1, 3, ODD, FP32, FP32)
    inputs["cache"] = replace(inputs["cache"], keys=inputs["cache"].keys.transpose(1, 2))
    with pytest.raises(ValueError, match="keys in place"):
        qsa_prepare_triton(**inputs)


# ---------------------------------------------------------------------- select


def select_inputs(b: int, r: int, context: int, dtype: torch.dtype, topk: int = 3) -> dict[str, Any]:
    inputs: dict[str, Any] = qsa_select_inputs(b, r, context, 3, 13, 4, topk, dtype, DEVICE)
    inputs["first"] = inputs["first"] - 5 * torch.arange(b, device=DEVICE) * (context > 20)
    return inputs


def assert_selected_alike(ours: Tensor, wanted: Tensor, inputs: dict[str, Any]) -> None:
    """The same blocks; others only where their scores lie closer than two orders of the same float32 sums can tell.

    A score sums dim products for each head, then the heads; each order is off by at most (dim + heads + 2) 2**-24 of
    the sum of magnitudes, which the product of the two lengths bounds.
    """
    assert ours.shape == wanted.shape
    assert ours.dtype == torch.int64
    for b, r in (ours != wanted).any(-1).nonzero().tolist():
        row, theirs = ours[b, r], wanted[b, r]
        assert bool((row.diff() > 0).all())
        parted = torch.tensor(sorted(set(row.tolist()) ^ set(theirs.tolist())), device=row.device)
        assert int(parted.min()) >= 0
        per_page = inputs["block_keys"].shape[1]
        pages = inputs["page_table"][inputs["slots"][b], parted // per_page]
        keys = inputs["block_keys"][pages, parted % per_page].double()
        q = inputs["index_q"][b, r].double()
        scores = (keys @ q.T).relu().sum(-1)
        size = float((keys.norm(dim=-1)[:, None] * q.norm(dim=-1)).sum(-1).max())
        assert float(scores.max() - scores.min()) <= 2 * (keys.shape[1] + q.shape[0] + 2) * 2.0**-24 * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("context", "plan"),
    [
        (0, {}),
        (11, {}),
        (15, {}),  # the last row alone has more blocks than it may keep
        (60, {}),
        (200, {"small": 16, "piece": 16}),  # four pieces of a row, the last one short
        (126, {"small": 16, "piece": 32}),  # 31 and 32 blocks: one full piece
        (130, {"small": 16, "piece": 32}),  # 33: the second piece has fewer blocks than a row may keep
    ],
    ids=str,
)
def test_selected_blocks_are_the_references(
    context: int, plan: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = select_inputs(2, 2, context, dtype)
    with poisoned_memory(monkeypatch):
        ours = qsa_select_triton(**inputs, **plan)
    assert_selected_alike(ours, qsa_select_reference(**inputs), inputs)


@pytest.mark.parametrize("plan", [{}, {"small": 4, "piece": 4}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selected_blocks_of_a_chunk_are_the_references(dtype: torch.dtype, plan: dict[str, int]) -> None:
    """37 rows, some within the budget, in runs of 16 (float32) or 64 rows: as many as the workspace takes.

    In pieces of 4 blocks, a row's one program goes through up to three of them.
    """
    inputs = select_inputs(1, 37, 2, dtype)
    ours = qsa_select_triton(**inputs, **plan, workspace_bytes=20 * 4 * 16)
    assert_selected_alike(ours, qsa_select_reference(**inputs), inputs)


@pytest.mark.parametrize("plan", [{}, {"small": 16, "piece": 16}], ids=str)
def test_ties_go_to_the_lower_block(plan: dict[str, int]) -> None:
    """Forty blocks of three keys over three pieces: copies of the best key in order, zero scores likewise."""
    inputs = select_inputs(1, 1, 159, BF16, topk=15)
    inputs["index_q"].fill_(1.0)
    at = torch.arange(40, device=DEVICE)
    pages, kinds = inputs["page_table"][1, at // 4], torch.tensor([1.0, 3.0, 2.0], device=DEVICE).repeat(14)[:40]
    inputs["block_keys"][pages, at % 4] = kinds[:, None].expand(40, 13).to(BF16)
    # 13 of the best kind, then the first two of the second
    wanted = sorted([*range(1, 40, 3), 2, 5])
    assert qsa_select_triton(**inputs, **plan)[0, 0].tolist() == wanted
    inputs["block_keys"].neg_()
    assert qsa_select_triton(**inputs, **plan)[0, 0].tolist() == list(range(15))


def test_a_selecting_rows_bits_are_its_own() -> None:
    """Rows and sequences alone, and other partitions of the work, choose the same among near ties."""
    inputs = select_inputs(2, 3, 90, BF16)
    # all keys all but equal: the last bits of the scores decide
    inputs["block_keys"] = (1 + 2.0**-7 * inputs["block_keys"].float().sign()).to(BF16)
    together = qsa_select_triton(**inputs)
    assert_same(qsa_select_triton(**inputs, small=8, piece=8), together)
    for b in range(2):
        for r in range(3):
            part = {
                "index_q": inputs["index_q"][b : b + 1, r : r + 1],
                "slots": inputs["slots"][b : b + 1],
                "first": inputs["first"][b : b + 1] + r,
            }
            assert_same(qsa_select_triton(**{**inputs, **part})[0, 0], together[b, r])


def test_unfinished_blocks_and_other_pages_are_not_read() -> None:
    inputs = select_inputs(2, 2, 37, FP32)
    wanted = qsa_select_reference(**inputs)
    keys = torch.full_like(inputs["block_keys"], torch.nan)
    for b in range(2):
        at = torch.arange((int(inputs["first"][b]) + 2) // 4, device=DEVICE)
        pages = inputs["page_table"][b + 1, at // 4]
        keys[pages, at % 4] = inputs["block_keys"][pages, at % 4]
    assert_same(qsa_select_triton(**{**inputs, "block_keys": keys}), wanted)


# ---------------------------------------------------------------------- attend


def attend_inputs(
    b: int, r: int, context: int, shape: SparseShape, dtype: torch.dtype, kv: torch.dtype
) -> dict[str, Any]:
    inputs: dict[str, Any] = qsa_attend_inputs(
        b, r, context, shape.heads, shape.kv_heads, shape.head_dim, shape.ratio, shape.topk, dtype, DEVICE
    )
    for name in ("keys", "values"):
        inputs[name] = inputs[name].to(kv)
    return inputs


@pytest.mark.parametrize(("dtype", "kv"), [(FP32, FP32), (BF16, BF16), (BF16, FP8)], ids=str)
@pytest.mark.parametrize(("context", "piece"), [(0, 64), (9, 64), (30, 16)], ids=str)
def test_attended_rows_lie_at_the_exact_result(
    context: int, piece: int, dtype: torch.dtype, kv: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First row of a text, everything kept, and more than fits: one, one and up to two pieces."""
    shape = replace(ODD, topk=7)
    inputs = attend_inputs(2, 2, context, shape, dtype, kv)
    with poisoned_memory(monkeypatch):
        ours = attend_triton(**inputs, piece=piece)
    assert_attended(ours, inputs, [0, 1])
    assert_attended(qsa_attend_reference(**inputs), inputs, [0, 1])


@pytest.mark.parametrize(("dtype", "kv"), [(FP32, FP32), (BF16, BF16), (BF16, FP8)], ids=str)
def test_a_chunks_rows_lie_at_the_exact_result(
    dtype: torch.dtype, kv: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """21 rows of which the first keep everything: tiles of rows, a tile on the boundary, rows that gather."""
    inputs = attend_inputs(1, 21, 3, replace(ODD, topk=4), dtype, kv)
    with poisoned_memory(monkeypatch):
        ours = attend_triton(**inputs)
    assert_attended(ours, inputs, list(range(21)))


@pytest.mark.parametrize("rows", [2, 18])
def test_only_kept_positions_are_read(rows: int) -> None:
    """NaN in other positions, other pages and page 0 reaches no result: zero times NaN is NaN."""
    inputs = attend_inputs(1, rows, 30, ODD, FP32, FP32)
    inputs["selected"][:] = inputs["selected"][:, :1]
    wanted = attend_triton(**inputs)
    page, table = inputs["keys"].shape[1], inputs["page_table"][1]
    keep = torch.cat([kept_positions(inputs["selected"][0, r], 30 + r, 4) for r in range(rows)]).unique()
    for name in ("keys", "values"):
        poisoned = torch.full_like(inputs[name], torch.nan)
        poisoned[table[keep // page], keep % page] = inputs[name][table[keep // page], keep % page]
        inputs[name] = poisoned
    assert_same(attend_triton(**inputs), wanted)


@pytest.mark.parametrize("programs", [5, 1000])
def test_rows_that_select_are_attended_alone(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are left as they are; a program goes through several pieces, and none where nobody selects."""
    monkeypatch.setattr(_attend_triton, "PROGRAMS", programs)
    inputs = attend_inputs(2, 3, 21, replace(ODD, topk=5), BF16, BF16)
    # rows 0 to 2 are at 21 to 23, and at 12 to 14
    inputs["first"] = inputs["first"] - torch.tensor([0, 9], device=DEVICE)
    wanted = attend_triton(**inputs, piece=16)
    left = torch.full_like(wanted, torch.nan)
    selecting = (inputs["first"][:, None] + torch.arange(3, device=DEVICE) + 1) // 4 > 5
    assert selecting.tolist() == [[False, False, True], [False, False, False]]
    ours = attend_triton(**inputs, piece=16, selecting=left)
    assert ours is left
    assert_same(ours[selecting], wanted[selecting])
    assert bool(ours[~selecting].isnan().all())
    short = {**inputs, "first": inputs["first"] - 5}
    assert bool(attend_triton(**short, piece=16, selecting=torch.full_like(wanted, torch.nan)).isnan().all())


@pytest.mark.filterwarnings("ignore:invalid value")  # the padding row's
def test_an_attending_rows_bits_are_its_own() -> None:
    """Beside other rows, beside a padding row at the scratch slot whose page holds NaN, and alone."""
    inputs = attend_inputs(3, 2, 21, replace(ODD, topk=5), BF16, BF16)
    inputs["slots"] = torch.tensor([2, 1, 0], device=DEVICE)
    inputs["first"][2] = 0
    inputs["selected"][2] = -1
    inputs["keys"][0] = inputs["values"][0] = torch.nan
    together = attend_triton(**inputs, piece=16)
    for b in range(2):
        for r in range(2):
            part = {name: inputs[name][b : b + 1, r : r + 1] for name in ("q", "gate", "selected")}
            part |= {"slots": inputs["slots"][b : b + 1], "first": inputs["first"][b : b + 1] + r}
            assert_same(attend_triton(**{**inputs, **part}, piece=16)[0, 0], together[b, r])


def test_large_scores_do_not_overflow() -> None:
    inputs = attend_inputs(1, 1, 20, ODD, BF16, BF16)
    inputs["q"] *= 1e4
    assert bool(torch.isfinite(attend_triton(**inputs, piece=16)).all())


# ---------------------------------------------------------------------- compiled for a GPU


def pointers(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def compiled_cases(dtype: str, kv: str, shape: SparseShape, names: str) -> list[Case]:
    """The named kernels as the launchers specialise them for a shape, one decode row and a chunk."""
    room, s, narrow = "stepfloor.kernels.qsa_", shape, dtype == "*fp32"
    block_d, block_i = 1 << (s.head_dim - 1).bit_length(), 1 << (s.index_dim - 1).bit_length()
    where = pointers("slots_ptr first_ptr page_table_ptr", "*i64")
    heads = {"HEADS": s.heads, "KV_HEADS": s.kv_heads, "DIM": s.head_dim, "RATIO": s.ratio, "PAGE": 64, "PDL": True}
    prepare = (
        pointers("projected_ptr cos_ptr sin_ptr block_keys_ptr raw_keys_ptr q_ptr gate_ptr index_q_ptr", dtype)
        | pointers("norm_q_ptr norm_k_ptr norm_index_q_ptr norm_index_k_ptr", "*fp32")
        | pointers("keys_ptr values_ptr", kv)
        | pointers("columns pages", "i32")
    )
    index = {"INDEX_HEADS": s.index_heads, "INDEX_DIM": s.index_dim, "ROTARY": s.index_dim // 2, "RING": 11}
    blocks = {"BLOCK_D": block_d, "BLOCK_I": block_i, "BLOCK_HALF": s.index_dim // 4, "BLOCK_RING": 16}
    blocks |= {"UNITS": 1 + s.kv_heads + s.index_heads + s.heads, "SETTLED": True}
    cases = [Case(f"{room}prepare", "_prepare_kernel", prepare | where | {"eps": "fp32"}, heads | index | blocks, 1)]
    score = pointers("index_q_ptr block_keys_ptr", dtype) | pointers("rows row0 count stride pages", "i32")
    score |= where | {"scores_ptr": "*fp32", "arrived_ptr": "*i32"}
    for m, n in ((16, 32),) if narrow else ((16, 128), (64, 64)):
        constants = {"PER_PAGE": 16, "ROOT": 11.3, "HEADS": s.index_heads, "DIM": s.index_dim, "RATIO": s.ratio}
        constants |= {"TOPK": s.topk, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_I": max(16, block_i), "PDL": True}
        cases.append(Case(f"{room}select", "_score_kernel", score, constants))
    attend = pointers("keys_ptr values_ptr", kv) | {"q_ptr": dtype, "selected_ptr": "*i64"} | where
    attend |= pointers("rows pages", "i32") | {"scale": "fp32"}
    pieces = pointers("count pieces", "i32")
    tile = {"TOPK": s.topk, "BLOCK_H": 16, "BLOCK_D": block_d}
    piece = attend | pieces | pointers("partial_ptr largest_ptr sum_ptr", "*fp32")
    for selecting in (False, True):
        constants = {"PIECE": 64, "SELECTING": selecting, "BLOCK_B": 16}
        cases.append(Case("stepfloor.kernels._attend_triton", "_piece_kernel", piece, heads | tile | constants))
    chunk = attend | pointers("gate_ptr output_ptr", dtype)
    tile |= {"TILE_ROWS": 1 if narrow else 8, "BLOCK_N": 16 if narrow else 64}
    cases.append(Case("stepfloor.kernels._attend_triton", "_dense_kernel", chunk, heads | tile, 4 if narrow else 8))
    cases.append(Case("stepfloor.kernels._attend_triton", "_gather_kernel", chunk, heads | tile))
    return [case for case in cases if case.name.split("_")[1] in names.split()]


def test_kernels_compile() -> None:
    cases = compiled_cases("*bf16", "*bf16", MODEL, "prepare score piece dense gather")
    cases += compiled_cases("*bf16", "*fp8e4nv", SMALL, "prepare piece dense")
    cases += compiled_cases("*fp32", "*fp32", replace(ODD, head_dim=24), "score piece")
    choose = pointers("scores_ptr", "*fp32") | pointers("first_ptr selected_ptr", "*i64")
    choose |= pointers("arrived_ptr candidate_bits_ptr candidate_blocks_ptr", "*i32")
    choose |= pointers("rows row0 count stride width", "i32")
    for piece, pieces in ((64, 1), (8192, 9)):
        constants = {"RATIO": 4, "TOPK": 512, "BLOCK_K": 512, "SMALL": min(piece, 4096), "PIECE": piece}
        constants |= {"PIECES": pieces, "BLOCK_FINAL": 8192 if pieces > 1 else 512, "PDL": True}
        cases.append(Case("stepfloor.kernels.qsa_select", "_choose_kernel", choose, constants, 16))
    join = pointers("partial_ptr largest_ptr sum_ptr", "*fp32") | pointers("gate_ptr output_ptr", "*bf16")
    join |= {"first_ptr": "*i64", "rows": "i32"}
    constants = {
        "SELECTING": True,
        "RATIO": 4,
        "TOPK": 512,
        "HEADS": 24,
        "DIM": 256,
        "PIECES": 33,
        "JOINED": 16,
        "BLOCK_P": 64,
        "BLOCK_D": 256,
        "PDL": True,
    }
    for selecting in (False, True):
        cases.append(
            Case("stepfloor.kernels._attend_triton", "_join_kernel", join, {**constants, "SELECTING": selecting})
        )
    assert_compiles(cases)


# ---------------------------------------------------------------------- on a GPU, the model's shapes


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", [MODEL, SMALL], ids=["model", "small"])
@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
@pytest.mark.parametrize(
    ("b", "r", "context"),
    [(1, 1, 0), (1, 1, 703), (4, 4, 8189), (16, 5, 700), (2, 8, 2046), (1, 3000, 5), (1, 8192, 0)],
)
def test_prepare_on_a_gpu(
    b: int, r: int, context: int, kv: torch.dtype, shape: SparseShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prepare_inputs(b, r, context, shape, BF16, kv)
    wanted, ours, again = copied(inputs), copied(inputs), copied(inputs)
    reference = qsa_prepare_reference(**wanted)
    with poisoned_memory(monkeypatch):
        output = qsa_prepare(**ours)
    assert_prepared_alike(output, reference, (ours["cache"], wanted["cache"]), shape)
    assert_same(qsa_prepare(**again), output)
    for name in CACHES:
        assert_same(bits(getattr(again["cache"], name)), bits(getattr(ours["cache"], name)))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("b", "r", "context"),
    [(1, 1, 700), (1, 1, 131071), (1, 5, 262160), (4, 4, 8200), (16, 5, 2045), (2, 8, 40000), (3, 2, 32766)],
)
def test_select_on_a_gpu(b: int, r: int, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across the pieces of a row (32768 tokens), and the last row alone bit for bit."""
    inputs: dict[str, Any] = qsa_select_inputs(b, r, context, 4, 128, 4, 512, BF16, "cuda")
    inputs["first"] = inputs["first"] - 3 * torch.arange(b, device="cuda")
    with poisoned_memory(monkeypatch):
        ours = qsa_select(**inputs)
    assert_selected_alike(ours, qsa_select_reference(**inputs), inputs)
    alone = {
        "index_q": inputs["index_q"][-1:, -1:],
        "slots": inputs["slots"][-1:],
        "first": inputs["first"][-1:] + r - 1,
    }
    for _ in range(20):
        assert_same(qsa_select(**{**inputs, **alone})[0, 0], ours[-1, -1])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("rows", "context"), [(8192, 0), (700, 131000), (17, 2040)])
def test_select_of_a_chunk_on_a_gpu(rows: int, context: int) -> None:
    inputs: dict[str, Any] = qsa_select_inputs(1, rows, context, 4, 128, 4, 512, BF16, "cuda")
    assert_selected_alike(qsa_select(**inputs), qsa_select_reference(**inputs), inputs)


@pytest.mark.gpu
@GPU
def test_ties_over_a_long_text_on_a_gpu() -> None:
    """65536 blocks of three keys: 21846 tie for the best, over all pieces."""
    inputs: dict[str, Any] = qsa_select_inputs(1, 1, 262143, 4, 128, 4, 512, BF16, "cuda")
    inputs["index_q"].fill_(1.0)
    inputs["block_keys"].fill_(1.0)
    at = torch.arange(0, 65536, 3, device="cuda")
    inputs["block_keys"][inputs["page_table"][1, at // 4], at % 4] = 2.0
    assert_same(qsa_select(**inputs)[0, 0], at[:512])
    inputs["block_keys"].fill_(-1.0)
    assert_same(qsa_select(**inputs)[0, 0], torch.arange(512, device="cuda"))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", [MODEL, SMALL], ids=["model", "small"])
@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
@pytest.mark.parametrize(("b", "r", "context"), [(1, 1, 0), (1, 1, 700), (4, 4, 2047), (16, 5, 9000), (2, 8, 2050)])
def test_attend_on_a_gpu(
    b: int, r: int, context: int, kv: torch.dtype, shape: SparseShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = attend_inputs(b, r, context, shape, BF16, kv)
    with poisoned_memory(monkeypatch):
        ours = qsa_attend(**inputs)
    assert_attended(ours, inputs, list(range(r)))
    part = {name: inputs[name][-1:, -1:] for name in ("q", "gate", "selected")}
    part |= {"slots": inputs["slots"][-1:], "first": inputs["first"][-1:] + r - 1}
    assert_same(qsa_attend(**{**inputs, **part})[0, 0], ours[-1, -1])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", [MODEL, SMALL], ids=["model", "small"])
@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
@pytest.mark.parametrize(("rows", "context"), [(8192, 0), (300, 1900), (100, 20000)])
def test_attend_of_a_chunk_on_a_gpu(
    rows: int, context: int, kv: torch.dtype, shape: SparseShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = attend_inputs(1, rows, context, shape, BF16, kv)
    with poisoned_memory(monkeypatch):
        ours = qsa_attend(**inputs)
    boundary = range(4 * shape.topk - context - 6, 4 * shape.topk - context + 12)
    sample = {0, 1, rows - 1, *range(0, rows, 89), *boundary}
    assert_attended(ours, inputs, sorted(row for row in sample if 0 <= row < rows))
    assert bool(torch.isfinite(ours).all())


@pytest.mark.gpu
@GPU
def test_graph_replay_equals_eager() -> None:
    """Slots and positions are read on the device, when the graph runs: dense rows, sparse rows, and a padding row."""
    inputs = prepare_inputs(4, 4, 9000, MODEL, BF16, BF16)
    other = copied(inputs)
    inputs["first"] = torch.tensor([8999, 100, 2046, 1500], device="cuda")
    other["slots"] = torch.tensor([3, 1, 4, 0], device="cuda")
    other["first"] = torch.tensor([5, 7000, 2043, 0], device="cuda")

    def layer(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, gate, index_q = qsa_prepare(**x)
        where, cache = (x["slots"], x["first"]), x["cache"]
        selected = qsa_select(index_q, *where, cache.block_keys, cache.page_table, 4, 512)
        return qsa_attend(q, gate, selected, *where, cache.keys, cache.values, cache.page_table, 4), selected

    held = copied(inputs)
    layer(copied(inputs))  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, selected = layer(held)
    for values in (inputs, other):
        for name in ("projected", "slots", "first"):
            held[name].copy_(values[name])
        for name in CACHES:
            getattr(held["cache"], name).copy_(getattr(values["cache"], name))
        output.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = copied(values)
        attended, chosen = layer(expected)
        assert_same(selected, chosen)
        assert_same(output, attended)
        for name in CACHES:
            assert_same(bits(getattr(held["cache"], name)), bits(getattr(expected["cache"], name)))
