"""What several devices exchange in a step and how long that takes: many small messages, so latency rules.

Source: layer structure of the `qwen4_exp` model under vLLM's tensor parallelism; a review of a two-device deployment
that counted 106 a step at k = 3. A later trace of the same software is reported to show 116 of about 40 us each: ten
more than its layers ask for, so take the count from a trace where there is one.
"""

from dataclasses import dataclass
from typing import Literal

from stepfloor.config import ModelConfig
from stepfloor.roofline.bytes import BF16_BYTES, FP32_BYTES
from stepfloor.roofline.shards import Shards


@dataclass(frozen=True, slots=True)
class Collective:
    """`count` exchanges of one kind in a step. num_bytes: of one, the whole result."""

    what: str
    kind: Literal["all-reduce", "all-gather"]
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """What devices exchange over.

    latency_us  of one small exchange, from and to; gbps  one way, in GB/s; source  of the figures
    """

    name: str
    latency_us: tuple[float, float]
    gbps: float
    source: str


LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("roce", (20.0, 40.0), 25.0, "200 GbE; 20 to 30 us estimated, about 40 us in a later trace"),
        Link("pcie", (10.0, 25.0), 50.0, "PCIe 5 x16; latency assumed, not measured: pass --collective-us"),
        Link("nvlink", (5.0, 15.0), 450.0, "NVLink 4; latency assumed, not measured: pass --collective-us"),
    )
}


def step_collectives(
    config: ModelConfig, sequences: int, spec_tokens: int, shards: Shards, draft_vocab: int | None = None
) -> tuple[Collective, ...]:
    """The exchanges of one step; none on one device. Expert parallelism adds none: results ride on the all-reduce."""
    if shards.devices == 1:
        return ()
    rows = sequences * (spec_tokens + 1)
    vector = config.hidden_size * BF16_BYTES
    found = [
        Collective("gated delta net out", "all-reduce", len(config.linear_layers), rows * vector),
        Collective("attention out", "all-reduce", len(config.sparse_layers), rows * vector),
        Collective("experts out", "all-reduce", config.num_hidden_layers, rows * vector),
        Collective("logits", "all-gather", 1, rows * config.vocab_size * FP32_BYTES),
    ]
    if spec_tokens:
        logits = (draft_vocab or config.vocab_size) * FP32_BYTES
        # the first draft pass carries all verified rows, the later ones one row a sequence
        found += [
            Collective("drafter layer, first pass", "all-reduce", 2, rows * vector),
            Collective("drafter layer", "all-reduce", 2 * (spec_tokens - 1), sequences * vector),
            Collective("drafter logits", "all-gather", spec_tokens, sequences * logits),
        ]
    return tuple(c for c in found if c.count)


def prefill_collectives(config: ModelConfig, tokens: int, shards: Shards) -> tuple[Collective, ...]:
    """The exchanges of one prompt chunk: one after every sub-layer."""
    if shards.devices == 1:
        return ()
    size = tokens * config.hidden_size * BF16_BYTES
    return (Collective("sub-layers out", "all-reduce", 2 * config.num_hidden_layers, size),)


def exchange_us(collectives: tuple[Collective, ...], link: Link, devices: int) -> tuple[float, float]:
    """Time of all exchanges, from and to: latency of each, and its bytes once around a ring."""
    wire = sum(c.count * c.num_bytes * _passes(c, devices) for c in collectives) / link.gbps / 1e3
    count = sum(c.count for c in collectives)
    return count * link.latency_us[0] + wire, count * link.latency_us[1] + wire


def _passes(collective: Collective, devices: int) -> float:
    """How often a ring moves the whole result over one device's link."""
    share = (devices - 1) / devices
    return 2 * share if collective.kind == "all-reduce" else share
