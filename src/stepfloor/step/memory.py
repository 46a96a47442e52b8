"""What torch's allocator may take of a GPU: pages that go back once they are free, and no more than the plan says."""

import logging

import torch

from stepfloor.roofline.memory import MemoryPlan

logger = logging.getLogger(__name__)

# Most that a driver takes after the plan is made, graphs apart. The rest of the reserve is for what torch's allocator
# counts: libraries' workspaces, fragmentation. A process of the shipped model on an H200 had 0.73 GiB beside torch's.
DRIVER_BYTES = 1 << 30


def open_memory(device: str) -> None:
    """Let torch map a GPU's memory page by page, not in blocks that stay whole while one tensor lives in them.

    Loading leaves gaps between the weights: in such blocks they came to 4.8 GiB beside 84.6 GiB in use on an H200.
    Called before the first allocation; a limit that an earlier plan set is lifted.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_per_process_memory_fraction(1.0, _index(device))


def keep_to_plan(plan: MemoryPlan, device: str) -> None:
    """Make the plan's total a limit of this process: what would pass it is an out-of-memory error, not a neighbour's.

    plan    made when its `available` bytes were what the device had free
    device  where all that the plan names is allocated by now, kernels and graphs included
    """
    free, whole = torch.cuda.mem_get_info(device)
    allowed = allowed_bytes(plan, free, torch.cuda.memory_reserved(device))
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / whole), _index(device))


def allowed_bytes(plan: MemoryPlan, free: int, reserved: int) -> int:
    """What torch may take of the plan's total: what the driver has taken of it, for kernels and graphs, is off.

    free      bytes of the device that nobody has
    reserved  bytes that torch has
    The driver's share is what has gone since the plan was made without being torch's. A neighbour that took memory in
    the meantime looks the same: beyond DRIVER_BYTES and the plan's graphs it is counted as the neighbour's, and said.
    """
    if plan.capacity.unified:  # the driver counts file pages too, so its share cannot be told
        return plan.total("device")
    gone = max(0, plan.available("device") - free - reserved)
    graphs = sum(line.nbytes for line in plan.lines if line.component == "graphs")
    most = min(DRIVER_BYTES, plan.capacity.device_reserve) + graphs
    if gone > most:
        logger.warning(
            "memory: %.2f GiB went while this process loaded, %.2f more than a driver takes: another process's",
            gone / 2**30,
            (gone - most) / 2**30,
        )
    return plan.total("device") - min(gone, most)


def _index(device: str) -> int:
    """Of a CUDA device; some of torch's functions take no name without one."""
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index
