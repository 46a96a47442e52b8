"""The small model's tensors: names and shapes of the release, first values, and the files they end in.

Names and layout: the bf16 release of Qwen3.8-Flash-Next (one name per tensor, experts fused, n-gram table in
shards). While training the table is one tensor; `save` splits it.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stepfloor.config import ModelConfig
from stepfloor.weights.expected import (
    Expected,
    expected_weights,
    expert_blocks,
    fused_experts,
    hash_buffers,
    shard_heights,
    table_name,
)

Weights = dict[str, Tensor]

MODEL = "model.language_model."
TABLE = "ple.ple_embedding.ngram_embedding.weight"
_FILE_BYTES = 12_000_000  # a file of the result must be small enough to be moved about


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every trained tensor in a fixed order. The hash constants are no weights and are left out."""
    expected = [e for e in expected_weights(config, drafter=True).values() if e.kind != "buffer"]
    for block in expert_blocks(config, drafter=True):
        expected += fused_experts(config, block)
    table = {f"{MODEL}{table_name(config)}.weight": (config.ngram_hash.rows, config.ngram_head_dim)}
    return {_stored_name(e): e.shape for e in expected} | table


def _stored_name(e: Expected) -> str:
    prefix = "" if e.name.startswith(("mtp.", "lm_head")) else MODEL
    bare = e.kind == "fused" or e.name.endswith((".A_log", ".dt_bias"))
    return f"{prefix}{e.name}" if bare else f"{prefix}{e.name}.weight"


def part(weights: Weights, prefix: str) -> Weights:
    """The weights below prefix, by their remaining names."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def initial(config: ModelConfig, seed: int) -> Weights:
    """float32 weights on the CPU before the first step; the same for the same seed.

    Norms start at their neutral value (0 where 1 is added, 1 in the gated norm), what writes to the residual
    starts small, decays span half-lives from about 1 to 700 tokens.
    """
    make = torch.Generator().manual_seed(seed)
    into_residual = 1 / math.sqrt(2 * config.num_hidden_layers)

    def start(name: str, shape: tuple[int, ...]) -> Tensor:
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if name.endswith("linear_attn.norm.weight"):
            return torch.ones(shape)
        if leaf == "A_log":
            return torch.empty(shape).uniform_(1, 16, generator=make).log()
        if leaf == "dt_bias":
            step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=make).exp()
            return step + torch.log(-torch.expm1(-step))  # softplus of this is the step
        if len(shape) == 1:
            return torch.zeros(shape)
        if leaf == "conv1d":
            return torch.zeros(shape) if ".ple." in name else torch.empty(shape).uniform_(-0.5, 0.5, generator=make)
        values = torch.randn(shape, generator=make)
        if leaf in ("embed_tokens", "ngram_embedding"):
            return 0.1 * values
        if leaf in ("block_inject_weight", "gate", "shared_expert_gate", "lm_head"):
            return 0.02 * values
        scale = into_residual if leaf in ("out_proj", "o_proj", "down_proj", "value_proj") else 1.0
        return 0.5 * scale * values / math.sqrt(shape[-1])

    return {name: start(name, shape) for name, shape in shapes(config).items()}


def save(weights: Weights, config: ModelConfig, directory: Path) -> int:
    """Write safetensors files and their index in the release's layout, rounded to bf16. Returns bytes written."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _released(weights, config)
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > _FILE_BYTES and files[-1]:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    where = {}
    for i, content in enumerate(files, 1):
        file_name = f"model-{i:05}-of-{len(files):05}.safetensors"
        save_file(content, directory / file_name, metadata={"format": "pt"})
        where |= dict.fromkeys(content, file_name)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    text = json.dumps(index, indent=1)
    (directory / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
    return total


def load(config: ModelConfig, directory: Path) -> Weights:
    """Read back what `save` wrote, the table in one piece again. Returns bf16 weights on the CPU."""
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    stored: Weights = {}
    for file_name in sorted(set(index["weight_map"].values())):
        stored |= load_file(directory / file_name)
    table = f"{MODEL}{table_name(config)}"
    shards = range(len(shard_heights(config)))
    stored[f"{table}.weight"] = torch.cat([stored[f"{table}.shard_{i}.weight"] for i in shards])
    return {name: stored[name] for name in shapes(config)}


def _released(weights: Weights, config: ModelConfig) -> Weights:
    tensors: Weights = {}
    for name, weight in weights.items():
        rounded = weight.detach().cpu().bfloat16().contiguous()
        if not name.endswith(TABLE):
            tensors[name] = rounded
            continue
        for i, shard in enumerate(rounded.split(shard_heights(config))):
            tensors[f"{name.removesuffix('weight')}shard_{i}.weight"] = shard.clone()
    buffers = hash_buffers(config).items()
    return tensors | {MODEL + name: torch.tensor(values, dtype=torch.int64) for name, values in buffers}
