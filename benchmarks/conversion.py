"""Time a conversion against a plain copy of the files it rewrites, watch its memory, and kill it ten times.

    python3 -m benchmarks.conversion make DIRECTORY            a generated checkpoint of 12 GB with the real names
    python3 -m benchmarks.conversion run SOURCE WORK [KIND]    copy, convert, convert, copy; kill; verify
    python3 -m benchmarks.conversion kill SOURCE WORK KIND SECONDS    the kills alone, after a run
    python3 -m benchmarks.conversion memory WORK [KIND]    peak memory at the released model's 296,145 tensors
    python3 -m benchmarks.conversion heavy WORK            errors of every kind on heavy-tailed weights

Source and work should lie on one disk. Files are dropped from the page cache before each leg, where the system allows.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# what imports torch is imported where it is used, so that a leg's memory is that of the command
from stepfloor.weights.checkpoint import open_checkpoint
from stepfloor.weights.conversions import CONVERSIONS, MANIFEST, REPORT, plan_conversion

MAKE = ("--like", "full", "--format", "nvfp4", "--layers", "24", "--experts", "64", "--table-rows", "10000000")
KILLS = 10


def main(arguments: list[str]) -> None:
    if arguments[0] == "make":
        command = [sys.executable, "-m", "stepfloor", "convert", "random", arguments[1], *MAKE, "--jobs", "2"]
        subprocess.run(command, check=True)
    elif arguments[0] == "kill":
        source, work, kind = Path(arguments[1]), Path(arguments[2]), arguments[3]
        killed(source, work / "killed", kind, float(arguments[4]))
        print("same bytes" if digest(work / "killed") == digest(work / "converted0") else "other bytes")
    elif arguments[0] == "memory":
        memory(Path(arguments[1]), arguments[2] if len(arguments) > 2 else "draft-head-nvfp4")
    elif arguments[0] == "heavy":
        heavy(Path(arguments[1]))
    elif arguments[0] == "leg":
        leg(arguments[1], Path(arguments[2]), Path(arguments[3]), arguments[4])
    else:
        run(Path(arguments[1]), Path(arguments[2]), arguments[3] if len(arguments) > 3 else "fp8-dense")


def leg(what: str, source: Path, final: Path, kind: str) -> None:
    """One process: torch alone, torch and the plan, or the whole conversion, imports in the command's order."""
    plan = None if what == "torch" else plan_conversion(open_checkpoint(source), kind)
    import torch

    from stepfloor.tools.requantize.convert import convert, destination

    # what a conversion loads before its first piece
    torch.zeros(4).to(torch.float8_e4m3fn)
    if what == "convert" and plan is not None:
        print("begin", flush=True)
        convert(plan, destination(str(final), final.parent, plan))
    # VmHWM and not ru_maxrss, which a child takes over from a larger parent
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print("peak", int(status.split("VmHWM:")[1].split()[0]) * 1024)


def memory(work: Path, kind: str) -> dict[str, int]:
    """Peak bytes by leg for the released NVFP4 geometry: true names, shapes and file lengths, sparse files."""
    from tests.checkpoints import make_sparse

    work.mkdir(parents=True, exist_ok=True)
    source = work / "sparse"
    if not source.exists():
        make_sparse(source, "nvfp4")
    final = work / f"sparse-{kind}"
    peaks = {what: child(what, source, final, kind)[1] for what in ("torch", "plan", "convert")}
    shutil.rmtree(final)
    for what, peak in peaks.items():
        print(f"{what}: peak {peak / 1e6:.0f} MB, {(peak - peaks['torch']) / 1e6:.0f} beyond Python and torch")
    print(json.dumps({"conversion": kind, "cores": os.cpu_count(), "peak_bytes": peaks}))
    return peaks


def heavy(work: Path) -> None:
    """Every conversion of small models whose matrices are Student's t; a table row for each class, and all findings."""
    from stepfloor.tools.convert import plan_random, write_random
    from stepfloor.tools.requantize.convert import convert, destination
    from stepfloor.tools.requantize.verify import verify

    work.mkdir(parents=True, exist_ok=True)
    for degrees in (5, 3, 2):
        source = work / f"t{degrees}"
        write_random(plan_random("small", "bf16"), source, seed=1)
        fatten(source, degrees)
        checkpoint = open_checkpoint(source)
        for kind in CONVERSIONS:
            plan = plan_conversion(checkpoint, kind)
            final = work / f"t{degrees}-{kind}"
            convert(plan, destination(str(final), work, plan))
            report = verify(final, checkpoint)
            for c in report["classes"]:
                rms, limit = c["relative_rms"], c["limit"]
                print(
                    f"| t{degrees} | {kind} | {c['class']} | {c['format']} | {c['tensors']} | "
                    f"{rms['min']:.4f} / {rms['median']:.4f} / {rms['max']:.4f} | {limit['relative_rms']} | "
                    f"{c['cosine_min']:.5f} | {limit['cosine']} |"
                )
            for finding in report["findings"]:
                print(f"{kind}: {finding['kind']}: {finding['message']}")


def fatten(directory: Path, degrees: int) -> None:
    """Redraw every bf16 matrix in place from Student's t with these degrees of freedom, its standard deviation kept."""
    import numpy
    import torch

    from stepfloor.weights.headers import read_header

    draw = numpy.random.default_rng(degrees)
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("r+b") as file:
            for entry in read_header(path).entries.values():
                if entry.dtype != "BF16" or len(entry.shape) < 2:
                    continue
                old = torch.frombuffer(entry.read(), dtype=torch.bfloat16)
                drawn = torch.from_numpy(draw.standard_t(degrees, old.numel()))
                new = (drawn * (old.float().std() / drawn.std())).bfloat16()
                file.seek(entry.offset)
                file.write(new.view(torch.uint8).numpy().tobytes())


def run(source: Path, work: Path, kind: str) -> None:
    """All legs; prints figures as they come and one JSON line at the end."""
    work.mkdir(parents=True, exist_ok=True)
    plan = plan_conversion(open_checkpoint(source), kind)
    read = {m.rows.file for f in plan.files for m in f.matrices} | {c.entry.file for f in plan.files for c in f.copies}
    touched = sorted(read)
    size = sum(path.stat().st_size for path in touched)
    print(f"{kind}: {len(plan.formats)} tensors in {len(touched)} files of {size / 1e9:.2f} GB are touched")
    times: dict[str, list[float]] = {"copy": [], "convert": []}
    baseline = child("plan", source, work / "none", kind)[1]
    peaks: list[int] = []
    loads: list[float] = []
    for which in ("copy", "convert", "convert", "copy"):
        drop(source)
        loads.append(os.getloadavg()[0])  # before the leg, whose own threads count in the next one's
        if which == "copy":
            times[which].append(plain_copy(touched, work / "copied"))
        else:
            final = work / f"converted{len(times[which])}"
            seconds, peak = child("convert", source, final, kind)
            times[which].append(seconds)
            peaks.append(peak)
        print(
            f"{which}: {times[which][-1]:.1f} s, {size / times[which][-1] / 1e6:.0f} MB/s, load {loads[-1]:.1f} before"
        )
    print(f"peak memory {max(peaks) / 1e6:.0f} MB, of which {baseline / 1e6:.0f} MB stand before the first piece")
    same = digest(work / "converted0") == digest(work / "converted1")
    shutil.rmtree(work / "converted1")
    moments = killed(source, work / "killed", kind, min(times["convert"]))
    resumed = digest(work / "killed") == digest(work / "converted0")
    start = time.perf_counter()
    from stepfloor.tools.requantize.verify import verify_with_progress

    clean = verify_with_progress(work / "converted0", open_checkpoint(source))
    verified = time.perf_counter() - start
    report = json.loads((work / "converted0" / REPORT).read_text(encoding="utf-8"))
    print(
        json.dumps(
            {
                "conversion": kind,
                "touched_bytes": size,
                "written_bytes": plan.written_bytes,
                "cores": os.cpu_count(),
                "copy_s": times["copy"],
                "convert_s": times["convert"],
                "load": loads,
                "ratio": sum(times["copy"]) / sum(times["convert"]),
                "peak_bytes": max(peaks),
                "baseline_bytes": baseline,
                "same_bytes_again": same,
                "killed_after_s": moments,
                "same_bytes_after_kills": resumed,
                "verify_s": verified,
                "verified": clean,
                "classes": report["classes"],
            }
        )
    )


def child(what: str, source: Path, final: Path, kind: str) -> tuple[float, int]:
    """(seconds, peak resident bytes) of a process of its own."""
    start = time.perf_counter()
    done = subprocess.run(command(what, source, final, kind), stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - start, int(done.stdout.split()[-1])


def command(what: str, source: Path, final: Path, kind: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.conversion", "leg", what, str(source), str(final), kind]


def plain_copy(files: list[Path], directory: Path) -> float:
    """Seconds to copy files and have them on the disk; the copies are removed."""
    directory.mkdir()
    start = time.perf_counter()
    for path in files:
        with path.open("rb") as reading, (directory / path.name).open("wb") as writing:
            shutil.copyfileobj(reading, writing, 8 << 20)
            writing.flush()
            os.fsync(writing.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(directory)
    return seconds


def killed(source: Path, final: Path, kind: str, seconds: float) -> list[float]:
    """Start, kill -9 at a random moment, ten times, then run to the end; returns the moments."""
    draw = random.Random(0)
    moments: list[float] = []
    for _ in range(KILLS):
        with subprocess.Popen(command("convert", source, final, kind), stdout=subprocess.PIPE) as process:
            if process.stdout is None:
                raise RuntimeError("no pipe")
            process.stdout.readline()
            # a resumed run has less to do, so the ten together come to about one whole run
            moments.append(draw.uniform(0, seconds / 6))
            time.sleep(moments[-1])
            process.send_signal(signal.SIGKILL)
            process.wait()
        if final.exists() and not (final / MANIFEST).exists():
            raise SystemExit("a directory that is not whole has the result's name")
        journal = final.with_name(f".{final.name}.journal")
        lines = len(journal.read_text(encoding="utf-8").splitlines()) - 1 if journal.exists() else 0
        print(f"killed after {moments[-1]:.1f} s: result {'there' if final.exists() else 'absent'}, journal of {lines}")
        if final.exists():  # it was quicker than we were; the next kill has to find work
            shutil.rmtree(final)
    child("convert", source, final, kind)
    return moments


def digest(directory: Path) -> str:
    """Of all names and bytes, the verifier's report left out."""
    found = hashlib.blake2b()
    for path in sorted(directory.iterdir()):
        if path.name == REPORT:
            continue
        found.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(8 << 20):
                found.update(block)
    return found.hexdigest()


def drop(directory: Path) -> None:
    """Forget the pages of files in a directory."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main(sys.argv[1:])
