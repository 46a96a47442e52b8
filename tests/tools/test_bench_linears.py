"""bench step --linears: which products it times, and what it says of them. Times on a CPU mean nothing."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stepfloor.cli import app
from stepfloor.config import ModelConfig
from stepfloor.errors import UserError
from stepfloor.formats.codec import PackedWeight
from stepfloor.tools.bench import linears
from stepfloor.tools.bench.linears import Timed, products, run_and_report_linears, summary


def test_products_are_those_of_the_full_model() -> None:
    """Sizes of the architecture: a joined projection that lost a part would be timed at the wrong size."""
    config = ModelConfig.read(Path(str(resources.files("stepfloor").joinpath("shipped", "full_config.json"))))
    found = {p.name: (p.n, p.k) for p in products(config)}
    assert found == {
        "head": (248320, 2560),
        "delta net in": (16480, 2560),
        "delta net out": (2560, 6144),  # attention's is the same
        "attention in": (13952, 2560),
        "router and shared": (1793, 2560),
        "n-gram key, value": (12800, 2560),
        "drafter in": (2560, 2560),
        "shared down": (2560, 640),
        "hc down": (324, 10240),
        "hc up": (10240, 320),
    }


def test_every_product_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig.read(Path(str(resources.files("stepfloor").joinpath("shipped", "config.json"))))
    config = replace(config, vocab_size=512)
    run_and_report_linears(config, "cpu", "abc", tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    rows = [line for line in capsys.readouterr().out.splitlines() if " x " in line and "N x K" not in line]
    assert len(rows) == len(record["linears"])
    # K of 16 and of 48 have no blocks of 32: two products, one of two formats, have fewer
    assert {(r["format"], r["rows"]) for r in record["linears"]} == {
        (f, m) for f in linears.TIMED_FORMATS for m in linears.ROWS
    }
    assert all(r["us"] > 0 and r["worst"] <= 1 for r in record["linears"])


def test_a_wrong_product_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedWeight("bf16", (16, 32), torch.randn(16, 32).to(torch.bfloat16))
    x = torch.randn(3, 32).to(torch.bfloat16)
    good = linears.linear(x, (packed,))
    monkeypatch.setattr(linears, "linear", lambda x, weights: good + 0.25 * good.abs().max())
    with pytest.raises(RuntimeError, match="times the bound"):
        linears._check(linears.Product("p", 16, 32), x, packed, packed)


def test_a_failure_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = ModelConfig.read(Path(str(resources.files("stepfloor").joinpath("shipped", "config.json"))))
    check = linears._check

    def broken(product: linears.Product, x: torch.Tensor, packed: PackedWeight, weight: PackedWeight) -> float:
        if packed.format == "mxfp8" and product.name == "attention in":
            raise RuntimeError("3.00 times the bound")
        return check(product, x, packed, weight)

    monkeypatch.setattr(linears, "_check", broken)
    monkeypatch.setattr(linears, "ROWS", (1,))
    with pytest.raises(UserError, match="1 products have no times: attention in in mxfp8"):
        run_and_report_linears(replace(config, vocab_size=512), "cpu", "abc", tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["failed"] == ["attention in in mxfp8: 3.00 times the bound"]
    timed = {r["format"] for r in record["linears"] if r["name"] == "attention in"}
    assert timed == set(linears.TIMED_FORMATS) - {"mxfp8"}


def test_marks() -> None:
    base = Timed(
        "head", 248320, 2560, False, "bf16", 1, 280, "cuBLAS", 300, 0.93, 0.92, 0.95, 1_271_398_400, 0.97, 0.85, 0.5
    )
    assert base.verdicts == ("against cuBLAS met", "85 % met")
    close = replace(base, high=1.01, fraction=0.84)
    assert close.verdicts == ("against cuBLAS unresolved", "85 % missed")
    assert replace(base, rows=64).verdicts == ()
    assert summary([base, close]).splitlines()[0] == "2 of 4 marks met"


def test_the_flag_times_products_and_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(linears, "run_and_report_linears", lambda *given: asked.append(given))
    small = str(resources.files("stepfloor").joinpath("shipped", "config.json"))
    output = tmp_path / "out.json"
    command = ["bench", "step", "--linears", "--device", "cpu", "--config", small, "--commit", "abc"]
    result = CliRunner().invoke(app, [*command, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert asked == [(ModelConfig.read(Path(small)), "cpu", "abc", output)]
