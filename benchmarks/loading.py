"""Loading beside the disk: a checkpoint of real tensor shapes is written, then read cold, by the loader and plainly.

    PYTHONPATH=src python3 -m benchmarks.loading [--gb 20] [--directory DIR] [--parts disk,start] [--json FILE]

disk   A release of fewer layers, in the NVFP4 layout, of --gb. Before each read the files are dropped from the page
       cache, and the share that stayed there is printed. "plain" reads the same files with as many threads and chunks
       as the loader, into pinned buffers, and does nothing with them: the rate of the disk. "load" is `load_model`; its
       first run may compile kernels. They take turns, the other one first in the second round. Then the model runs a
       few tokens, and `stepfloor generate` is started on the directory, cold, with a terminal for its bar.
start  `stepfloor bench step` on weights drawn on the device, twice: from the start of the process to the line that says
       it has loaded, to the first row of its table, to its end. The second run finds all kernels in the cache.

Codes are cut from blocks of random bytes, so writing costs no more than the disk; scales, norms and hash buffers are
those of `model.random`, so the model's activations stay finite.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import math
import mmap
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.config import EngineConfig, ModelConfig
from stepfloor.engine import Engine
from stepfloor.errors import UserError
from stepfloor.formats.codec import E4M3_MAX
from stepfloor.model.load import load_model
from stepfloor.model.random import _fill_codes, _fill_scale, special_values
from stepfloor.model.tensors import CHUNK_BYTES, DTYPES, READERS
from stepfloor.request import Request, SamplingParams
from stepfloor.weights.checkpoint import Checkpoint, open_checkpoint
from stepfloor.weights.expected import hash_buffers
from stepfloor.weights.releases import Plan, Planned, Stored, layout, plan_random

RELEASE = "nvfp4"
BLOCK_BYTES = 32 << 20  # of random codes, from which tensors are cut
MATRIX_KINDS = ("linear", "fused")
SHIFT = 4096 + 64  # where the next tensor is cut, so that no two neighbours are alike


# ---------------------------------------------------------------------- writing


def choose_plan(like: str, wanted_bytes: int) -> Plan:
    """As many layers as fit in so many bytes beside a table of a quarter of them; the table takes what is left."""
    config = plan_random(like, RELEASE).config
    row_bytes = config.ngram_head_dim
    fewest, table = config.ple_layer + 1, wanted_bytes // 4
    most = config.num_hidden_layers

    def sized(layers: int, table_bytes: int) -> Plan:
        return plan_random(
            like, RELEASE, layers=layers, table_rows=max(2 * config.ngram_heads, table_bytes // row_bytes)
        )

    least = sized(fewest, table).nbytes
    if least > wanted_bytes:
        enough = math.ceil((least - table) * 4 / 3 / 1e9)  # the table takes a quarter of whatever is asked for
        raise UserError(
            f"{fewest} layers of this model take {(least - table) / 1e9:.1f} GB beside the table; pass --gb {enough} "
            "or more"
        )
    a_layer = max(1, sized(min(most, fewest + 4), table).nbytes - least) // max(1, min(most, fewest + 4) - fewest)
    layers = min(most, fewest + (wanted_bytes - least) // a_layer)
    rest = wanted_bytes - sized(layers, table).nbytes
    return sized(layers, table + max(0, rest))


class Blocks:
    """Random bytes of every kind of part, drawn once and cut anew for each tensor."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._device = device
        self._table_sigma = config.ple_embed_dim**-0.5
        self._buffers = hash_buffers(config)
        self._made: dict[tuple[str, str, float], Tensor] = {}
        self._at = 0
        self._lock = threading.Lock()

    def pieces(self, planned: Planned, suffix: str, stored: Stored) -> Iterator[memoryview]:
        """The bytes of one stored tensor, in pieces."""
        name, shape = planned.expected.name, stored.shape
        matrix = planned.expected.kind in MATRIX_KINDS or name == "embed_tokens" or len(planned.expected.shape) == 2
        if planned.format == "int64":
            yield _bytes(torch.tensor(self._buffers[name], dtype=torch.int64))
        elif suffix == "weight" and not (matrix and not name.endswith("conv1d")):
            make = torch.Generator().manual_seed(len(name))
            yield _bytes(special_values(name, planned.expected.shape, make).to(DTYPES[stored.dtype]))
        elif suffix == "input_scale":
            yield _bytes(torch.full(shape, 8.0 / (6.0 * E4M3_MAX)))
        else:
            sigma = self._table_sigma if ".ngram_embedding" in name else planned.expected.shape[-1] ** -0.5
            block = self._block(planned.format, suffix, stored.dtype, sigma)
            with self._lock:
                self._at = at = (self._at + SHIFT) % (block.numel() // 2)
            at -= at % 8
            left = stored.nbytes
            while left:
                piece = block[at : at + left]
                yield piece.numpy().data
                left -= piece.numel()
                at = 0

    def _block(self, format_name: str, suffix: str, dtype: str, sigma: float) -> Tensor:
        with self._lock:
            key = (format_name, suffix, sigma)
            if key not in self._made:
                make = torch.Generator(self._device).manual_seed(len(self._made))
                out = torch.empty(BLOCK_BYTES // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=self._device)
                if suffix == "weight":
                    _fill_codes(out, format_name, sigma, make)
                else:
                    _fill_scale(out, format_name, sigma, make)
                self._made[key] = out.view(torch.uint8).cpu()
            return self._made[key]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(plan: Plan, directory: Path, device: str, say: Callable[[str], None]) -> float:
    """Write a plan's files and wait until the disk has them; the seconds it took."""
    begin = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in plan.documents.items():
        (directory / name).write_text(json.dumps(content))
    blocks = Blocks(plan.config, device)
    for name, weights in plan.files.items():
        header, offsets = layout(weights)
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(p.nbytes for p in weights))
            file.flush()
            _fill(file.fileno(), weights, offsets, blocks)
            os.fsync(file.fileno())
        say(f"{name} written, {sum(p.nbytes for p in weights) / 1e9:.2f} GB")
    return time.perf_counter() - begin


def _fill(descriptor: int, weights: tuple[Planned, ...], offsets: dict[str, int], blocks: Blocks) -> None:
    def put(planned: Planned) -> None:
        for suffix, stored in planned.parts.items():
            at = offsets[stored.name]
            for piece in blocks.pieces(planned, suffix, stored):
                done = 0
                while done < len(piece):
                    done += os.pwrite(descriptor, piece[done:], at + done)
                at += len(piece)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(put, weights):
            pass


# ---------------------------------------------------------------------- reading


def drop(files: list[Path]) -> float:
    """Take files out of the page cache; the share of their pages that stayed."""
    stayed = total = 0
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        found, pages = _resident_pages(path)
        stayed, total = stayed + found, total + pages
    return stayed / max(1, total)


def _resident_pages(path: Path) -> tuple[int, int]:
    """Pages of a file that are in memory, and all of them."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        state = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), state)
        del start
    return (pages if failed else sum(b & 1 for b in bytes(state))), pages


def plain_read(files: list[Path], pinned: bool) -> float:
    """Read every byte with the loader's threads and chunks; seconds."""
    own = threading.local()

    def read(path: Path, offset: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        view = own.buffer.numpy().data
        with path.open("rb", buffering=0) as source:
            source.seek(offset)
            at = 0
            while at < CHUNK_BYTES and (got := source.readinto(view[at:])):
                at += got

    begin = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        chunks = [(path, at) for path in files for at in range(0, path.stat().st_size, CHUNK_BYTES)]
        for future in [pool.submit(read, *chunk) for chunk in chunks]:
            future.result()
    return time.perf_counter() - begin


def load(checkpoint: Checkpoint, device: str, say: Callable[[str], None]) -> tuple[float, float]:
    """Load and forget: seconds, and by how many GiB the process's memory rose at most."""
    gc.collect()
    reset_peak()
    before = status_bytes("VmRSS")
    begin = time.perf_counter()
    config = EngineConfig(spec_tokens=3, max_model_len=512)
    model = load_model(
        checkpoint, config.positions, device, lambda done, total: say(f"layer {done} of {total}"), decode_rows=4
    )
    if device != "cpu":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    peak = status_bytes("VmHWM") - before
    del model
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return seconds, peak / (1 << 30)


def reset_peak() -> None:
    """Let VmHWM begin anew, where the system allows it."""
    with contextlib.suppress(OSError):  # the peak then is that of the whole process, which is no less
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def runs(checkpoint: Checkpoint, device: str) -> list[int]:
    """A few greedy tokens, to see that what was loaded is a model."""
    engine = Engine(checkpoint, EngineConfig(spec_tokens=3, max_model_len=512, device=device))
    engine.submit(Request("load", (1, 2, 3), SamplingParams(temperature=0.0, seed=0), 8))
    ids: list[int] = []
    for piece in engine.run():
        if piece.finish_reason == "error":
            raise RuntimeError(f"the loaded model is broken: {piece.error}")
        ids += piece.token_ids
    return ids


def generate(directory: Path, device: str, limit_s: float) -> dict[str, object]:
    """`stepfloor generate` on a directory, its standard error a terminal: how long it took and what its bar showed."""
    command = [sys.executable, "-m", "stepfloor", "generate", str(directory), "--token-ids", "1,2,3", "--json"]
    command += ["--max-tokens", "8", "--max-model-len", "512", "--device", device, "--temperature", "0"]
    ours, theirs = pty.openpty()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL, text=True)
    os.close(theirs)
    shown: list[bytes] = []

    def watch() -> None:
        try:
            while text := os.read(ours, 4096):
                shown.append(text)
        except OSError:
            pass  # the terminal is gone with the process

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        out, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"not done after {limit_s:.0f} s"}
    finally:
        watcher.join(2)
        os.close(ours)
    seconds = time.perf_counter() - begin
    terminal = b"".join(shown).decode(errors="replace")
    if process.returncode:
        return {"failed": terminal.strip()[-400:]}
    percent = [int(p) for p in re.findall(r"(\d+)%", terminal)]
    return {
        "process_s": seconds,
        "bar_percents": sorted(set(percent)),
        "tokens": len(json.loads(out.splitlines()[-1])["token_ids"]),
    }


def disk_part(options: argparse.Namespace, directory: Path, say: Callable[[str], None]) -> dict[str, object]:
    """Write, then read in turn."""
    on_gpu = options.device != "cpu"
    plan = choose_plan(options.like, int(options.gb * 1e9))
    say(f"{plan.nbytes / 1e9:.2f} GB: {plan.config.num_hidden_layers} layers, {plan.config.ngram_hash.rows} table rows")
    written_s = write(plan, directory, options.device, say)
    print(f"written: {plan.nbytes / 1e9:.2f} GB in {written_s:.1f} s, {plan.nbytes / written_s / 1e9:.2f} GB/s")
    checkpoint = open_checkpoint(directory)
    files = sorted(directory.glob("*.safetensors"))
    rows: list[dict[str, object]] = []
    print("round   what  seconds    GB/s  still cached  host memory at most, GiB", flush=True)
    for turn in range(options.rounds):
        for what in ("plain", "load") if turn % 2 == 0 else ("load", "plain"):
            cached = drop(files)
            if what == "plain":
                seconds, peak = plain_read(files, on_gpu), 0.0
            else:
                seconds, peak = load(checkpoint, options.device, say)
            rate = plan.nbytes / seconds / 1e9
            rows.append({"turn": turn, "what": what, "s": seconds, "gbps": rate, "cached": cached, "peak_gib": peak})
            print(f"{turn:5} {what:>6} {seconds:8.2f} {rate:7.2f} {100 * cached:11.1f} % {peak:14.2f}", flush=True)
    best = {what: min(float(str(r["s"])) for r in rows if r["what"] == what) for what in ("plain", "load")}
    print(f"load takes {best['load'] / best['plain']:.3f} of the time of plain reads (best of each)", flush=True)
    drop(files)
    started = generate(directory, options.device, options.limit_s / 3)
    print(f"stepfloor generate, cold: {started}", flush=True)
    ids = runs(checkpoint, options.device)
    print(f"8 greedy tokens of it: {ids}", flush=True)
    return {
        "bytes": plan.nbytes,
        "written_s": written_s,
        "rows": rows,
        "ratio": best["load"] / best["plain"],
        "generate": started,
    }


# ---------------------------------------------------------------------- from the start of a process


def start_part(options: argparse.Namespace) -> list[dict[str, float]]:
    """`stepfloor bench step` on drawn weights, twice, with a clock beside its lines."""
    command = [sys.executable, "-u", "-m", "stepfloor", "bench", "step", "--device", options.device, "--steps", "8"]
    command += ["--sequences", "1", "--spec-tokens", "3", "--context", "64", "--no-count-experts", "--no-profile"]
    command += ["--config", str(options.config)] if options.config else []
    found: list[dict[str, float]] = []
    for turn in range(2):
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        stop = threading.Timer(options.limit_s / 2, process.kill)
        stop.start()
        marks: dict[str, float] = {}
        lines: list[str] = []
        for line in process.stdout or ():
            lines.append(line)
            now = time.perf_counter() - begin
            if line.startswith("loaded in"):
                marks.setdefault("loaded_s", now)
            elif re.match(r"\s+a\s+1\s+3\s", line):
                marks.setdefault("first_row_s", now)
        process.wait()
        stop.cancel()
        marks["end_s"] = time.perf_counter() - begin
        if process.returncode:
            raise RuntimeError(f"bench step ended with {process.returncode}: {''.join(lines)[-600:]}")
        found.append(marks)
        print(f"start {turn + 1}: " + ", ".join(f"{name} {value:.1f}" for name, value in marks.items()), flush=True)
    ready = found[-1].get("first_row_s", found[-1]["end_s"])
    print(f"ready and timed {ready:.1f} s after the start, kernels cached: {'met' if ready < 60 else 'missed'} (60 s)")
    return found


def main() -> int:
    """1 if a part fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=20.0)
    parser.add_argument("--like", default="full", help="full, small or a config.json")
    parser.add_argument("--config", type=Path, help="of the random model of the start part; full size without it")
    parser.add_argument("--directory", type=Path, help="where to write; a new temporary directory without it")
    parser.add_argument("--parts", type=lambda s: s.split(","), default=["disk", "start"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit-s", type=int, default=420, help="give up with a traceback after this long")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit_s, exit=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    name = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu"
    record: dict[str, object] = {"device": name, "torch": torch.__version__, "commit": options.commit}
    directory = Path(tempfile.mkdtemp(prefix="stepfloor-loading-", dir=options.directory))
    try:
        if "disk" in options.parts:
            record["disk"] = disk_part(options, directory / "model", say)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record) + "\n")
    if "start" in options.parts:
        record["start"] = start_part(options)
    line = json.dumps(record, separators=(",", ":"))
    if options.json is None:
        print(line)
    else:
        options.json.write_text(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
