"""The byte floor of a decode step: what the target pass and the draft passes must read and write.

Counted: every matrix and vector of the layers once per pass, experts as the expected number of distinct ones, the
head once per pass, the recurrent state once in and once out, the embedding and n-gram rows of the tokens, and what
grows with the context. Left out, because they are small: activations, convolution windows, new key/value rows.

A matrix is known by its canonical name (`layers.3.self_attn.q_proj`, `mtp.layers.0.mlp.experts.gate_up_proj`), so
the floor of a planned mix of formats and the floor of a checkpoint's stored bytes are the same computation.
Source: names and shapes of the `qwen4_exp` releases; transformers 5.24, modular_qwen4_exp.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stepfloor.config import ModelConfig
from stepfloor.roofline.bytes import BF16_BYTES, FP32_BYTES, distinct_experts, kept_tokens
from stepfloor.roofline.groups import HasBytes, pass_group
from stepfloor.roofline.planned import WeightFormats, planned_weights

GB = 1e9
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class PassBytes:
    """Bytes of one pass over the layers, by what they are.

    dense    as in WeightFormats; other  router, indexer, small projections, convolutions, norms, n-gram projections
    state    recurrent state, read and written; context  keys, values and block keys read; rows  embedding and table
    """

    experts: float
    dense: float
    other: float
    head: float
    state: float
    context: float
    rows: float

    @property
    def total(self) -> float:
        return self.experts + self.dense + self.other + self.head + self.state + self.context + self.rows


@dataclass(frozen=True, slots=True)
class StepBytes:
    """One step: the target's pass over spec_tokens + 1 rows a sequence, then one draft pass per draft."""

    target: PassBytes
    drafts: tuple[PassBytes, ...]

    @property
    def draft_total(self) -> float:
        return sum(draft.total for draft in self.drafts)

    @property
    def total(self) -> float:
        return self.target.total + self.draft_total


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time one step can take: its bytes at a bandwidth in GB/s."""

    step: StepBytes
    bandwidth_gbps: float

    @property
    def step_us(self) -> float:
        return self.step.total / self.bandwidth_gbps / 1e3

    def fraction(self, measured_us: float) -> float:
        """Share of the floor that a measured step reached; 1 is the floor itself."""
        return self.step_us / measured_us

    def tokens_per_s(self, tokens_per_step: float) -> float:
        """Rate of one sequence at the floor, for the mean number of tokens a step delivers to it."""
        return tokens_per_step * 1e6 / self.step_us


def step_bytes(
    config: ModelConfig,
    formats: WeightFormats,
    sequences: int = 1,
    spec_tokens: int = 3,
    context_tokens: int = 0,
) -> StepBytes:
    """Bytes of one step of `sequences` sequences that hold `context_tokens` tokens each, for a mix of formats."""
    return checkpoint_step_bytes(config, planned_weights(config, formats), sequences, spec_tokens, context_tokens)


def checkpoint_step_bytes(
    config: ModelConfig,
    weights: Mapping[str, HasBytes],
    sequences: int = 1,
    spec_tokens: int = 3,
    context_tokens: int = 0,
) -> StepBytes:
    """The same for the bytes a checkpoint stores.

    weights  canonical name -> weight; experts fused or one by one, the n-gram table whole or in shards. A head kept
             for the drafter alone is `mtp.lm_head`; without one the drafter reads `lm_head`.
    Raises ValueError for a name that belongs to no group, and for drafts without a drafter.
    """
    if spec_tokens and not config.has_drafter:
        raise ValueError(f"a config without a drafter cannot draft; got spec_tokens {spec_tokens}")
    groups: dict[tuple[bool, str], int] = {}
    for name, weight in weights.items():
        key = (name.startswith("mtp."), pass_group(name))
        groups[key] = groups.get(key, 0) + weight.num_bytes
    head = groups[False, "head"]
    embedding_row = groups[False, "embedding"] / config.vocab_size
    table_rows = groups[False, "table"] * config.ngram_heads / config.ngram_hash.rows

    def one_pass(drafter: bool, rows: int) -> PassBytes:
        touched = distinct_experts(rows, config.num_experts, config.num_experts_per_tok) / config.num_experts
        sparse_layers = config.mtp_num_hidden_layers if drafter else len(config.sparse_layers)
        return PassBytes(
            experts=groups[drafter, "experts"] * touched,
            dense=groups[drafter, "dense"],
            other=groups[drafter, "other"],
            head=groups.get((True, "head"), head) if drafter else head,
            state=0 if drafter else sequences * _state_bytes(config),
            context=sequences * sparse_layers * _context_bytes(config, context_tokens),
            rows=rows * (embedding_row + (0 if drafter else table_rows)),
        )

    verified = sequences * (spec_tokens + 1)
    # the first draft pass runs over the rows just verified, the later ones over one row a sequence
    drafts = (one_pass(True, verified if i == 0 else sequences) for i in range(spec_tokens))
    return StepBytes(one_pass(False, verified), tuple(drafts))


def _state_bytes(c: ModelConfig) -> int:
    per_layer = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    return 2 * len(c.linear_layers) * per_layer * FP32_BYTES


def _context_bytes(c: ModelConfig, context_tokens: int) -> int:
    """Of one sparse layer and one sequence: the selected keys and values, and every block key."""
    kept = kept_tokens(context_tokens, c.indexer_compress_ratio, c.indexer_topk)
    block_keys = context_tokens // c.indexer_compress_ratio * c.indexer_head_dim
    return (kept * 2 * c.kv_width + block_keys) * BF16_BYTES
