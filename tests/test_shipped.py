"""The small model that ships: transformers reads it as we do, and `stepfloor generate` does what its help says."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import stepfloor
from stepfloor.config import EngineConfig
from stepfloor.engine import Engine
from stepfloor.request import Request, SamplingParams
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint

SHIPPED = Path(stepfloor.__file__).parent / "shipped"
QUESTION = "What does `shutil.copytree` do?"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(SHIPPED)


def greedy(checkpoint: Checkpoint, prompt: Sequence[int], count: int, k: int) -> list[int]:
    engine = Engine(checkpoint, EngineConfig(spec_tokens=k, max_model_len=512))
    engine.submit(Request("test", tuple(prompt), SamplingParams(temperature=0.0), count))
    return [token for piece in engine.run() for token in piece.token_ids]


def test_it_fits_what_may_be_shipped(checkpoint: Checkpoint) -> None:
    assert sum(f.stat().st_size for f in SHIPPED.iterdir()) <= 24_000_000
    assert checkpoint.config.num_hidden_layers >= 12
    assert checkpoint.has_drafter
    assert not checkpoint.findings


@pytest.mark.parametrize("text", ["def main", "class Reader:\n    def read(self, size=-1):\n", "import os\n"])
def test_transformers_writes_the_same_greedy_text(checkpoint: Checkpoint, text: str) -> None:
    """In float32 on both sides: a difference would be an equation, not a rounding.

    Near-ties could differ by rounding alone; they are looked for at the first difference and printed.
    """
    tokenizer = Tokenizer.load(SHIPPED)
    prompt = tokenizer.encode(text)
    assert AutoTokenizer.from_pretrained(SHIPPED).encode(text, add_special_tokens=False) == prompt
    theirs = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.bfloat16).eval()
    count = 48
    with torch.no_grad():
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    expected = out[0, len(prompt) :].tolist()
    ours = greedy(checkpoint, prompt, count, k=3)
    for i, (mine, other) in enumerate(zip(ours, expected, strict=True)):
        if mine != other:
            with torch.no_grad():
                row = theirs(torch.tensor([prompt + ours[:i]])).logits[0, -1].float()
            gap = (row[other] - row[mine]).item()
            # bf16 keeps 8 bits: logits near the best one lie 2**-8 of its size apart, and 12 layers of other
            # rounding points move a logit by a few such steps
            bound = 4 * 2.0**-8 * row.abs().max().item()
            print(f"near-tie at token {i}: gap {gap:.4f}, bound {bound:.4f}")
            assert gap <= bound
            return


def test_drafts_change_no_greedy_text(checkpoint: Checkpoint) -> None:
    prompt = Tokenizer.load(SHIPPED).encode("def parse(self, text):\n    ")
    plain = greedy(checkpoint, prompt, 40, k=0)
    for k in (1, 3, 7):
        assert greedy(checkpoint, prompt, 40, k) == plain


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepfloor", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)


def test_generate_streams_text_and_ends_with_one_json_object() -> None:
    result = run("generate", "--chat", "--prompt", QUESTION, "--temperature", "0", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["text"] == "Recursively copy a directory tree and return the destination directory."
    assert result.stdout.startswith(report["text"])
    assert report["finish_reason"] == "stop"
    assert report["tokens"] == len(report["token_ids"])
    wanted = {"tokens_per_s", "ms_per_step", "delivered_per_step", "accepted_per_position", "bytes_per_step"}
    assert wanted | {"fraction_of_floor"} <= report.keys()
    assert 1 < report["delivered_per_step"] <= 4
    assert 0 < report["fraction_of_floor"] < 1


def test_standard_input_is_a_prompt_and_a_seed_fixes_the_text() -> None:
    arguments = ("generate", "--max-tokens", "16", "--seed", "7", "--temperature", "1")
    first, second = run(*arguments, text="import re\n"), run(*arguments, text="import re\n")
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout
    assert "tokens/s" in first.stderr
    assert "% of the floor" in first.stderr


def test_coupled_text_is_the_same_for_every_number_of_drafts() -> None:
    arguments = ("generate", "--prompt", "def f", "--max-tokens", "24", "--seed", "3", "--acceptance", "coupled")
    texts = {run(*arguments, "--temperature", "1", "--spec-tokens", k).stdout for k in ("0", "2", "3")}
    assert len(texts) == 1


def test_yarn_by_override_reaches_past_the_trained_context() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 100000.0, "partial_rotary_factor": 0.25, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 4096, "mrope_section": [4, 2, 2]}
    overrides = {"text_config": {"rope_parameters": rope, "max_position_embeddings": 16384}}
    arguments = ("generate", "--prompt", "def main", "--max-tokens", "8", "--temperature", "0")
    stretched = run(*arguments, "--hf-overrides", json.dumps(overrides), "--max-model-len", "8192")
    assert stretched.returncode == 0, stretched.stderr
    assert stretched.stdout.strip()


def test_drafts_without_a_drafter_are_refused_when_asked_for(tmp_path: Path) -> None:
    """Without the option such a checkpoint decodes plainly; with it, nothing is quietly left out."""
    for file in SHIPPED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((SHIPPED / "config.json").read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 0}
    weights = {k: v for part in SHIPPED.glob("*.safetensors") for k, v in load_file(part).items() if k[:4] != "mtp."}
    for file in (*tmp_path.glob("*.safetensors*"), tmp_path / "config.json"):
        file.unlink()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("generate", str(tmp_path), "--prompt", "x", "--max-tokens", "4", "--temperature", "0")
    assert run(*arguments).returncode == 0
    refused = run(*arguments, "--spec-tokens", "2")
    assert refused.returncode == 2
    assert "no drafter" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate",), "wanted a prompt"),
        (("generate", "--token-ids", "1,two"), "--token-ids wants integers"),
        (("generate", "--token-ids", "5000"), "token ids must be 0 to 3071"),
        (("generate", "--token-ids", "1", "--chat"), "--token-ids is the whole prompt"),
        (("generate", "--prompt", "x", "--spec-tokens", "8"), "--spec-tokens must be 0 to 7; got 8"),
        (("generate", "--prompt", "x", "--acceptance", "typical"), "--acceptance must be standard or coupled"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature must be"),
        (("generate", "--prompt", "x", "--top-p", "0"), "top_p"),
        (("generate", "--prompt", "x", "--max-tokens", "0"), "max_tokens must be at least 1"),
        (("generate", "no/such/model", "--prompt", "x"), "no/such/model"),
        (("generate", "--prompt", "x", "--hf-overrides", "{"), "--hf-overrides wants a JSON object"),
        (("generate", "--prompt", "x", "--hf-overrides", "[1]"), "--hf-overrides wants a JSON object"),
        (("generate", "--prompt", "x", "--max-model-len", "1"), "--max-model-len must be 2 to 4096"),
        (("generate", "--prompt", "x", "--max-model-len", "5000"), "--max-model-len must be 2 to 4096"),
        (("generate", "--prompt", "word " * 400, "--max-model-len", "64"), "leaves no room"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_two(arguments: tuple[str, ...], sentence: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
