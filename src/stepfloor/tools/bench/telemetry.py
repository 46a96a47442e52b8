"""What the GPU did meanwhile, by nvidia-smi: clocks, temperature, power, and whether the clocks were held down.

nvidia-smi runs beside the client for the length of the window and writes a line a second, so that nothing here waits
for a driver. A value that a board does not have (GB10 has no memory clock) is null; nothing seen is not zero.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime

from stepfloor.tools.bench.result import Device, Telemetry

EVERY_MS = 1000
STOP_S = 10
COLUMNS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "clock_event_reasons": "clocks_event_reasons.active",
}
# NVML's bits: software thermal, hardware slowdown, hardware thermal, power brake
THROTTLE_BITS = 0x20 | 0x08 | 0x40 | 0x80
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class Recorder:
    """Records from `start` to `stop`, if there is something to record."""

    def __init__(self, host: str) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._begin = 0.0
        self._wall = 0.0
        self.unavailable: str | None = None
        if host not in LOCAL_HOSTS:
            self.unavailable = f"the server is on {host}, whose GPU is not visible here"
        elif shutil.which("nvidia-smi") is None:
            self.unavailable = "there is no nvidia-smi here"

    def start(self) -> None:
        """Begin; `begin` of the window is now."""
        self._begin, self._wall = time.perf_counter(), time.time()
        if self.unavailable is not None:
            return
        query = ",".join(("timestamp", "index", "name", *COLUMNS.values()))
        # it lives as long as the process that writes it
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def stop(self, begin: float) -> Telemetry:
        """End, and say what was seen; times count from `begin`, a time of time.perf_counter."""
        if self._process is None:
            return Telemetry(None, self.unavailable)
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.seek(0)
        lines = self._out.read().splitlines()
        self._out.close()
        devices = parse_lines(lines, self._wall + (begin - self._begin))
        if not devices:
            return Telemetry(None, f"nvidia-smi says: {lines[0] if lines else 'nothing'}")
        return Telemetry("nvidia-smi", None, devices)


def parse_lines(lines: Sequence[str], begin_wall: float) -> tuple[Device, ...]:
    """Devices of nvidia-smi's lines; begin_wall is the time of day when the window began."""
    rows: dict[str, list[tuple[float, list[float | None]]]] = {}
    for line in lines:
        stamp, *rest = [part.strip() for part in line.split(",")]
        if len(rest) != 2 + len(COLUMNS):
            continue
        try:
            at = datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp() - begin_wall
        except ValueError:
            continue
        rows.setdefault(f"GPU {rest[0]}: {rest[1]}", []).append((at, [_number(part) for part in rest[2:]]))
    return tuple(
        Device(
            name,
            tuple(at for at, _ in samples),
            {column: tuple(values[i] for _, values in samples) for i, column in enumerate(COLUMNS)},
        )
        for name, samples in rows.items()
    )


def throttled(telemetry: Telemetry) -> str | None:
    """Which GPU's clocks were held down by heat or power in at least a twentieth of the samples, if one's were."""
    for device in telemetry.devices:
        reasons = [int(r) for r in device.columns.get("clock_event_reasons", ()) if r is not None]
        held = sum(bool(r & THROTTLE_BITS) for r in reasons)
        if reasons and held / len(reasons) >= 0.05:
            return f"{device.name}: clocks held down in {held} of {len(reasons)} samples"
    return None


def _number(text: str) -> float | None:
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None  # [N/A], [Not Supported]
