"""Random checkpoints: the layout of each release, values that do not depend on the writer, and refusals."""

import json
import math
from pathlib import Path

import pytest
import torch

from stepfloor import cli
from stepfloor.errors import UserError
from stepfloor.formats.codec import PackedWeight
from stepfloor.model.load import load_model
from stepfloor.tools import convert
from stepfloor.tools.convert import plan_random, write_random
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from tests.checkpoints import ALL_RELEASES, INDEX, make_tiny, tiny_config

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
}


def values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Decoded through the codec, as the loader would."""
    weight = checkpoint.weights[name]
    parts = {p: torch.frombuffer(e.read(), dtype=DTYPES[e.dtype]).reshape(e.shape) for p, e in weight.parts.items()}
    if len(weight.shape) != 2:
        return parts["weight"]
    n, k = weight.shape
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    return PackedWeight(weight.format, (n, k), parts["weight"], scale, parts.get("weight_scale_2")).dequantize()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("tiny")
    return {release: open_checkpoint(make_tiny(root, release)) for release in ALL_RELEASES}


@pytest.mark.parametrize("table", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("release", ALL_RELEASES)
def test_every_release_with_every_table_passes_the_census(tmp_path: Path, release: str, table: str) -> None:
    checkpoint = open_checkpoint(make_tiny(tmp_path, release, table=table, experts=1, table_rows=100))
    assert checkpoint.table.format == {"bf16": "bf16", "fp8": "fp8_tensor", "nvfp4": "nvfp4"}[table]


def test_same_seed_is_the_same_model_in_every_format(opened: dict[str, Checkpoint]) -> None:
    plain = opened["bf16"]
    experts = values(plain, "layers.2.mlp.experts.gate_up_proj").float()
    for release in ALL_RELEASES[1:]:
        other = opened[release]
        gate = values(other, "layers.2.mlp.experts.1.gate_proj")
        # fp4 is the coarsest: a sixth of the block's largest value
        assert (gate - experts[1, :48]).abs().max() < 0.25 * experts.abs().max(), release
        up = values(other, "layers.2.mlp.experts.1.up_proj")
        assert (up - experts[1, 48:]).abs().max() < 0.25 * experts.abs().max(), release
        z = values(other, "layers.0.linear_attn.in_proj_z")
        assert torch.allclose(z, values(plain, "layers.0.linear_attn.in_proj_z"), atol=0.03), release


def test_writing_in_parallel_or_again_gives_the_same_bytes(tmp_path: Path) -> None:
    plan = plan_random(str(tiny_config(tmp_path)), "nvidia-nvfp4")
    write_random(plan, tmp_path / "a", seed=3)
    write_random(plan, tmp_path / "b", seed=3, jobs=4)
    write_random(plan, tmp_path / "c", seed=4)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    name = next((tmp_path / "a").glob("model-0*")).name
    assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()


def test_chunks_do_not_show_in_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a table of several chunks must share one scale; rows of a chunk must land behind each other
    monkeypatch.setattr(convert, "_CHUNK", 128 * 16)
    checkpoint = open_checkpoint(make_tiny(tmp_path, "mxfp8-nvfp4", table_rows=4000))
    shard = values_of_shard(checkpoint, 1)
    assert shard.shape[0] > 256
    assert (shard.abs().amax(1) > 0).all()
    sigma = checkpoint.config.ple_embed_dim**-0.5
    assert shard.std().item() == pytest.approx(sigma, rel=0.05)


def values_of_shard(checkpoint: Checkpoint, i: int) -> torch.Tensor:
    table = checkpoint.table
    assert table.scale is not None
    parts = checkpoint.weights[f"{table.name}.shard_{i}"].parts | table.scale.parts
    tensors = {p: torch.frombuffer(e.read(), dtype=DTYPES[e.dtype]).reshape(e.shape) for p, e in parts.items()}
    shape = (table.heights[i], table.width)
    packed = PackedWeight(
        table.format, shape, tensors["weight"], tensors["weight_scale"], tensors.get("weight_scale_2")
    )
    return packed.dequantize()


def test_fp8_table_shares_one_scale(opened: dict[str, Checkpoint]) -> None:
    sigma = opened["nvfp4"].config.ple_embed_dim ** -0.5
    assert values_of_shard(opened["nvfp4"], 0).std().item() == pytest.approx(sigma, rel=0.1)


def test_gate_and_up_share_their_global_scale(opened: dict[str, Checkpoint]) -> None:
    for e in range(2):
        gate, up = (opened["nvfp4"].weights[f"layers.0.mlp.experts.{e}.{n}_proj"] for n in ("gate", "up"))
        for part in ("weight_scale_2", "input_scale"):
            assert bytes(gate.parts[part].read()) == bytes(up.parts[part].read())


def test_values_have_the_size_of_a_trained_model(opened: dict[str, Checkpoint]) -> None:
    checkpoint = opened["bf16"]
    assert values(checkpoint, "embed_tokens").std().item() == pytest.approx(128**-0.5, rel=0.1)
    assert values(checkpoint, "layers.0.linear_attn.norm").float().mean().item() == pytest.approx(1.0, abs=0.05)
    assert values(checkpoint, "layers.0.mlp_hyper_connection.hc_norm").float().abs().max() < 0.2
    decay = values(checkpoint, "layers.0.linear_attn.A_log").float()
    assert ((decay >= 0) & (decay <= math.log(16.0) + 0.01)).all()
    step = torch.nn.functional.softplus(values(checkpoint, "layers.0.linear_attn.dt_bias").float())
    assert ((step > 0.0009) & (step < 0.11)).all()


def test_shards_past_the_last_row_are_neither_stored_nor_asked_for(tmp_path: Path) -> None:
    path = tiny_config(tmp_path)
    raw = json.loads(path.read_text())
    raw["text_config"] |= {"split_ngram_parts": 200}
    path.write_text(json.dumps(raw))
    write_random(plan_random(str(path), "nvfp4"), tmp_path / "new")
    checkpoint = open_checkpoint(tmp_path / "new")
    assert len(checkpoint.table.heights) < 200
    assert sum(checkpoint.table.heights) == checkpoint.table.rows
    load_model(checkpoint, 8, "cpu")


@pytest.mark.parametrize("release", ALL_RELEASES)
def test_every_release_loads(opened: dict[str, Checkpoint], release: str) -> None:
    load_model(opened[release], 8, "cpu")


def test_every_matrix_is_drawn_on_its_own(opened: dict[str, Checkpoint]) -> None:
    a, b = (values(opened["bf16"], f"layers.{i}.linear_attn.in_proj_z") for i in (0, 1))
    assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()) < 0.1


def test_float32_of_what_is_not_quantized(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny(tmp_path, "nvfp4", dtype="float32"))
    assert checkpoint.weights["layers.0.linear_attn.in_proj_qkv"].format == "fp32"
    assert checkpoint.weights["layers.0.mlp.experts.0.gate_proj"].format == "nvfp4"


def test_metadata_lies_where_each_release_has_it(opened: dict[str, Checkpoint]) -> None:
    nvidia = opened["nvidia-nvfp4"].directory
    assert "quantization_config" not in json.loads((nvidia / "config.json").read_text())
    section = json.loads((nvidia / "hf_quant_config.json").read_text())["quantization"]
    assert section["quant_algo"] == "MIXED_PRECISION"
    assert section["quantized_layers"]["mtp.layers.0.mlp.experts"] == {"quant_algo": "FP8_PB_WO", "group_size": 128}
    assert (nvidia / "model-fp8-mtp-ple.safetensors").exists()
    fp8 = json.loads((opened["fp8"].directory / "config.json").read_text())["quantization_config"]
    assert fp8["weight_block_size"] == [128, 128]
    mtp = json.loads((opened["fp8dense-mtp"].directory / "config.json").read_text())["quantization_config"]
    assert {"mtp.layers.0.mlp.experts", "mtp.layers.4.mlp.experts"} <= set(mtp["quantized_layers"])
    assert not (opened["bf16"].directory / "hf_quant_config.json").exists()


def test_full_size_splits_into_files_of_bearable_size() -> None:
    plan = plan_random("full", "bf16")
    sizes = [sum(p.nbytes for p in file) for file in plan.files.values()]
    assert max(sizes) <= 5_000_000_000
    assert sum(sizes) == plan.documents[INDEX]["metadata"]["total_size"] == plan.nbytes
    assert plan.documents["generation_config.json"]["eos_token_id"] == [248046, 248044]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"release_name": "int3"}, "--format must be one of bf16, fp8"),
        ({"table": "int3"}, "--table must be bf16, fp8 or nvfp4"),
        ({"dtype": "half"}, "--dtype must be bfloat16 or float32"),
        ({"layers": 1}, r"--layers must be 2 \(the n-gram layer is number 2\) to 12; got 1"),
        ({"layers": 13}, "to 12; got 13"),
        ({"experts": 9}, "--experts must be 1 to 8; got 9"),
        ({"table_rows": 3}, "--table-rows must be at least 16; got 3"),
        ({"like": "/no/such.json"}, "--like wants full, small or a config.json"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], wanted: str) -> None:
    given = {"like": "small", "release_name": "bf16"} | options
    with pytest.raises(UserError, match=wanted):
        plan_random(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("release", "key", "size", "wanted"),
    [
        (
            "nvfp4",
            "moe_intermediate_size",
            40,
            r"nvfp4 stores rows of a multiple of 16 values; .*down_proj has rows of 40",
        ),
        ("mxfp8-nvfp4", "shared_expert_intermediate_size", 48, "mxfp8 stores rows of a multiple of 32 values"),
        ("mxfp8-nvfp4", "ple_embed_dim", 64, "nvfp4 stores rows of a multiple of 16 values; .*shard_0 has rows of 8"),
    ],
)
def test_shape_that_a_format_cannot_store_is_refused(
    tmp_path: Path, release: str, key: str, size: int, wanted: str
) -> None:
    path = tiny_config(tmp_path)
    raw = json.loads(path.read_text())
    raw["text_config"][key] = size
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=wanted):
        plan_random(str(path), release)


def test_what_was_cut_short_can_be_written_again(tmp_path: Path) -> None:
    """Half a checkpoint was left, and the directory refused the next time."""
    plan, seen = plan_random(str(tiny_config(tmp_path)), "nvfp4"), []

    def cut(nbytes: int) -> None:
        seen.append(nbytes)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random(plan, tmp_path / "new", advance=cut)
    assert list((tmp_path / "new").iterdir()) == []
    write_random(plan, tmp_path / "new")
    assert open_checkpoint(tmp_path / "new").num_bytes > 0


def test_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="has something in it"):
        write_random(plan_random("small", "bf16"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_disk_that_is_too_small_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(UserError, match=r"takes 360\.\d GB|takes 359\.\d GB"):
        write_random(plan_random("full", "bf16"), tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


def test_command_line_makes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", "random", str(tmp_path / "new"), "--like", str(tiny_config(tmp_path)), "--format", "fp8"]
    monkeypatch.setattr("sys.argv", ["stepfloor", *arguments, "--layers", "2", "--experts", "1", "--table-rows", "100"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert "bytes of weights in 1 files" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "new").config.num_hidden_layers == 2
