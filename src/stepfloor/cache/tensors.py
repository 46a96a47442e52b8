"""What a sequence leaves behind, as tensors: keys and values in pages, the rest in one slot per sequence.

Sizes per sequence: architecture of `qwen4_exp`, section "per-sequence state". Page 0 and the slot
after the last are scratch: padding rows of a captured step write there and nobody reads it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepfloor.config import EngineConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows of each of B sequences: a decode step (chunk False), or a prompt chunk of one sequence (B = 1).

    tokens    [B, R] int64
    slots     [B] int64
    first     [B] int64, position of each sequence's first row
    pending   [B] int64, rows of the last decode step that were accepted and are not in the recurrent state yet
    rejected  [B] int64, rows of the last decode step that were not accepted
    history   [B, ngram_size - 1] int64, the committed tokens before the first row
    settled   whether slots, first, pending, the page table and what earlier steps or passes left in a layer's recurrent
              state, kept rows and raw keys were final before something that no kernel of these rows overtakes: a plain
              kernel or a copy, the start of a graph, or a kernel that starts in turn
    """

    tokens: Tensor
    slots: Tensor
    first: Tensor
    pending: Tensor
    rejected: Tensor
    history: Tensor
    chunk: bool
    settled: bool = False


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """The device memory of all sequences. Lists run over layers of their kind; the drafter's layer comes last.

    keys, values  [pages, P, KV heads, head_dim] in the model's dtype or E4M3
    block_keys    [pages, P / ratio, indexer_head_dim]
    raw_keys      [slots, ring, indexer_head_dim]
    page_table    [slots, pages of the longest sequence] int64
    state         [slots, HV, K, V] float32, recurrent state without the pending rows
    raw_rows      [slots, taps - 1 + R, channels], inputs of the convolution: its history, then pending rows
    gate_rows     [slots, R, 2 HV]
    ngram_rows    [slots, dilation (taps - 1) + R, S D], newest last
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_keys: list[Tensor]
    raw_keys: list[Tensor]
    page_table: Tensor
    state: list[Tensor]
    raw_rows: list[Tensor]
    gate_rows: list[Tensor]
    ngram_rows: Tensor

    def reset(self, slot: int) -> None:
        """Make a slot the beginning of a sequence: everything a first row reads is zero."""
        for tensors in (self.state, self.raw_rows):
            for tensor in tensors:
                tensor[slot].zero_()
        self.ngram_rows[slot].zero_()


def allocate(config: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> CacheTensors:
    """Allocate the cache, every page and slot at once."""
    device = engine.device
    slots = engine.max_num_seqs + 1
    pages = engine.num_pages
    rows = engine.spec_tokens + 1
    sparse = len(config.sparse_layers) + (1 if engine.spec_tokens else 0)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    stored = torch.float8_e4m3fn if engine.kv_cache_dtype == "fp8" else dtype
    page = (pages, engine.block_size, config.num_key_value_heads, config.head_dim)
    block_page = (pages, engine.block_size // config.indexer_compress_ratio, config.indexer_head_dim)
    ring = config.indexer_compress_ratio + engine.spec_tokens
    heads = config.linear_num_value_heads
    return CacheTensors(
        keys=[zeros(*page, dtype=stored) for _ in range(sparse)],
        values=[zeros(*page, dtype=stored) for _ in range(sparse)],
        block_keys=[zeros(*block_page) for _ in range(sparse)],
        raw_keys=[zeros(slots, ring, config.indexer_head_dim) for _ in range(sparse)],
        page_table=zeros(slots, engine.pages_per_sequence, dtype=torch.int64),
        state=[
            zeros(slots, heads, config.linear_key_head_dim, config.linear_value_head_dim, dtype=torch.float32)
            for _ in config.linear_layers
        ],
        raw_rows=[
            zeros(slots, config.linear_conv_kernel_dim - 1 + rows, config.conv_width) for _ in config.linear_layers
        ],
        gate_rows=[zeros(slots, rows, 2 * heads) for _ in config.linear_layers],
        ngram_rows=zeros(slots, config.ngram_size * (config.ple_conv_kernel_size - 1) + rows, config.stream_width),
    )
