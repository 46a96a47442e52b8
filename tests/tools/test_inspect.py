"""What `inspect` prints is what the files hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepfloor import cli
from stepfloor.tools.inspect import show, summary
from stepfloor.weights.checkpoint import open_checkpoint
from stepfloor.weights.expected import CATEGORIES
from tests.checkpoints import ALL_RELEASES, Copy, make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {release: make_tiny(root, release) for release in ALL_RELEASES}


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_categories_add_up_to_the_total(tiny: dict[str, Path], release: str) -> None:
    report = summary(open_checkpoint(tiny[release]))
    assert sum(c["bytes"] for c in report["categories"]) == report["bytes"]
    assert {c["category"] for c in report["categories"]} == set(CATEGORIES)


def test_formats_are_told_apart_within_a_category(tiny: dict[str, Path]) -> None:
    report = summary(open_checkpoint(tiny["fp8dense-mtp"]))
    held = {(c["category"], c["format"]) for c in report["categories"]}
    assert {
        ("routed experts", "nvfp4"),
        ("drafter experts", "fp8_block"),
        ("drafter, rest", "fp8_channel"),
        ("drafter, rest", "bf16"),
        ("gated delta net", "fp8_channel"),
        ("hyper-connections", "fp8_channel"),
        ("lm_head", "fp8_channel"),
        ("n-gram table", "fp8_tensor"),
        ("norms and other", "int64"),
    } <= held


def test_official_fp8_release_reads_more_dense_bytes_than_fp8dense(tiny: dict[str, Path]) -> None:
    def dense(release: str) -> int:
        report = summary(open_checkpoint(tiny[release]))
        kinds = ("gated delta net", "sparse attention", "hyper-connections", "shared experts", "lm_head")
        return sum(c["bytes"] for c in report["categories"] if c["category"] in kinds)

    assert dense("fp8") > 1.6 * dense("fp8dense")


def test_json_is_one_object(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["stepfloor", "inspect", str(tiny["nvfp4"]), "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["table"]["format"] == "fp8_tensor"
    assert report["table"]["rows_per_token"] == 8
    assert [f["kind"] for f in report["findings"]] == ["metadata"]
    rules = {p["group"]: p["rule"] for p in report["precisions"]}
    assert rules["layers.*.mlp.experts"] == "quant_algo"
    assert rules["layers.*.self_attn.q_proj"] == "ignore '*.self_attn.*'"


def test_table_for_people_names_sizes_and_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Copy.of(make_tiny(tmp_path, "nvfp4"), tmp_path / "copy")
    copy.put("model.visual.patch_embed.weight", "BF16", [2], bytes(4))
    show(open_checkpoint(copy.save()))
    printed = capsys.readouterr().out
    assert "4 layers (3 gated delta net, 1 sparse attention), 2 of 2 experts, with drafter" in printed
    assert "vision tower (not loaded)" in printed
    assert "routed experts: 4 modules in nvfp4, claimed by quant_algo" in printed
    assert "note (metadata): layers.1.ple.ple_embedding.ngram_embedding" in printed


def test_a_layout_is_inspected_without_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["stepfloor", "inspect", "qwen3.8-flash-next:bf16", "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] + report["vision_bytes"] == 359_999_963_128
    assert report["table"]["shards"] == 128


def test_inspect_loads_no_torch(tiny: dict[str, Path]) -> None:
    program = (
        "import sys; from stepfloor.weights.checkpoint import open_checkpoint; "
        "from stepfloor.tools.inspect import summary; summary(open_checkpoint(sys.argv[1])); "
        "assert not {'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny["bf16"])], check=True, env={"PYTHONPATH": "src"})
