"""What training minimises: the next token, the drafter against the target, and three small regularisers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.forward import Mode, Network
from demo.weights import Weights

DRAFT_PASSES = 3
_DRAFT, _BALANCE, _ROUTER_Z, _INDEX = 0.3, 0.01, 1e-4, 0.1  # weights of the terms beside the next token's loss


@dataclass(frozen=True, slots=True)
class Losses:
    """total to minimise; next_token in nats; drafts in nats, one per pass; extra [3] as in Network."""

    total: Tensor
    next_token: Tensor
    drafts: Tensor
    extra: Tensor


def losses(net: Network, weights: Weights, rows: Tensor, mode: Mode) -> Losses:
    """Loss of rows [B, T + 1].

    The drafter learns the target's own distribution one token ahead, not the text: a draft is accepted when it is
    what the target would have said. Pass j at row p is judged by the target at p + 1.
    """
    tokens, following = rows[:, :-1], rows[:, 1:]
    head = weights["lm_head.weight"]
    mixed, residual, extra = net.target(weights, tokens, mode)
    logits = F.linear(mixed, head)
    next_token = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
    wanted = logits[:, 1:].detach().float().softmax(-1)
    vectors, more = net.drafts(weights, residual, following, mode, DRAFT_PASSES)
    drafts = []
    for j, vector in enumerate(vectors):
        draft = F.linear(vector[:, j:-1], head).float()
        agreement = (wanted[:, j:] * draft).sum(-1)
        drafts.append((draft.logsumexp(-1) - agreement).mean())
    extra = (extra + more) / (len(net.config.layer_types) + DRAFT_PASSES)
    total = next_token + _DRAFT * sum(drafts) + _BALANCE * extra[0] + _ROUTER_Z * extra[1] + _INDEX * extra[2]
    return Losses(total, next_token.detach(), torch.stack(drafts).detach(), extra.detach())
