"""The network over whole batches, differentiable: the target, and the drafter as drafting will run it.

Source: transformers 5.24, qwen4_exp/modeling_qwen4_exp.py for the target (tests hold the two together); section
3 of the architecture notes for the drafter, which transformers leaves out. Weights are plain dicts by release
name; x [B, T, D] is a sub-layer's input, R [B, T, S * D] the residual streams.

Beside its output each layer returns what training adds to the loss, `extra` [3] float32: the router's balance, the
router's z, and for sparse attention the distance in nats between the indexer's scores and where attention went.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.delta import gated_delta_rule
from demo.weights import MODEL, TABLE, Weights, part
from stepfloor.config import LINEAR, ModelConfig
from stepfloor.kernels.ngram_rows import ngram_rows
from stepfloor.model.rope import rope_tables


@dataclass(frozen=True, slots=True)
class Mode:
    """How a forward runs.

    dropout  share of embeddings, n-gram values and sub-layer outputs zeroed; 0 outside training
    dense    sparse attention keeps every block, so that the indexer learns from all of them
    """

    dropout: float = 0.0
    dense: bool = False


class Network:
    """Puts the blocks below together. `wrap` may compile them; all layers share the compiled functions."""

    def __init__(self, config: ModelConfig, device: torch.device, wrap: Callable[..., Any] = lambda f: f) -> None:
        self.config = config
        self._device = device
        self._read, self._write, self._delta_net, self._attention, self._experts, self._ple = map(
            wrap, (read, write, delta_net, attention, experts, ple)
        )
        constants = config.ngram_hash
        numbers = (constants.multipliers, constants.sizes, constants.offsets)
        self._hash = [torch.tensor(n, device=device) for n in numbers]
        # Made once: a copy from the host in the middle of a step would wait for the device.
        self._dense = {flag: torch.tensor(flag, device=device) for flag in (False, True)}
        self._rotations: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def target(self, weights: Weights, tokens: Tensor, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, T] -> the vector the head reads [B, T, D], R before the final mixer, extra [3]."""
        c = self.config
        residual = F.embedding(tokens, weights[MODEL + "embed_tokens.weight"])
        residual = F.dropout(residual, mode.dropout, mode.dropout > 0).repeat(1, 1, c.hc_count)
        cos, sin = self._rotation(tokens.shape[1], residual.dtype)
        extra = residual.new_zeros(3, dtype=torch.float32)
        for i, kind in enumerate(c.layer_types):
            w = part(weights, f"{MODEL}layers.{i}.")
            if i == c.ple_layer:
                residual = self._ple(c, part(w, "ple."), residual, self._rows(tokens), mode.dropout)
            x, inject = self._read(c, part(w, "attn_hyper_connection."), residual)
            index = extra.new_zeros(())
            if kind == LINEAR:
                y = self._delta_net(c, part(w, "linear_attn."), x)
            else:
                y, _, _, index = self._attention(
                    c, part(w, "self_attn."), x, cos, sin, [], None, self._dense[mode.dense]
                )
            residual = self._write(residual, y, inject, mode.dropout)
            residual, more = self._experts_layer(w, residual, index, mode)
            extra = extra + more
        mixed, _ = self._read(c, part(weights, MODEL + "hyper_connection_mixer."), residual)
        return mixed, residual, extra

    def drafts(
        self, weights: Weights, residual: Tensor, following: Tensor, mode: Mode, passes: int
    ) -> tuple[list[Tensor], Tensor]:
        """What the head reads in each draft pass, for every row at once.

        residual   [B, T, S * D] of the target; following [B, T], the token after each row
        Returns `passes` tensors [B, T, D] and extra [3]. Entry j, row p is pass j + 1 at position p, in a round
        whose first pass stood at p - j; it predicts the token at p + 2. Rows p < j have no such round.

        In pass 1 a row sees first-pass rows up to itself. In pass j it sees first-pass rows up to p - j + 1, then
        the one row each that passes 2 to j appended. Which blocks a row keeps is decided in pass 1 and reused by
        the later ones; drafting decides again, from an index query that differs by a pass.
        """
        c, w = self.config, part(weights, "mtp.")
        layer = part(w, "layers.0.")
        embedded = F.embedding(following, weights[MODEL + "embed_tokens.weight"])
        embedded = norm(embedded, w["pre_fc_norm_embedding.weight"], c.rms_norm_eps)
        embedded = F.linear(embedded, w["fc_embedding.weight"]).unsqueeze(-2)  # [B, T, 1, D]
        cos, sin = self._rotation(following.shape[1], residual.dtype)
        extra, keep = residual.new_zeros(3, dtype=torch.float32), None
        earlier: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for _ in range(passes):
            hidden = norm(residual, w["pre_fc_norm_hidden.weight"], c.rms_norm_eps).unflatten(-1, (c.hc_count, -1))
            residual = (F.linear(hidden, w["fc_hidden.weight"]) + embedded).flatten(-2)
            x, inject = self._read(c, part(layer, "attn_hyper_connection."), residual)
            y, keys, keep, index = self._attention(
                c, part(layer, "self_attn."), x, cos, sin, earlier, keep, self._dense[mode.dense]
            )
            residual = self._write(residual, y, inject, mode.dropout)
            residual, more = self._experts_layer(layer, residual, index, mode)
            outputs.append(self._read(c, part(w, "hyper_connection_mixer."), residual)[0])
            extra = extra + more
            earlier = [*earlier, keys]
            residual = _shift_rows(residual)
        return outputs, extra

    def _experts_layer(self, w: Weights, residual: Tensor, index: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        x, inject = self._read(self.config, part(w, "mlp_hyper_connection."), residual)
        y, balance, router_z = self._experts(self.config, part(w, "mlp."), x)
        return self._write(residual, y, inject, mode.dropout), torch.stack((balance, router_z, index))

    def _rotation(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if (rows, dtype) not in self._rotations:
            self._rotations[rows, dtype] = rope_tables(self.config.rope, rows, dtype, str(self._device))
        return self._rotations[rows, dtype]

    def _rows(self, tokens: Tensor) -> Tensor:
        c = self.config
        history = tokens.new_full((tokens.shape[0], c.ngram_size - 1), c.eos_token_id)
        return ngram_rows(tokens, history, *self._hash, c.eos_token_id)


def norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """RMS norm with 1 + weight, one mean per group of the last axis; float32 inside, one rounding."""
    x32 = x.float().unflatten(-1, (groups, -1))
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32.flatten(-2) * (1 + weight.float())).to(x.dtype)


def read(c: ModelConfig, w: Weights, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """Hyper-connection read: R [B, T, S * D] -> x [B, T, D] and write weights [B, T, S] (None in a mixer)."""
    n = norm(residual, w["hc_norm.weight"], c.rms_norm_eps, c.hc_count)
    low = F.silu(F.linear(n, w["input_mix_weight_down.weight"]) / c.hc_count)
    gate = torch.sigmoid(F.linear(low, w["input_mix_weight_up.weight"]))
    x = (gate * n).unflatten(-1, (c.hc_count, -1)).mean(-2)
    inject = w.get("block_inject_weight.weight")
    return x, None if inject is None else 2 * torch.sigmoid(F.linear(n, inject) / c.hc_count)


def write(residual: Tensor, y: Tensor, inject: Tensor, dropout: float) -> Tensor:
    """Hyper-connection write: R[s] + inject[s] * y, with dropout of y while training."""
    y = F.dropout(y, dropout, dropout > 0)
    return residual + (inject.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)


def delta_net(c: ModelConfig, w: Weights, x: Tensor) -> Tensor:
    """Gated delta net: x [B, T, D] -> [B, T, D]."""
    batch, rows, _ = x.shape
    heads, per_key = c.linear_num_value_heads, c.linear_num_value_heads // c.linear_num_key_heads
    raw = F.linear(x, w["in_proj_qkv.weight"])
    mixed = F.silu(causal_conv(raw, w["conv1d.weight"], 1)).float()
    q, k, v = mixed.split((c.key_width, c.key_width, c.value_width), -1)

    def unit(t: Tensor) -> Tensor:
        t = t.unflatten(-1, (c.linear_num_key_heads, -1))
        return (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(per_key, 2)

    a = F.linear(x, w["in_proj_a.weight"]).float()
    log_decay = -w["A_log"].float().exp() * F.softplus(a + w["dt_bias"].float())
    beta = torch.sigmoid(F.linear(x, w["in_proj_b.weight"]).float())
    scale = c.linear_key_head_dim**-0.5
    out = gated_delta_rule(scale * unit(q), unit(k), v.unflatten(-1, (heads, -1)), log_decay, beta)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + c.rms_norm_eps) * w["norm.weight"].float()
    gate = F.linear(x, w["in_proj_z.weight"]).float().view(batch, rows, heads, -1)
    gate = torch.sigmoid(gate) if c.output_gate_type == "sigmoid" else F.silu(gate)
    return F.linear((out * gate).flatten(2).to(x.dtype), w["out_proj.weight"])


def causal_conv(x: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Depthwise convolution that looks back: x [B, T, C], weight [C, 1, taps]; summed in float32."""
    taps, rows = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, (taps - 1) * dilation, 0))
    total = padded[:, :rows].float() * weight[:, 0, 0].float()
    for i in range(1, taps):
        total = total + padded[:, i * dilation : i * dilation + rows].float() * weight[:, 0, i].float()
    return total.to(x.dtype)


def attention(
    c: ModelConfig,
    w: Weights,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    earlier: list[tuple[Tensor, Tensor]],
    keep: Tensor | None,
    dense: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Sparse attention over the kept positions: x [B, T, D] -> [B, T, D], own (keys, values), keep, index loss.

    earlier, keep  of the draft passes before this one; empty and None otherwise
    dense          bool, keep every block
    """
    batch, rows, _ = x.shape
    heads = c.num_attention_heads
    q, gate = F.linear(x, w["q_proj.weight"]).view(batch, rows, heads, -1).chunk(2, -1)
    k = F.linear(x, w["k_proj.weight"]).view(batch, rows, c.num_key_value_heads, -1)
    v = F.linear(x, w["v_proj.weight"]).view(batch, rows, c.num_key_value_heads, -1)
    turn = cos[:, None], sin[:, None]
    q = rotate(norm(q, w["q_norm.weight"], c.rms_norm_eps), *turn).transpose(1, 2)  # [B, H, T, d]
    k = rotate(norm(k, w["k_norm.weight"], c.rms_norm_eps), *turn).transpose(1, 2)
    k, v = (t.repeat_interleave(heads // c.num_key_value_heads, 1) for t in (k, v.transpose(1, 2)))
    scores = None
    if keep is None:
        scores = index_scores(c, part(w, "indexer."), x.detach(), cos, sin)
        keep = kept_positions(c, scores.detach(), rows, dense)
    probability, out = _attend(q, k, v, keep, earlier)
    index = x.new_zeros((), dtype=torch.float32)
    if scores is not None:
        index = index_loss(c, scores, probability.detach(), keep)
    out = out.transpose(1, 2) * torch.sigmoid(gate)
    return F.linear(out.flatten(2), w["o_proj.weight"]), (k, v), keep, index


def _attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, earlier: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Softmax attention [B, H, T, d]. With passes before this one, the first-pass keys end earlier and each later
    pass, this one last, adds the one row it appended."""
    scale = q.shape[-1] ** -0.5
    passes = len(earlier)
    first_k, first_v = earlier[0] if earlier else (k, v)
    rows = q.shape[2]
    reach = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril(-passes)
    scores = (q @ first_k.mT).float() * scale
    scores = scores.masked_fill(~(keep.unsqueeze(1) & reach), float("-inf"))
    appended = [(_shift_rows(pk, passes - j, 2), _shift_rows(pv, passes - j, 2)) for j, (pk, pv) in enumerate(earlier)]
    appended = [*appended[1:], (k, v)] if earlier else []
    own = [(q.float() * pk.float()).sum(-1, keepdim=True) * scale for pk, _ in appended]
    probability = torch.cat((scores, *own), -1).softmax(-1)
    out = probability[..., :rows].to(v.dtype) @ first_v
    for j, (_, pv) in enumerate(appended):
        out = out + probability[..., rows + j : rows + j + 1].to(v.dtype) * pv
    return probability, out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first cos.shape[-1] values, half-split pairs."""
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, passed), -1)


def index_scores(c: ModelConfig, w: Weights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Score of every complete block for every row: [B, T, T // ratio] float32, later blocks included."""
    ratio, dim = c.indexer_compress_ratio, c.indexer_head_dim
    blocks = x.shape[1] // ratio
    q, k = F.linear(x, w["index_qk_proj.weight"]).split((c.indexer_n_heads * dim, dim), -1)
    q = rotate(norm(q.unflatten(-1, (-1, dim)), w["q_layernorm.weight"], c.rms_norm_eps), cos[:, None], sin[:, None])
    pooled = k[:, : blocks * ratio].unflatten(1, (blocks, ratio)).float().mean(2).to(x.dtype)
    first = slice(0, blocks * ratio, ratio)
    keys = rotate(norm(pooled, w["k_layernorm.weight"], c.rms_norm_eps), cos[first], sin[first])
    dots = torch.einsum("bthd,bnd->bthn", q.float(), keys.float())
    return dots.relu().sum(2) * dim**-0.5


def kept_positions(c: ModelConfig, scores: Tensor, rows: int, dense: Tensor) -> Tensor:
    """Which positions each row attends to: its best complete blocks and its open tail. Returns bool [B, T, T]."""
    ratio, topk = c.indexer_compress_ratio, c.indexer_topk
    position = torch.arange(rows, device=scores.device)
    visible = _visible_blocks(c, rows, scores.shape[2], scores.device)
    chosen = visible.expand_as(scores)
    if scores.shape[2] > topk:
        order = torch.sort(scores.masked_fill(~visible, float("-inf")), dim=-1, descending=True, stable=True).indices
        best = torch.zeros_like(chosen).scatter(-1, order[..., :topk], True)
        chosen = (best | dense) & visible
    blocks = F.pad(chosen.repeat_interleave(ratio, -1), (0, rows - scores.shape[2] * ratio))
    tail = (position >= ((position + 1) // ratio * ratio)[:, None]) & (position <= position[:, None])
    return blocks | tail


def index_loss(c: ModelConfig, scores: Tensor, probability: Tensor, keep: Tensor) -> Tensor:
    """Cross-entropy in nats from attention's share per kept block to the softmax of the block scores."""
    ratio, blocks = c.indexer_compress_ratio, scores.shape[2]
    share = probability[..., : blocks * ratio].mean(1).unflatten(-1, (blocks, ratio)).sum(-1)  # [B, T, N]
    rows = probability.shape[2]
    visible = _visible_blocks(c, rows, blocks, scores.device) & keep[..., : blocks * ratio : ratio]
    share = share.masked_fill(~visible, 0)
    share = share / share.sum(-1, keepdim=True).clamp_min(1e-6)
    log_score = scores.masked_fill(~visible, -1e4).log_softmax(-1)
    return -(share * log_score).sum(-1).mean()


def _visible_blocks(c: ModelConfig, rows: int, blocks: int, device: torch.device) -> Tensor:
    complete = (torch.arange(rows, device=device) + 1) // c.indexer_compress_ratio
    return torch.arange(blocks, device=device) < complete[:, None]  # [T, N]


def experts(c: ModelConfig, w: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mixture of experts, every expert computed and most weighted zero: with few small experts the cheapest way.

    x [B, T, D] -> y [B, T, D]; balance: experts * sum of load times mean probability, 1 when even; router z.
    """
    logits = F.linear(x, w["gate.weight"]).float()
    probability = logits.softmax(-1)
    top, ids = probability.topk(c.num_experts_per_tok, -1)
    if c.norm_topk_prob:
        top = top / top.sum(-1, keepdim=True)
    weights = torch.zeros_like(probability).scatter(-1, ids, top)
    gate, up = F.linear(x, w["experts.gate_up_proj"].flatten(0, 1)).unflatten(-1, (c.num_experts, -1)).chunk(2, -1)
    hidden = F.silu(gate) * up * weights.unsqueeze(-1).to(x.dtype)
    y = F.linear(hidden.flatten(2), w["experts.down_proj"].transpose(0, 1).flatten(1))
    shared = F.silu(F.linear(x, w["shared_expert.gate_proj.weight"])) * F.linear(x, w["shared_expert.up_proj.weight"])
    shared = F.linear(shared, w["shared_expert.down_proj.weight"])
    y = y + torch.sigmoid(F.linear(x, w["shared_expert_gate.weight"])) * shared
    load = (weights > 0).float().mean((0, 1)) / c.num_experts_per_tok
    balance = c.num_experts * (load * probability.mean((0, 1))).sum()
    return y, balance, logits.logsumexp(-1).square().mean()


def ple(c: ModelConfig, w: Weights, residual: Tensor, rows: Tensor, dropout: float) -> Tensor:
    """Add the n-gram rows to R: rows [B, T, heads] of the table, gated by R, then a dilated convolution."""
    streams, eps = c.hc_count, c.rms_norm_eps
    e = F.embedding(rows, w[TABLE.removeprefix("ple.")]).flatten(2)
    e = F.dropout(e, dropout, dropout > 0)
    key = norm(F.linear(e, w["key_proj.weight"]), w["norm_key.weight"], eps, streams).unflatten(-1, (streams, -1))
    query = norm(residual, w["norm_query.weight"], eps, streams).unflatten(-1, (streams, -1))
    dot = (key * query).sum(-1, keepdim=True).float() * c.hidden_size**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt()).to(e.dtype)
    u = (gate * F.linear(e, w["value_proj.weight"]).unsqueeze(2)).flatten(2)
    n = norm(u, w["norm_conv.weight"], eps, streams)
    return residual + u + F.silu(causal_conv(n, w["conv1d.weight"], c.ngram_size))


def _shift_rows(t: Tensor, by: int = 1, axis: int = 1) -> Tensor:
    """Row p becomes row p + by; zeros come in at the front."""
    if by == 0:
        return t
    front = torch.zeros_like(t.narrow(axis, 0, by))
    return torch.cat((front, t.narrow(axis, 0, t.shape[axis] - by)), axis)
