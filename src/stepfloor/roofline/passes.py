"""What one pass over the layers reads and writes, component by component, on one of the devices that share it.

Counted: every matrix and vector once per pass, experts as the expected number of distinct ones, the head once per
pass, the recurrent state once in and once out, the embedding and n-gram rows of the tokens, and what grows with the
context. Left out, because they are small: activations, convolution windows, new key/value rows.
Source: names and shapes of the `qwen4_exp` releases; transformers 5.24, modular_qwen4_exp.py.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from stepfloor.config import ModelConfig
from stepfloor.roofline.bytes import BF16_BYTES, FP32_BYTES, distinct_experts, kept_tokens
from stepfloor.roofline.groups import HasBytes, pass_group, weight_component
from stepfloor.roofline.shards import ONE_DEVICE, Shards

Category = Literal["experts", "dense", "other", "head", "state", "context", "rows"]


class HasShape(HasBytes, Protocol):
    """A weight of a checkpoint: bytes, format and logical shape."""

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Matrices:
    """`count` matrices [n, k] of one format and kind, such as the gate matrices of a layer's experts."""

    format: str
    count: int
    n: int
    k: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one component in one pass, and which category of read it is."""

    component: str
    category: Category
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Routing:
    """How much of an expert choice of its own each further token of a window makes.

    1 is uniform and independent choice. Neighbouring tokens overlap in fact; tokens of different sequences are taken
    as independent.
    """

    independence: float = 1.0

    def distinct(self, sequences: int, rows: int, num_experts: int, topk: int) -> float:
        """Expected distinct experts of a layer for windows of `rows` tokens of each of `sequences` sequences."""
        tokens = sequences * (1 + (rows - 1) * self.independence)
        return distinct_experts(tokens, num_experts, topk)


UNIFORM = Routing()


def measured_routing(tokens: int, experts: float, num_experts: int, topk: int) -> Routing:
    """The routing under which a window of `tokens` tokens touches `experts` distinct experts a layer.

    Raises ValueError for a count that no window of that length can touch.
    """
    most = min(tokens * topk, num_experts)
    if tokens < 2 or not topk <= experts <= most or experts >= num_experts:
        raise ValueError(f"{tokens} tokens (at least 2) touch {topk} to {most} experts; got {experts}")
    effective = math.log(1 - experts / num_experts) / math.log((num_experts - topk) / num_experts)
    return Routing((effective - 1) / (tokens - 1))


def fold(weights: Mapping[str, HasShape]) -> dict[str, Matrices]:
    """Experts stored one by one, fused experts and shards of the table as one entry each: 75,000 names become 1,300."""
    folded: dict[str, Matrices] = {}
    for name, weight in weights.items():
        *stack, n, k = (1, *weight.shape) if len(weight.shape) < 2 else weight.shape
        count = math.prod(stack)
        if name.endswith("experts.gate_up_proj"):
            count, n = 2 * count, n // 2
        key = re.sub(r"(\.experts)\.\d+(?=\.)|\.shard_\d+$", r"\1", name)
        known = folded.get(key)
        if known is None:
            folded[key] = Matrices(weight.format, count, n, k, weight.num_bytes)
        elif ".ngram_embedding" in key:
            shared = "shard" not in name  # the one scale of all shards
            rows = known.n if shared else n if known.k != k else known.n + n
            folded[key] = Matrices(known.format, 1, rows, max(known.k, k), known.num_bytes + weight.num_bytes)
        else:
            folded[key] = Matrices(weight.format, known.count + count, n, k, known.num_bytes + weight.num_bytes)
    return folded


class ByteModel:
    """The bytes of one device's passes, for one set of weights."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, HasBytes], shards: Shards = ONE_DEVICE) -> None:
        """Sum the weights by component. Raises ValueError for a name that belongs to none.

        weights  canonical name -> weight; experts fused, one by one or folded, the table whole or in shards. A head
                 kept for the drafter alone is `mtp.lm_head`; without one the drafter reads `lm_head`.
        """
        self.config, self.shards = config, shards
        self._groups: dict[tuple[bool, str, str], float] = {}
        for name, weight in weights.items():
            key = (name.startswith("mtp."), weight_component(name), pass_group(name))
            size = weight.num_bytes / shards.divisor(name)
            self._groups[key] = self._groups.get(key, 0) + size
        self._head = self._sum(False, "head")
        self._draft_head = self._sum(True, "head") or self._head
        self._embedding_row = self._sum(False, "embedding") / config.vocab_size
        self._table_rows = self._sum(False, "table") * config.ngram_heads / config.ngram_hash.rows

    def target(
        self,
        sequences: int,
        rows: int,
        context_tokens: int = 0,
        routing: Routing = UNIFORM,
        kv_bytes: int = BF16_BYTES,
        uneven: bool = False,
    ) -> tuple[Part, ...]:
        """One pass of the model over `rows` rows of each of `sequences` sequences.

        uneven  count the experts of the busiest device in place of an even share
        """
        c = self.config
        state = self.shards.heads(c.linear_num_value_heads) * c.linear_key_head_dim * c.linear_value_head_dim
        return (
            *self._weights(False, sequences, rows, routing, uneven),
            Part("head", "head", self._head),
            Part("recurrent state", "state", sequences * 2 * len(c.linear_layers) * state * FP32_BYTES),
            *self._context(sequences, len(c.sparse_layers), context_tokens, kv_bytes),
            Part("embedding and table rows", "rows", sequences * rows * (self._embedding_row + self._table_rows)),
        )

    def draft(
        self,
        sequences: int,
        rows: int,
        context_tokens: int = 0,
        routing: Routing = UNIFORM,
        kv_bytes: int = BF16_BYTES,
        uneven: bool = False,
        draft_vocab: int | None = None,
    ) -> tuple[Part, ...]:
        """The same of the drafter. draft_vocab: ids its head scores, where that is not all of them."""
        share = 1.0 if draft_vocab is None else draft_vocab / self.config.vocab_size
        return (
            *self._weights(True, sequences, rows, routing, uneven),
            Part("head", "head", self._draft_head * share),
            *self._context(sequences, self.config.mtp_num_hidden_layers, context_tokens, kv_bytes),
            Part("embedding and table rows", "rows", sequences * rows * self._embedding_row),
        )

    def step(
        self,
        sequences: int = 1,
        spec_tokens: int = 3,
        context_tokens: int = 0,
        routing: Routing = UNIFORM,
        kv_bytes: int = BF16_BYTES,
        uneven: bool = False,
        draft_vocab: int | None = None,
    ) -> tuple[tuple[Part, ...], ...]:
        """The target's pass over spec_tokens + 1 rows a sequence, then one draft pass per draft.

        Raises ValueError for drafts without a drafter.
        """
        if spec_tokens and not self.config.has_drafter:
            raise ValueError(f"a config without a drafter cannot draft; got spec_tokens {spec_tokens}")
        shared = (context_tokens, routing, kv_bytes, uneven)
        # the first draft pass runs over the rows just verified, the later ones over one row a sequence
        return (
            self.target(sequences, spec_tokens + 1, *shared),
            *(
                self.draft(sequences, 1 if i else spec_tokens + 1, *shared, draft_vocab=draft_vocab)
                for i in range(spec_tokens)
            ),
        )

    def _sum(self, drafter: bool, group: str) -> float:
        return sum(size for (d, _, g), size in self._groups.items() if (d, g) == (drafter, group))

    def _weights(self, drafter: bool, sequences: int, rows: int, routing: Routing, uneven: bool) -> tuple[Part, ...]:
        c = self.config
        experts = routing.distinct(sequences, rows, c.num_experts, c.num_experts_per_tok)
        busiest = self.shards.busiest(experts) if uneven else 1.0
        parts: list[Part] = []
        for (d, component, group), size in self._groups.items():
            if d != drafter or group not in ("experts", "dense", "other"):
                continue
            touched = experts / c.num_experts * busiest if group == "experts" else 1.0
            parts.append(Part(component, group, size * touched))
        return tuple(parts)

    def _context(self, sequences: int, layers: int, context_tokens: int, kv_bytes: int) -> tuple[Part, ...]:
        """Of the sparse layers: the selected keys and values, and every block key."""
        c = self.config
        kept = kept_tokens(context_tokens, c.indexer_compress_ratio, c.indexer_topk)
        width = self.shards.kv_heads(c.num_key_value_heads) * c.head_dim
        blocks = context_tokens // c.indexer_compress_ratio * c.indexer_head_dim * BF16_BYTES
        return (
            Part("keys and values", "context", sequences * layers * kept * 2 * width * kv_bytes),
            Part("block keys", "context", sequences * layers * blocks),
        )


def total(parts: tuple[Part, ...]) -> float:
    """Bytes of a pass."""
    return sum(part.num_bytes for part in parts)


def by_component(parts: tuple[Part, ...]) -> dict[str, float]:
    """Bytes by component; a component whose parts are read in two ways is one."""
    sums: dict[str, float] = {}
    for part in parts:
        sums[part.component] = sums.get(part.component, 0) + part.num_bytes
    return sums
