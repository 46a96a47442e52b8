"""Make checkpoints: random weights of this architecture in the exact layout of every release.

Each tensor is drawn from its own canonical name and the seed, so one seed gives the same model in every format up
to that format's rounding, and the order of writing does not matter. Nothing larger than a chunk is held.
Source: the layouts of `weights.releases`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.config import ModelConfig
from stepfloor.errors import UserError
from stepfloor.formats.codec import E4M3_MAX, PackedWeight, quantize
from stepfloor.model.random import special_values
from stepfloor.weights.expected import hash_buffers
from stepfloor.weights.releases import RELEASES as RELEASES
from stepfloor.weights.releases import Plan, Planned, layout
from stepfloor.weights.releases import plan_random as plan_random

_CHUNK = 1 << 22  # values drawn at a time: 16 MB in float32


def write_random(
    plan: Plan, destination: Path, *, seed: int = 0, jobs: int = 1, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Draw the weights of a plan and stream them to disk, one chunk per job in memory.

    advance is called with the bytes of each tensor once it is on disk. What ends it early, Ctrl-C too, leaves the
    directory empty. Raises UserError if destination exists and is not empty, or if the disk is too small.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"wanted an empty or new directory; {destination} has something in it; choose another")
    destination.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(destination).free) < plan.nbytes:
        raise UserError(
            f"this checkpoint takes {plan.nbytes / 1e9:.1f} GB; {destination} has {free / 1e9:.1f} GB free; pass "
            "--layers, --experts or --table-rows for a smaller one"
        )
    try:
        for name, content in plan.documents.items():
            (destination / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name, weights in plan.files.items():
            _write_file(plan.config, destination / name, weights, seed, jobs, advance)
    except BaseException:
        for name in (*plan.documents, *plan.files):
            (destination / name).unlink(missing_ok=True)
        raise


def _write_file(
    config: ModelConfig,
    path: Path,
    weights: tuple[Planned, ...],
    seed: int,
    jobs: int,
    advance: Callable[[int], None],
) -> None:
    header, offsets = layout(weights)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(p.nbytes for p in weights))
        file.flush()

        def write(planned: Planned) -> int:
            positions = {part: offsets[stored.name] for part, stored in planned.parts.items()}
            for part, tensor in _draw(config, planned, seed):
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                # pwrite keeps no shared position, so that jobs may write in any order
                written = 0
                while written < len(data):
                    written += os.pwrite(file.fileno(), data[written:], positions[part] + written)
                positions[part] += len(data)
            return planned.nbytes

        with ThreadPoolExecutor(max_workers=jobs) as pool:
            for nbytes in pool.map(write, weights):
                advance(nbytes)


def _draw(config: ModelConfig, planned: Planned, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(part, next piece of its bytes) until each part is whole."""
    expected, name = planned.expected, planned.expected.name
    if planned.format == "int64":
        yield "weight", torch.tensor(hash_buffers(config)[name], dtype=torch.int64)
    elif "weight" not in planned.parts:
        scale = _tensor_scale(planned.format, _table_sigma(config))
        yield next(iter(planned.parts)), scale.bfloat16() if planned.format == "fp8_tensor" else scale
    elif expected.kind == "fused":
        block, _, leaf = name.rpartition(".")
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        rows, k = expected.shape[1] // len(leaves), expected.shape[2]
        for e in range(expected.shape[0]):
            for one in leaves:
                for chunk in _matrix(f"{block}.{e}.{one}", (rows, k), k**-0.5, seed):
                    yield "weight", quantize(chunk, planned.format).data
    elif expected.kind == "linear" or name == "embed_tokens" or name.endswith(("mlp.gate", "shared_expert_gate")):
        sigma = _table_sigma(config) if ".ngram_embedding." in name else expected.shape[1] ** -0.5
        n, k = expected.shape
        scale = _tensor_scale(planned.format, sigma) if planned.format in ("fp8_tensor", "nvfp4") else None
        for chunk in _matrix(name, (n, k), sigma, seed):
            packed = quantize(chunk, planned.format, scale)
            yield from (
                (part, tensor) for part, tensor in _parts(packed) if part not in _ONCE and part in planned.parts
            )
        for part in _ONCE:
            if part in planned.parts and scale is not None:
                # activations of a normed model stay within about 8
                yield part, scale if part == "weight_scale_2" else torch.tensor(8.0 / (6.0 * E4M3_MAX))
    else:
        values = special_values(name, expected.shape, _generator(name, seed))
        yield "weight", values.to(torch.float32 if planned.format == "fp32" else torch.bfloat16)


_ONCE = ("weight_scale_2", "input_scale")


def _parts(packed: PackedWeight) -> Iterator[tuple[str, Tensor]]:
    yield "weight", packed.data
    if packed.scale is not None:
        yield "weight_scale_inv" if packed.format == "fp8_block" else "weight_scale", packed.scale


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _matrix(name: str, shape: tuple[int, int], sigma: float, seed: int) -> Iterator[Tensor]:
    """Rows of a normal matrix; a chunk is a multiple of 128 rows, so that blocks of 128 stay whole."""
    generator, (n, k) = _generator(name, seed), shape
    step = max(_CHUNK // k // 128, 1) * 128
    for start in range(0, n, step):
        rows = min(step, n - start)
        yield torch.randn((rows, k), generator=generator).clamp_(-_CAP, _CAP).mul_(sigma)


_CAP = 6.0  # standard deviations; a known extremum lets a scale be written before the last row is drawn


def _tensor_scale(format_name: str, sigma: float) -> Tensor:
    return torch.tensor(_CAP * sigma / (E4M3_MAX if format_name == "fp8_tensor" else 6.0 * E4M3_MAX))


def _table_sigma(config: ModelConfig) -> float:
    return config.ple_embed_dim**-0.5


def write_with_progress(plan: Plan, destination: Path, *, seed: int, jobs: int) -> None:
    """write_random with a bar on the terminal and a closing line."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=plan.nbytes)
        write_random(plan, destination, seed=seed, jobs=jobs, advance=lambda n: progress.advance(task, n))
    print(f"{destination}: {plan.nbytes:,} bytes of weights in {len(plan.files)} files")
