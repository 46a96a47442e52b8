"""GPUs this model is run on: memory and bandwidth, as specified and as measured.

Source: vendors' data sheets; `read_gbps` is what a streaming read kernel reached, where somebody measured it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU.

    memory_gb       device memory in GB (10^9 bytes); on unified memory the whole machine's
    bandwidth_gbps  specified memory bandwidth in GB/s
    read_gbps       measured streaming read in GB/s, None where nothing was measured
    """

    name: str
    memory_gb: float
    bandwidth_gbps: float
    read_gbps: float | None = None

    @property
    def floor_gbps(self) -> float:
        """The divisor of a floor: what was measured where it was, else what is specified."""
        return self.read_gbps or self.bandwidth_gbps


GPUS: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        Hardware("GB10", 128.0, 273.0),
        Hardware("RTX 5090", 32.0, 1792.0),
        Hardware("RTX PRO 6000", 96.0, 1792.0),
        Hardware("H100", 80.0, 3350.0),
        # 4.65 TB/s: a streaming kernel over 4 GiB
        Hardware("H200", 141.0, 4800.0, 4650.0),
    )
}


def find_gpu(device_name: str) -> Hardware | None:
    """The entry whose name occurs in the driver's name of the device ("NVIDIA H200"); None if there is none."""
    # whole words: a GH200 is no H200
    matches = [gpu for name, gpu in GPUS.items() if f" {name} ".lower() in f" {device_name} ".lower()]
    return max(matches, key=lambda gpu: len(gpu.name), default=None)
