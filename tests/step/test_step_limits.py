"""What a step takes at most, and how long it is waited for."""

import pytest
import torch

from stepfloor import config as engine_config
from stepfloor.config import EngineConfig
from stepfloor.errors import UserError
from stepfloor.kernels import hc_down, hc_mix, linear, moe_route
from stepfloor.step import step
from tests.roofline.released import RELEASED

MOST = engine_config.MAX_DECODE_ROWS


@pytest.mark.parametrize("operator", [linear, hc_down, hc_mix, moe_route])
def test_the_limit_is_that_of_the_kernels(operator: object) -> None:
    """Past it an operator goes another way, whose sums have other bits."""
    assert operator.MAX_ROWS == MOST  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sequences", "k", "ranges"),
    [(16, 4, ()), (80, 0, ()), (20, 3, ()), (16, 7, ((1, 8, 7), (9, 16, 4)))],
)
def test_as_many_rows_as_kernels_serve(sequences: int, k: int, ranges: tuple[tuple[int, int, int], ...]) -> None:
    EngineConfig(k, ranges, max_num_seqs=sequences, device="cuda").check(RELEASED)


@pytest.mark.parametrize(
    ("sequences", "k", "ranges", "rows"),
    [(16, 5, (), 96), (81, 0, (), 81), (21, 3, (), 84), (16, 7, ((9, 16, 4),), 80)],
)
def test_more_rows_are_refused_on_a_gpu(
    sequences: int, k: int, ranges: tuple[tuple[int, int, int], ...], rows: int
) -> None:
    asked = EngineConfig(k, ranges, max_num_seqs=sequences, device="cuda")
    if rows > MOST:
        with pytest.raises(UserError, match=rf"at most {MOST} rows.* make {rows}"):
            asked.check(RELEASED)
    else:
        asked.check(RELEASED)
    EngineConfig(k, ranges, max_num_seqs=sequences).check(RELEASED)


def test_a_chunk_fits_a_grid() -> None:
    EngineConfig(max_num_batched_tokens=65_535).check(RELEASED)
    with pytest.raises(UserError, match="at most 65535; got 65536"):
        EngineConfig(max_num_batched_tokens=65_536).check(RELEASED)


def test_pages_hold_one_sequence_at_least_and_all_at_most() -> None:
    """Else a request would wait for ever, or memory be taken that nobody can use."""

    def check(pages: int) -> None:
        asked = EngineConfig(spec_tokens=0, max_num_seqs=3, max_model_len=640, num_gpu_blocks_override=pages)
        asked.check(RELEASED)

    check(11)
    check(33)
    for pages in (0, 10, 34, 100_000_000):
        with pytest.raises(UserError, match=f"must be 11 to 33, .* got {pages}$"):
            check(pages)


def test_a_step_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def query(self) -> bool:
            return False

    monkeypatch.setattr(step, "_LIMIT_S", 0.01)
    with pytest.raises(RuntimeError, match=r"slots \[3, 5\]"):
        step.Report((3, 5), torch.zeros(2, 1), Never()).wait()  # type: ignore[arg-type]
