"""Where a step's time beyond its byte floor went: time by kind of kernel, less the bytes of its weights and state.

A product's kernel does not say which matrix it multiplied, so losses are by kind: all matrix products together, the
experts with the shared expert's second half, the hyper-connections. Kernels' times are credits (tools.bench.profile).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stepfloor.config import ModelConfig
from stepfloor.roofline.groups import HasBytes
from stepfloor.roofline.passes import ByteModel
from stepfloor.tools.bench.profile import Profile

PRODUCTS, EXPERTS, HYPER = "matrix products", "experts", "hyper-connections"
DELTA, ATTENTION, EMBEDDING = "delta rule", "sparse attention", "embedding and n-grams"
ROUTING, DRAFTER, REST = "routing", "drafter's norms", "sampling and step"

# beginnings of kernels' names. Where two operators of other sizes share one, it is the full model's.
KERNELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        PRODUCTS,
        ("linear", "_product_kernel", "_add_slices", "dense_kernel"),
    ),
    (EXPERTS, ("moe_gate_up", "moe_down", "_gate_up", "_products", "_sum_kernel", "decode_experts")),
    (HYPER, ("hc_", "_norms", "_activations", "_gates")),
    (DELTA, ("gdn_", "_recur", "_close", "_solve", "_scan", "_read")),
    (ATTENTION, ("qsa_", "_piece", "_join", "_prepare", "_choose", "_score", "_dense", "_gather")),
    (ROUTING, ("moe_route", "_route")),
    (EMBEDDING, ("_embed", "_ngram", "_gate_kernel", "_convolve", "_keep")),
    (DRAFTER, ("_mtp", "_take")),
)

# components of roofline.passes
_COMPONENTS = {
    **dict.fromkeys(("gdn", "qsa", "indexer", "router", "shared_experts", "ple", "mtp", "head"), PRODUCTS),
    "experts": EXPERTS,
    "hc": HYPER,
    "recurrent state": DELTA,
    **dict.fromkeys(("keys and values", "block keys"), ATTENTION),
    "embedding and table rows": EMBEDDING,
    "vectors": REST,
}
_WITH_EXPERTS = "shared_expert.down_proj"


@dataclass(frozen=True, slots=True)
class Loss:
    """One kind of kernel in a step: microseconds, bytes, and what the bytes take at the bandwidth read."""

    kind: str
    us: float
    num_bytes: float
    floor_us: float

    @property
    def loss_us(self) -> float:
        """Time beyond the floor."""
        return self.us - self.floor_us

    def line(self) -> str:
        """One row of the table."""
        return f"  {self.kind:<22} {self.us:9.1f} {self.num_bytes / 1e9:8.3f} {self.floor_us:9.1f} {self.loss_us:9.1f}"


HEADER = f"  {'':<22} {'us':>9} {'GB':>8} {'floor us':>9} {'loss us':>9}"


def losses_of(
    profile: Profile,
    config: ModelConfig,
    weights: Mapping[str, HasBytes],
    sequences: int,
    spec_tokens: int,
    context: int,
    bandwidth_gbps: float,
) -> tuple[Loss, ...]:
    """Largest loss first; idle time is a kind of its own. Bytes add up to those of the step, experts under uniform
    routing, times to the step's.
    """
    us: dict[str, float] = {}
    for operator in profile.operators:
        kind = kind_of(operator.name)
        us[kind] = us.get(kind, 0.0) + operator.us
    us["idle"] = profile.gap_us + profile.idle_us
    moved: dict[str, float] = {}
    for part in (part for one in ByteModel(config, weights).step(sequences, spec_tokens, context) for part in one):
        kind = _COMPONENTS[part.component]
        moved[kind] = moved.get(kind, 0.0) + part.num_bytes
    second = sum(
        weight.num_bytes * (spec_tokens if name.startswith("mtp.") else 1)
        for name, weight in weights.items()
        if name.removesuffix(".weight").endswith(_WITH_EXPERTS)
    )
    moved[PRODUCTS] -= second
    moved[EXPERTS] += second
    found = [
        Loss(kind, us.get(kind, 0.0), moved.get(kind, 0.0), moved.get(kind, 0.0) / bandwidth_gbps / 1e3)
        for kind in us.keys() | moved.keys()
    ]
    return tuple(sorted(found, key=lambda loss: (-loss.loss_us, loss.kind)))


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, starts in KERNELS if kernel.startswith(starts)), REST)
