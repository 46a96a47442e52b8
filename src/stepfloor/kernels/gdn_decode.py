"""Gated delta net over the rows of one decode step: convolution, gates, delta rule, gated norm.

The recurrent state is kept as it was at an earlier commit, beside the projected rows since. A step first replays
the rows that the last step accepted and writes the state once; then it runs its own rows, which stay pending
until the next step knows how many of them were accepted.

On a GPU one kernel does all of it in bf16 (`gdn_decode.cu`): the state is read once and written once. For many
sequences two do, with the same bits (`gdn_rows.cu`, `gdn_state.cu`). What they refuse, other sizes, types and devices,
goes through four Triton kernels (`_delta.py`). The bits of a row depend on nothing but the row and what came before it
in either: not on B, not on R, nor on whether it was replayed.

Source: transformers 5.24, Qwen4ExpTextGatedDeltaNet.forward (qwen4_exp/modeling_qwen4_exp.py).
"""

import logging
import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from stepfloor.kernels._delta import DeltaConstants, Replay, close, keep, prepare, recur, why_not_triton
from stepfloor.kernels._jit import Launch, compile_cuda, default_cache_dir, device_arch, missing_for_cuda, runs_triton
from stepfloor.kernels._stream import shared_limit
from stepfloor.kernels._torch import delta_rows, delta_rule, gated_norm

logger = logging.getLogger(__name__)

TAPS = 4
MOST_ROWS = 32  # pending and new ones of a sequence
MOST_SHARED = 227 * 1024
ROW_WARPS = 4  # of a block of gdn_rows.cu
MOST_THREADS = 512  # of a block of gdn_state.cu
# Sequences from which two kernels take over. Between its neighbours, settled, H200: 7.3 us against 8.8 at 2 sequences,
# 11.1 against 13.5 at 4, 31.5 against 50.3 at 16, 45 against 66 at 16 with four rows each.
SPLIT_FROM = 2
SPLIT_RINGS = (3, 2, 1)  # the first that fits
WHOLE_WIDTHS = (32, 64, 128, 256)  # heads of which a lane of gdn_rows.cu loads its channels at once


@dataclass(frozen=True, slots=True)
class Choice:
    """Fields of a DeltaPlan from so many sequences on."""

    sequences: int
    parts: int
    early: int = 1


# All give a value the same bits. Between its neighbours in a layer, one row, H200: 8.1 us with two blocks of a head
# against 8.7 with one at 1 sequence, 15.5 against 14.5 at 4 (16 columns a warp, early 1).
PLANS = (Choice(1, parts=2), Choice(2, parts=1))
# For calls that are settled; between its neighbours, one row and four: 5.8 and 9.1 us against 8.1 and 12.7 (early 1) at
# 1 sequence, 14.7 and 19.8 at 4.
SETTLED_PLANS = (Choice(1, parts=2, early=3), Choice(2, parts=1, early=2))


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """A specialisation of `gdn_decode.cu`, whose macros have these names. `cols` alone decides the bits of a value.

    rows    new rows; kept  rows that can be pending
    silu    whether silu, not sigmoid, gates the norm
    cols    columns of a warp; parts  blocks of a head
    joined  whether a cluster holds all blocks that read a key head, as rewriting rows in place demands
    early   what may precede the end of the kernel before: 0 nothing, 1 calling the state into the L2, 2 reading it, 3
            replaying the pending rows too and writing the state; 2 and 3 for calls that are `settled`
    passing whether a written state leaves the L2 before other lines
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    rows: int
    kept: int
    silu: bool
    cols: int = 16
    parts: int = 2
    joined: bool = True
    early: int = 1
    passing: bool = True

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.value_dim // (self.parts * self.cols) * 32

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.parts * (self.heads // self.key_heads if self.joined else 1)

    def blocks(self, sequences: int) -> int:
        """Blocks of the grid."""
        return sequences * (self.key_heads if self.joined else self.heads) * self.cluster

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `gdn_decode.cu` lays it out."""
        width, every = self.value_dim // self.parts, self.rows + self.kept
        rows = (TAPS - 1 + every) * (2 * self.key_dim + width) * 2 + self.rows * width * 2
        operands = self.rows * self.key_dim + every * (self.key_dim + width)
        results = self.rows * (width + self.value_dim // self.cols) + 2 * every
        return rows + 4 * (operands + results)

    @property
    def per_multiprocessor(self) -> int:
        """Blocks that registers allow: 80 a thread with 8 columns, of which 32 hold state, or 128 with 16 and 64."""
        return max(1, 65536 // (self.threads * (80 if self.cols == 8 else 128 if self.cols == 16 else 200)))

    def fits(self) -> bool:
        """Whether the kernel can be built for these sizes."""
        deep = 4 * 32 // (self.cols // 4)
        width = self.value_dim // self.parts
        return (
            self.heads % self.key_heads == 0
            and self.value_dim % (self.cols * self.parts) == 0
            and width % 8 == 0
            and self.key_dim % max(32, deep) == 0
            and self.rows + self.kept <= MOST_ROWS
            and self.cluster <= 16
            and self.threads <= 1024
            and self.shared_bytes <= MOST_SHARED
        )

    def macros(self) -> dict[str, int]:
        """The macros that specialise `gdn_decode.cu`."""
        return {
            "KEY_HEADS": self.key_heads,
            "HEADS": self.heads,
            "K": self.key_dim,
            "V": self.value_dim,
            "ROWS": self.rows,
            "KEPT": self.kept,
            "SILU": int(self.silu),
            "COLS": self.cols,
            "PARTS": self.parts,
            "JOINED": int(self.joined),
            "EARLY": self.early,
            "PASSING": int(self.passing),
            "PER_SM": self.per_multiprocessor,
        }


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A specialisation of `gdn_rows.cu` and `gdn_state.cu`, for many sequences; same bits as the fused kernel's.

    base     sizes, rows, activation and columns of a warp
    ring     states in the shared memory of a block of `gdn_state.cu`: one is worked on, the others are on their way
    settled  whether the call is: kept rows and states are then read before the kernel before has ended
    """

    base: DeltaPlan
    ring: int
    settled: bool

    @property
    def threads(self) -> int:
        """Threads of a block of `gdn_state.cu`."""
        return (self.base.value_dim // self.base.cols + 1) * 32

    @property
    def gates(self) -> int:
        """Rows for which a head's decays and betas have room: bulk copies take multiples of 16 bytes."""
        every = self.base.rows + self.base.kept
        return every + -every % 4

    @property
    def state_bytes(self) -> int:
        """Dynamic shared memory of a block of `gdn_state.cu`, as it lays it out."""
        p = self.base
        every = p.rows + p.kept
        operands = (p.rows + every) * p.key_dim + 2 * self.gates + every * p.value_dim
        results = p.rows * (p.value_dim + p.value_dim // p.cols)
        one = 4 * (operands + results)
        return self.ring * (4 * p.key_dim * p.value_dim + 16) + 2 * (one + -one % 16) + 32

    def row_blocks(self, sequences: int) -> int:
        """Blocks of `gdn_rows.cu`."""
        return -(-sequences * (2 * self.base.key_heads + self.base.heads) // ROW_WARPS)

    def state_blocks(self, sequences: int, multiprocessors: int) -> int:
        """Blocks of `gdn_state.cu`: one for each multiprocessor, if there is work for it."""
        return min(sequences * self.base.heads, multiprocessors)

    def scratch(self, sequences: int) -> tuple[int, int]:
        """Floats that the first kernel hands to the second: queries and keys; decays, betas and values."""
        p = self.base
        every = p.rows + p.kept
        keys = p.key_heads * (p.rows + every) * p.key_dim
        return sequences * keys, sequences * p.heads * (2 * self.gates + every * p.value_dim)

    def fits(self, shared_limit: int = MOST_SHARED) -> bool:
        """Whether the kernels can be built for these sizes; shared_limit: bytes of shared memory a block can have."""
        p = self.base
        deep = 4 * 32 // (p.cols // 4)
        return (
            p.heads % p.key_heads == 0
            and p.key_dim in WHOLE_WIDTHS
            and p.value_dim in WHOLE_WIDTHS
            and p.value_dim % p.cols == 0
            and p.key_dim % deep == 0
            and p.rows + p.kept <= MOST_ROWS
            and self.threads <= MOST_THREADS
            and self.state_bytes <= shared_limit
        )

    def row_macros(self) -> dict[str, int]:
        """The macros that specialise `gdn_rows.cu`."""
        names = ("KEY_HEADS", "HEADS", "K", "V", "ROWS", "KEPT", "SILU", "COLS")
        every = self.base.macros()
        return {name: every[name] for name in names} | {"SETTLED": int(self.settled)}

    def state_macros(self) -> dict[str, int]:
        """The macros that specialise `gdn_state.cu`."""
        return self.row_macros() | {"RING": self.ring}


def gdn_decode_reference(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
) -> Tensor:
    """One sequence after the other; the delta rule row by row."""
    history, count, rows = constants.history, *projected.shape[:2]
    raw, z, gates = projected.split(constants.parts, -1)
    outputs = []
    for b in range(count):
        slot, accepted = int(slots[b]), int(pending[b])
        # pending and new rows are neighbours, so one convolution serves the replay and the step
        window = torch.cat((raw_rows[slot, : history + accepted], raw[b]))
        window_gates = torch.cat((gate_rows[slot, :accepted], gates[b]))
        operands = delta_rows(window, window_gates, constants)
        delta_rule(operands, state[slot], 0, accepted)
        outputs.append(delta_rule(operands, state[slot].clone(), accepted, accepted + rows))
        raw_rows[slot, : history + rows] = window[accepted:]
        gate_rows[slot, :rows] = gates[b]
    mixed = torch.cat(outputs).to(projected.dtype)  # [B * R, HV, V]
    gate, c = z.reshape(mixed.shape), constants
    return gated_norm(mixed, gate, c.norm_weight, c.eps, c.activation).reshape(count, rows, -1)


def gdn_decode(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
    settled: bool = False,
) -> Tensor:
    """Replay accepted rows into the state, then run R new rows of each of B sequences.

    projected    [B, R, C + HV * V + 2 * HV]: q, k, v before convolution (C channels), z, b, a
    state        [slots, HV, K, V] float32, advanced in place by the pending rows
    raw_rows     [slots, taps - 1 + R', C]: the convolution's history, then the pending rows; rewritten in place
    gate_rows    [slots, R', 2 * HV] b and a of the pending rows; rewritten in place
    slots        [B] int64; pending [B] int64, rows of the last step that were accepted (0 after a prefill)
    settled      whether whatever last touched state, kept rows, slots and pending ran before something that is no
                 dependent launch (a copy, a plain kernel, the start of a graph), and that before this call; the kernel
                 may then read and write them before its predecessor has ended
    Returns [B, R, HV * V]. On a GPU slots and pending are read there; the first call of a shape loads its kernel, which
    a graph capture must not do. Raises ValueError if R exceeds the rows that can be pending or the shapes disagree.
    """
    if projected.shape[1] > gate_rows.shape[1]:
        raise ValueError(f"gdn_decode holds {gate_rows.shape[1]} pending rows a sequence; got {projected.shape[1]}")
    columns = constants.columns
    if projected.shape[2] != columns or slots.shape != projected.shape[:1] or pending.shape != slots.shape:
        raise ValueError(
            f"gdn_decode wants projected [B, R, {columns}], slots [B], pending [B]; got {tuple(projected.shape)}, "
            f"{tuple(slots.shape)}, {tuple(pending.shape)}"
        )
    operands = (projected, state, raw_rows, gate_rows, slots, pending, constants)
    if projected.is_cuda:
        plan = choose_plan(plan_for(constants, projected.shape[1], gate_rows.shape[1]), projected.shape[0], settled)
        reason = _why_not_cuda(plan, projected.device, _as_the_kernel_reads(*operands))
        if reason is None:
            out = projected.new_empty((*projected.shape[:2], constants.parts[1]))
            split = choose_split(plan, projected.shape[0], settled, shared_limit(projected.device))
            if split is not None:
                scratch = projected.new_empty(sum(split.scratch(projected.shape[0])), dtype=torch.float32)
                arguments = pack_split_arguments(split, *operands, out, scratch)
                for launch in split_launches_for(split, projected.shape[0], projected.device, default_cache_dir()):
                    launch(arguments)
                return out
            launch = launch_for(plan, projected.shape[0], projected.device, default_cache_dir())
            launch(pack_arguments(*operands, out, raw_rows, gate_rows))
            return out
    if runs_triton(projected):
        reason = why_not_triton(projected, (state, raw_rows, gate_rows, slots, pending), constants)
        if reason is None:
            return gdn_decode_triton(*operands)
        _say(f"gdn_decode runs its reference: {reason}")
    return gdn_decode_reference(*operands)


def gdn_decode_triton(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
) -> Tensor:
    """Queue the portable kernels."""
    count, rows = projected.shape[:2]
    replay = Replay(gate_rows, pending)
    prepared = prepare(projected, raw_rows, slots, constants, replay)
    out = projected.new_empty((count * rows, constants.parts[1]))
    recur(prepared, state, slots, constants, replay, out)
    close(out, projected, constants)
    keep(projected, raw_rows, slots, constants, replay)
    return out.view(count, rows, -1)


def decodes_on_cuda(constants: DeltaConstants, rows: int, device: torch.device) -> bool:
    """Whether windows of `rows` rows of one sequence run the CUDA kernel on this GPU."""
    bf16 = constants.norm_weight.dtype == torch.bfloat16 and constants.history == TAPS - 1
    return _why_not_cuda(choose_plan(plan_for(constants, rows, rows), 1), device, bf16) is None


def plan_for(constants: DeltaConstants, rows: int, kept: int) -> DeltaPlan:
    """The plan of a layer for windows of `rows` rows, with room for `kept` pending ones."""
    c = constants
    return DeltaPlan(c.key_heads, c.heads, c.key_dim, c.value_dim, rows, kept, c.activation == "silu")


def choose_plan(plan: DeltaPlan, sequences: int, settled: bool = False) -> DeltaPlan:
    """The plan for a number of sequences."""
    choice = [c for c in (SETTLED_PLANS if settled else PLANS) if sequences >= c.sequences][-1]
    return replace(plan, parts=choice.parts, early=choice.early)


def choose_split(plan: DeltaPlan, sequences: int, settled: bool, shared_limit: int) -> SplitPlan | None:
    """The plan of the two kernels for many sequences; None where the fused one is faster or they cannot be built.

    shared_limit  bytes of shared memory a block can have
    """
    if sequences < SPLIT_FROM:
        return None
    splits = (SplitPlan(plan, ring, settled) for ring in SPLIT_RINGS)
    return next((split for split in splits if split.fits(shared_limit)), None)


@cache
def launch_for(
    plan: DeltaPlan, sequences: int, device: torch.device, cache_dir: Path, dependent: bool = True
) -> Launch:
    """The compiled kernel, once a process. The first call loads it, which no graph capture may do."""
    cubin = compile_cuda("gdn_decode.cu", plan.macros(), device_arch(device), cache_dir)
    return Launch(
        cubin,
        "gdn_decode_kernel",
        device,
        plan.blocks(sequences),
        plan.threads,
        plan.shared_bytes,
        cluster=plan.cluster,
        dependent=dependent,
    )


@cache
def split_launches_for(
    plan: SplitPlan, sequences: int, device: torch.device, cache_dir: Path, dependent: bool = True
) -> tuple[Launch, Launch]:
    """The two compiled kernels in their order; the second always waits for the first itself. See `launch_for`."""
    arch = device_arch(device)
    rows = compile_cuda("gdn_rows.cu", plan.row_macros(), arch, cache_dir)
    state = compile_cuda("gdn_state.cu", plan.state_macros(), arch, cache_dir)
    blocks = plan.state_blocks(sequences, torch.cuda.get_device_properties(device).multi_processor_count)
    return (
        Launch(rows, "gdn_rows_kernel", device, plan.row_blocks(sequences), ROW_WARPS * 32, 0, dependent=dependent),
        Launch(state, "gdn_state_kernel", device, blocks, plan.threads, plan.state_bytes),
    )


def pack_arguments(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
    out: Tensor,
    raw_to: Tensor,
    gates_to: Tensor,
) -> bytes:
    """struct Arguments of `gdn_decode.cu`; rows may be written to other tensors than they are read from."""
    pointers = (
        projected,
        state,
        raw_rows,
        raw_to,
        gate_rows,
        gates_to,
        slots,
        pending,
        constants.conv_weight,
        constants.a_log,
        constants.dt_bias,
        constants.norm_weight,
        out,
    )
    addresses = [tensor.data_ptr() for tensor in pointers]
    sizes = (projected.stride(1), state.shape[0], projected.shape[0])
    return struct.pack(f"{len(addresses)}Pqqif", *addresses, *sizes, constants.eps)


def pack_split_arguments(
    plan: SplitPlan,
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
    out: Tensor,
    scratch: Tensor,
) -> bytes:
    """struct Arguments of `include/delta_split.cuh`; scratch [sum(plan.scratch(B))] float32."""
    c = constants
    pointers = (projected, state, raw_rows, gate_rows, slots, pending, c.conv_weight, c.a_log, c.dt_bias, c.norm_weight)
    addresses = [tensor.data_ptr() for tensor in (*pointers, out)]
    at = scratch.data_ptr()
    for floats in plan.scratch(projected.shape[0]):
        addresses.append(at)
        at += 4 * floats
    return struct.pack(f"{len(addresses)}Pqif", *addresses, projected.stride(1), projected.shape[0], c.eps)


def _as_the_kernel_reads(
    projected: Tensor,
    state: Tensor,
    raw_rows: Tensor,
    gate_rows: Tensor,
    slots: Tensor,
    pending: Tensor,
    constants: DeltaConstants,
) -> bool:
    """Whether dtypes, strides and alignment are those that the addresses in the kernel assume."""
    halves = (projected, raw_rows, gate_rows, constants.norm_weight)
    floats = (state, constants.conv_weight, constants.a_log, constants.dt_bias)
    whole = (*halves[1:], *floats, slots, pending)
    batch, row, column = projected.stride()
    return (
        all(t.dtype == torch.bfloat16 for t in halves)
        and all(t.dtype == torch.float32 for t in floats)
        and slots.dtype == pending.dtype == torch.int64
        and all(t.is_contiguous() for t in whole)
        and all(t.data_ptr() % 16 == 0 for t in (projected, state, raw_rows, constants.conv_weight))
        and constants.norm_weight.data_ptr() % 8 == 0
        and column == 1
        and row % 8 == 0
        and (batch == projected.shape[1] * row or projected.shape[0] == 1)
        and constants.history == TAPS - 1
    )


@cache
def _say(sentence: str) -> None:
    logger.info(sentence)


@cache
def _why_not_cuda(plan: DeltaPlan, device: torch.device, readable: bool) -> str | None:
    """Why the CUDA kernel does not run, said once."""
    reason = missing_for_cuda()
    if reason is None and not readable:
        reason = f"the kernel reads contiguous bf16 rows, float32 state and {TAPS} taps"
    if reason is None and not plan.fits():
        reason = f"the kernel cannot be built for {plan}"
    if reason is None and torch.cuda.get_device_capability(device)[0] < 9:
        reason = "the kernel needs compute capability 9.0 (clusters)"
    if reason is not None:
        _say(f"gdn_decode does not run its CUDA kernel: {reason}")
    return reason


def gdn_decode_inputs(
    b: int, r: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Inputs that the test, the tuner and the bench share; b sequences in the last slots, some rows pending."""
    make = torch.Generator(device).manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, device=device)

    channels = 2 * key_heads * key_dim + heads * value_dim
    return {
        "projected": rand(b, r, channels + heads * value_dim + 2 * heads).to(dtype),
        "state": 0.1 * rand(b + 1, heads, key_dim, value_dim),
        "raw_rows": rand(b + 1, 3 + r, channels).to(dtype),
        "gate_rows": rand(b + 1, r, 2 * heads).to(dtype),
        "slots": torch.arange(1, b + 1, device=device),
        "pending": torch.randint(0, r + 1, (b,), generator=make, device=device),
        "constants": DeltaConstants(
            conv_weight=rand(channels, 4) / 2,
            a_log=torch.linspace(0, 2, heads, device=device),
            dt_bias=torch.ones(heads, device=device),
            norm_weight=(1 + 0.1 * rand(value_dim)).to(dtype),
            key_heads=key_heads,
            key_dim=key_dim,
            eps=1e-6,
            activation="sigmoid",
        ),
    }
