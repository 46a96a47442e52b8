"""transformers' qwen4_exp as the oracle: random models, saved as checkpoints that stepfloor loads by its own path."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen4_exp.modeling_qwen4_exp as hf
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen4ExpTextConfig

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "hc_count": 4,
    "hc_lowrank": 20,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ngram_vocab_size_base": 101,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "eos_token_id": 5,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


class Drafter(nn.Module):
    """The multi-token predictor assembled from the oracle's own modules; transformers discards `mtp.*`."""

    def __init__(self, config: Qwen4ExpTextConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.streams = config.hc_count
        self.pre_fc_norm_embedding = hf.Qwen4ExpTextRMSNorm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = hf.Qwen4ExpTextRMSNorm(self.streams * width, eps=config.rms_norm_eps)
        self.fc_embedding = nn.Linear(width, width, bias=False)
        self.fc_hidden = nn.Linear(width, width, bias=False)
        sparse = config.layer_types.index("indexed_attention")
        plain = Qwen4ExpTextConfig(**{**config.to_dict(), "ple_layer_ids": []})
        plain._attn_implementation = "sdpa"
        self.layers = nn.ModuleList([hf.Qwen4ExpTextDecoderLayer(plain, sparse)])
        self.hyper_connection_mixer = hf.Qwen4ExpTextGatedResidual(config, use_combine=False)

    def forward(self, residual: Tensor, embedding: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """residual [T, S D], embedding [T, D] of the next tokens; the residual and mixed vector of T rows."""
        hidden = self.fc_hidden(self.pre_fc_norm_hidden(residual).unflatten(-1, (self.streams, -1)))
        e = self.fc_embedding(self.pre_fc_norm_embedding(embedding))
        rows = residual.shape[0]
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None, None]
        out = self.layers[0]((hidden + e[:, None]).flatten(1)[None], (cos[None], sin[None]), attention_mask=causal)
        return out[0], self.hyper_connection_mixer(out)[0]


class Oracle:
    """A random transformers model with a drafter, and the directory it is saved in."""

    def __init__(self, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        self.raw = {**TINY, **changes}
        self.config = Qwen4ExpTextConfig(**self.raw)
        self.config._attn_implementation = "sdpa"
        torch.manual_seed(seed)
        self.model = hf.Qwen4ExpForCausalLM(self.config).eval()
        self.drafter = Drafter(self.config).eval()
        with torch.no_grad():
            for module in (self.model, self.drafter):
                _randomize(module)
        self.model.to(dtype)
        self.drafter.to(dtype)
        self.directory = directory
        self._save(dtype)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V] in one pass."""
        return self.model(input_ids=torch.tensor([tokens])).logits[0]

    @torch.no_grad()
    def residual(self, tokens: list[int]) -> Tensor:
        """[T, S D] before the final mixer."""
        seen: list[Tensor] = []
        mixer = self.model.model.hyper_connection_mixer
        hook = mixer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        self.logits(tokens)
        hook.remove()
        return seen[0][0]

    def rope(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos, sin [T, rotary] of text positions."""
        positions = torch.arange(count).view(1, 1, -1).expand(3, 1, -1)
        cos, sin = self.model.model.rotary_emb(torch.zeros(1, dtype=dtype), positions)
        return cos[0], sin[0]

    def _save(self, dtype: torch.dtype) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.contiguous() for name, t in self.model.state_dict().items()}
        tensors |= {f"mtp.{name}": t.contiguous() for name, t in self.drafter.state_dict().items()}
        save_file(tensors, self.directory / "model.safetensors")
        text = {**self.raw, "model_type": "qwen4_exp_text", "mtp_num_hidden_layers": 1, "rms_norm_eps": 1e-6}
        text["layer_types"] = [
            "full_attention" if kind == "indexed_attention" else kind for kind in self.config.layer_types
        ]
        (self.directory / "config.json").write_text(json.dumps(text))


def _randomize(module: nn.Module) -> None:
    """Weights large enough that every path matters: norms away from their centres, gates away from a half."""
    for name, parameter in module.named_parameters():
        if "A_log" in name:
            continue
        fan = parameter.shape[-1] if parameter.ndim > 1 and "embed" not in name else 4
        parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else fan**-0.5))
        if name.endswith("linear_attn.norm.weight"):
            parameter.add_(1.0)
