"""The network in plain torch calls to operators: the target, its drafter, and the weights they read.

Source: transformers 5.24, qwen4_exp/modeling_qwen4_exp.py; the drafter is vLLM 0.33's qwen4_exp predictor. The
residual is S streams of width D; a sub-layer reads one mixed vector of D and writes its output to every stream.
That write waits for the next read, since the two are one operator (hc_down).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.cache.tensors import CacheTensors, Rows
from stepfloor.config import ModelConfig
from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels.embed import embed
from stepfloor.kernels.gdn_decode import DeltaConstants, gdn_decode
from stepfloor.kernels.gdn_prefill import gdn_prefill
from stepfloor.kernels.hc_down import StreamedDown, hc_down
from stepfloor.kernels.hc_mix import StreamedMix, hc_mix
from stepfloor.kernels.linear import MAX_ROWS, StreamedPair, StreamedWeight, linear
from stepfloor.kernels.moe_down import TiledExperts, TiledShared, moe_down
from stepfloor.kernels.moe_gate_up import moe_gate_up
from stepfloor.kernels.moe_route import moe_route
from stepfloor.kernels.mtp_fuse import mtp_fuse
from stepfloor.kernels.mtp_norm import mtp_norm
from stepfloor.kernels.ngram_gather import GatherTable, ngram_gather
from stepfloor.kernels.ngram_rows import ngram_rows
from stepfloor.kernels.ple_mix import ple_mix
from stepfloor.kernels.qsa_attend import qsa_attend
from stepfloor.kernels.qsa_prepare import SparseCache, SparseNorms, SparseShape, qsa_prepare
from stepfloor.kernels.qsa_select import qsa_select

Matrices = tuple[PackedWeight, ...]
"""Matrices that share an input, outputs side by side; more than one where their formats differ."""
Projection = tuple[PackedWeight | StreamedWeight | StreamedPair, ...]
"""The same, as `linear` reads them on the model's device."""


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """norm_scale [S D] float32; down: [rank + S, S D], the write weights' rows last; up: [S D, rank]."""

    norm_scale: Tensor
    down: tuple[PackedWeight | StreamedDown, ...]
    up: tuple[PackedWeight | StreamedMix, ...]


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta net. project: q, k, v, z, b, a."""

    project: Projection
    constants: DeltaConstants
    out: Projection


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Sparse attention. project: q with gate per head, k, v, indexer queries, indexer key."""

    project: Projection
    norms: SparseNorms
    out: Projection


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts. router: the router, the shared expert's gate and up, its gate [1, D], in this order.

    gate_up: E matrices [2 I, D], gate rows first; down: E matrices [D, I]; shared_down [D, Is].
    """

    router: Projection
    shared_down: tuple[PackedWeight | TiledShared, ...]
    gate_up: PackedWeight | TiledExperts
    down: PackedWeight | TiledExperts


@dataclass(frozen=True, slots=True)
class NgramBlock:
    """The n-gram table and what turns its rows into an addend of the residual."""

    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor
    shards: tuple[PackedWeight, ...] | GatherTable
    key_value: Projection
    norm_key: Tensor
    norm_query: Tensor
    norm_conv: Tensor
    conv_weight: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; `index` counts layers of its attention kind."""

    index: int
    attention_hc: HyperConnection
    attention: LinearAttention | SparseAttention
    mlp_hc: HyperConnection
    experts: Experts
    ngram: NgramBlock | None = None


@dataclass(frozen=True, slots=True)
class Drafter:
    """The multi-token predictor: one sparse-attention layer that reads the target's residual and the next token."""

    norm_hidden: Tensor
    norm_embedding: Tensor
    fc_hidden: Projection
    fc_embedding: Projection
    layer: Layer
    mixer: HyperConnection
    head: Projection


@dataclass(frozen=True, slots=True)
class Written:
    """A residual [T, S D] and the sub-layer output that waits to be written to it: y [T, D] times weights [T, S]."""

    residual: Tensor
    y: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """Immutable after load. cos, sin [positions, rotary] cover every position a sequence may touch.

    on_routed  called with every layer and the experts [T, topk] its rows chose, while work is queued: it may queue more
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    mixer: HyperConnection
    head: Projection
    drafter: Drafter | None
    cos: Tensor
    sin: Tensor
    on_routed: Callable[[Layer, Tensor], None] | None = None

    def target(self, rows: Rows, cache: CacheTensors) -> tuple[Tensor, Tensor]:
        """Run rows through every layer.

        Returns the residual before the final mixer [B R, S D], which the drafter reads, and the mixed vector
        [B R, D], which the head reads.
        """
        stream = Written(embed(rows.tokens.flatten(), self.embedding, self.config.hc_count))
        for layer in self.layers:
            stream = self._layer(layer, stream, rows, cache)
        return self._final(self.mixer, stream)

    def draft(
        self, drafter: Drafter, residual: Tensor, following: Tensor, rows: Rows, cache: CacheTensors
    ) -> tuple[Tensor, Tensor]:
        """One pass of the drafter: residual [B R, S D] of each row and the token after it, following [B, R].

        Returns its residual before its mixer, which the next pass reads, and the mixed vector for its head.
        """
        config = self.config
        hidden, token = mtp_norm(
            residual,
            self.embedding,
            following.flatten(),
            drafter.norm_hidden,
            drafter.norm_embedding,
            config.hc_count,
            config.rms_norm_eps,
        )
        # S rows a token: a decode step may have more than `linear` takes for one, and the library's bits depend on
        # how many there are
        parts = (hidden,) if rows.chunk else hidden.split(MAX_ROWS // config.hc_count)
        projected = [linear(part, drafter.fc_hidden) for part in parts]
        streams = projected[0] if len(projected) == 1 else torch.cat(projected)
        fused = mtp_fuse(streams, linear(token, drafter.fc_embedding))
        return self._final(drafter.mixer, self._layer(drafter.layer, Written(fused), rows, cache))

    def logits(self, hidden: Tensor, head: Projection | None = None) -> Tensor:
        """Project mixed vectors [T, D] to the vocabulary, [T, V] in the model's dtype."""
        return linear(hidden, self.head if head is None else head)

    def _layer(self, layer: Layer, stream: Written, rows: Rows, cache: CacheTensors) -> Written:
        if layer.ngram is not None:
            stream = self._ngram(layer.ngram, stream, rows, cache)
        residual, x, weights = self._read(layer.attention_hc, stream)
        if isinstance(layer.attention, LinearAttention):
            y = self._linear_attention(layer.attention, layer.index, x, rows, cache)
        else:
            y = self._sparse_attention(layer.attention, layer.index, x, rows, cache)
        residual, x, weights = self._read(layer.mlp_hc, Written(residual, y, weights))
        return Written(residual, self._experts(layer, x), weights)

    def _read(self, hc: HyperConnection, stream: Written) -> tuple[Tensor, Tensor, Tensor]:
        """Write what waits, then mix the streams: the residual, a sub-layer's input, and its write weights."""
        config = self.config
        residual, normed, low, weights = hc_down(
            stream.residual,
            stream.y,
            stream.weights,
            hc.norm_scale,
            hc.down,
            config.hc_lowrank,
            config.hc_count,
            config.rms_norm_eps,
        )
        return residual, hc_mix(low, normed, hc.up, config.hc_count), weights

    def _final(self, mixer: HyperConnection, stream: Written) -> tuple[Tensor, Tensor]:
        residual, hidden, _ = self._read(mixer, stream)
        return residual, hidden

    def _linear_attention(
        self, attention: LinearAttention, index: int, x: Tensor, rows: Rows, cache: CacheTensors
    ) -> Tensor:
        projected = linear(x, attention.project)
        if rows.chunk:
            state, raw_rows = cache.state[index], cache.raw_rows[index]
            mixed = gdn_prefill(projected, state, raw_rows, rows.slots, attention.constants)
        else:
            mixed = gdn_decode(
                projected.unflatten(0, rows.tokens.shape),
                cache.state[index],
                cache.raw_rows[index],
                cache.gate_rows[index],
                rows.slots,
                rows.pending,
                attention.constants,
                rows.settled,
            ).flatten(0, 1)
        return linear(mixed, attention.out)

    def _sparse_attention(
        self, attention: SparseAttention, index: int, x: Tensor, rows: Rows, cache: CacheTensors
    ) -> Tensor:
        config = self.config
        layer_cache = SparseCache(
            cache.keys[index], cache.values[index], cache.block_keys[index], cache.raw_keys[index], cache.page_table
        )
        shape = SparseShape(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.indexer_n_heads,
            config.indexer_head_dim,
            config.indexer_compress_ratio,
            config.indexer_topk,
        )
        q, gate, index_q = qsa_prepare(
            linear(x, attention.project).unflatten(0, rows.tokens.shape),
            rows.slots,
            rows.first,
            self.cos,
            self.sin,
            attention.norms,
            layer_cache,
            shape,
            config.rms_norm_eps,
            rows.settled,
        )
        selected = qsa_select(
            index_q, rows.slots, rows.first, layer_cache.block_keys, cache.page_table, shape.ratio, shape.topk
        )
        mixed = qsa_attend(
            q,
            gate,
            selected,
            rows.slots,
            rows.first,
            layer_cache.keys,
            layer_cache.values,
            cache.page_table,
            shape.ratio,
        )
        return linear(mixed.flatten(0, 1), attention.out)

    def _experts(self, layer: Layer, x: Tensor) -> Tensor:
        experts, config = layer.experts, self.config
        ids, weights, shared, shared_gate = moe_route(
            linear(x, experts.router), config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        )
        if self.on_routed is not None:
            self.on_routed(layer, ids)
        hidden = moe_gate_up(x, ids, experts.gate_up)
        return moe_down(hidden, ids, weights, experts.down, shared, shared_gate, experts.shared_down)

    def _ngram(self, block: NgramBlock, stream: Written, rows: Rows, cache: CacheTensors) -> Written:
        config = self.config
        ids = ngram_rows(rows.tokens, rows.history, block.multipliers, block.sizes, block.offsets, config.eos_token_id)
        gathered = ngram_gather(ids.flatten(0, 1), block.shards, stream.residual.dtype)
        return Written(
            ple_mix(
                stream.residual,
                stream.y,
                stream.weights,
                linear(gathered, block.key_value).unflatten(0, rows.tokens.shape),
                cache.ngram_rows,
                rows.slots,
                rows.rejected,
                block.norm_key,
                block.norm_query,
                block.norm_conv,
                block.conv_weight,
                config.ngram_size,
                config.hc_count,
                config.rms_norm_eps,
            )
        )
