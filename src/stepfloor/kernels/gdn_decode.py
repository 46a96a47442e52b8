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
from functools import cache

import torch
from torch import Tensor

from stepfloor.kernels._delta import DeltaConstants, Replay, close, keep, prepare, recur, why_not_triton
from stepfloor.kernels._delta_fused import TAPS, DeltaPlan, choose_plan, launch_for, pack_arguments, plan_for
from stepfloor.kernels._delta_split import choose_split, pack_split_arguments, split_launches_for
from stepfloor.kernels._jit import default_cache_dir, missing_for_cuda, runs_triton
from stepfloor.kernels._stream import say_once, shared_limit
from stepfloor.kernels._torch import delta_rows, delta_rule, gated_norm

logger = logging.getLogger(__name__)


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
    settled      whether whatever last touched state, kept rows, slots and pending ran before something that nothing
                 overtakes (a copy, a plain kernel, the start of a graph, a kernel that starts in turn), and that before
                 this call; the kernel may then read and write them before its predecessor has ended
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
        say_once(logger, f"gdn_decode runs its reference: {reason}")
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
        say_once(logger, f"gdn_decode does not run its CUDA kernel: {reason}")
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
