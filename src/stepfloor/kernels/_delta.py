"""What the two operators of a gated delta net share: a layer's constants.

Source: transformers 5.24, Qwen4ExpTextGatedDeltaNet.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaConstants:
    """What a layer's weights and config fix; HV value heads of size V, C = 2 * key_heads * key_dim + HV * V channels.

    conv_weight    [C, taps] float32
    a_log, dt_bias [HV] float32
    norm_weight    [V] in the model's dtype, centred on one
    key_heads      query heads and key heads, each serving HV / key_heads value heads
    key_dim        K, size of a query or key head
    eps            of the closing norm
    activation     of the closing norm's gate: sigmoid or silu
    """

    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    key_heads: int
    key_dim: int
    eps: float
    activation: str

    @property
    def channels(self) -> int:
        """C."""
        return self.conv_weight.shape[0]

    @property
    def history(self) -> int:
        """Rows before a row that its convolution reads."""
        return self.conv_weight.shape[1] - 1

    @property
    def heads(self) -> int:
        """HV."""
        return self.a_log.shape[0]

    @property
    def value_dim(self) -> int:
        """V."""
        return self.norm_weight.shape[0]

    @property
    def parts(self) -> tuple[int, int, int]:
        """Columns of a projected row: q, k, v before convolution; z; b and a."""
        return self.channels, self.heads * self.value_dim, 2 * self.heads

    @property
    def columns(self) -> int:
        """All columns of a projected row."""
        return sum(self.parts)
