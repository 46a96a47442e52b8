"""Where tensors come from: a mapped file, a streamed one, and none at all."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepfloor.config import ModelConfig
from stepfloor.model.load import load_model
from stepfloor.model.random import RandomTensors
from stepfloor.model.tensors import (
    AHEAD_BYTES,
    CHUNK_BYTES,
    GAP_BYTES,
    MappedTensors,
    Span,
    StreamedTensors,
    spans,
)
from stepfloor.weights.checkpoint import open_checkpoint
from stepfloor.weights.headers import Entry
from stepfloor.weights.synthetic import synthetic_checkpoint
from tests.checkpoints import make_tiny, tiny_config
from tests.ours import Ours

FORMATS = {"experts": "nvfp4", "lm_head": "mxfp8", "mtp.lm_head": "nvfp4", "ngram_embedding": "fp8_tensor"}


def format_of(name: str) -> str:
    return next((f for part, f in sorted(FORMATS.items(), reverse=True) if part in name), "bf16")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_streamed_is_mapped(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny(tmp_path, "nvfp4"))
    arrived: list[int] = []
    streamed, mapped = StreamedTensors(torch.device("cpu"), arrived.append), MappedTensors()
    weights = list(checkpoint.weights.values())
    for weight in weights:
        theirs = mapped.parts(weight)
        for suffix, tensor in streamed.parts(weight).items():
            assert tensor.dtype == theirs[suffix].dtype
            assert same_bytes(tensor, theirs[suffix]), (weight.name, suffix)
    assert sum(arrived) == checkpoint.num_bytes
    block = [w for w in weights if w.name.startswith("layers.0.mlp.experts.") and w.name.endswith("up_proj")]
    for suffix, stack in streamed.stacked(block).items():
        assert same_bytes(stack, mapped.stacked(block)[suffix])
    streamed.close()


def test_neighbours_are_read_at_once(tmp_path: Path) -> None:
    """Scalars of many experts, a few bytes apart, are one read; what is far away or large is a read of its own."""
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"

    def piece(file: Path, offset: int, nbytes: int) -> tuple[Entry, Tensor]:
        return Entry(file, "U8", (nbytes,), offset, nbytes), torch.empty(nbytes, dtype=torch.uint8)

    far = 16 * 511 + 4 + GAP_BYTES
    wanted = [piece(path, far, 8), piece(other, 0, 8), piece(path, far + 8 + GAP_BYTES + 1, 5)]
    wanted += [piece(path, 16 * i, 4) for i in reversed(range(512))]
    found = spans(wanted)
    assert [(s.file, s.offset, s.nbytes, len(s.parts)) for s in found] == [
        (path, 0, far + 8, 513),
        (path, far + 8 + GAP_BYTES + 1, 5, 1),
        (other, 0, 8, 1),
    ]
    assert [at for at, _ in found[0].parts] == [*range(0, 16 * 512, 16), far]
    large = spans([piece(path, 0, 2 * CHUNK_BYTES + 7), piece(path, 2 * CHUNK_BYTES + 7, CHUNK_BYTES - 6)])
    assert [(s.offset, s.nbytes) for s in large] == [
        (0, CHUNK_BYTES),
        (CHUNK_BYTES, CHUNK_BYTES),
        (2 * CHUNK_BYTES, 7),
        (2 * CHUNK_BYTES + 7, CHUNK_BYTES - 6),
    ]


def test_the_system_is_asked_to_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of a file once, and never less than half of the distance before the reader."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda file, begin, nbytes, advice: asked.append((begin, nbytes)))
    streamed = StreamedTensors(torch.device("cpu"))
    for number in (0, 1, 3, 2, *range(4, 200)):
        streamed._read_ahead(0, Span(Path("a"), number * CHUNK_BYTES, CHUNK_BYTES, ()))
        assert sum(asked[-1]) - (number + 1) * CHUNK_BYTES >= AHEAD_BYTES // 2
    streamed.close()
    assert [begin for begin, _ in asked[1:]] == [begin + nbytes for begin, nbytes in asked[:-1]]
    assert len(asked) < 20


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(bytes(CHUNK_BYTES + 10))
    entry = Entry(path, "U8", (CHUNK_BYTES + 20,), 0, CHUNK_BYTES + 20)
    streamed = StreamedTensors(torch.device("cpu"))
    with pytest.raises(OSError, match="ended 10 bytes early"):
        streamed.read_into(entry, torch.empty(CHUNK_BYTES + 20, dtype=torch.uint8))
    streamed.close()


def test_a_checkpoint_in_no_file_has_the_layout_of_one(tmp_path: Path) -> None:
    """What the census makes of a written release, tensor by tensor."""
    written = open_checkpoint(make_tiny(tmp_path, "nvfp4"))
    formats = {"experts": "nvfp4", "ngram_embedding": "fp8_tensor", "mtp.": "bf16"}

    def of(name: str) -> str:
        if name == "mtp.lm_head":
            return ""
        return next((f for part, f in sorted(formats.items(), reverse=True) if part in name), "bf16")

    made = synthetic_checkpoint(written.config, of)
    assert made.weights.keys() == written.weights.keys()
    for name, weight in written.weights.items():
        ours = made.weights[name]
        assert (ours.shape, ours.format) == (weight.shape, weight.format), name
        for suffix, entry in weight.parts.items():
            if suffix != "input_scale":
                assert (ours.parts[suffix].dtype, ours.parts[suffix].nbytes) == (entry.dtype, entry.nbytes), name
    assert made.table.row_bytes == written.table.row_bytes
    assert made.table.heights == written.table.heights


def test_random_weights_give_finite_logits_of_a_models_size(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(json.loads(tiny_config(tmp_path).read_text()))
    checkpoint = synthetic_checkpoint(config, format_of)
    source = RandomTensors(config, torch.device("cpu"))
    model = load_model(checkpoint, 64, "cpu", source=source)
    again = load_model(checkpoint, 64, "cpu", source=RandomTensors(config, torch.device("cpu")))
    assert torch.equal(model.layers[0].experts.gate_up.data, again.layers[0].experts.gate_up.data)
    spread = model.layers[0].experts.gate_up.data.std() * config.hidden_size**0.5
    assert 0.9 < float(spread) < 1.1  # variance 1 / K, in codes and scales as in plain numbers
    assert 0.9 < float(model.head[0].data.std()) * config.hidden_size**0.5 < 1.1
    ours = Ours(checkpoint, source=source)
    logits = ours.logits(torch.randint(0, config.vocab_size, (32,)).tolist())
    assert torch.isfinite(logits).all()
    assert 0.1 < float(logits.std()) < 10


def test_a_model_loaded_in_inference_mode(tmp_path: Path) -> None:
    """The reading threads have a mode of their own, which cannot copy into tensors of another one."""
    checkpoint = open_checkpoint(make_tiny(tmp_path, "nvfp4"))
    weight = checkpoint.weights["layers.0.mlp.gate"]
    streamed = StreamedTensors(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.inference_mode():
        arrived = streamed.parts(weight)["weight"]
    assert same_bytes(arrived.cpu(), MappedTensors().parts(weight)["weight"])
    streamed.close()
