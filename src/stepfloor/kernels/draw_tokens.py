"""One token for each row of processed logits: Gumbel-max, the argmax of logits plus noise.

The noise is a function of (seed, position, stream, token id), so the token does not depend on the row, the batch or
the number of drafts. At temperature 0 there is no noise and the token is the argmax.

Source: Gumbel 1954 (argmax(log p + G) is distributed as p; a constant added to a row changes nothing, so processed
logits need no softmax); kernels/_noise.py for the noise.
"""

import torch
from torch import Tensor

from stepfloor.kernels._noise import DRAFT as DRAFT
from stepfloor.kernels._noise import TARGET as TARGET
from stepfloor.kernels._noise import gumbel_noise


def draw_tokens_reference(
    logits: Tensor, slots: Tensor, positions: Tensor, temperature: Tensor, seeds: Tensor | None, stream: int
) -> Tensor:
    """The source's equation."""
    healthy = torch.isfinite(logits.amax(-1))
    if seeds is not None:
        noise = gumbel_noise(seeds[slots], positions, torch.full_like(positions, stream), logits.shape[1])
        logits = logits + torch.where(temperature[slots][:, None] == 0, 0.0, noise)
    # argmax returns the lowest id among equals
    return torch.where(healthy, logits.argmax(-1), -1)


def draw_tokens(
    logits: Tensor, slots: Tensor, positions: Tensor, temperature: Tensor, seeds: Tensor | None, stream: int
) -> Tensor:
    """Draw one token id from each row.

    logits       fp32 [N, V], from process_logits
    slots        int64 [N], the slot whose settings a row uses
    positions    int64 [N], index of the drawn token in its sequence
    temperature  fp32 [slots]; rows at 0 take their argmax, the lowest id among equals
    seeds        int64 [slots]; None: every row is at temperature 0
    stream       TARGET or DRAFT
    Returns int64 [N], -1 where the row has no finite maximum. Raises ValueError if shapes disagree.
    """
    if logits.ndim != 2 or slots.shape != logits.shape[:1] or positions.shape != slots.shape:
        raise ValueError(
            "draw_tokens wants logits [N, V], slots [N], positions [N]; "
            f"got {tuple(logits.shape)}, {tuple(slots.shape)}, {tuple(positions.shape)}"
        )
    return draw_tokens_reference(logits, slots, positions, temperature, seeds, stream)


def draw_tokens_inputs(n: int, vocab_size: int, device: str) -> dict[str, Tensor | int]:
    """Rows at temperature 1 except the first, which is greedy; one slot each."""
    make = torch.Generator(device).manual_seed(0)
    temperature = torch.ones(n, device=device)
    temperature[0] = 0.0
    return {
        "logits": 4 * torch.randn(n, vocab_size, generator=make, device=device),
        "slots": torch.arange(n, device=device),
        "positions": 1000 + torch.arange(n, device=device),
        "temperature": temperature,
        "seeds": torch.arange(n, device=device) * 0x1234567890AB,
        "stream": TARGET,
    }
