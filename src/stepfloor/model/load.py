"""From a checkpoint's tensors to a Model: parts that share an input are stacked, norms get their 1 once.

Source: tensor names and layouts of the `qwen4_exp` releases, `weights`. On the CPU, matrices are mapped from the
file and decoded as they are used; only small models are decoded once (see `is_small`). On a GPU they are read there
and put, once, into the order in which the kernels stream them.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from stepfloor.config import SPARSE
from stepfloor.errors import UserError
from stepfloor.formats.codec import PackedWeight, stack_rows
from stepfloor.kernels.gdn_decode import DeltaConstants
from stepfloor.kernels.hc_down import hc_down_repack
from stepfloor.kernels.hc_mix import hc_mix_repack
from stepfloor.kernels.linear import linear_join
from stepfloor.kernels.moe_down import moe_down_repack
from stepfloor.kernels.moe_gate_up import moe_gate_up_repack
from stepfloor.kernels.ngram_gather import GatherTable, ngram_gather_table
from stepfloor.kernels.qsa_prepare import SparseNorms
from stepfloor.model.model import (
    Drafter,
    Experts,
    HyperConnection,
    Layer,
    LinearAttention,
    Model,
    NgramBlock,
    Projection,
    SparseAttention,
)
from stepfloor.model.pinned import pinned_copy
from stepfloor.model.rope import rope_tables
from stepfloor.model.tensors import DTYPES, MappedTensors, StreamedTensors, TensorSource
from stepfloor.weights.checkpoint import Checkpoint, Weight
from stepfloor.weights.expected import shard_heights

logger = logging.getLogger(__name__)

SMALL_BYTES = 1 << 30


def is_small(checkpoint: Checkpoint) -> bool:
    """Whether a CPU model is held in float32 and run by one thread.

    Its products take 5 to 40 us, and converting a matrix at every use would cost as much again. A second thread
    gains nothing at that size, and on a busy machine every hand-over to it may wait for a time slice: 5 steps of
    the shipped model took 0.07 s with one thread and 4.9 s with two beside other load (2-core Xeon, torch 2.13).
    """
    return checkpoint.num_bytes < SMALL_BYTES


def load_model(
    checkpoint: Checkpoint,
    positions: int,
    device: str,
    on_layer: Callable[[int, int], None] | None = None,
    drafter: bool = True,
    decode_rows: int = 1,
    table_on: str | None = None,
    source: TensorSource | None = None,
) -> Model:
    """Build the model from a checkpoint that passed its census.

    positions    positions the rotary tables cover; drafter  False leaves the drafter out
    on_layer     called as (layers done, layers in all), for a progress bar
    decode_rows  most rows of a decode step: kernels for so many are made ready
    table_on     where the n-gram table lies: "cpu" is pinned host memory for a model on a GPU; None: with the model
    source       of the tensors' values; None reads the checkpoint's files
    Raises UserError where stored values forbid stacking (gate and up with different global scales).
    """
    if source is not None:
        return _Loader(checkpoint, device, source, decode_rows, table_on).model(positions, on_layer, drafter)
    if device == "cpu":
        return _Loader(checkpoint, device, MappedTensors(), decode_rows, table_on).model(positions, on_layer, drafter)
    streamed = StreamedTensors(torch.device(device))
    try:
        return _Loader(checkpoint, device, streamed, decode_rows, table_on).model(positions, on_layer, drafter)
    finally:
        streamed.close()


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, device: str, source: TensorSource, decode_rows: int, table_on: str | None
    ) -> None:
        self.config = checkpoint.config
        self.weights = checkpoint.weights
        self.device = device
        self.source = source
        self.decode_rows = decode_rows
        self.table_on = table_on
        self.on_gpu = device != "cpu"
        self.decode_all = device == "cpu" and is_small(checkpoint)
        self.dtype = DTYPES[self.weights["embed_tokens"].parts["weight"].dtype]

    def model(self, positions: int, on_layer: Callable[[int, int], None] | None, drafter: bool) -> Model:
        config = self.config
        cos, sin = rope_tables(config.rope, positions, self.dtype, self.device)
        kinds = config.layer_types
        layers: list[Layer] = []

        def layer(i: int) -> Layer:
            return self._layer(f"layers.{i}", kinds[i], kinds[:i].count(kinds[i]), i == config.ple_layer)

        # two at a time: while one layer is put in order on the device, the next is read
        with ThreadPoolExecutor(2 if self.on_gpu else 1) as pool:
            for made in pool.map(layer, range(len(kinds))):
                layers.append(made)
                if on_layer is not None:
                    on_layer(len(layers), len(kinds))
        head = self._projection("lm_head")
        return Model(
            config,
            self._vector("embed_tokens"),
            tuple(layers),
            self._hyper_connection("hyper_connection_mixer", inject=False),
            head,
            self._drafter(kinds.count(SPARSE), head) if drafter and config.has_drafter else None,
            cos,
            sin,
        )

    def _layer(self, prefix: str, kind: str, index: int, ngram: bool) -> Layer:
        return Layer(
            index,
            self._hyper_connection(f"{prefix}.attn_hyper_connection"),
            self._sparse_attention(f"{prefix}.self_attn")
            if kind == SPARSE
            else self._linear_attention(f"{prefix}.linear_attn"),
            self._hyper_connection(f"{prefix}.mlp_hyper_connection"),
            self._experts(f"{prefix}.mlp"),
            self._ngram(f"{prefix}.ple") if ngram else None,
        )

    def _drafter(self, index: int, head: Projection) -> Drafter:
        return Drafter(
            self._norm("mtp.pre_fc_norm_hidden"),
            self._norm("mtp.pre_fc_norm_embedding"),
            self._projection("mtp.fc_hidden"),
            self._projection("mtp.fc_embedding"),
            self._layer("mtp.layers.0", SPARSE, index, ngram=False),
            self._hyper_connection("mtp.hyper_connection_mixer", inject=False),
            self._projection("mtp.lm_head") if "mtp.lm_head" in self.weights else head,
        )

    def _hyper_connection(self, prefix: str, inject: bool = True) -> HyperConnection:
        names = [f"{prefix}.input_mix_weight_down"] + ([f"{prefix}.block_inject_weight"] if inject else [])
        norm, down, up = (
            self._norm(f"{prefix}.hc_norm"),
            self._joined(names),
            self._joined([f"{prefix}.input_mix_weight_up"]),
        )
        if not self.on_gpu:
            return HyperConnection(norm, down, up)
        rank, streams, rows = self.config.hc_lowrank, self.config.hc_count, self.decode_rows
        return HyperConnection(
            norm,
            hc_down_repack(down, rank, streams, self.device, max_rows=rows),
            hc_mix_repack(up, streams, self.device, max_rows=rows),
        )

    def _linear_attention(self, prefix: str) -> LinearAttention:
        config = self.config
        return LinearAttention(
            self._projection(*(f"{prefix}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
            DeltaConstants(
                conv_weight=self._vector(f"{prefix}.conv1d").squeeze(1).float(),
                a_log=self._vector(f"{prefix}.A_log").float(),
                dt_bias=self._vector(f"{prefix}.dt_bias").float(),
                norm_weight=self._vector(f"{prefix}.norm"),
                key_heads=config.linear_num_key_heads,
                key_dim=config.linear_key_head_dim,
                eps=config.rms_norm_eps,
                activation=config.output_gate_type,
            ),
            self._projection(f"{prefix}.out_proj"),
        )

    def _sparse_attention(self, prefix: str) -> SparseAttention:
        return SparseAttention(
            self._projection(
                f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj", f"{prefix}.indexer.index_qk_proj"
            ),
            SparseNorms(
                self._norm(f"{prefix}.q_norm"),
                self._norm(f"{prefix}.k_norm"),
                self._norm(f"{prefix}.indexer.q_layernorm"),
                self._norm(f"{prefix}.indexer.k_layernorm"),
            ),
            self._projection(f"{prefix}.o_proj"),
        )

    def _experts(self, prefix: str) -> Experts:
        shared = f"{prefix}.shared_expert"
        fused = f"{prefix}.experts.gate_up_proj" in self.weights
        gate_up = (
            self._matrix(f"{prefix}.experts.gate_up_proj")
            if fused
            else self._stacked_experts(prefix, "gate_proj", "up_proj")
        )
        down = self._matrix(f"{prefix}.experts.down_proj") if fused else self._stacked_experts(prefix, "down_proj")
        shared_down = self._joined([f"{shared}.down_proj"])
        router = self._projection(
            f"{prefix}.gate", f"{shared}.gate_proj", f"{shared}.up_proj", f"{prefix}.shared_expert_gate"
        )
        if not self.on_gpu:
            return Experts(router, shared_down, gate_up, down)
        topk, rows = self.config.num_experts_per_tok, self.decode_rows
        tiled_gate_up = moe_gate_up_repack(gate_up, topk, self.device, max_rows=rows)
        tiled_down, tiled_shared = moe_down_repack(down, shared_down, topk, self.device, max_rows=rows)
        return Experts(router, tiled_shared, tiled_gate_up, tiled_down)

    def _stacked_experts(self, prefix: str, *leaves: str) -> PackedWeight:
        """Per-expert matrices as one stack, the named ones of an expert joined along their rows."""
        stacks = [self._stack(prefix, leaf) for leaf in leaves]
        if len(stacks) == 1:
            return stacks[0]
        try:
            return stack_rows(stacks)
        except ValueError as error:
            raise UserError(
                f"{prefix}.experts.*.{leaves[0]} and {leaves[1]} cannot share a kernel: {error}; convert again"
            ) from None

    def _stack(self, prefix: str, leaf: str) -> PackedWeight:
        """One matrix of every expert."""
        weights = [self.weights[f"{prefix}.experts.{e}.{leaf}"] for e in range(self.config.num_experts)]
        first = weights[0]
        if any(w.format != first.format for w in weights):
            raise UserError(
                f"{prefix}.experts.*.{leaf} are stored in {sorted({w.format for w in weights})}; one kernel reads "
                "them all; export them in one format"
            )
        return self._packed(first, self.source.stacked(weights), (len(weights),))

    def _projection(self, *names: str) -> Projection:
        """Matrices that share an input, ready for `linear`."""
        joined = self._joined(names)
        if not self.on_gpu:
            return joined
        return linear_join(joined, self.device, max_rows=self.decode_rows)

    def _joined(self, names: Sequence[str]) -> tuple[PackedWeight, ...]:
        """Matrices that share an input: neighbours that can be stacked are, the others stay side by side."""
        joined: list[PackedWeight] = []
        for name in names:
            matrix = self._matrix(name)
            if joined:
                try:
                    joined[-1] = stack_rows((joined[-1], matrix))
                    continue
                except ValueError:
                    pass  # another format, or scales that cannot be joined: a product of its own
            joined.append(matrix)
        return tuple(joined)

    def _ngram(self, prefix: str) -> NgramBlock:
        def constant(values: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        hashing = self.config.ngram_hash  # the census compared these with the stored buffers
        return NgramBlock(
            constant(hashing.multipliers),
            constant(hashing.sizes),
            constant(hashing.offsets),
            self._table(f"{prefix}.ple_embedding.ngram_embedding"),
            self._projection(f"{prefix}.key_proj", f"{prefix}.value_proj"),
            self._norm(f"{prefix}.norm_key"),
            self._norm(f"{prefix}.norm_query"),
            self._norm(f"{prefix}.norm_conv"),
            self._vector(f"{prefix}.conv1d").squeeze(1).float(),
        )

    def _table(self, prefix: str) -> tuple[PackedWeight, ...] | GatherTable:
        """The table's shards; on the CPU as mapped from the file, never copied: it may be larger than the memory."""
        # split_ngram_parts may promise more shards than there are rows for
        count = len(shard_heights(self.config))
        stored = [self.weights[f"{prefix}.shard_{i}"] for i in range(count)]
        shards = [_with_scales(weight, self._table_parts(weight)) for weight in stored]
        table = self.weights.get(prefix)
        if table is not None:
            shared = self._table_parts(table)
            shards = [
                replace(s, scale=shared.get("weight_scale", s.scale), scale_2=shared.get("weight_scale_2", s.scale_2))
                for s in shards
            ]
        if self.decode_all:
            whole = torch.cat([s.dequantize() for s in shards])
            return (PackedWeight("fp32", (whole.shape[0], whole.shape[1]), whole),)
        return ngram_gather_table(shards, self.device) if self.on_gpu else tuple(shards)

    def _table_parts(self, weight: Weight) -> dict[str, Tensor]:
        parts = self.source.parts(weight)
        if self.on_gpu and self.table_on == "cpu":
            # kernels read pinned memory by its address; a shard passes through the device on its way
            parts = {suffix: pinned_copy(tensor) for suffix, tensor in parts.items()}
        return parts

    def _matrix(self, name: str) -> PackedWeight:
        weight = self.weights[name]
        return self._packed(weight, self.source.parts(weight))

    def _packed(self, weight: Weight, parts: dict[str, Tensor], stack: tuple[int, ...] = ()) -> PackedWeight:
        packed = _with_scales(weight, parts, stack)
        if self.decode_all:
            return PackedWeight("fp32", packed.shape, packed.dequantize().contiguous())
        return packed

    def _vector(self, name: str) -> Tensor:
        return self.source.parts(self.weights[name])["weight"]

    def _norm(self, name: str) -> Tensor:
        """Scale of a norm whose stored weight is centred on zero."""
        return 1.0 + self._vector(name).float()


def _with_scales(weight: Weight, parts: dict[str, Tensor], stack: tuple[int, ...] = ()) -> PackedWeight:
    """A stored matrix, or a stack of matrices like `weight`, its scales in the shapes of PackedWeight."""
    n, k = weight.shape[-2:]
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    if scale is not None and weight.format == "fp8_block":
        scale = scale.reshape(*stack, -(-n // 128), -(-k // 128))
    elif scale is not None and weight.format == "fp8_channel":
        scale = scale.reshape(*stack, n)
    scale_2 = parts.get("weight_scale_2")
    return PackedWeight(
        weight.format, (n, k), parts["weight"], scale, None if scale_2 is None else scale_2.reshape(stack)
    )
