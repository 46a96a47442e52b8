"""bench matrix: cells of decode alone, a file that goes on, and where a curve bends."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepfloor.errors import UserError
from stepfloor.tools.bench import matrix
from stepfloor.tools.bench.load import Load
from stepfloor.tools.bench.matrix import Grid, decode_metrics, knee, run
from stepfloor.tools.bench.result import Request, Result, read_results
from tests.tools.bench.stub_server import Script, stub

SCRIPT = Script(first_ms=20, gap_ms=10, tokens_per_chunk=3)
GRID = Grid((1, 2), (0, 64), 0.5, "decode", Load(output_len="900"))


@pytest.fixture(autouse=True)
def _settles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "SETTLE_S", 0.05)


def codes(result: Result) -> set[str]:
    return {flag.code for flag in result.flags if flag.invalidates}


def invalid(result: Result) -> set[str]:
    """Codes, without the one of a busy machine."""
    return codes(result) - {"client_overloaded"}


def test_a_decode_cell_counts_tokens_of_its_window_only() -> None:
    """Guards against: prefill in a rate of decode. Two users, tokens each 0.1 s, the second 1 s later."""

    def user(index: int, first: float) -> Request:
        chunks = tuple(first + i / 10 for i in range(41))
        return Request(
            index, 0.0, 0.0, chunks[0], chunks[-1], chunks[-1] + 0.1, chunk_s=chunks,
            chunk_tokens=tuple(2 * (i + 1) for i in range(41)), output_tokens=82, cut=True,
        )  # fmt: skip

    metrics = decode_metrics([user(0, 0.5), user(1, 1.5)], 1.55, 3.55, 0)
    assert metrics["output_throughput"].value == pytest.approx(2 * 20 * 2 / 2.0)
    assert metrics["per_user_rate"].value == pytest.approx(20)
    assert metrics["tpot_ms"].value == pytest.approx(50)
    assert metrics["itl_ms"].value == pytest.approx(100)
    assert metrics["ttft_ms"].value == pytest.approx(1000)
    assert metrics["effective_concurrency"].value == pytest.approx(2)


def test_a_matrix_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """B08, B17. Guards against: a finished cell measured again, cells of two loads in one file."""
    path = tmp_path / "m.jsonl"

    def slow_prefill(number: int, body: Mapping[str, Any]) -> Script:
        return replace(SCRIPT, first_ms=20 + 100 * (number % 2))

    with stub(slow_prefill, drafts=3) as server:
        results = run(server.url, GRID, path)
        assert [(r.load["concurrency"], r.load["context"]) for r in results] == [(1, 0), (2, 0), (1, 64), (2, 64)]
        for result in results:
            assert invalid(result) == set()
            users = result.load["concurrency"]
            if "client_overloaded" not in codes(result):
                # 3 tokens each 10 ms and user, however long the prompts took. At either end of the window a user's
                # chunk may fall on either side, and be up to 10 ms, one gap, late in a process that was in time
                chunk = 3 * users / (result.window_s or 1)
                assert result.metrics["output_throughput"].value == pytest.approx(300 * users, abs=4 * chunk)
            assert result.metrics["acceptance_length"].value == pytest.approx(3)
            assert [r.prompt_tokens for r in result.requests] == [max(32, result.load["context"])] * users
        prompts = [str(served.body["prompt"]) for served in server.served]
        assert len(set(prompts)) == len(prompts)

        count = len(server.served)
        assert run(server.url, GRID, path) == results
        assert len(server.served) == count
        more = run(server.url, replace(GRID, concurrency=(1, 2, 3), context=(0,)), path)
        assert [r.load["concurrency"] for r in more] == [1, 2, 3]
        assert len(read_results(path)) == 5
        with pytest.raises(UserError, match=r"measured with cell_seconds 0\.5, and now it is 9"):
            run(server.url, replace(GRID, seconds=9), path)
        with pytest.raises(UserError, match="another --seed"):
            run(server.url, replace(GRID, load=replace(GRID.load, seed=1)), path)


def test_cells_that_are_no_measurement_are_marked(tmp_path: Path) -> None:
    """Guards against: a cell that did not fit, or whose tokens are not counted, as a number in the table."""
    path = tmp_path / "m.jsonl"
    with stub(replace(SCRIPT, usage=False)) as server:
        small = Grid((1,), (0, 131_072), 0.2, "decode", Load(output_len="300"))
        uncounted, too_long = run(server.url, small, path)
        assert invalid(uncounted) == {"usage_missing"}
        assert invalid(too_long) == {"does_not_fit"}
        assert too_long.metrics == {}
        server.script_of = lambda number, body: SCRIPT
        again = run(server.url, small, path, again=True)
    assert invalid(again[0]) == set()
    assert [len(r.requests) for r in read_results(path)] == [1, 0]


def test_whole_cells_are_runs_of_bench_serve() -> None:
    """Guards against: a matrix that means something else by the same names."""
    with stub(SCRIPT) as server:
        load = Load(num_prompts=4, output_len="12")
        (result,) = run(server.url, Grid((2,), (40,), 1.0, "whole", load), None)
    assert result.kind == "matrix cell"
    assert len(result.requests) == 4
    assert result.metrics["total_throughput"].value == pytest.approx(4 * 52 / (result.window_s or 1))


@pytest.mark.parametrize(
    ("points", "found"),
    [
        ([(1, 100), (2, 190), (4, 340), (8, 380)], 4),
        ([(1, 100), (2, 110), (4, 120)], 1),
        ([(1, 100), (2, 190), (4, 360), (8, 700)], None),
        ([(8, 380), (1, 100), (4, 340), (2, 190)], 4),
        ([(1, 100), (2, 190)], None),
    ],
)
def test_the_knee_is_where_one_more_brings_little(points: list[tuple[int, float]], found: int | None) -> None:
    """B18. Guards against: a knee that depends on the order of cells or is found in two points."""
    assert knee(points)[0] == found
