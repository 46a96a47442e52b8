"""Read bandwidth of the memory that weights stream from: what turns a step's bytes into its floor."""

import os
import time

import torch

from stepfloor.kernels.stream_read import stream_read

READ_BYTES = 1 << 28
READ_BYTES_GPU = 1 << 32  # far beyond an L2 of 60 MB, and long beside a launch
ROUNDS = 5
SECONDS_GPU = 0.5  # the first rounds find clocks that have rested; 30 of them once read 3.8 TB/s of 4.4


def read_bandwidth_gbps(device: str) -> float:
    """Best of a few sums over a buffer larger than any last-level cache is likely to keep, in GB/s.

    Measured, not looked up: a figure from this moment on this machine, other load included. On the CPU all cores
    read, however many the step uses: the floor is the machine's.
    """
    if device != "cpu":
        return _gpu_bytes_per_s(device) / 1e9
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return READ_BYTES / _best_seconds() / 1e9
    finally:
        torch.set_num_threads(threads)


def _best_seconds() -> float:
    buffer = torch.ones(READ_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return best


def _gpu_bytes_per_s(device: str) -> float:
    """The best of a few streaming reads, timed by the device."""
    free = torch.cuda.mem_get_info(device)[0]
    buffer = torch.ones(min(READ_BYTES_GPU, free // 2) // 4, dtype=torch.int32, device=device)
    stream_read(buffer)  # compiles
    torch.cuda.synchronize(device)
    best = float("inf")
    start = time.perf_counter()
    while time.perf_counter() - start < SECONDS_GPU:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        stream_read(buffer)
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after))
    return 4 * buffer.numel() / (best * 1e-3)
