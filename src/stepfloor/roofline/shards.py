"""How weights, states and experts are divided among several devices that run one step together.

The rules are those of vLLM's tensor parallelism for this model: projections, both vocabulary matrices, experts and the
n-gram table are divided; hyper-connections, router, indexer, n-gram projections and vectors are kept whole on every
device. With expert parallelism a device holds whole experts in place of slices of all; the bytes are the same, but a
pass touches them unevenly.
Source: vLLM 0.33, `qwen4_exp` model files; a review of a two-device deployment (bytes per step and device).
"""

import math
from dataclasses import dataclass

from stepfloor.config import ModelConfig
from stepfloor.roofline.groups import weight_component

Shape = tuple[int, int]

_DIVIDED = ("gdn", "qsa", "shared_experts", "experts", "head", "embedding", "table")
# expected largest of d standard normal values
_LARGEST_OF = {1: 0.0, 2: 0.564, 3: 0.846, 4: 1.029, 5: 1.163, 6: 1.267, 7: 1.352, 8: 1.424}


@dataclass(frozen=True, slots=True)
class Shards:
    """The devices of one step.

    devices          that share every layer; expert_parallel  whole experts a device, not slices
    num_kv_heads     of the model; where there are more devices than heads, each keeps one whole
    """

    devices: int = 1
    expert_parallel: bool = False
    num_kv_heads: int = 2

    def heads(self, count: int) -> int:
        """A device's share of heads or channels, rounded up."""
        return -(-count // self.devices)

    def kv_heads(self, count: int) -> int:
        """Key/value heads a device keeps: its share, at least one."""
        return max(1, -(-count // self.devices))

    def divisor(self, name: str) -> int:
        """Into how many parts the weight of this canonical name is cut."""
        leaf = name.rpartition(".")[2]
        if name.startswith("mtp.fc_") or weight_component(name) not in _DIVIDED:
            return 1
        if leaf in ("k_proj", "v_proj"):
            return min(self.devices, self.num_kv_heads)
        return self.devices

    def busiest(self, experts: float) -> float:
        """Expected share of `experts` distinct ones on the device that has most, over the even share.

        1 where slices of all experts are held. Otherwise each expert lies on one of `devices` by chance; the largest
        of the counts is reckoned as that of normal values with their spread.
        """
        if not self.expert_parallel or self.devices == 1 or experts <= 0:
            return 1.0
        d = self.devices
        mean = experts / d
        spread = math.sqrt(experts / d * (1 - 1 / d))
        largest = _LARGEST_OF.get(d, math.sqrt(2 * math.log(d)))
        return min(float(d), (mean + largest * math.sqrt(d / (d - 1)) * spread) / mean)


ONE_DEVICE = Shards()


def device_bytes(name: str, num_bytes: int, shards: Shards) -> int:
    """Bytes of one weight on one device."""
    return -(-num_bytes // shards.divisor(name))


def matrix_shapes(config: ModelConfig, shards: Shards = ONE_DEVICE) -> dict[str, Shape]:
    """[N, K] of every matrix product of a step on one device, projections that share an input as one.

    The inject rows ride on the hyper-connection's down matrix, whose rows are then padded to a multiple of 16.
    """
    c, heads = config, shards.heads
    kv_width = shards.kv_heads(c.num_key_value_heads) * c.head_dim
    attention = heads(c.attention_width)
    qkv = 2 * attention + 2 * kv_width
    rank = -(-(c.hc_lowrank + c.hc_count) // 16) * 16
    return {
        "head": (heads(c.vocab_size), c.hidden_size),
        "router": (c.num_experts, c.hidden_size),
        "shared gate": (1, c.hidden_size),
        "shared gate and up": (2 * heads(c.shared_expert_intermediate_size), c.hidden_size),
        "shared down": (c.hidden_size, heads(c.shared_expert_intermediate_size)),
        "hc down and inject": (rank, c.stream_width),
        "hc down": (c.hc_lowrank, c.stream_width),
        "hc up": (c.stream_width, c.hc_lowrank),
        "gdn qkv and z": (heads(c.conv_width + c.value_width), c.hidden_size),
        "gdn b and a": (2 * heads(c.linear_num_value_heads), c.hidden_size),
        "qsa qkv and gate": (qkv, c.hidden_size),
        "qsa with indexer": (qkv + c.indexer_width, c.hidden_size),
        "indexer": (c.indexer_width, c.hidden_size),
        "gdn out": (c.hidden_size, heads(c.value_width)),
        "qsa out": (c.hidden_size, attention),
    }
