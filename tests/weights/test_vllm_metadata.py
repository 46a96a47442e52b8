"""vLLM 0.33's own configuration code reads the metadata of converted checkpoints, for every kind of layer.

Runs where vllm can be imported, which needs no GPU and none of its CUDA parts: the wheel unpacked and its pure Python
requirements on the path. The model files want torchvision and Triton kernels and are not imported: the names that they
map and the parts that they join are written out below, from models/qwen4_exp/nvidia/{model,mtp}.py of 0.33.0.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepfloor.tools.requantize.convert import convert, destination
from stepfloor.weights.checkpoint import open_checkpoint
from stepfloor.weights.conversions import STOCK_VLLM_LEAVES, plan_conversion
from tests.checkpoints import make_tiny

modelopt = pytest.importorskip("vllm.model_executor.layers.quantization.modelopt", reason="vllm is not installed")
linear = pytest.importorskip("vllm.model_executor.layers.linear")
utils = pytest.importorskip("vllm.model_executor.models.utils")

pytestmark = pytest.mark.slow  # importing vllm takes half a minute

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj", "indexer.index_qk_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "kv_proj": ["key_proj", "value_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
    "input_mix_weight_down_block_inject": ["input_mix_weight_down", "block_inject_weight", "_input_mix_padding"],
}
# entry point -> how it renames what a checkpoint lists, and the prefix it asks under
ENTRIES = {
    "conditional generation": (
        {
            "model.visual.": "visual.",
            "lm_head.": "language_model.lm_head.",
            "model.language_model.": "language_model.model.",
        },
        "language_model.model.",
        "language_model.lm_head",
    ),
    "causal language model": ({"model.language_model.": "model."}, "model.", "lm_head"),
    "not renamed": ({}, "model.language_model.", "lm_head"),
}
FP8, NVFP4, BLOCK = "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "FP8_PB_WO"
DENSE = {
    "layers.0.linear_attn.in_proj_qkvz": FP8,
    "layers.0.linear_attn.in_proj_ba": None,
    "layers.0.linear_attn.out_proj": FP8,
    "layers.3.self_attn.qkv_proj": FP8,
    "layers.3.self_attn.o_proj": FP8,
    "layers.3.self_attn.indexer.index_qk_proj": None,
    "layers.2.mlp.shared_expert.gate_up_proj": FP8,
    "layers.2.mlp.shared_expert.down_proj": FP8,
    "layers.2.mlp.shared_expert_gate": None,
    "layers.2.mlp.gate": None,
    "layers.2.mlp.experts": NVFP4,
    "layers.0.attn_hyper_connection.input_mix_weight_down_block_inject": FP8,
    "layers.0.mlp_hyper_connection.input_mix_weight_up": FP8,
    "hyper_connection_mixer.input_mix_weight_down": FP8,
    "hyper_connection_mixer.input_mix_weight_up": FP8,
    "layers.1.ple.kv_proj": None,
    "layers.1.ple.ple_embedding.ngram_embedding": "FP8",
}
DRAFTER = {
    "fc_embedding": FP8,
    "fc_hidden": FP8,
    "layers.4.self_attn.qkv_proj": FP8,
    "layers.4.self_attn.o_proj": FP8,
    "layers.4.mlp.shared_expert.gate_up_proj": FP8,
    "layers.4.mlp.experts": BLOCK,
    "layers.4.mlp.gate": None,
}


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """quantization_config of each conversion of a tiny release, some one after the other."""
    root = tmp_path_factory.mktemp("converted")
    source = make_tiny(root, "nvfp4")

    def made(kind: str, at: Path, name: str, leave: tuple[str, ...] = ()) -> Path:
        plan = plan_conversion(open_checkpoint(at), kind, leave)
        return convert(plan, destination(str(root / name), root, plan)).directory

    dense = made("fp8-dense", source, "dense")
    found = {
        "fp8-dense": dense,
        "stock": made("fp8-dense", source, "stock", STOCK_VLLM_LEAVES),
        "mtp-fp8": made("mtp-fp8", dense, "mtp"),
        "head-mxfp8": made("head-mxfp8", source, "head"),
        "draft-head-nvfp4": made("draft-head-nvfp4", source, "draft"),
        "ple-nvfp4": made("ple-nvfp4", dense, "ple"),
    }
    return {
        name: json.loads((directory / "config.json").read_text())["quantization_config"]
        for name, directory in found.items()
    }


def config_of(section: dict[str, Any], renamed: dict[str, str]) -> Any:
    kind = modelopt.ModelOptMixedPrecisionConfig
    assert kind.override_quantization_method(section, None) == "modelopt_mixed"
    config = kind.from_config(copy.deepcopy(section))
    config.apply_vllm_mapper(utils.WeightsMapper(orig_to_new_prefix=renamed))
    config.packed_modules_mapping = PACKED
    return config


def check(config: Any, name: str, wanted: str | None) -> None:
    assert config._resolve_quant_algo(name) == wanted, name
    assert not config.is_layer_excluded(name), name
    if not name.endswith((".experts", "ngram_embedding")):
        layer = linear.LinearBase.__new__(linear.LinearBase)
        method = type(config.get_quant_method(layer, name)).__name__
        assert method == ("UnquantizedLinearMethod" if wanted is None else "ModelOptLinearMethod"), name


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", DENSE)
def test_dense_layers(sections: dict[str, dict[str, Any]], entry: str, name: str) -> None:
    renamed, prefix, _ = ENTRIES[entry]
    check(config_of(sections["fp8-dense"], renamed), prefix + name, DENSE[name])
    check(config_of(sections["mtp-fp8"], renamed), prefix + name, DENSE[name])
    check(config_of(sections["stock"], renamed), prefix + name, _left(name))


def _left(name: str) -> str | None:
    return None if "hyper_connection" in name or "self_attn" in name else DENSE[name]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("kind", "wanted"), [("fp8-dense", FP8), ("stock", None), ("head-mxfp8", "MXFP8"), ("draft-head-nvfp4", None)]
)
def test_head(sections: dict[str, dict[str, Any]], entry: str, kind: str, wanted: str | None) -> None:
    renamed, _, head = ENTRIES[entry]
    check(config_of(sections[kind], renamed), head, wanted)


@pytest.mark.parametrize("entry", ENTRIES)
def test_table(sections: dict[str, dict[str, Any]], entry: str) -> None:
    renamed, prefix, _ = ENTRIES[entry]
    name = prefix + "layers.1.ple.ple_embedding.ngram_embedding"
    assert config_of(sections["ple-nvfp4"], renamed)._resolve_quant_algo(name) == "NVFP4"


@pytest.mark.parametrize("name", DRAFTER)
def test_drafter(sections: dict[str, dict[str, Any]], name: str) -> None:
    """The draft model counts its layer on from the last one; it renames nothing else and asks under mtp."""

    def of(kind: str) -> Any:
        config = config_of(sections[kind], {})
        config.quantized_layers = {
            re.sub(r"(?<=\.layers\.)\d+", lambda m: str(4 + int(m[0])), n) if n.startswith("mtp.") else n: entry
            for n, entry in config.quantized_layers.items()
        }
        return config

    check(of("mtp-fp8"), f"mtp.{name}", DRAFTER[name])
    check(of("fp8-dense"), f"mtp.{name}", None)
