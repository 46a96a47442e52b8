"""Read bandwidth of the memory that weights stream from: what turns a step's bytes into its floor."""

import os
import time

import torch

READ_BYTES = 1 << 28
ROUNDS = 5


def read_bandwidth_gbps(device: str) -> float:
    """Best of a few sums over a buffer larger than any last-level cache is likely to keep, in GB/s.

    Measured, not looked up: a figure from this moment on this machine, other load included. On the CPU all cores
    read, however many the step uses: the floor is the machine's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return READ_BYTES / _best_seconds(device) / 1e9
    finally:
        torch.set_num_threads(threads)


def _best_seconds(device: str) -> float:
    buffer = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(ROUNDS):
        _wait(device)
        start = time.perf_counter()
        buffer.sum()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
