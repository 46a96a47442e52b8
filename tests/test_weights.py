"""The census: what a good checkpoint reports, and one sentence for every way to break one."""

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepfloor import cli
from stepfloor.config import ModelConfig
from stepfloor.errors import UserError
from stepfloor.tools.convert import plan_random
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from stepfloor.weights.expected import category, split_name
from stepfloor.weights.headers import Entry, read_header
from stepfloor.weights.sources import Hub, hub_cache, resolve_source
from tests.checkpoints import ALL_RELEASES, INDEX, Copy, Raw, make_sparse, make_tiny, write_file

TEXT = "model.language_model."
TABLE = "layers.1.ple.ple_embedding.ngram_embedding"
PER_EXPERT = tuple(r for r in ALL_RELEASES if r != "bf16")
NVFP4 = tuple(r for r in ALL_RELEASES if "nvfp4" in r or "fp8dense" in r)
FP8_TABLE = tuple(r for r in ALL_RELEASES if r not in ("bf16", "mxfp8-nvfp4"))
VISION_BYTES = 2 * 448_931_056


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny checkpoint per release, made once; tests change copies."""
    root = tmp_path_factory.mktemp("tiny")
    return {release: make_tiny(root, release) for release in ALL_RELEASES}


@pytest.fixture
def copy_of(tiny: dict[str, Path], tmp_path: Path) -> Callable[[str], Copy]:
    return lambda release: Copy.of(tiny[release], tmp_path / "copy")


def fault_of(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


# What a good checkpoint reports


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_census_counts_every_byte_of_every_release_once(tiny: dict[str, Path], release: str) -> None:
    checkpoint = open_checkpoint(tiny[release])
    files = [read_header(path) for path in tiny[release].glob("*.safetensors")]
    assert checkpoint.num_bytes == sum(e.nbytes for f in files for e in f.entries.values())
    assert checkpoint.has_drafter
    assert checkpoint.ignored_bytes == checkpoint.vision_bytes == 0


@pytest.mark.parametrize(
    ("release", "name", "wanted"),
    [
        ("bf16", "layers.3.mlp.experts.gate_up_proj", "bf16"),
        ("fp8", "layers.3.mlp.experts.1.up_proj", "fp8_block"),
        ("fp8", "mtp.layers.0.mlp.experts.0.down_proj", "fp8_block"),
        ("nvfp4", "layers.0.mlp.experts.0.gate_proj", "nvfp4"),
        ("nvfp4", "mtp.layers.0.mlp.experts.down_proj", "bf16"),
        ("nvfp4", f"{TABLE}.shard_3", "fp8_tensor"),
        ("nvidia-nvfp4", "mtp.layers.0.mlp.experts.1.gate_proj", "fp8_block"),
        ("mxfp8-nvfp4", "layers.3.self_attn.q_proj", "mxfp8"),
        ("mxfp8-nvfp4", "layers.0.linear_attn.in_proj_b", "bf16"),
        ("mxfp8-nvfp4", f"{TABLE}.shard_0", "nvfp4"),
        ("fp8dense", "lm_head", "fp8_channel"),
        ("fp8dense", "layers.3.self_attn.indexer.index_qk_proj", "bf16"),
        ("fp8dense-mtp", "mtp.layers.0.self_attn.o_proj", "fp8_channel"),
        ("fp8dense-mtp", "mtp.fc_hidden", "bf16"),
        ("fp8dense", "layers.1.ple.ple_embedding.layer_multipliers", "int64"),
    ],
)
def test_format_comes_from_dtype_and_scales(tiny: dict[str, Path], release: str, name: str, wanted: str) -> None:
    assert open_checkpoint(tiny[release]).weights[name].format == wanted


def test_read_maps_bytes_of_one_tensor_without_copying(tiny: dict[str, Path]) -> None:
    import torch

    checkpoint = open_checkpoint(tiny["nvfp4"])
    entry = checkpoint.weights["layers.0.linear_attn.A_log"].parts["weight"]
    view = entry.read()
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        assert bytes(view) == file.read(entry.nbytes)
    assert not view.readonly  # torch.frombuffer warns about read-only memory
    assert torch.frombuffer(view, dtype=torch.bfloat16).shape == entry.shape
    view[0] ^= 1
    assert entry.file.read_bytes()[entry.offset] == view[0] ^ 1, "the map must be private"


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.replace(TEXT, "model."),
        lambda n: n.replace(TEXT, "language_model.model."),
        lambda n: "model." + n if n.startswith("mtp.") else n,
        lambda n: "language_model." + n if n.startswith("lm_head.") else n,
        lambda n: n.replace("mtp.layers.0.", "mtp.layers.4."),
    ],
    ids=["text-only", "language_model.model", "model.mtp", "language_model.lm_head", "mtp-layer-numbered-on"],
)
def test_name_variants_are_the_same_checkpoint(copy_of: Callable[[str], Copy], change: Callable[[str], str]) -> None:
    copy = copy_of("nvidia-nvfp4")
    wanted = list(open_checkpoint(copy.directory).weights)
    copy.rename(change)
    assert list(open_checkpoint(copy.save()).weights) == wanted


def test_vision_tower_and_ignored_tensors_are_counted_but_not_loaded(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("bf16")
    wanted = open_checkpoint(copy.directory).num_bytes
    copy.put("model.visual.blocks.0.attn.qkv.weight", "BF16", [4, 4], bytes(32))
    copy.put("model.language_model.hyper_connection_mixer.block_inject_weight.weight", "BF16", [4], bytes(8))
    copy.put("model.language_model.layers.1.ple.hashstats_count", "I64", [1], bytes(8))
    copy.put("model.language_model.layers.1.ple.token_lookup", "I64", [1], bytes(8))
    checkpoint = open_checkpoint(copy.save())
    assert (checkpoint.num_bytes, checkpoint.vision_bytes, checkpoint.ignored_bytes) == (wanted, 32, 24)


def test_scale_layouts_of_other_exporters_are_accepted(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("fp8dense-mtp")
    scale = copy.tensor("layers.0.linear_attn.out_proj.weight_scale")
    scale.shape = [*scale.shape, 1]
    block = copy.tensor("mtp.layers.0.mlp.experts.0.gate_proj.weight_scale_inv")
    block.shape = [block.shape[0], 1, block.shape[1], 1]
    wide = copy.tensor("mtp.layers.0.mlp.experts.1.gate_proj.weight_scale_inv")
    wide.dtype, wide.data = "F32", b"".join(b"\0\0" + wide.data[i : i + 2] for i in range(0, len(wide.data), 2))
    assert open_checkpoint(copy.save()).has_drafter


def test_weight_only_nvfp4_without_input_scale_is_accepted(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("nvfp4")
    copy.pop("layers.0.mlp.experts.0.gate_proj.input_scale")
    parts = open_checkpoint(copy.save()).weights["layers.0.mlp.experts.0.gate_proj"].parts
    assert set(parts) == {"weight", "weight_scale", "weight_scale_2"}


def test_own_draft_head_is_accepted(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("bf16")
    head = copy.tensor("lm_head.weight")
    copy.put("mtp.lm_head.weight", head.dtype, head.shape, head.data)
    assert open_checkpoint(copy.save()).weights["mtp.lm_head"].shape == tuple(head.shape)


def test_whole_table_of_a_plain_export_reads_as_shards(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("bf16")
    shards = [copy.pop(f"ngram_embedding.shard_{i}.weight") for i in range(4)]
    rows, width = sum(s.shape[0] for s in shards), shards[0].shape[1]
    copy.put(f"{TEXT}{TABLE}.weight", "BF16", [rows, width], b"".join(s.data for s in shards))
    checkpoint = open_checkpoint(copy.save())
    for i, shard in enumerate(shards):
        assert bytes(checkpoint.weights[f"{TABLE}.shard_{i}"].parts["weight"].read()) == shard.data


def test_transformers_own_export_is_accepted(tmp_path: Path) -> None:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    raw = plan_random("small", "bf16", layers=4, table_rows=200, experts=2).documents["config.json"]["text_config"]
    model = Qwen4ExpForCausalLM(
        Qwen4ExpTextConfig(**{k: v for k, v in raw.items() if k not in ("model_type", "dtype")})
    )
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.weights["layers.3.self_attn.q_proj"].format == "fp32"
    # transformers drops the drafter, so the checkpoint that is served has none
    assert not checkpoint.has_drafter
    assert not checkpoint.config.has_drafter
    assert [f.kind for f in checkpoint.findings] == ["drafter"]


def test_stop_ids_come_from_the_generation_config(copy_of: Callable[[str], Copy]) -> None:
    directory = copy_of("bf16").directory
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert open_checkpoint(directory).stop_token_ids == (7, 3)
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert open_checkpoint(directory).stop_token_ids == (5,)


def test_stop_ids_without_generation_config_include_the_tokenizers(copy_of: Callable[[str], Copy]) -> None:
    directory = copy_of("bf16").directory
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer_config.json").write_text(
        '{"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}, "8": {"content": "<pad>"}}}'
    )
    assert open_checkpoint(directory).stop_token_ids == (9, 0)


def test_table_geometry(tiny: dict[str, Path]) -> None:
    table = open_checkpoint(tiny["mxfp8-nvfp4"]).table
    assert (table.width, table.format, table.row_bytes) == (16, "nvfp4", 8 + 1)
    assert sum(table.heights) == table.rows
    assert table.locate(table.shard_rows * 2 + 1) == (2, 1)
    assert table.scale is not None
    assert set(table.scale.parts) == {"weight_scale_2"}


def test_categories_cover_the_names() -> None:
    assert category("layers.0.mlp.shared_expert_gate") == "norms and other"
    assert category("mtp.layers.0.self_attn.q_proj") == "drafter, rest"
    assert split_name("language_model.lm_head.weight") == ("lm_head", "weight")


# Full size, from headers of files that hold no data


def test_bf16_release_has_the_published_total(tmp_path: Path) -> None:
    make_sparse(tmp_path / "full", "bf16")
    write_file(
        tmp_path / "full" / "model-visual.safetensors",
        {"model.visual.all": {"dtype": "BF16", "shape": [VISION_BYTES // 2], "data_offsets": [0, VISION_BYTES]}},
        b"",
    )
    path = tmp_path / "full" / "model-visual.safetensors"
    os.truncate(path, path.stat().st_size + VISION_BYTES)
    index = json.loads((tmp_path / "full" / INDEX).read_text())
    index["weight_map"]["model.visual.all"] = path.name
    index["metadata"]["total_size"] += VISION_BYTES
    (tmp_path / "full" / INDEX).write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path / "full")
    assert checkpoint.num_bytes + checkpoint.vision_bytes == 359_999_963_128
    assert sum(w.num_bytes for n, w in checkpoint.weights.items() if n.startswith("mtp.")) == 2 * 2_607_150_848
    assert len([n for n in checkpoint.weights if n.startswith("mtp.")]) == 31
    assert checkpoint.table.rows == 320_001_536
    assert checkpoint.table.heights == (2_500_012,) * 128
    assert not checkpoint.findings


def test_radixark_release_has_the_published_sizes() -> None:
    sizes: dict[str, int] = {}
    plan = plan_random("full", "nvfp4")
    for planned in (p for file in plan.files.values() for p in file):
        kind = category(planned.expected.name)
        # scalars per matrix are left out of the published figure
        matrix = sum(s.nbytes for s in planned.parts.values() if s.shape != ())
        sizes[kind] = sizes.get(kind, 0) + (matrix if kind == "routed experts" else planned.nbytes)
    gib = {kind: size / 2**30 for kind, size in sizes.items()}
    assert sizes["routed experts"] == 48 * 512 * 2_764_800  # 63.28 GiB
    assert gib["routed experts"] == pytest.approx(63.28, abs=0.005)
    assert gib["n-gram table"] == pytest.approx(47.68, abs=0.005)
    assert gib["drafter experts"] + gib["drafter, rest"] == pytest.approx(4.86, abs=0.005)
    assert gib["gated delta net"] == pytest.approx(3.884, abs=0.001)
    assert gib["sparse attention"] == pytest.approx(1.113, abs=0.001)
    assert gib["hyper-connections"] == pytest.approx(1.193, abs=0.001)
    assert (plan.nbytes + VISION_BYTES) / 2**30 == pytest.approx(125.87, abs=0.01)


def test_table_formats_have_the_published_sizes() -> None:
    def table_gib(release: str) -> float:
        plan = plan_random("full", release, experts=1, layers=4)
        table = [p for file in plan.files.values() for p in file if category(p.expected.name) == "n-gram table"]
        return sum(p.nbytes for p in table) / 2**30

    assert table_gib("fp8") == pytest.approx(47.68, abs=0.005)
    assert table_gib("mxfp8-nvfp4") == pytest.approx(26.82, abs=0.005)


@pytest.mark.parametrize(("release", "wanted"), [("fp8dense", 591), ("fp8", 0)])
def test_dense_fp8_tensor_count(release: str, wanted: int) -> None:
    plan = plan_random("full", release, experts=1)
    dense = [p for file in plan.files.values() for p in file if ".experts." not in p.expected.name]
    assert sum(p.format == "fp8_channel" for p in dense) == wanted


@pytest.mark.slow
def test_census_of_300_000_tensors_takes_seconds(tmp_path: Path) -> None:
    import time

    make_sparse(tmp_path / "full", "nvfp4")
    start = time.process_time()
    checkpoint = open_checkpoint(tmp_path / "full")
    assert time.process_time() - start < 15.0  # 3.2 s on a 2-core Xeon
    assert len(checkpoint.weights) == 74_958


# Mutations: each fault has its own sentence


@dataclass(frozen=True)
class Mutation:
    """A way to break a checkpoint, the releases it applies to, and the sentences it must cause."""

    name: str
    change: Callable[[Copy], None]
    wanted: tuple[str, ...]
    releases: tuple[str, ...] = ALL_RELEASES


def rename(copy: Copy) -> None:
    file, name = copy.find("layers.0.linear_attn.in_proj_b.weight")
    copy.files[file][name.replace("in_proj_b", "in_proj_y")] = copy.files[file].pop(name)


def duplicate(copy: Copy) -> None:
    tensor, (_, name) = copy.tensor("layers.2.linear_attn.norm.weight"), copy.find("layers.2.linear_attn.norm.weight")
    copy.put(name.replace(TEXT, "model."), tensor.dtype, tensor.shape, tensor.data, "extra.safetensors")


def both_layouts(copy: Copy) -> None:
    copy.put(f"{TEXT}layers.0.mlp.experts.down_proj", "BF16", [2, 128, 48], bytes(2 * 128 * 48 * 2))


def retype(ending: str, dtype: str) -> Callable[[Copy], None]:
    def change(copy: Copy) -> None:
        copy.tensor(ending).dtype = dtype

    return change


def reshape(ending: str, shape: list[int]) -> Callable[[Copy], None]:
    def change(copy: Copy) -> None:
        tensor = copy.tensor(ending)
        unit = len(tensor.data) // max(prod(tensor.shape), 1)
        tensor.shape, tensor.data = shape, (tensor.data + bytes(1 << 16))[: prod(shape) * unit]

    return change


def drop(ending: str) -> Callable[[Copy], None]:
    return lambda copy: void(copy.pop(ending))


def put(name: str, dtype: str, shape: list[int], data: bytes) -> Callable[[Copy], None]:
    return lambda copy: copy.put(name, dtype, shape, data)


def void(_: object) -> None:
    return None


def first_file(copy: Copy) -> Path:
    return copy.directory / sorted(copy.files)[0]


def on_disk(change: Callable[[Path], None]) -> Callable[[Copy], None]:
    """Break the first file after it was written."""

    def apply(copy: Copy) -> None:
        copy.save()
        change(first_file(copy))
        copy.files.clear()
        copy.follow = False

    return apply


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"12345")


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5000000000\n")


def edit_header(change: Callable[[dict], None], extra: str = "") -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        listed = json.loads(raw[8:start])
        change(listed)
        text = json.dumps(listed)
        text = (text[:-1] + extra + "}").encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])

    return apply


def overlap(listed: dict) -> None:
    names = [n for n in listed if n != "__metadata__"]
    a, b = listed[names[0]], listed[names[1]]
    size = b["data_offsets"][1] - b["data_offsets"][0]
    start = a["data_offsets"][0] + 8
    b["data_offsets"] = [start, start + size]


def wrong_length(listed: dict) -> None:
    name = next(n for n in listed if n.endswith("A_log"))
    listed[name]["shape"] = [17]


def unknown_dtype(listed: dict) -> None:
    name = next(n for n in listed if n.endswith("A_log"))
    listed[name]["dtype"] = "F4"


def flip_hash(ending: str) -> Callable[[Copy], None]:
    def change(copy: Copy) -> None:
        tensor = copy.tensor(ending)
        values = list(struct.unpack(f"<{len(tensor.data) // 8}q", tensor.data))
        values[1] += 2
        tensor.data = struct.pack(f"<{len(values)}q", *values)

    return change


def bf16_buffers(copy: Copy) -> None:
    tensor = copy.tensor("layer_multipliers")
    tensor.dtype, tensor.data = "BF16", bytes(2 * 3)


def scalar(ending: str, value: float) -> Callable[[Copy], None]:
    def change(copy: Copy) -> None:
        for tensors in copy.files.values():
            for name in (n for n in tensors if n.endswith(ending)):
                raw = struct.pack("<f", value)
                tensors[name].data = raw if tensors[name].dtype == "F32" else raw[2:]

    return change


def config(**values: object) -> Callable[[Copy], None]:
    return lambda copy: copy.edit("config.json", lambda c: c["text_config"].update(values))


def index(change: Callable[[dict], None]) -> Callable[[Copy], None]:
    def apply(copy: Copy) -> None:
        copy.follow = False
        change(copy.index["weight_map"])

    return apply


def no_index_lost_file(copy: Copy) -> None:
    copy.save()
    (copy.directory / INDEX).unlink()
    path = first_file(copy)
    path.rename(path.with_name("model-00001-of-00003.safetensors"))
    copy.files.clear()
    copy.save = lambda: copy.directory  # type: ignore[method-assign]


def lost_file(copy: Copy) -> None:
    copy.save()
    first_file(copy).unlink()
    copy.files.clear()
    copy.follow = False


def unlisted_file(copy: Copy) -> None:
    copy.follow = False
    copy.put("junk.weight", "BF16", [1], b"\0\0", "consolidated.safetensors")


def mixed_table(copy: Copy) -> None:
    shard = copy.tensor("ngram_embedding.shard_1.weight")
    shard.dtype = "F8_E4M3" if shard.dtype != "F8_E4M3" else "U8"
    shard.shape = [shard.shape[0], len(shard.data) // shard.shape[0]]


def packed_draft_projection(copy: Copy) -> None:
    tensor = copy.tensor("mtp.fc_hidden.weight")
    tensor.dtype, tensor.data = "U8", bytes(128 * 128)
    copy.put("mtp.fc_hidden.weight_scale", "F8_E4M3", [128, 8], bytes(128 * 8))


MUTATIONS = [
    Mutation(
        "renamed tensor is both missing and unknown",
        rename,
        (
            r"layers\.0\.linear_attn\.in_proj_b is missing: wanted \[2, 128\]",
            r"in_proj_y \(.*\) is no tensor of this model",
        ),
    ),
    Mutation("dropped norm", drop("mlp_hyper_connection.hc_norm.weight"), (r"hc_norm is missing: wanted \[512\]",)),
    Mutation(
        "dropped expert matrix",
        drop("layers.2.mlp.experts.1.up_proj.weight"),
        (r"layers\.2\.mlp\.experts\.1\.up_proj: .*weight_scale.* found but no weight",),
        PER_EXPERT,
    ),
    Mutation(
        "dropped fused experts",
        drop("layers.2.mlp.experts.down_proj"),
        (r"layers\.2\.mlp\.experts\.down_proj is missing: wanted \[2, 128, 48\]",),
        ("bf16",),
    ),
    Mutation(
        "same tensor in two files under two spellings",
        duplicate,
        (r"layers\.2\.linear_attn\.norm: weight is stored twice, in extra\.safetensors and model-",),
    ),
    Mutation(
        "experts fused and single",
        both_layouts,
        (r"layers\.0\.mlp\.experts is stored twice: fused \(down_proj\) and as 6 matrices",),
        PER_EXPERT,
    ),
    Mutation(
        "half precision float",
        retype("layers.0.linear_attn.in_proj_a.weight", "F16"),
        (r"in_proj_a: wanted BF16, F32 or a quantized layout; found F16 .* without a scale",),
    ),
    Mutation(
        "norm in half precision", retype("self_attn.q_norm.weight", "F16"), (r"q_norm: wanted BF16 or F32; found F16",)
    ),
    Mutation(
        "transposed router",
        reshape("layers.0.mlp.gate.weight", [128, 2]),
        (r"layers\.0\.mlp\.gate: wanted \[2, 128\]; found BF16 \[128, 2\]",),
    ),
    Mutation(
        "transposed convolution",
        reshape("layers.0.linear_attn.conv1d.weight", [128, 4]),
        (r"conv1d: wanted \[128, 1, 4\]; found BF16 \[128, 4\]",),
    ),
    Mutation("cut download", on_disk(cut(lambda n: n - 2)), (r"wanted (\d+) bytes; found \d+; the download was cut",)),
    Mutation("cut inside the header", on_disk(cut(lambda _: 100)), (r"header claims \d+ bytes but only 92 follow",)),
    Mutation("empty file", on_disk(cut(lambda _: 0)), (r"wanted a safetensors file; found 0 bytes",)),
    Mutation("trailing bytes", on_disk(append), (r"5 trailing bytes belong to no tensor",)),
    Mutation(
        "pointer file of Git LFS", on_disk(pointer), (r"found a Git LFS pointer of \d+ bytes; run `git lfs pull`",)
    ),
    Mutation("overlapping tensors", on_disk(edit_header(overlap)), (r" overlaps .* by \d+ bytes",)),
    Mutation(
        "offsets that disagree with the shape",
        on_disk(edit_header(wrong_length)),
        (r"A_log is BF16 \[17\] and wants 34 bytes; data_offsets \[\d+, \d+\] give another number",),
    ),
    Mutation(
        "unheard-of dtype", on_disk(edit_header(unknown_dtype)), (r"A_log has dtype 'F4', which no release uses",)
    ),
    Mutation(
        "name twice in one header",
        on_disk(edit_header(void, ', "lm_head.weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}')),
        (r"lm_head\.weight is listed twice in the header",),
    ),
    Mutation(
        "hash multiplier off by two",
        flip_hash("layer_multipliers"),
        (r"layer_multipliers\[1\]: config\.json implies \d+; the file stores \d+",),
    ),
    Mutation(
        "hash size off by two",
        flip_hash("ngram_heads_vocab_sizes"),
        (r"ngram_heads_vocab_sizes\[1\]: config\.json implies 29; the file stores 31",),
    ),
    Mutation(
        "another seed", config(seed=1235), (r"layer_multipliers\[0\]: config\.json implies \d+; the file stores \d+",)
    ),
    Mutation("buffers cast to bf16", bf16_buffers, (r"layer_multipliers: wanted I64; found BF16 \[3\]",)),
    Mutation(
        "scale beside a bf16 weight",
        put("mtp.fc_embedding.weight_scale", "F32", [128], bytes(512)),
        (r"mtp\.fc_embedding\.weight_scale \(.*\) is a scale beside a BF16 weight",),
    ),
    Mutation(
        "draft projection quantized and read as bf16",
        packed_draft_projection,
        (r"mtp\.fc_hidden: wanted \[128, 64\] as nvfp4; found U8", r"mtp\.fc_hidden\.weight_scale_2 is missing"),
    ),
    Mutation(
        "dropped global scale",
        drop("layers.0.mlp.experts.0.gate_proj.weight_scale_2"),
        (r"layers\.0\.mlp\.experts\.0\.gate_proj\.weight_scale_2 is missing: nvfp4 wants F32 \[\]",),
        NVFP4,
    ),
    Mutation(
        "dropped block scale",
        drop("layers.3.mlp.experts.1.down_proj.weight_scale"),
        (r"layers\.3\.mlp\.experts\.1\.down_proj\.weight_scale is missing: nvfp4 wants F8_E4M3 \[128, 3\]",),
        NVFP4,
    ),
    Mutation(
        "padded block scale",
        reshape("layers.3.mlp.experts.1.down_proj.weight_scale", [128, 4]),
        (r"down_proj\.weight_scale: nvfp4 of \[128, 48\] wants \[128, 3\]; found F8_E4M3 \[128, 4\].*padded",),
        NVFP4,
    ),
    Mutation(
        "block scale of another type",
        retype("layers.3.mlp.experts.1.down_proj.weight_scale", "U8"),
        (r"down_proj\.weight_scale: nvfp4 wants F8_E4M3; found U8",),
        NVFP4,
    ),
    Mutation(
        "scale nothing reads",
        put(f"{TEXT}layers.0.mlp.experts.0.gate_proj.pre_quant_scale", "BF16", [128], bytes(256)),
        (r"gate_proj\.pre_quant_scale \(.*\) is a scale (nvfp4|fp8_block) does not use",),
        PER_EXPERT,
    ),
    Mutation(
        "dropped block scale of FP8",
        drop("mtp.layers.0.mlp.experts.0.up_proj.weight_scale_inv"),
        (r"up_proj: wanted BF16, F32 or a quantized layout; found F8_E4M3 \[48, 128\] without a scale",),
        ("fp8", "nvidia-nvfp4", "fp8dense-mtp"),
    ),
    Mutation(
        "dropped channel scale",
        drop("lm_head.weight_scale"),
        (r"lm_head: wanted BF16, F32 or a quantized layout; found F8_E4M3 \[64, 128\] without a scale",),
        ("fp8dense", "fp8dense-mtp"),
    ),
    Mutation(
        "channel scale of the wrong length",
        reshape("lm_head.weight_scale", [128]),
        (r"lm_head\.weight_scale: fp8_channel of \[64, 128\] wants \[64\] or \[64, 1\]; found F32 \[128\]",),
        ("fp8dense",),
    ),
    Mutation(
        "MXFP8 scale of the wrong shape",
        reshape("layers.3.self_attn.q_proj.weight_scale", [128, 2]),
        (r"q_proj\.weight_scale: mxfp8 of \[128, 128\] wants \[128, 4\]; found U8 \[128, 2\]",),
        ("mxfp8-nvfp4",),
    ),
    Mutation(
        "divisor in place of a multiplier",
        scalar("layers.0.mlp.experts.0.gate_proj.weight_scale_2", 3584.0),
        (r"gate_proj\.weight_scale_2 is 3584; wanted a multiplier below 1.*would mean 0\.000279018",),
        NVFP4,
    ),
    Mutation(
        "table scale that is no number",
        scalar("ngram_embedding.weight_scale", float("nan")),
        (r"ngram_embedding\.weight_scale is nan; wanted a positive scale",),
        FP8_TABLE,
    ),
    Mutation(
        "table scale dropped",
        drop("ngram_embedding.weight_scale"),
        (r"ngram_embedding\.weight_scale is missing: wanted the one BF16 or F32 scale of the fp8_tensor table",),
        FP8_TABLE,
    ),
    Mutation(
        "table scale of more than one value",
        reshape("ngram_embedding.weight_scale", [2]),
        (r"ngram_embedding\.weight_scale: wanted one BF16 or F32 value; found BF16 \[2\]",),
        FP8_TABLE,
    ),
    Mutation(
        "table scale of another format",
        put(f"{TEXT}{TABLE}.weight_scale", "BF16", [1], b"\x80\x3a"),
        (r"ngram_embedding\.weight_scale \(.*\) is a scale that a table of (nvfp4|bf16) does not use",),
        ("mxfp8-nvfp4", "bf16"),
    ),
    Mutation(
        "block scales of a table shard dropped",
        drop("ngram_embedding.shard_2.weight_scale"),
        (r"shard_2\.weight_scale is missing: nvfp4 wants F8_E4M3 \[\d+, 1\]",),
        ("mxfp8-nvfp4",),
    ),
    Mutation("table shard dropped", drop("ngram_embedding.shard_3.weight"), (r"shard_3",)),
    Mutation("table of two types", mixed_table, (r"ngram_embedding: wanted one dtype in all shards; found",)),
    Mutation(
        "table cut in another number of shards",
        config(split_ngram_parts=2),
        (r"ngram_embedding: wanted 2 shards of \d+ rows by config\.json .*; found 4 shards",),
    ),
    Mutation(
        "table of another height",
        config(ngram_vocab_size_base=101),
        (r"shard_0: wanted \[\d+, 16\].*; found",),
        ("bf16", "nvfp4"),
    ),
    Mutation(
        "config that denies its drafter",
        config(mtp_num_hidden_layers=0),
        (r"mtp_num_hidden_layers 0 but the files hold \d+ mtp\.\* tensors",),
    ),
    Mutation("drafter with a hole", drop("mtp.fc_hidden.weight"), (r"mtp\.fc_hidden is missing: wanted \[128, 128\]",)),
    Mutation(
        "index that names a tensor nobody has",
        index(lambda names: names.update({"ghost.weight": sorted(set(names.values()))[0]})),
        (r"index\.json puts ghost\.weight in model-.*, whose header lacks it \(no file has it\)",),
    ),
    Mutation(
        "index that forgets a tensor",
        index(lambda names: void(names.pop("lm_head.weight"))),
        (r"lm_head\.weight \(model-.*\) is not listed in model\.safetensors\.index\.json",),
    ),
    Mutation(
        "index that puts a tensor in another file",
        index(lambda names: names.update({"lm_head.weight": "model-fp8-mtp-ple.safetensors"})),
        (r"puts lm_head\.weight in model-fp8.*, whose header lacks it \(it is in model-00001",),
        ("nvidia-nvfp4",),
    ),
    Mutation("file the index does not name", unlisted_file, (r"consolidated\.safetensors is not named by",)),
    Mutation(
        "file the index names is gone",
        lost_file,
        (r"model-\S+ is named by .*index\.json but not there",),
        ("nvidia-nvfp4",),
    ),
    Mutation(
        "numbered files with a gap",
        no_index_lost_file,
        (r"model-00002-of-00003\.safetensors is not there", r"model-00003-of-00003\.safetensors is not there"),
        ("nvfp4",),
    ),
    Mutation(
        "vendor container",
        lambda copy: copy.edit("config.json", lambda c: c.update(quantization_config={"quant_method": "nvfp4_csf"})),
        (r"is a CSF container \(quant_method 'nvfp4_csf'\)",),
        ("nvfp4",),
    ),
]


@pytest.mark.parametrize(
    ("mutation", "release"),
    [pytest.param(m, r, id=f"{m.name} | {r}") for m in MUTATIONS for r in m.releases],
)
def test_fault_has_its_sentence_and_exit_code(
    copy_of: Callable[[str], Copy],
    mutation: Mutation,
    release: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = copy_of(release)
    mutation.change(copy)
    directory = copy.save()
    monkeypatch.setattr("sys.argv", ["stepfloor", "inspect", str(directory)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    for sentence in mutation.wanted:
        assert re.search(sentence, message), message


def test_a_lost_file_is_one_fault_and_not_a_thousand(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("nvidia-nvfp4")
    (copy.directory / "model-fp8-mtp-ple.safetensors").unlink()
    message = fault_of(copy.directory)
    assert message.count("\n") == 0, message
    assert "model-fp8-mtp-ple.safetensors is named by" in message


def test_all_faults_of_all_files_come_in_one_message(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("nvidia-nvfp4")
    rename(copy)
    flip_hash("layer_multipliers")(copy)
    copy.pop("lm_head.weight")
    copy.tensor("q_norm.weight").dtype = "F16"
    copy.pop("mtp.layers.0.mlp.experts.0.up_proj.weight_scale_inv")
    copy.pop("layers.0.mlp.experts.0.gate_proj.weight_scale_2")
    directory = copy.save()
    append(first_file(copy))
    message = fault_of(directory)
    assert "has 7 faults:" in message
    for wanted in ("in_proj_b is missing", "in_proj_y", "lm_head is missing", "q_norm: wanted", "without a scale"):
        assert wanted in message
    assert "weight_scale_2 is missing" in message
    assert "5 trailing bytes" in message


def test_many_faults_of_one_kind_are_counted_not_listed(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("nvfp4")
    for tensors in copy.files.values():
        for name in [n for n in tensors if n.endswith("_proj.weight_scale_2")]:
            del tensors[name]
    message = fault_of(copy.save())
    assert "has 24 faults:" in message
    assert re.search(r"\.\.\. and \d+ more that differ from the last in numbers only", message)
    assert len(message.splitlines()) < 20


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (8190, "wanted {0} bytes; found {1}; the download was cut"),
        (8197, "5 trailing bytes"),
    ],
)
def test_a_file_that_is_not_as_long_as_its_header_says(tmp_path: Path, data: int, wanted: str) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8192]}}, bytes(data))
    size = path.stat().st_size
    (fault,) = read_header(path).faults
    assert wanted.format(size + 8192 - data, size) in fault
    assert path.name in fault


def test_a_hole_between_tensors_is_reported(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}
    write_file(tmp_path / "a.safetensors", {"a": entry}, bytes(8))
    (fault,) = read_header(tmp_path / "a.safetensors").faults
    assert "4 bytes between the header and a belong to no tensor" in fault


@pytest.mark.parametrize("info", [{}, {"dtype": "BF16", "shape": 3, "data_offsets": [0, 6]}, [], {"dtype": []}, None])
def test_a_header_that_is_json_but_no_tensor_list(tmp_path: Path, info: object) -> None:
    write_file(tmp_path / "a.safetensors", {"a": info}, b"")
    assert any("wanted dtype, shape and data_offsets" in f for f in read_header(tmp_path / "a.safetensors").faults)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "has none"),
        ("{", "not valid JSON"),
        ('{"model_type": "llama"}', "serves qwen4_exp"),
        ("[]", "JSON object"),
    ],
)
def test_config_that_is_absent_broken_or_foreign(
    copy_of: Callable[[str], Copy], content: str | None, wanted: str
) -> None:
    directory = copy_of("bf16").directory
    if content is None:
        (directory / "config.json").unlink()
    else:
        (directory / "config.json").write_text(content)
    assert wanted in fault_of(directory)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_a_fault_and_never_a_crash(
    tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("damaged", numbered=True)
    for path in tiny["nvidia-nvfp4"].iterdir():
        (directory / path.name).symlink_to(path)
    path = data.draw(st.sampled_from(sorted(directory.iterdir())))
    raw = bytearray(path.read_bytes())
    end = len(raw) if path.suffix == ".json" else 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from(b'09-"[]{},\x00\xff') | st.integers(0, 255))
    path.unlink()
    path.write_bytes(raw)
    with contextlib.suppress(UserError):
        open_checkpoint(directory)


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "x", [], [None], {}, {"a": 1}, 10**30])
def test_any_value_under_any_key_of_the_config_is_read_or_refused(value: object) -> None:
    config = plan_random("small", "bf16").documents["config.json"]
    for section in (config, config["text_config"], config["text_config"]["rope_parameters"]):
        for key in section:
            before, section[key] = section[key], value
            with contextlib.suppress(UserError):
                ModelConfig.from_dict(config)
            section[key] = before


def test_wrong_table_override_is_refused(tiny: dict[str, Path]) -> None:
    assert open_checkpoint(tiny["nvfp4"], hf_overrides={"ple_embedding_dtype": "float8_e4m3fn"})
    with pytest.raises(UserError, match="'nvfp4' was passed, but the headers hold a fp8_tensor table"):
        open_checkpoint(tiny["nvfp4"], hf_overrides={"ple_embedding_dtype": "nvfp4"})


# Metadata: claims are compared, stored dtypes win


def findings(checkpoint: Checkpoint) -> str:
    return "\n".join(f.message for f in checkpoint.findings)


@pytest.mark.parametrize("release", [r for r in ALL_RELEASES if r != "nvfp4"])
def test_consistent_metadata_is_silent(tiny: dict[str, Path], release: str) -> None:
    assert findings(open_checkpoint(tiny[release])) == ""


def test_radixark_pattern_that_contradicts_its_table_is_a_note(tiny: dict[str, Path]) -> None:
    message = findings(open_checkpoint(tiny["nvfp4"]))
    assert "ignore '*.ple.*' says BF16; the headers hold fp8_tensor, which decides" in message


def test_rule_that_matches_nothing_is_reported(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("nvfp4")
    copy.edit("config.json", lambda c: c["quantization_config"]["ignore"].append("*.cross_attn.*"))
    assert "ignore '*.cross_attn.*' matches no tensor" in findings(open_checkpoint(copy.directory))


def test_module_with_two_conflicting_rules_is_reported(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("nvidia-nvfp4")
    copy.edit("hf_quant_config.json", lambda c: c["quantization"].update(exclude_modules=["mtp*"]))
    message = findings(open_checkpoint(copy.directory))
    assert "mtp.layers.0.mlp.experts: exclude_modules 'mtp*' says BF16, quantized_layers" in message


def test_stored_dtype_wins_over_the_claim(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("fp8dense")
    layers = f"{TEXT}layers.0.linear_attn.in_proj_a"
    copy.edit(
        "config.json",
        lambda c: c["quantization_config"]["quantized_layers"].update({layers: {"quant_algo": "MXFP8"}}),
    )
    checkpoint = open_checkpoint(copy.directory)
    assert checkpoint.weights["layers.0.linear_attn.in_proj_a"].format == "bf16"
    assert "claims MXFP8; the headers hold bf16, which decides" in findings(checkpoint)


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({"quant_algo": "NVFP4", "group_size": 32}, "NVFP4 has groups of 16; the metadata says 32"),
        ({"quant_algo": "INT3"}, "quant_algo 'INT3' is unknown"),
    ],
)
def test_odd_metadata_is_reported(copy_of: Callable[[str], Copy], section: dict, wanted: str) -> None:
    copy = copy_of("nvfp4")
    copy.edit("config.json", lambda c: c["quantization_config"].update(section))
    assert wanted in findings(open_checkpoint(copy.directory))


def test_table_dtype_may_be_absent(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("nvidia-nvfp4")
    assert "ple_embedding_dtype" not in json.loads((copy.directory / "config.json").read_text())["text_config"]
    assert open_checkpoint(copy.directory).table.format == "fp8_tensor"


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "language_model.model.", ""])
def test_metadata_may_carry_any_prefix(copy_of: Callable[[str], Copy], prefix: str) -> None:
    copy = copy_of("fp8dense-mtp")

    def change(c: dict) -> None:
        section = c["quantization_config"]
        section["quantized_layers"] = {n.replace(TEXT, prefix): a for n, a in section["quantized_layers"].items()}

    copy.edit("config.json", change)
    assert findings(open_checkpoint(copy.directory)) == ""


def test_index_total_that_disagrees_is_a_note(copy_of: Callable[[str], Copy]) -> None:
    copy = copy_of("bf16")
    copy.edit(INDEX, lambda c: c["metadata"].update(total_size=5))
    assert "says 5 bytes; the headers hold" in findings(open_checkpoint(copy.directory))


# Where a checkpoint comes from


def snapshot(cache: Path, name: str, revision: str, source: Path | None, ref: str | None = "main") -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    directory = repository / "snapshots" / revision
    directory.mkdir(parents=True)
    if source is not None:
        for path in source.iterdir():
            (directory / path.name).symlink_to(path)
    if ref is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(revision)
    return directory


def test_snapshot_reached_through_refs_need_not_be_hex(tiny: dict[str, Path], tmp_path: Path) -> None:
    wanted = snapshot(tmp_path, "someone/Flash", "fp8dense-7b71922", tiny["fp8dense"])
    assert resolve_source("someone/Flash", Hub(tmp_path, offline=True)) == wanted
    assert open_checkpoint(wanted).num_bytes


def test_wrong_owner_names_the_id_that_is_present(tiny: dict[str, Path], tmp_path: Path) -> None:
    snapshot(tmp_path, "RadixArk/Flash-NVFP4", "abc", tiny["nvfp4"])
    with pytest.raises(UserError, match="RadixArk/Flash-NVFP4 is; pass that id, or add --download"):
        resolve_source("radixark-typo/Flash-NVFP4", Hub(tmp_path))


def test_offline_refuses_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids fetching"):
        resolve_source("someone/Flash", Hub(tmp_path, offline=True))


def test_offline_names_the_files_an_incomplete_snapshot_lacks(tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = snapshot(tmp_path, "someone/Flash", "abc", tiny["nvidia-nvfp4"])
    (directory / "model-fp8-mtp-ple.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 files are not in .* \(model-fp8-mtp-ple.safetensors\)"):
        resolve_source("someone/Flash", Hub(tmp_path, offline=True))


def test_a_directory_has_no_revisions(tmp_path: Path) -> None:
    """`--revision v1 ./model` once ran whatever lay there."""
    with pytest.raises(UserError, match="--revision v1 chooses among"):
        resolve_source(tmp_path, Hub(tmp_path / "cache"), revision="v1")


def test_online_without_the_snapshot_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def fetch(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    resolve_source("someone/Flash", Hub(tmp_path / "cache", token="secret"), revision="v1")
    assert (asked["name"], asked["revision"], asked["token"]) == ("someone/Flash", "v1", "secret")
    assert asked["cache_dir"] == tmp_path / "cache"


@pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "three/part/name", "name"])
def test_what_is_neither_directory_nor_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="wanted a checkpoint directory or a hub id"):
        resolve_source(name, Hub(tmp_path))


def test_cache_directory_follows_the_hub_variables() -> None:
    assert hub_cache("/hf", "/cache") == Path("/cache")
    assert hub_cache("/hf", None) == Path("/hf/hub")
    assert hub_cache(None, None, "/xdg") == Path("/xdg/huggingface/hub")
    assert hub_cache(None, None) == Path("~/.cache/huggingface/hub").expanduser()


def test_rows_of_an_entry_share_its_file() -> None:
    entry = Entry(Path("a"), "BF16", (10, 4), 100, 80)
    assert entry.rows(2, 5) == Entry(Path("a"), "BF16", (3, 4), 116, 24)


def test_tiny_config_is_served() -> None:
    assert ModelConfig.from_dict(plan_random("small", "bf16").documents["config.json"]).has_drafter


def test_raw_is_what_was_written(tiny: dict[str, Path], tmp_path: Path) -> None:
    copy = Copy.of(tiny["nvfp4"], tmp_path / "copy")
    assert isinstance(copy.tensor("lm_head.weight"), Raw)
    assert open_checkpoint(copy.save()).num_bytes == open_checkpoint(tiny["nvfp4"]).num_bytes
