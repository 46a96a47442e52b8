"""Which kernel each operator of a decode step runs, told from the weights that a model holds.

Operators decide at each call; what they decide by is fixed once the weights are loaded. Prompt chunks and steps of more
than 80 rows run torch's library on decoded matrices, or Triton, and are not meant here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from stepfloor.formats.codec import PackedWeight
from stepfloor.kernels.gdn_decode import DeltaConstants, decodes_on_cuda
from stepfloor.kernels.hc_down import StreamedDown
from stepfloor.kernels.hc_mix import StreamedMix
from stepfloor.kernels.linear import StreamedPair, StreamedWeight, runs_triton
from stepfloor.kernels.moe_down import TiledExperts, TiledShared, why_not_grouped
from stepfloor.kernels.moe_route import routes_on_cuda
from stepfloor.kernels.ngram_gather import GatherTable
from stepfloor.model.model import Layer, LinearAttention, Model, NgramBlock

REFERENCE = "torch reference"
# these have one kernel for a GPU, whatever the weights are
ONE_KERNEL = (
    "accept_drafts", "begin_rows", "commit_rows", "count_tokens", "draw_tokens", "embed", "gdn_prefill",
    "match_drafts", "mtp_fuse", "mtp_norm", "ngram_rows", "ple_mix", "process_logits", "qsa_attend", "qsa_prepare",
    "qsa_select", "take_rows",
)  # fmt: skip

Single = PackedWeight | StreamedWeight | StreamedDown | StreamedMix | TiledExperts | TiledShared
Held = Single | StreamedPair


@dataclass(frozen=True, slots=True)
class Machine:
    """What operators look at besides the weights: is it a GPU, has it Triton, are activations bf16."""

    gpu: bool
    triton: bool
    bf16: bool


def backends(model: Model, window: int) -> dict[str, str]:
    """What runs each operator in a decode step of `window` rows a sequence, e.g. "CUDA, streamed nvfp4"."""
    device, dtype = model.embedding.device, model.embedding.dtype
    machine = Machine(device.type == "cuda", runs_triton(model.embedding), dtype == torch.bfloat16)
    drafter = model.drafter
    layers = [*model.layers, *(() if drafter is None else (drafter.layer,))]
    mixers = [model.mixer, *(() if drafter is None else (drafter.mixer,))]
    mixers += [hc for layer in layers for hc in (layer.attention_hc, layer.mlp_hc)]
    tables = [layer.ngram for layer in layers if layer.ngram is not None]
    routed, constants = model.config.num_experts_per_tok, _constants(layers)
    one = "Triton" if machine.triton else REFERENCE
    names = dict.fromkeys(ONE_KERNEL, one)
    names["linear"] = _joined(weights_backend(held, machine) for held in _projections(model, layers, tables))
    names["hc_down"] = _joined(weights_backend(hc.down, machine) for hc in mixers)
    names["hc_mix"] = _joined(weights_backend(hc.up, machine) for hc in mixers)
    names["moe_gate_up"] = _joined(experts_backend(layer.experts.gate_up, machine) for layer in layers)
    names["moe_down"] = _joined(experts_backend(layer.experts.down, machine) for layer in layers)
    names["moe_route"] = "CUDA" if machine.gpu and routes_on_cuda(device, dtype, routed) else one
    names["gdn_decode"] = "CUDA" if machine.gpu and all(decodes_on_cuda(c, window, device) for c in constants) else one
    if tables:
        names["ngram_gather"] = _joined(table_backend(block.shards, machine) for block in tables)
    return dict(sorted(names.items()))


def weights_backend(held: Sequence[Held], machine: Machine) -> str:
    """What multiplies rows with matrices that share them, in linear, hc_down or hc_mix."""
    apart: list[Single] = []
    for weight in held:
        apart += (weight.first, weight.second) if isinstance(weight, StreamedPair) else (weight,)
    return _joined(_matrix_backend(weight, machine) for weight in apart)


def experts_backend(held: PackedWeight | TiledExperts, machine: Machine) -> str:
    """What runs the routed experts."""
    if isinstance(held, TiledExperts) and machine.gpu and machine.bf16:
        return f"CUDA, streamed {held.format}"
    grouped = isinstance(held, TiledExperts) or why_not_grouped(held) is None
    if not machine.gpu or not machine.triton or not grouped:
        return REFERENCE
    return f"Triton, {_format(held)}"


def table_backend(shards: Sequence[PackedWeight] | GatherTable, machine: Machine) -> str:
    """What reads rows of the n-gram table."""
    return f"Triton, {shards.format}" if machine.triton and isinstance(shards, GatherTable) else REFERENCE


def _matrix_backend(weight: Single, machine: Machine) -> str:
    if isinstance(weight, PackedWeight):
        return f"Triton, {weight.format}" if machine.triton else REFERENCE
    if machine.gpu and machine.bf16:
        return f"CUDA, streamed {_format(weight)}"
    # linear takes a streamed matrix apart in torch; the two others go on with their portable kernels
    portable = machine.triton and not isinstance(weight, StreamedWeight)
    return f"Triton, {_format(weight)}" if portable else REFERENCE


def _format(weight: Single) -> str:
    return weight.format if isinstance(weight, PackedWeight | TiledExperts | TiledShared) else weight.plan.format


def _projections(model: Model, layers: Sequence[Layer], tables: Sequence[NgramBlock]) -> list[Sequence[Held]]:
    """All that `linear` reads."""
    held: list[Sequence[Held]] = [model.head, *(block.key_value for block in tables)]
    for layer in layers:
        held += [layer.attention.project, layer.attention.out, layer.experts.router]
    if model.drafter is not None:
        held += [model.drafter.fc_hidden, model.drafter.fc_embedding, model.drafter.head]
    return held


def _constants(layers: Sequence[Layer]) -> list[DeltaConstants]:
    return [layer.attention.constants for layer in layers if isinstance(layer.attention, LinearAttention)]


def _joined(names: Iterable[str]) -> str:
    """Each name once, as "CUDA, streamed bf16 and CUDA, streamed fp8_block"."""
    once = sorted({part for name in names for part in name.split(" and ")})
    return " and ".join(once)
