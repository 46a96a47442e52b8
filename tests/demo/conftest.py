"""A model of the shipped architecture, shrunk until a test takes a moment, with random weights."""

import json
from importlib.resources import files
from typing import Any

import pytest
import torch

from demo.weights import Weights, shapes
from stepfloor.config import ModelConfig

TINY = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 8, "layer_types": None, "full_attention_interval": 4,
    "hc_lowrank": 20, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_attention_heads": 6, "head_dim": 32, "indexer_n_heads": 4, "indexer_head_dim": 16, "indexer_budget": 16,
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "ple_embed_dim": 64, "heads_per_ngram": 8, "ngram_vocab_size_base": 101, "eos_token_id": 5,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_json() -> dict[str, Any]:
    """config.json of the tiny model: the shipped one with smaller numbers."""
    raw = json.loads(files("stepfloor").joinpath("shipped/config.json").read_text())
    raw["text_config"] |= TINY
    raw["text_config"]["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 2
    raw["text_config"]["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
    return raw


@pytest.fixture(scope="session")
def tiny(tiny_json: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(tiny_json)


@pytest.fixture(scope="session")
def tiny_weights(tiny: ModelConfig) -> Weights:
    """Random everywhere, norms included, so that no weight can be forgotten unnoticed."""
    make = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in shapes(tiny).items():
        spread = 0.3 if len(shape) == 1 else 0.5 if "embed" in name else shape[-1] ** -0.5
        weights[name] = spread * torch.randn(shape, generator=make)
        if name.endswith("linear_attn.norm.weight"):
            weights[name] += 1
    return weights
