"""Devices this model is run on: memory and bandwidth, as specified, as reported and as measured.

`read_gbps` is what a streaming read kernel reached, where somebody measured it; it wins over the specification.
"""

from dataclasses import dataclass

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device.

    memory_bytes    what its driver reports; on unified memory what the system has in all
    bandwidth_gbps  specified memory bandwidth in GB/s
    read_gbps       measured streaming read in GB/s, None where nothing was measured
    achieved        share of bandwidth_gbps that whole steps were seen to reach, from and to
    unified         host and device share the memory; link  what several are connected by
    idle_bytes      most that was seen available on an idle machine, where that is less than all; None elsewhere
    source          of the figures
    """

    name: str
    memory_bytes: int
    bandwidth_gbps: float
    read_gbps: float | None = None
    achieved: tuple[float, float] = (0.80, 0.92)
    unified: bool = False
    link: str = "pcie"
    source: str = ""
    idle_bytes: int | None = None

    @property
    def floor_gbps(self) -> float:
        """The divisor of a floor: what was measured where it was, else what is specified."""
        return self.read_gbps or self.bandwidth_gbps


# share reached by single kernels and whole steps of other engines where nobody reported one for the device
_ASSUMED = "share reached: assumed"
GPUS: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        Hardware(
            "GB10",
            int(121.7 * _GIB),
            273.0,
            achieved=(0.86, 0.90),
            unified=True,
            link="roce",
            source="DGX Spark data sheet (LPDDR5X); MemTotal and 235 to 245 GB/s reached: owners' reports",
            idle_bytes=109 * _GIB,  # 94 to 109 GiB were reported
        ),
        Hardware(
            "RTX 5090",
            32_607 * _MIB,
            1792.0,
            achieved=(0.83, 0.92),
            source="NVIDIA product page; 1.65 TB/s reached by a head kernel: an owner's trace",
        ),
        Hardware(
            "RTX PRO 6000",
            97_887 * _MIB,
            1792.0,
            achieved=(0.83, 0.92),
            source="NVIDIA product page (Blackwell, 96 GB); 1.49 TB/s reached by a head kernel: an owner's trace",
        ),
        Hardware("RTX 4090", 24_564 * _MIB, 1008.0, source=f"NVIDIA product page; {_ASSUMED}"),
        Hardware("RTX 3090", 24_576 * _MIB, 936.0, source=f"NVIDIA product page; {_ASSUMED}"),
        Hardware("H100", 81_559 * _MIB, 3350.0, link="nvlink", source=f"NVIDIA data sheet (SXM, 80 GB); {_ASSUMED}"),
        Hardware(
            "H200",
            int(139.8 * _GIB),
            4800.0,
            4650.0,
            achieved=(0.80, 0.97),
            link="nvlink",
            source="NVIDIA data sheet; 4.65 TB/s by our own streaming kernel over 4 GiB",
        ),
        Hardware("B200", 183_359 * _MIB, 8000.0, link="nvlink", source=f"NVIDIA data sheet; {_ASSUMED}"),
        Hardware(
            "Strix Halo",
            128 * _GIB,
            256.0,
            unified=True,
            link="roce",
            source=f"AMD product page (Ryzen AI Max+ 395, LPDDR5X-8000, 256 bit); {_ASSUMED}",
        ),
        Hardware("M1 Max", 64 * _GIB, 400.0, unified=True, source=f"Apple specifications; {_ASSUMED}"),
        Hardware("M4 Max", 128 * _GIB, 546.0, unified=True, source=f"Apple specifications; {_ASSUMED}"),
        Hardware("M3 Ultra", 512 * _GIB, 819.0, unified=True, source=f"Apple specifications; {_ASSUMED}"),
    )
}


def find_gpu(device_name: str) -> Hardware | None:
    """The entry whose name occurs in the driver's name of the device ("NVIDIA H200"); None if there is none."""
    # whole words: a GH200 is no H200
    matches = [gpu for name, gpu in GPUS.items() if f" {name} ".lower() in f" {device_name} ".lower()]
    return max(matches, key=lambda gpu: len(gpu.name), default=None)


def named_device(name: str) -> Hardware | None:
    """The entry a user means: "gb10", "pro-6000", "5090", "h200"; None if none or several fit."""
    wanted = _plain(name)
    exact = [gpu for gpu in GPUS.values() if _plain(gpu.name) == wanted]
    found = exact or [gpu for gpu in GPUS.values() if wanted and wanted in _plain(gpu.name)]
    return found[0] if len(found) == 1 else find_gpu(name)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
