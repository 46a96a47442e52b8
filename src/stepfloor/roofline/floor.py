"""The byte floor of a decode step: what the target pass and the draft passes must read and write.

What is counted, and on how many devices, is said in `roofline.passes`; here are one device and independent routing.
A matrix is known by its canonical name (`layers.3.self_attn.q_proj`, `mtp.layers.0.mlp.experts.gate_up_proj`), so
the floor of a planned mix of formats and the floor of a checkpoint's stored bytes are the same computation.
Source: names and shapes of the `qwen4_exp` releases; transformers 5.24, modular_qwen4_exp.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from stepfloor.config import ModelConfig
from stepfloor.roofline.groups import HasBytes
from stepfloor.roofline.passes import ByteModel, Part
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
    target, *drafts = ByteModel(config, weights).step(sequences, spec_tokens, context_tokens)
    return StepBytes(_pass_bytes(target), tuple(_pass_bytes(draft) for draft in drafts))


def _pass_bytes(parts: tuple[Part, ...]) -> PassBytes:
    sums = dict.fromkeys((field.name for field in fields(PassBytes)), 0.0)
    for part in parts:
        sums[part.category] += part.num_bytes
    return PassBytes(**sums)
