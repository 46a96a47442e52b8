"""The edges' Triton kernels: they compile without a GPU; on one, a captured step replays what ran eagerly."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from stepfloor.formats.codec import PackedWeight, quantize
from stepfloor.kernels.embed import embed
from stepfloor.kernels.hc_down import hc_down, hc_down_inputs, hc_down_reference
from stepfloor.kernels.hc_mix import hc_mix, hc_mix_inputs, hc_mix_reference
from stepfloor.kernels.linear import linear
from stepfloor.kernels.mtp_fuse import mtp_fuse
from stepfloor.kernels.mtp_norm import mtp_norm
from stepfloor.kernels.ngram_gather import TABLE_FORMATS, ngram_gather, ngram_gather_inputs, ngram_gather_table
from stepfloor.kernels.ngram_rows import ngram_rows, ngram_rows_inputs
from stepfloor.kernels.ple_mix import ple_mix, ple_mix_inputs
from tests.kernels.compare import assert_same, copied
from tests.kernels.compiled import Case, assert_compiles
from tests.kernels.edges import DEVICE
from tests.kernels.streamed import down_faults, mix_faults

ROOM = "stepfloor.kernels."
# what a product reads of each format: codes, scale, scale_2
STORED = {
    "bf16": ("*bf16", None, None),
    "fp32": ("*fp32", None, None),
    "fp8_block": ("*u8", "*bf16", None),
    "fp8_channel": ("*u8", "*fp32", None),
    "fp8_tensor": ("*u8", "*bf16", None),
    "mxfp8": ("*u8", "*u8", None),
    "nvfp4": ("*u8", "*u8", "*fp32"),
}


def case(file: str, name: str, types: str, num_warps: int = 4, **constants: Any) -> Case:
    """types: the arguments as `name:type`, integers without a type; None as a constant is a tensor left out."""
    signature = {n: t or "i32" for n, _, t in (word.partition(":") for word in types.split())}
    return Case(ROOM + file, name, signature, {**constants, "PDL": True}, num_warps)


def cases() -> Iterator[Case]:
    """Every kernel of this file's operators with the released model's constants."""
    b, i, f = ":*bf16", ":*i64", ":*fp32"
    types = f"tokens_ptr{i} table_ptr{b} out_ptr{b} vocabulary d"
    yield case("embed", "_embed_kernel", types, STREAMS=4, BLOCK=1024)
    types = f"tokens_ptr{i} history_ptr{i} multipliers_ptr{i} sizes_ptr{i} offsets_ptr{i} out_ptr{i} count rows eos"
    yield case("ngram_rows", "_ngram_rows_kernel", types, HEADS=16, ORDERS=3, BLOCK_ROWS=8, BLOCK_HEADS=16)
    types = f"rows_ptr{i} data_ptr{i} scales_ptr{i} factors_ptr{f} out_ptr{b} count height"
    for name in TABLE_FORMATS:
        blocks = {"BLOCK_ROWS": 4, "BLOCK_WIDTH": 256}
        yield case("ngram_gather", "_ngram_gather_kernel", types, WIDTH=160, FORMAT=name, ALIGNMENT=16, **blocks)
    types = f"residual_ptr{b} key_value_ptr{b} norm_key_ptr{f} norm_query_ptr{f} norm_conv_ptr{f} out_ptr{b} "
    types += f"gates_ptr{b} normed_ptr{b} d root_d:fp32 eps:fp32"
    blocks = {"STREAMS": 4, "BLOCK": 4096}
    yield case("ple_mix", "_gate_kernel", types + f" y_ptr{b} y_weights_ptr{b}", 8, WRITE=True, **blocks)
    yield case("ple_mix", "_gate_kernel", types, 8, WRITE=False, y_ptr=None, y_weights_ptr=None, **blocks)
    window = {"HISTORY": 9, "KEPT": 13, "BLOCK_KEPT": 16, "BLOCK": 128}
    types = f"conv_rows_ptr{b} normed_ptr{b} slots_ptr{i} rejected_ptr{i} rows kept_rows width"
    yield case("ple_mix", "_keep_kernel", types, **window)
    types += f" conv_weight_ptr{f} key_value_ptr{b} gates_ptr{b} out_ptr{b} d"
    for rows, keep in ((1, True), (4, True), (16, False)):
        taps = {"TAPS": 4, "DILATION": 3, "STREAMS": 4}
        yield case("ple_mix", "_convolve_kernel", types, ROWS=rows, KEEP=keep, **taps, **window)
    types = f"residual_ptr{b} embedding_ptr{b} tokens_ptr{i} norm_hidden_ptr{f} norm_embedding_ptr{f} hidden_ptr{b} "
    types += f"vectors_ptr{b} vocabulary width part_width d eps:fp32"
    yield case("mtp_norm", "_mtp_norm_kernel", types, 16, GATHER=True, BLOCK_WIDTH=16384, BLOCK=4096)
    yield case("mtp_fuse", "_mtp_fuse_kernel", f"hidden_ptr{b} token_ptr{b} out_ptr{b} d", STREAMS=4, BLOCK=1024)
    types = f"residual_ptr{b} y_ptr{b} y_weights_ptr{b} scale_ptr{f} written_ptr{b} normed_ptr{b} d eps:fp32"
    yield case("hc_down", "_norms_kernel", types, STREAMS=4, BLOCK=4096, WRITE=True)
    types = f"projected_ptr{b} low_ptr{b} weights_ptr{b} rank columns"
    yield case("hc_down", "_activations_kernel", types, STREAMS=4, BLOCK=256)
    yield case("hc_mix", "_gates_kernel", f"logits_ptr{b} normed_ptr{b} out_ptr{b} d", STREAMS=4, BLOCK=1024)
    types = f"part_ptr{f} out_ptr{b} count n out_stride"
    yield case("_product", "_add_slices_kernel", types, SLICES=12, BLOCK=256)
    for name, (codes, scale, scale_2) in STORED.items():
        for wide in (True,) if name == "fp32" else (True, False):
            parts = {"scale_ptr": scale, "scale_2_ptr": scale_2}
            types = (
                f"x_ptr:{'*fp32' if wide else '*bf16'} data_ptr:{codes} out_ptr{f} count n k steps x_stride out_stride "
            )
            types += " ".join(f"{part}:{t}" for part, t in parts.items() if t)
            absent = {part: None for part, t in parts.items() if t is None}
            tile = {"ROWS": 16, "BLOCK_N": 32, "BLOCK_K": 64 if wide else 128}
            yield case("_product", "_product_kernel", types, FORMAT=name, WIDE=wide, **tile, **absent)


def test_every_kernel_compiles() -> None:
    assert_compiles(list(cases()))


class Edges:
    """The operators of this file in a row, on one set of tensors that a graph can be captured with."""

    def __init__(self, sequences: int, rows: int, d: int, rank: int, name: str, pinned: bool) -> None:
        make = torch.Generator(DEVICE).manual_seed(0)
        bf16 = torch.bfloat16

        def weight(n: int, k: int) -> tuple[PackedWeight, ...]:
            return (quantize(torch.randn(n, k, generator=make, device=DEVICE) / k**0.5, name),)

        self.rows = ngram_rows_inputs(sequences, rows, 500, 8, DEVICE)
        gather = ngram_gather_inputs(1, 8, 32, 3000, 3, "fp8_tensor", bf16, DEVICE)
        shards = gather["shards"]
        if pinned:
            shards = [PackedWeight(s.format, s.shape, s.data.cpu().pin_memory(), s.scale) for s in shards]
        self.table = ngram_gather_table(shards, DEVICE)
        self.embedding = torch.randn(500, d, generator=make, device=DEVICE).to(bf16)
        self.ple = ple_mix_inputs(sequences, rows, d, bf16, DEVICE)
        self.down = hc_down_inputs(sequences * rows, d, rank, name, bf16, DEVICE)
        self.up = hc_mix_inputs(1, d, rank, name, bf16, DEVICE)["up"]
        self.key_value, self.hidden, self.token = weight(5 * d, 256), weight(d, d), weight(d, d)

    def step(self) -> tuple[Tensor, ...]:
        """From ids to the drafter's residual."""
        tokens = self.rows["tokens"].flatten()
        residual = embed(tokens, self.embedding, 4)
        found = ngram_gather(ngram_rows(**self.rows).flatten(0, 1), self.table, torch.bfloat16)
        key_value = linear(found, self.key_value).unflatten(0, self.rows["tokens"].shape)
        residual = ple_mix(**{**self.ple, "residual": residual, "key_value": key_value})
        residual, normed, low, weights = hc_down(**{**self.down, "residual": residual})
        x = hc_mix(low, normed, self.up, 4)
        norms = (torch.ones(residual.shape[1], device=DEVICE), self.down["norm_scale"][: self.embedding.shape[1]])
        hidden, vectors = mtp_norm(residual, self.embedding, tokens, *norms, 4, 1e-6)
        return residual, x, weights, mtp_fuse(linear(hidden, self.hidden), linear(vectors, self.token))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp8_channel", "nvfp4"])
def test_a_captured_step_replays_what_ran_eagerly(name: str, pinned: bool) -> None:
    """New ids, slots and counts of rejected rows are read when the graph runs; kernels that start early wait."""
    edges = Edges(4, 4, 256, 16, name, pinned)
    cache = edges.ple["conv_rows"].clone()
    edges.step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = edges.step()
    for turn in range(4):
        edges.rows["tokens"].random_(0, 500)
        edges.ple["slots"].copy_(edges.ple["slots"].roll(turn))
        edges.ple["rejected"].random_(0, 5)
        edges.ple["conv_rows"].copy_(cache)
        for t in captured:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        kept = edges.ple["conv_rows"].clone()
        edges.ple["conv_rows"].copy_(cache)
        assert_same(captured, edges.step())
        assert_same(edges.ple["conv_rows"], kept)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize(("d", "rank"), [(256, 16), (2560, 320)])
def test_hyper_connections_without_repacking(d: int, rank: int) -> None:
    """What the streamed kernels refuse, and what nobody repacked, row bits included."""
    inputs = hc_down_inputs(80, d, rank, "bf16", torch.bfloat16, DEVICE)
    mixed = hc_mix_inputs(80, d, rank, "bf16", torch.bfloat16, DEVICE)
    together, mix = hc_down(**inputs), hc_mix(**mixed)
    assert down_faults(together, hc_down_reference(**inputs), inputs["down"][0]) == []
    assert mix_faults(mix, hc_mix_reference(**mixed), mixed["low"], mixed["normed"], mixed["up"][0]) == []
    for rows in (1, 2, 16, 17, 65):
        part = {n: inputs[n][:rows] for n in ("residual", "y", "y_weights")}
        assert_same(hc_down(**{**inputs, **part}), tuple(t[:rows] for t in together))
        assert_same(hc_mix(mixed["low"][:rows], mixed["normed"][:rows], mixed["up"], 4), mix[:rows])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_prefill_rows_of_the_real_model() -> None:
    """8192 rows of one sequence in one call, or in two halves: same history, and nothing beyond 2**31 is cut off."""
    inputs = ple_mix_inputs(1, 8192, 2560, torch.bfloat16, DEVICE)
    inputs |= {"conv_rows": inputs["conv_rows"][:, :13].contiguous(), "rejected": torch.zeros_like(inputs["slots"])}
    whole, halves = copied(inputs), copied(inputs)
    together = ple_mix(**whole)
    parts = []
    for half in (slice(0, 4096), slice(4096, 8192)):
        part = {n: inputs[n][half] for n in ("residual", "y", "y_weights")} | {
            "key_value": inputs["key_value"][:, half]
        }
        parts.append(ple_mix(**{**halves, **part}))
    assert_same(torch.cat(parts), together)
    assert_same(halves["conv_rows"][1, -9:], whole["conv_rows"][1, -9:])
