"""What `floor` prints is what the byte model says, and what it cannot answer it refuses in a sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepfloor import cli
from stepfloor.errors import UserError
from stepfloor.roofline.floor import checkpoint_step_bytes
from stepfloor.tools.floor.bars import bar
from stepfloor.tools.floor.report import answer, ask, memory
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from stepfloor.weights.releases import open_layout
from tests.checkpoints import make_tiny


@pytest.fixture(scope="module")
def bf16() -> Checkpoint:
    return open_layout("qwen3.8-flash-next:bf16")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "nvfp4")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["stepfloor", "floor", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code
    return code if isinstance(code, int) else 1


def test_the_report_is_the_byte_model(bf16: Checkpoint) -> None:
    report = answer(bf16, ask(bf16.config, "h200", spec_tokens=2, sequences=3, context=5000))
    step = checkpoint_step_bytes(bf16.config, bf16.weights, 3, 2, 5000)
    now = report["now"]
    assert now["step_bytes"] == pytest.approx(step.total)
    assert now["target_bytes"] == pytest.approx(step.target.total)
    assert sum(c["target_bytes"] + c["draft_bytes"] for c in now["components"]) == pytest.approx(step.total)
    assert now["floor_ms"] == pytest.approx(step.total / 4650e6)
    assert sum(now["categories"].values()) == pytest.approx(step.total)


def test_levers_of_the_first_release(bf16: Checkpoint) -> None:
    """bf16 experts are the largest lever; what is saved together is less than the sum of what each saves."""
    report = answer(bf16, ask(bf16.config, "gb10"))
    *single, together = report["levers"]
    assert single[0]["lever"] == "experts=nvfp4"
    assert [x["saved_ms"] for x in single] == sorted((x["saved_ms"] for x in single), reverse=True)
    assert max(x["saved_ms"] for x in single) < together["saved_ms"] < sum(x["saved_ms"] for x in single)
    assert all(x["risk"] and x["work"] for x in single)


def test_what_if_is_the_floor_of_the_changed_release(bf16: Checkpoint) -> None:
    question = ask(bf16.config, "5090", what_if="experts=nvfp4,dense=fp8_tensor,head=mxfp8,draft_head=nvfp4")
    after = answer(bf16, question)["what_if"]
    assert f"{after['target_bytes'] / 1e9:.3f}" == "9.840"  # published for these formats, four rows
    assert after["draft_bytes"][1] < answer(bf16, question)["now"]["draft_bytes"][1]


def test_a_reduced_draft_vocabulary_reads_its_share_of_the_head(bf16: Checkpoint) -> None:
    whole, less = (answer(bf16, ask(bf16.config, "gb10", what_if=w)) for w in ("", "draft_vocab=32768"))
    saved = whole["now"]["step_bytes"] - less["what_if"]["step_bytes"]
    assert saved == pytest.approx(3 * 1_271_398_400 * (1 - 32_768 / 248_320))


def test_best_number_of_drafts(bf16: Checkpoint) -> None:
    """Drafts that are hardly ever accepted do not pay; drafts that always are do."""
    for shares, best in (("0.05,0.01,0.0", 0), ("1,1,1", 3), ("0.8,0.2,0.1", 1)):
        report = answer(bf16, ask(bf16.config, "gb10", acceptance=shares, what_if="experts=nvfp4"))
        assert report["choices"]["best"] == best, shares
    choices = report["choices"]["choices"]
    assert [c["tokens_per_step"] for c in choices] == pytest.approx([1.0, 1.8, 2.0, 2.1])


def test_acceptance_from_a_mean_length(bf16: Checkpoint) -> None:
    question = ask(bf16.config, "gb10", acceptance_length=2.2)
    assert question.acceptance is not None
    assert 1 + sum(question.acceptance) == pytest.approx(2.2)
    assert question.acceptance[1] == pytest.approx(question.acceptance[0] ** 2)
    assert answer(bf16, question)["now"]["tokens_per_step"] == pytest.approx([2.2, 2.2])


def test_measured_bandwidth_wins(bf16: Checkpoint) -> None:
    report = answer(bf16, ask(bf16.config, "h200", bandwidth=4000))
    assert (report["bandwidth_gbps"], report["bandwidth"]) == (4000, "given")
    assert answer(bf16, ask(bf16.config, "h200"))["bandwidth"] == "measured"
    assert answer(bf16, ask(bf16.config, "gb10"))["bandwidth"] == "specified"
    for device in ("h200", "gb10", "3090"):
        first, last = answer(bf16, ask(bf16.config, device))["now"]["expected_ms"]
        assert answer(bf16, ask(bf16.config, device))["now"]["floor_ms"] <= first < last


def test_several_devices_say_what_they_exchange(bf16: Checkpoint) -> None:
    question = ask(bf16.config, "gb10", tensor_parallel_size=2, expert_parallel=True, collective_us=40.0)
    now = answer(bf16, question)["now"]
    assert sum(e["count"] for e in now["exchanges"]) == 106
    assert now["exchanges_ms"][0] == now["exchanges_ms"][1] > 4.24
    assert now["floor_ms"] == pytest.approx(now["bytes_ms"] + now["exchanges_ms"][0])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"device": "abacus"}, "--device 'abacus' is not known"),
        ({"device": "rtx"}, "'rtx' is not known"),
        ({"spec_tokens": 8}, "--spec-tokens must be 0 to 7"),
        ({"sequences": 0}, "must be positive"),
        ({"what_if": "dense=int3"}, "no such format"),
        ({"what_if": "norms=fp8"}, "'norms' cannot be changed"),
        ({"what_if": "draft_vocab=0"}, "draft_vocab must be 1 to 248320"),
        ({"acceptance": "1.2"}, "shares lie between 0 and 1"),
        ({"acceptance_length": 4.5}, "3 drafts give 1 to 4 tokens a step; got 4.5"),
        ({"distinct_experts": "4=9"}, "4 tokens .* touch 10 to 40 experts; got 9"),
        ({"link": "string"}, "--link must be one of roce, pcie, nvlink"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype must be bf16 or fp8"),
    ],
)
def test_refusals(bf16: Checkpoint, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        ask(bf16.config, options.pop("device", "gb10"), **options)


def test_a_format_that_rows_do_not_divide_into_is_refused(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    with pytest.raises(UserError, match=r"mxfp8 stores rows of a multiple of 32 values; hyper_connection_mixer"):
        answer(checkpoint, ask(checkpoint.config, "gb10", what_if="hc=mxfp8"))


def test_unknown_layout_names_those_there_are() -> None:
    with pytest.raises(UserError, match=r"qwen3\.8-flash-next:nvfp4, .*got 'qwen3\.8-flash-next:int2'"):
        open_layout("qwen3.8-flash-next:int2")


def test_memory_plan_of_a_question(bf16: Checkpoint) -> None:
    options: dict[str, Any] = {
        "max_num_seqs": 1, "max_model_len": 4096, "max_num_batched_tokens": 512, "block_size": 64, "host_gib": 64.0,
    }  # fmt: skip
    question = ask(bf16.config, "gb10")
    plan = memory(bf16, question, table="mmap", available_gib=None, **options)
    assert plan.refusal() is not None
    small = ask(bf16.config, "gb10", what_if="experts=nvfp4,dense=fp8")
    assert memory(bf16, small, table="mmap", available_gib=None, **options).fits
    assert not memory(bf16, small, table="mmap", available_gib=60.0, **options).fits
    with pytest.raises(UserError, match="--ngram-table must be one of gpu, pinned, mmap, direct; got 'tape'"):
        memory(bf16, question, table="tape", available_gib=None, **options)


def test_command_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each table once, on a checkpoint on disk."""
    assert run(monkeypatch, "--device", "list") == 0
    assert "H200" in capsys.readouterr().out
    picture = tmp_path / "step.svg"
    arguments = [str(tiny), "--device", "pro-6000", "--what-if", "dense=fp8", "--acceptance", "0.7,0.5", "--shapes"]
    more = ["--memory", "--max-model-len", "2048", "--ngram-table", "pinned", "--plot", str(picture)]
    assert run(monkeypatch, *arguments, *more) == 0
    printed = capsys.readouterr().out
    for words in ("with dense=fp8_channel:", "floor ", "expected ", "best", "gdn qkv and z", "total, host", "fits"):
        assert words in printed, words
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert run(monkeypatch, str(tiny), "--json", "--memory", "--max-model-len", "2048") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == "GB10"
    assert report["memory"]["fits"]
    assert run(monkeypatch, str(tiny), "--plot", str(tmp_path / "step.png")) == 2


def test_floor_and_inspect_load_no_torch(tiny: Path) -> None:
    program = (
        "import sys; from stepfloor import cli; sys.argv = ['stepfloor', *sys.argv[1:]]\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)"
    )
    for command in ("floor", "inspect"):
        subprocess.run(
            [sys.executable, "-c", program, command, str(tiny)], check=True, env={"PYTHONPATH": "src"},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip


def test_bars() -> None:
    assert bar(1.0, 4) == "████"
    assert bar(0.5, 4) == "██"
    assert bar(0.03125, 4) == "▏"
    assert bar(0.0, 4) == ""
