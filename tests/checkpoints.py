"""Tiny checkpoints of every release, and a way to break them: read all tensors, change one thing, write again."""

import json
import shutil
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from stepfloor.tools.convert import RELEASES, layout, plan_random, write_random

TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "hc_lowrank": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "indexer_head_dim": 32,
    "num_experts": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
    "ple_embed_dim": 128,
    "ngram_vocab_size_base": 23,
}


def tiny_config(directory: Path) -> Path:
    """config.json of four layers, each matrix small but of a shape every format can store."""
    raw = json.loads(resources.files("stepfloor").joinpath("shipped", "config.json").read_text())
    text = raw["text_config"]
    text |= TINY | {"num_hidden_layers": 4, "layer_types": text["layer_types"][:4]}
    path = directory / "tiny.json"
    path.write_text(json.dumps(raw))
    return path


def make_tiny(root: Path, release: str, **options: Any) -> Path:
    """Write a tiny checkpoint under root and return its directory."""
    directory = root / release
    write_random(plan_random(str(tiny_config(root)), release, **options), directory, seed=1)
    return directory


def make_sparse(directory: Path, release: str) -> int:
    """The full-size release as files of the true length that hold scalars and nothing else; returns their bytes."""
    from stepfloor.tools.convert import _draw

    plan = plan_random("full", release)
    directory.mkdir()
    for name, document in plan.documents.items():
        (directory / name).write_text(json.dumps(document))
    for name, weights in plan.files.items():
        header, offsets = layout(weights)
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(p.nbytes for p in weights))
            for planned in weights:
                if planned.format == "int64":
                    for part, tensor in _draw(plan.config, planned, 0):
                        file.seek(offsets[planned.parts[part].name])
                        file.write(tensor.numpy().tobytes())
                for part, stored in planned.parts.items():
                    if part.startswith("weight_scale") and stored.dtype in ("F32", "BF16"):
                        file.seek(offsets[stored.name])
                        file.write(b"\x00\x00\x80\x3a" if stored.dtype == "F32" else b"\x80\x3a")
    return plan.nbytes


@dataclass
class Raw:
    """One stored tensor as bytes."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class Copy:
    """A checkpoint in memory: change `files`, `index` or JSON documents, then save."""

    directory: Path
    files: dict[str, dict[str, Raw]] = field(default_factory=dict)
    index: dict[str, Any] = field(default_factory=dict)
    follow: bool = True

    @classmethod
    def of(cls, source: Path, directory: Path) -> "Copy":
        shutil.copytree(source, directory)
        copy = cls(directory, index=json.loads((directory / INDEX).read_text()))
        for path in sorted(directory.glob("*.safetensors")):
            raw = path.read_bytes()
            start = 8 + int.from_bytes(raw[:8], "little")
            listed = json.loads(raw[8:start])
            listed.pop("__metadata__", None)
            copy.files[path.name] = {
                name: Raw(i["dtype"], i["shape"], raw[start + i["data_offsets"][0] : start + i["data_offsets"][1]])
                for name, i in listed.items()
            }
        return copy

    def find(self, ending: str) -> tuple[str, str]:
        """(file, stored name) of the first tensor whose name ends so."""
        for file, tensors in self.files.items():
            for name in tensors:
                if name.endswith(ending):
                    return file, name
        raise KeyError(ending)

    def tensor(self, ending: str) -> Raw:
        file, name = self.find(ending)
        return self.files[file][name]

    def pop(self, ending: str) -> Raw:
        file, name = self.find(ending)
        return self.files[file].pop(name)

    def put(self, name: str, dtype: str, shape: list[int], data: bytes, file: str | None = None) -> None:
        self.files.setdefault(file or next(iter(self.files)), {})[name] = Raw(dtype, shape, data)

    def rename(self, change: Any) -> None:
        """Rename every tensor by a function of its name."""
        self.files = {f: {change(n): t for n, t in tensors.items()} for f, tensors in self.files.items()}

    def edit(self, document: str, change: Any) -> None:
        path = self.directory / document
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    def save(self) -> Path:
        """Write the files, and an index that follows the tensors unless follow is False."""
        for file, tensors in self.files.items():
            self.write(file, tensors)
        if self.follow:
            total = sum(len(t.data) for tensors in self.files.values() for t in tensors.values())
            names = {name: file for file, tensors in self.files.items() for name in tensors}
            self.index = {"metadata": {"total_size": total}, "weight_map": names}
        (self.directory / INDEX).write_text(json.dumps(self.index))
        return self.directory

    def write(self, file: str, tensors: dict[str, Raw]) -> None:
        listed, data = {}, b""
        for name, tensor in tensors.items():
            offsets = [len(data), len(data) + len(tensor.data)]
            listed[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            data += tensor.data
        write_file(self.directory / file, listed, data)


def write_file(path: Path, listed: dict[str, Any], data: bytes) -> None:
    """A safetensors file with any header at all."""
    text = json.dumps(listed).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


INDEX = "model.safetensors.index.json"
ALL_RELEASES = tuple(RELEASES)
