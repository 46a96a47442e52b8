"""From a checkpoint's tensors to a Model: parts that share an input are stacked, norms get their 1 once.

Source: tensor names and layouts of the `qwen4_exp` releases, `weights`. On the CPU, matrices are mapped from the
file and decoded as they are used; only small models are decoded once (see `is_small`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from stepfloor.config import SPARSE
from stepfloor.errors import UserError
from stepfloor.formats.codec import PackedWeight, stack_rows
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
from stepfloor.model.rope import rope_tables
from stepfloor.weights.checkpoint import Checkpoint, Weight
from stepfloor.weights.expected import shard_heights
from stepfloor.weights.headers import Entry

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
}
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
) -> Model:
    """Build the model from a checkpoint that passed its census.

    positions  positions the rotary tables cover; drafter  False leaves the drafter out
    on_layer   called as (layers done, layers in all), for a progress bar
    Raises UserError where stored values forbid stacking (gate and up with different global scales).
    """
    return _Loader(checkpoint, device).model(positions, on_layer, drafter)


class _Loader:
    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self.config = checkpoint.config
        self.weights = checkpoint.weights
        self.device = device
        self.decode_all = device == "cpu" and is_small(checkpoint)
        self.dtype = DTYPES[self.weights["embed_tokens"].parts["weight"].dtype]

    def model(self, positions: int, on_layer: Callable[[int, int], None] | None, drafter: bool) -> Model:
        config = self.config
        cos, sin = rope_tables(config.rope, positions, self.dtype, self.device)
        layers: list[Layer] = []
        counts = dict.fromkeys(config.layer_types, 0)
        for i, kind in enumerate(config.layer_types):
            layers.append(self._layer(f"layers.{i}", kind, counts[kind], i == config.ple_layer))
            counts[kind] += 1
            if on_layer is not None:
                on_layer(i + 1, config.num_hidden_layers)
        head = self._projection("lm_head")
        return Model(
            config,
            self._vector("embed_tokens"),
            tuple(layers),
            self._hyper_connection("hyper_connection_mixer", inject=False),
            head,
            self._drafter(counts.get(SPARSE, 0), head) if drafter and config.has_drafter else None,
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
        down = [f"{prefix}.input_mix_weight_down"] + ([f"{prefix}.block_inject_weight"] if inject else [])
        return HyperConnection(
            self._norm(f"{prefix}.hc_norm"),
            self._projection(*down),
            self._projection(f"{prefix}.input_mix_weight_up"),
        )

    def _linear_attention(self, prefix: str) -> LinearAttention:
        return LinearAttention(
            self._projection(*(f"{prefix}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))),
            self._vector(f"{prefix}.conv1d").squeeze(1).float(),
            self._vector(f"{prefix}.A_log").float(),
            self._vector(f"{prefix}.dt_bias").float(),
            self._vector(f"{prefix}.norm"),
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
        return Experts(
            self._projection(
                f"{prefix}.gate", f"{shared}.gate_proj", f"{shared}.up_proj", f"{prefix}.shared_expert_gate"
            ),
            self._projection(f"{shared}.down_proj"),
            self._matrix(f"{prefix}.experts.gate_up_proj")
            if fused
            else self._stacked_experts(prefix, "gate_proj", "up_proj"),
            self._matrix(f"{prefix}.experts.down_proj") if fused else self._stacked_experts(prefix, "down_proj"),
        )

    def _stacked_experts(self, prefix: str, *parts: str) -> PackedWeight:
        """Per-expert matrices as one stack, the named parts joined along their rows."""
        experts = [
            self._joined([f"{prefix}.experts.{e}.{part}" for part in parts]) for e in range(self.config.num_experts)
        ]
        first = experts[0]

        def stack(tensors: list[Tensor | None]) -> Tensor | None:
            present = [t for t in tensors if t is not None]
            return torch.stack(present) if present else None

        return replace(
            first,
            data=torch.stack([e.data for e in experts]),
            scale=stack([e.scale for e in experts]),
            scale_2=stack([e.scale_2 for e in experts]),
        )

    def _joined(self, names: list[str]) -> PackedWeight:
        matrices = [self._matrix(name) for name in names]
        if len(matrices) == 1:
            return matrices[0]
        try:
            return stack_rows(matrices)
        except ValueError as error:
            raise UserError(f"{names[0]} and {names[-1]} cannot share a kernel: {error}; convert again") from None

    def _projection(self, *names: str) -> Projection:
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

    def _table(self, prefix: str) -> tuple[PackedWeight, ...]:
        """The table's shards as mapped from the file; never copied, it may be larger than the memory."""
        # split_ngram_parts may promise more shards than there are rows for
        count = len(shard_heights(self.config))
        shards = [self._stored(self.weights[f"{prefix}.shard_{i}"]) for i in range(count)]
        table = self.weights.get(prefix)
        if table is not None:
            scalars = {suffix: _tensor(entry) for suffix, entry in table.parts.items()}
            shards = [
                replace(s, scale=scalars.get("weight_scale", s.scale), scale_2=scalars.get("weight_scale_2", s.scale_2))
                for s in shards
            ]
        if self.decode_all:
            whole = torch.cat([s.dequantize() for s in shards])
            return (PackedWeight("fp32", (whole.shape[0], whole.shape[1]), whole),)
        return tuple(shards)

    def _matrix(self, name: str) -> PackedWeight:
        packed = self._stored(self.weights[name]).to(self.device)
        if self.decode_all:
            return PackedWeight("fp32", packed.shape, packed.dequantize().contiguous())
        return packed

    def _stored(self, weight: Weight) -> PackedWeight:
        parts = {suffix: _tensor(entry) for suffix, entry in weight.parts.items()}
        n, k = weight.shape[-2:]
        scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
        if scale is not None and weight.format == "fp8_block":
            scale = scale.reshape(-(-n // 128), -(-k // 128))
        elif scale is not None and weight.format == "fp8_channel":
            scale = scale.reshape(n)
        scale_2 = parts.get("weight_scale_2")
        return PackedWeight(
            weight.format, (n, k), parts["weight"], scale, None if scale_2 is None else scale_2.reshape(())
        )

    def _vector(self, name: str) -> Tensor:
        return _tensor(self.weights[name].parts["weight"]).to(self.device)

    def _norm(self, name: str) -> Tensor:
        """Scale of a norm whose stored weight is centred on zero."""
        return 1.0 + self._vector(name).float()


def _tensor(entry: Entry) -> Tensor:
    return torch.frombuffer(entry.read(), dtype=DTYPES[entry.dtype]).reshape(entry.shape)
