"""Which part of the model a weight is, and how a pass over the layers reads it, judged by its canonical name.

Source: tensor names of the `qwen4_exp` releases, without text prefix and `.weight`.
"""

from collections.abc import Mapping
from typing import Protocol


class HasBytes(Protocol):
    """What the byte model asks of a weight: how many bytes it is stored in, scales included."""

    @property
    def num_bytes(self) -> int: ...


def pass_group(name: str) -> str:
    """experts, dense, other, head, embedding, table or buffer: how a pass reads the weight of this canonical name."""
    return _classify(name)[1]


def weight_component(name: str) -> str:
    """Which of the components below the weight is, the drafter's under the name of the target's."""
    return _classify(name)[0]


def component_bytes(weights: Mapping[str, HasBytes]) -> dict[str, int]:
    """Stored bytes by component: gdn, qsa, indexer, hc, router, shared_experts, experts, head, embedding, ple, table,
    vectors, and mtp_dense, mtp_experts, mtp_head for the drafter."""
    total: dict[str, int] = {}
    for name, stored in weights.items():
        component, group = _classify(name)
        if name.startswith("mtp."):
            component = f"mtp_{group}" if group in ("experts", "head") else "mtp_dense"
        total[component] = total.get(component, 0) + stored.num_bytes
    return total


# last part of the name -> component, and how a pass reads it
_LEAVES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "out_proj"), ("gdn", "dense")),
    **dict.fromkeys(("in_proj_a", "in_proj_b"), ("gdn", "other")),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ("qsa", "dense")),
    **dict.fromkeys(("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"), ("hc", "dense")),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ("shared_experts", "dense")),
    **dict.fromkeys(("fc_embedding", "fc_hidden"), ("mtp", "dense")),
    **dict.fromkeys(("gate", "shared_expert_gate"), ("router", "other")),
    **dict.fromkeys(("key_proj", "value_proj"), ("ple", "other")),
    **dict.fromkeys(("conv1d", "A_log", "dt_bias", "norm"), ("vectors", "other")),
    **dict.fromkeys(("q_norm", "k_norm", "q_layernorm", "k_layernorm"), ("vectors", "other")),
    **dict.fromkeys(("norm_key", "norm_query", "norm_conv"), ("vectors", "other")),
    **dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden"), ("vectors", "other")),
    **dict.fromkeys(("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"), ("table", "buffer")),
    "hc_norm": ("hc", "other"),
    "index_qk_proj": ("indexer", "other"),
    "lm_head": ("head", "head"),
    "embed_tokens": ("embedding", "embedding"),
}


def _classify(name: str) -> tuple[str, str]:
    if ".experts." in name:
        return "experts", "experts"
    if ".ngram_embedding" in name:
        return "table", "table"
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf not in _LEAVES:
        raise ValueError(f"the byte model knows no weight named {name!r}")
    return _LEAVES[leaf]
