"""Every release loads and computes what its numbers say: the same logits as its decoded twin.

The twin is the same model in the plain layout, every matrix decoded and stored as float32 or bf16.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stepfloor.formats.codec import PackedWeight
from stepfloor.model import load
from stepfloor.model.tensors import DTYPES
from stepfloor.tools.convert import plan_random, write_random
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from tests.checkpoints import ALL_RELEASES, make_tiny, tiny_config
from tests.ours import Ours

TOKENS = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(0)).tolist()
BARE = ("A_log", "dt_bias", "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def decoded(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor by its canonical name, quantized ones decoded to float32; experts stacked, scales used up."""
    out: dict[str, Tensor] = {}
    table = checkpoint.table
    shared = {} if table.scale is None else table.scale.parts
    for name, weight in checkpoint.weights.items():
        if name == table.name:
            continue
        entries = weight.parts | (shared if name.startswith(f"{table.name}.shard_") else {})
        parts = {
            suffix: torch.frombuffer(bytearray(entry.read()), dtype=DTYPES[entry.dtype]).reshape(entry.shape)
            for suffix, entry in entries.items()
        }
        if weight.format in ("bf16", "fp32", "int64"):
            out[name] = parts["weight"]
            continue
        n, k = weight.shape[-2:]
        scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
        assert scale is not None
        if weight.format == "fp8_block":
            scale = scale.reshape(-(-n // 128), -(-k // 128))
        elif weight.format == "fp8_channel":
            scale = scale.reshape(n)
        scale_2 = parts.get("weight_scale_2")
        scale_2 = None if scale_2 is None else scale_2.reshape(())
        out[name] = PackedWeight(weight.format, (n, k), parts["weight"], scale, scale_2).dequantize()
    for block in sorted({name.rpartition(".experts.")[0] for name in out if ".experts." in name}):
        if f"{block}.experts.gate_up_proj" in out:
            continue
        experts = range(checkpoint.config.num_experts)
        part = {kind: [out.pop(f"{block}.experts.{e}.{kind}_proj") for e in experts] for kind in ("gate", "up", "down")}
        pairs = zip(part["gate"], part["up"], strict=True)
        out[f"{block}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        out[f"{block}.experts.down_proj"] = torch.stack(part["down"])
    return out


def twin_of(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype) -> Checkpoint:
    """The checkpoint again, as a plain release in one dtype."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in decoded(checkpoint).items():
        bare = name.endswith(BARE) or name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        prefix = "" if name.startswith(("mtp.", "lm_head")) else "model.language_model."
        stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
        tensors[f"{prefix}{name}" + ("" if bare else ".weight")] = stored.contiguous()
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    raw = json.loads((checkpoint.directory / "config.json").read_text())
    raw.pop("quantization_config", None)
    raw["text_config"].pop("ple_embedding_dtype", None)
    (directory / "config.json").write_text(json.dumps(raw))
    return open_checkpoint(directory)


def logits(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """The target's and the drafter's."""
    ours = Ours(checkpoint, spec_tokens=1)
    target = ours.logits(TOKENS)
    ours.start()
    drafter = ours.model.drafter
    assert drafter is not None
    with torch.inference_mode():
        return target, ours.model.logits(ours.chunk(TOKENS[:-1], TOKENS[1:])[1], drafter.head)


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_a_float32_twin_gives_the_same_bits(tmp_path: Path, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are decoded to float32 for every product, so where they were decoded cannot matter."""
    path = tiny_config(tmp_path)
    raw = json.loads(path.read_text())
    raw["text_config"]["moe_intermediate_size"] = 128  # one block of fp8_block, so that gate and up can be stacked
    path.write_text(json.dumps(raw))
    write_random(plan_random(str(path), release, dtype="float32"), tmp_path / release, seed=1)
    checkpoint = open_checkpoint(tmp_path / release)
    twin = logits(twin_of(checkpoint, tmp_path / "twin", torch.float32))
    assert all(torch.isfinite(part).all() for part in twin)
    assert twin[0].std() > 0.01
    at_load = logits(checkpoint)
    # as a model too large to be decoded at load, which decodes at every use
    monkeypatch.setattr(load, "SMALL_BYTES", 0)
    at_use = logits(checkpoint)
    for i, name in enumerate(("target", "drafter")):
        assert torch.equal(at_load[i], twin[i]), name
        assert torch.equal(at_use[i], twin[i]), name


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_a_bf16_twin_differs_by_its_rounding(tmp_path: Path, release: str) -> None:
    """The twin's weights are rounded once more, 2**-9 or less in the mean, and so are some ten of the products on the
    way through a layer; with the 40 roundings of a layer's activations, which now fall elsewhere, that is a walk of
    50 steps a layer. An fp8 or nvfp4 value times a power of two is a bf16 value, other scales make the difference.
    """
    checkpoint = open_checkpoint(make_tiny(tmp_path, release))
    twin = logits(twin_of(checkpoint, tmp_path / "twin", torch.bfloat16))
    layers = checkpoint.config.num_hidden_layers + 1
    for ours, theirs in zip(logits(checkpoint), twin, strict=True):
        assert ours.dtype == theirs.dtype == torch.bfloat16
        error = float((ours.float() - theirs.float()).square().mean().sqrt())
        walk = (50 * layers) ** 0.5 * 2.0**-9 * float(theirs.float().square().mean().sqrt())
        print(f"{release}: rms error {error:.1e} of {walk:.1e}")
        assert error <= walk
        if release == "bf16":
            assert error == 0.0
