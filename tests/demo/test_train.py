"""The recipe end to end, on a model that takes seconds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from demo import train as recipe
from demo.evaluate import _windows, choices, delivered, held_out
from demo.forward import Mode, Network
from demo.losses import losses
from demo.optimizer import orthogonal
from demo.weights import MODEL, Weights, load, shapes
from stepfloor.config import ModelConfig
from stepfloor.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def trained(tiny_json: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves after three steps on a slice of the corpus."""
    config = json.loads(json.dumps(tiny_json))
    config["text_config"] |= {"vocab_size": 600, "eos_token_id": 0}
    directory = tmp_path_factory.mktemp("trained")
    (directory / "given.json").write_text(json.dumps(config))
    out = directory / "out"
    given = ["--out", out, "--config", directory / "given.json", "--device", "cpu", "--steps", "3", "--no-evaluate"]
    given += ["--rows", "2", "--length", "64", "--documents", "3", "--minutes", "10"]
    before = sys.argv
    sys.argv = ["demo.train", *map(str, given)]
    try:
        recipe.main()
    finally:
        sys.argv = before
    return out


def test_the_directory_loads_in_transformers_with_the_same_logits(trained: Path) -> None:
    config = ModelConfig.load(trained)
    weights = {name: w.float() for name, w in load(config, trained).items()}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        trained, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    tokens = torch.tensor([Tokenizer.load(trained).encode("def main():\n    return 1\n" * 3)])
    with torch.no_grad():
        want = model(input_ids=tokens).logits
        mixed, _, _ = Network(config, tokens.device).target(weights, tokens, Mode())
        got = F.linear(mixed, weights["lm_head.weight"])
    assert (got - want).abs().max() < 2e-5 * want.abs().max()


def test_the_directory_is_a_release(trained: Path) -> None:
    index = json.loads((trained / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert {f.name for f in trained.iterdir()} == files | {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    shards = {n for n in index["weight_map"] if "ngram_embedding.shard_" in n}
    assert shards == {f"{MODEL}layers.1.ple.ple_embedding.ngram_embedding.shard_{i}.weight" for i in range(4)}
    assert json.loads((trained / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_training_moves_every_weight(tiny: ModelConfig, tiny_weights: Weights) -> None:
    """A weight no gradient reaches would ship as it was drawn. The indexer's own loss is what moves it."""
    weights = {name: w.clone().requires_grad_() for name, w in tiny_weights.items()}
    rows = torch.randint(0, tiny.vocab_size, (2, 41), generator=torch.Generator().manual_seed(0))
    losses(Network(tiny, rows.device), weights, rows, Mode()).total.backward()
    still = [n for n, w in weights.items() if w.grad is None or not w.grad.abs().sum() > 0]
    assert still == []


def test_bf16_losses_are_close_to_float32(tiny: ModelConfig, tiny_weights: Weights) -> None:
    rows = torch.randint(0, tiny.vocab_size, (2, 41), generator=torch.Generator().manual_seed(0))
    net = Network(tiny, rows.device)
    rounded = {name: w.bfloat16().requires_grad_() for name, w in tiny_weights.items()}
    coarse = losses(net, rounded, rows, Mode(0.0, dense=True))
    coarse.total.backward()
    fine = losses(net, tiny_weights, rows, Mode(0.0, dense=True))
    # a few dozen roundings of 2**-9 each, averaged over 80 rows
    assert abs(coarse.next_token - fine.next_token) < 0.02 * fine.next_token
    assert ((coarse.drafts - fine.drafts).abs() < 0.02 * fine.drafts).all()


def test_the_shipped_model_fits_the_budget() -> None:
    config = ModelConfig.load(recipe._SHIPPED.parent)
    assert 2 * sum(torch.Size(s).numel() for s in shapes(config).values()) < recipe.MAX_BYTES - 500_000


def test_overlapping_windows_judge_every_token_once() -> None:
    for size in (5, 1024, 1025, 1500, 2048, 3000):
        judged = []
        for start, window in _windows([list(range(1, size + 1))], None):
            judged += window[1:][start:]
        assert judged == list(range(1, size + 1))


def test_agreement_and_nats_are_those_of_one_forward(tiny: ModelConfig, tiny_weights: Weights) -> None:
    """The shares are counted by hand here: pass j at row p against the target's first choice at p + 1."""
    documents = [torch.randint(1, tiny.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()]
    net = Network(tiny, torch.device("cpu"))
    result = delivered(net, tiny_weights, documents, torch.device("cpu"), prompts=1)
    assert result["prompts"] == 1
    assert result["repeating"] in (0, 1)
    nats, accepted = held_out(net, tiny_weights, [documents[0][:40]], torch.device("cpu"))
    logits, drafts = choices(net, tiny_weights, torch.tensor([[0, *documents[0][:40]]]))
    assert nats == pytest.approx(F.cross_entropy(logits[0], torch.tensor(documents[0][:40]), reduction="sum").item())
    best = logits[0].argmax(-1)
    for j, share in enumerate(accepted):
        assert share == pytest.approx(float((drafts[j][0, j:-1] == best[j + 1 :]).sum()) / 39, abs=1e-6)


def test_orthogonal_updates_have_singular_values_near_one() -> None:
    update = orthogonal(torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_the_rate_rises_holds_and_falls() -> None:
    assert recipe.rate(0.0) < 0.05
    assert recipe.rate(0.02) == recipe.rate(0.4) == 1.0
    assert recipe.rate(0.7) == pytest.approx(0.5)
    assert recipe.rate(1.0) == pytest.approx(0.01)
