"""The released model's shape, for tests that reproduce published numbers."""

from stepfloor.config import ModelConfig

RELEASED = ModelConfig.from_dict(
    {
        "model_type": "qwen4_exp_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "output_gate_type": "sigmoid",
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "indexer_n_heads": 4,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": 20_000_000,
        "split_ngram_parts": 128,
        "eos_token_id": 248044,
        "mtp_num_hidden_layers": 1,
    }
)
