"""bench step on the CPU with the small model's shape, and what it makes of a trace."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import stepfloor
from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.engine import Engine
from stepfloor.errors import UserError
from stepfloor.tools.bench import step as bench
from stepfloor.tools.bench.profile import Event, summarise
from stepfloor.tools.bench.step import (
    MIXES,
    Cell,
    ExpertCounter,
    Plan,
    bench_steps,
    random_checkpoint,
    run_and_report,
    why_void,
)
from stepfloor.weights.checkpoint import Checkpoint
from tests.checkpoints import tiny_config

FULL = Path(stepfloor.__file__).parent / "shipped/full_config.json"


def plan(**changes: object) -> Plan:
    base = {"format": "a", "sequences": (2,), "spec_tokens": (2,), "contexts": (40,), "acceptance": 2, "steps": 5}
    return Plan(**{**base, "device": "cpu", "prefill_tokens": 16, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("mix", ["a", "c", "fp8"])
def test_a_cell_is_what_it_says(tmp_path: Path, mix: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = random_checkpoint(ModelConfig.read(tiny_config(tmp_path)), MIXES[mix])
    run_and_report(checkpoint, plan(format=mix), True, "abc", tmp_path / "line.json")
    out, err = capsys.readouterr()
    record = json.loads(out.splitlines()[-1])
    assert record == json.loads((tmp_path / "line.json").read_text())
    (cell,) = record["cells"]
    assert (cell["sequences"], cell["spec_tokens"], cell["steps"], cell["acceptance"]) == (2, 2, 5, 2)
    assert cell["tokens_per_step"] == pytest.approx(2.0)
    assert cell["tokens_per_s"] == pytest.approx(2 * 2.0 / cell["step_ms"] * 1e3)
    assert cell["fraction"] == pytest.approx(cell["floor_ms"] / cell["step_ms"])
    assert record["facts"]["prefill_tokens_per_s"] > 0
    assert "loaded in" in err


def test_a_run_that_is_cut_leaves_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = random_checkpoint(ModelConfig.read(tiny_config(tmp_path)), MIXES["a"])
    output, measure, seen = tmp_path / "line.json", bench._measure, []

    def cut(*arguments: object) -> Cell:
        if output.is_file():
            seen.append(len(json.loads(output.read_text())["cells"]))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measure(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bench, "_measure", cut)
    with pytest.raises(KeyboardInterrupt):
        run_and_report(checkpoint, plan(sequences=(1, 2, 4), count_experts=False), True, "abc", output)
    assert seen == [0, 1, 2]
    assert len(json.loads(output.read_text())["cells"]) == 2
    assert capsys.readouterr().out.count("\n") == 3  # the heading and two rows


def test_room_as_a_server_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of an engine are as wide as it may be asked for, not as the cell needs."""
    configs, engine = [], bench.Engine

    def noted(checkpoint: Checkpoint, config: EngineConfig, **rest: Any) -> Engine:
        configs.append(config)
        return engine(checkpoint, config, **rest)

    monkeypatch.setattr(bench, "Engine", noted)
    checkpoint = random_checkpoint(ModelConfig.read(tiny_config(tmp_path)), MIXES["a"])
    (cell,), _ = bench_steps(checkpoint, plan(max_model_len=500, prefill_tokens=0, count_experts=False), print, True)
    assert {config.max_model_len for config in configs} == {500}
    assert cell.step_ms > 0


def test_a_step_with_few_experts_is_seen() -> None:
    """A mean hides a step whose rows agree; the counts of a step are kept until its last layer."""
    first, last, drafter = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    model = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=2, num_experts=9),
        drafter=SimpleNamespace(layer=drafter),
        embedding=torch.empty(1),
        layers=(first, last),
    )
    counter = ExpertCounter(cast(Any, model), 2)

    def step(*chosen: list[list[int]]) -> None:
        for layer, ids in zip((first, last), chosen, strict=True):
            counter(cast(Any, layer), torch.tensor(ids))
        counter(cast(Any, drafter), torch.tensor([[0, 1], [2, 3]]))

    step([[0, 1], [0, 1]], [[0, 1], [0, 1]])
    counter.begin()
    step([[0, 1], [2, 3]], [[8, 7], [6, 5]])
    counter(cast(Any, first), torch.tensor([[0, 1], [2, 3], [4, 5]]))  # a prompt's
    step([[0, 1], [1, 2]], [[4, 4], [4, 4]])
    assert counter.counted(2) == (2.0, 3.0, 4.0)


def test_routing_that_is_not_uniform_voids_a_cell() -> None:
    full = ModelConfig.read(FULL)
    # 4 rows of 48 layers: uniform routing has 38.8
    assert why_void((38.4, 38.8, 39.2), 4, full) is None
    assert "33.0 to 39.0" in (why_void((33.0, 38.8, 39.0), 4, full) or "")
    assert "34.1 in the mean" in (why_void((34.0, 34.1, 34.2), 4, full) or "")
    # few layers of few experts: steps differ by more
    small = replace(full, num_experts=8, num_experts_per_tok=2, layer_types=full.layer_types[:4])
    assert why_void((2.5, 3.5, 4.0), 2, small) is None
    assert why_void((10.0, 10.0, 10.0), 1, full) is None
    assert why_void((1.0, 1.0, 1.0), 4, replace(full, num_experts=1, num_experts_per_tok=1)) is None


def test_real_acceptance_is_measured(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(ModelConfig.read(tiny_config(tmp_path)), MIXES["a"])
    cells, _ = bench_steps(checkpoint, plan(acceptance=None, prefill_tokens=0, count_experts=False), print, True)
    assert isinstance(cells[0], Cell)
    assert cells[0].acceptance is None
    assert 1.0 <= cells[0].tokens_per_step <= 3.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_cache_dtype": "fp16"}, "--kv-cache-dtype"),
        ({"ngram_table": "disk"}, "--ngram-table"),
        ({"spec_tokens": (8,)}, "0 to 7"),
        (
            {"max_model_len": 100},
            "--context 40 with 5 steps of 2 drafts needs 2[0-9]* tokens, and --max-model-len is 100",
        ),
        ({"contexts": (10**6,)}, "the model's context is"),
    ],
)
def test_what_is_no_choice_is_refused_before_loading(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """A cell once ran as auto and was recorded as what had been asked for."""
    checkpoint = random_checkpoint(ModelConfig.read(tiny_config(tmp_path)), MIXES["a"])
    with pytest.raises(UserError, match=says):
        bench_steps(checkpoint, plan(**change), print, True)


def test_no_gpu_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    checkpoint = random_checkpoint(ModelConfig.read(tiny_config(tmp_path)), MIXES["a"])
    with pytest.raises(UserError, match="finds 0 CUDA devices"):
        bench_steps(checkpoint, plan(device="cuda"), print, True)


def test_a_trace_is_credited_to_the_nanosecond() -> None:
    """Overlapping kernels must not be counted twice, and idle time goes to the right place."""
    events = []
    for step in range(3):
        at = step * 100_000
        events += [
            Event("_begin_rows_kernel", True, at, at + 10_000),
            Event("linear_kernel", True, at + 5_000, at + 50_000),  # starts early
            Event("moe_down_kernel", True, at + 60_000, at + 80_000),
            Event("Memcpy DtoH (Device -> Pinned)", True, at + 85_000, at + 90_000),
            Event("cudaGraphLaunch", False, at, at + 3_000),
        ]
    events.append(Event("cudaEventSynchronize", False, 120_000, 130_000))
    events.append(Event("Memcpy HtoD (Pageable -> Device)", True, 190_000, 195_000))
    profile = summarise(events)
    assert (profile.steps, profile.kernels, profile.copies, profile.graph_launches) == (2, 3, 1.5, 1)
    assert profile.synchronising == (("cudaEventSynchronize", 1),)
    assert profile.pageable_copies == 1
    us = {operator.name: operator.us for operator in profile.operators}
    assert (us["_begin_rows_kernel"], us["linear_kernel"], us["moe_down_kernel"]) == (10, 40, 20)
    assert profile.idle_us == pytest.approx(10 + 5)
    assert profile.gap_us == pytest.approx((10 + 5) / 2)
    assert sum(us.values()) + profile.idle_us + profile.gap_us == pytest.approx(100)
