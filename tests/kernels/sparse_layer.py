"""A sparse-attention layer for tests: cache in shuffled pages, poisoned where nothing was written."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepfloor.kernels.qsa_attend import kept_positions, qsa_attend
from stepfloor.kernels.qsa_prepare import SparseCache, SparseNorms, SparseShape, qsa_prepare
from stepfloor.kernels.qsa_select import qsa_select
from tests.kernels.compare import UNIT, assert_within
from tests.kernels.source import Recording

PAGE_BLOCKS = 2


@dataclass
class Operands:
    """What a layer adds to its cache: shape, norms, tables of cos and sin."""

    shape: SparseShape
    norms: SparseNorms
    cos: Tensor
    sin: Tensor
    eps: float
    dtype: torch.dtype

    @property
    def columns(self) -> int:
        s = self.shape
        return (2 * s.heads + 2 * s.kv_heads) * s.head_dim + (s.index_heads + 1) * s.index_dim


def source_operands(recording: Recording, layer: int) -> Operands:
    """Operands of a layer of the recorded model."""
    config, prefix = recording.config, f"layers.{layer}.self_attn"
    return Operands(
        SparseShape(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.indexer_n_heads,
            config.indexer_head_dim,
            config.indexer_compress_ratio,
            config.indexer_budget // config.indexer_compress_ratio,
        ),
        SparseNorms(
            *(
                recording.norm(f"{prefix}.{n}")
                for n in ("q_norm", "k_norm", "indexer.q_layernorm", "indexer.k_layernorm")
            )
        ),
        recording.cos,
        recording.sin,
        config.rms_norm_eps,
        recording.dtype,
    )


def source_projections(recording: Recording, layer: int) -> Tensor:
    """[T, columns] as the source's own products gave them."""
    prefix = f"layers.{layer}.self_attn"
    parts = ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj")
    return torch.cat([recording.out(f"{prefix}.{part}") for part in parts], -1)


def random_operands(shape: SparseShape, positions: int, dtype: torch.dtype) -> Operands:
    """Norm scales about one, and rotations of any speed."""
    make = torch.Generator().manual_seed(11)
    rotary = min(shape.head_dim, shape.index_dim) // 4 * 2
    angle = torch.arange(positions)[:, None] * 0.3 ** torch.arange(rotary // 2)
    angle = torch.cat((angle, angle), -1)
    sizes = (shape.head_dim, shape.head_dim, shape.index_dim, shape.index_dim)
    norms = SparseNorms(*(1 + 0.1 * torch.randn(n, generator=make) for n in sizes))
    return Operands(shape, norms, angle.cos().to(dtype), angle.sin().to(dtype), 1e-6, dtype)


class SparseLayer:
    """Runs windows as the model does; page 0 belongs to nobody and slot 0 is unused."""

    def __init__(self, operands: Operands, slots: int, positions: int, ring: int, seed: int = 0) -> None:
        shape, dtype = operands.shape, operands.dtype
        self.operands = operands
        page = PAGE_BLOCKS * shape.ratio
        pages = -(-positions // page)
        make = torch.Generator().manual_seed(seed)
        order = 1 + torch.randperm(slots * pages, generator=make).reshape(slots, pages)

        def poison(*size: int) -> Tensor:
            return torch.full(size, torch.nan, dtype=dtype)

        self.cache = SparseCache(
            poison(1 + slots * pages, page, shape.kv_heads, shape.head_dim),
            poison(1 + slots * pages, page, shape.kv_heads, shape.head_dim),
            poison(1 + slots * pages, PAGE_BLOCKS, shape.index_dim),
            poison(slots + 1, ring, shape.index_dim),
            torch.cat((torch.zeros(1, pages, dtype=torch.int64), order)),
        )

    def prepare(self, slots: list[int], first: list[int], projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o = self.operands
        where = torch.tensor(slots), torch.tensor(first)
        return qsa_prepare(projected, *where, o.cos, o.sin, o.norms, self.cache, o.shape, o.eps)

    def run(self, slots: list[int], first: list[int], projected: Tensor) -> tuple[Tensor, Tensor]:
        """Attended rows [B, R, H * head_dim] and selected blocks [B, R, topk]."""
        q, gate, index_q = self.prepare(slots, first, projected)
        shape, cache = self.operands.shape, self.cache
        where = torch.tensor(slots), torch.tensor(first)
        selected = qsa_select(index_q, *where, cache.block_keys, cache.page_table, shape.ratio, shape.topk)
        return (
            qsa_attend(q, gate, selected, *where, cache.keys, cache.values, cache.page_table, shape.ratio),
            selected,
        )

    def sequence(self, slot: int, length: int) -> dict[str, Tensor]:
        """Keys, values and block keys of a sequence's first `length` tokens, out of their pages."""
        cache, ratio = self.cache, self.operands.shape.ratio
        at, blocks = torch.arange(length), torch.arange(length // ratio)
        page = PAGE_BLOCKS * ratio
        table = cache.page_table[slot]
        return {
            "keys": cache.keys[table[at // page], at % page],
            "values": cache.values[table[at // page], at % page],
            "block_keys": cache.block_keys[table[blocks // PAGE_BLOCKS], blocks % PAGE_BLOCKS],
        }

    def tensors(self) -> list[Tensor]:
        return [getattr(self.cache, name) for name in ("keys", "values", "block_keys", "raw_keys")]


def same_bits(one: Any, other: Any) -> bool:
    """Equal, NaN where NaN."""
    return torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))


def assert_attended(ours: Tensor, inputs: dict[str, Any], rows: list[int]) -> None:
    """Within the roundings of the exact result, which are those of the reference (one of them is at another place).

    A score sums head_dim products in float32, no larger than the lengths' product; an error of it is a relative one of
    its weight, and of the sum of weights. Weights are rounded to the model's dtype once, relative to themselves: at
    most a unit of the sum of |weight value|. Up to `kept` of them are summed twice in float32, with an exponential or
    two of 2**-22 each. The result, the gate and their product are rounded once each. Tensor cores cut sums off rather
    than round them: float32 units count twice.
    """
    q, keys, values = inputs["q"].double(), inputs["keys"], inputs["values"]
    heads, page, unit = q.shape[2], keys.shape[1], UNIT[inputs["q"].dtype]
    gate = torch.sigmoid(inputs["gate"].double()).unflatten(-1, (heads, -1))
    for b in range(q.shape[0]):
        table, first = inputs["page_table"][inputs["slots"][b]], int(inputs["first"][b])
        for r in rows:
            at = kept_positions(inputs["selected"][b, r], first + r, inputs["ratio"])
            k, v = (
                x[table[at // page], at % page].double().repeat_interleave(heads // x.shape[2], 1)
                for x in (keys, values)
            )
            weights = (torch.einsum("hd,nhd->hn", q[b, r], k) / q.shape[3] ** 0.5).softmax(-1)
            wanted = torch.einsum("hn,nhd->hd", weights, v) * gate[b, r]
            reach = torch.einsum("hn,nhd->hd", weights, v.abs()) * gate[b, r]
            size = float((q[b, r].norm(dim=-1) * k.norm(dim=-1).amax(0)).max()) * q.shape[3] ** 0.5
            sums = (2 * size + 2 * len(at) + 16) * 2 * 2.0**-24
            bound = 1.02 * ((sums + unit) * reach + 3 * unit * wanted.abs())
            assert_within(ours[b, r].double(), wanted.flatten(), bound.flatten())
