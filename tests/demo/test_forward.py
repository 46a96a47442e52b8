"""The training forward against transformers, and the drafter against drafting done one row at a time."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.models.qwen4_exp.modeling_qwen4_exp as hf
from torch import Tensor
from transformers import AutoConfig

from demo.delta import gated_delta_rule
from demo.forward import Mode, Network, attention, experts, norm, read, write
from demo.weights import MODEL, Weights, part
from stepfloor.config import ModelConfig
from stepfloor.model.rope import rope_tables

ROWS = 53


@pytest.fixture(scope="module")
def text_config(tiny_json: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_text(json.dumps(tiny_json))
    config = AutoConfig.from_pretrained(directory).get_text_config()
    config._attn_implementation = "sdpa"
    return config


@pytest.fixture(scope="module")
def tokens(tiny: ModelConfig) -> Tensor:
    made = torch.randint(0, tiny.vocab_size, (2, ROWS), generator=torch.Generator().manual_seed(1))
    made[0, [7, 8, 20, 33, 50]] = tiny.eos_token_id
    return made


def load(module: torch.nn.Module, weights: Weights) -> None:
    """Every parameter from weights; buffers stay as the module made them."""
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert not unexpected
    assert not set(missing) & {name for name, _ in module.named_parameters()}


def test_logits_are_those_of_transformers(
    tiny: ModelConfig, tiny_weights: Weights, text_config: Any, tokens: Tensor
) -> None:
    model = hf.Qwen4ExpForCausalLM(text_config).eval()
    load(model.model, part(tiny_weights, MODEL))
    load(model.lm_head, part(tiny_weights, "lm_head."))
    with torch.no_grad():
        want = model(input_ids=tokens).logits
        mixed, _, _ = Network(tiny, tokens.device).target(tiny_weights, tokens, Mode())
        got = F.linear(mixed, tiny_weights["lm_head.weight"])
    # 16 index blocks against a budget of 4: selection is at work, and must agree for the logits to
    assert (got - want).abs().max() < 2e-5 * want.abs().max()


def test_the_first_draft_pass_is_the_release_drafter(
    tiny: ModelConfig, tiny_weights: Weights, text_config: Any, tokens: Tensor
) -> None:
    """transformers has no drafter; this one is put together from its modules."""
    w = part(tiny_weights, "mtp.")
    layer, mixer = hf.Qwen4ExpTextDecoderLayer(text_config, 3), hf.Qwen4ExpTextGatedResidual(text_config, False)
    load(layer, part(w, "layers.0."))
    load(mixer, part(w, "hyper_connection_mixer."))
    norms = hf.Qwen4ExpTextRMSNorm(64), hf.Qwen4ExpTextRMSNorm(256)
    load(norms[0], part(w, "pre_fc_norm_embedding."))
    load(norms[1], part(w, "pre_fc_norm_hidden."))
    residual = torch.randn(2, ROWS, 256, generator=torch.Generator().manual_seed(2))
    rotary = hf.Qwen4ExpTextRotaryEmbedding(text_config)
    causal = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1)
    with torch.no_grad():
        (mixed,), _ = Network(tiny, tokens.device).drafts(tiny_weights, residual, tokens, Mode(), 1)
        embedded = norms[0](tiny_weights[MODEL + "embed_tokens.weight"][tokens])
        e = F.linear(embedded, w["fc_embedding.weight"])
        h = F.linear(norms[1](residual).unflatten(-1, (4, 64)), w["fc_hidden.weight"])
        fused = (h + e.unsqueeze(-2)).flatten(-2)
        turn = rotary(fused, torch.arange(ROWS).view(1, 1, -1).expand(3, 2, -1))
        want = mixer(layer(fused, turn, attention_mask=causal))
    want = want[0] if isinstance(want, tuple) else want
    assert (mixed - want).abs().max() < 2e-5 * want.abs().max()


def test_later_passes_are_what_drafting_computes(tiny: ModelConfig, tiny_weights: Weights, tokens: Tensor) -> None:
    """A round that stands at row p: the first pass over rows 0 to p, then one appended row a pass.

    Within the index budget, where keeping is not choosing; there every row of every pass must agree.
    """
    rows = tiny.indexer_budget
    net = Network(tiny, tokens.device)
    residual = torch.randn(1, rows, 256, generator=torch.Generator().manual_seed(2))
    following = tokens[:1, :rows]
    with torch.no_grad():
        whole, _ = net.drafts(tiny_weights, residual, following, Mode(), 3)
        for p in range(rows - 2):
            got = [whole[j][0, p + j] for j in range(3)]
            want = draft_round(net, tiny_weights, residual[:, : p + 1], following[:, : p + 3])
            for a, b in zip(got, want, strict=True):
                assert (a - b).abs().max() < 2e-5 * b.abs().max()


def draft_round(net: Network, weights: Weights, residual: Tensor, following: Tensor) -> list[Tensor]:
    """One round by its definition. The rows' inputs are fixed, first-pass rows and one more a pass, so the layer can
    be run over all of them again and only its newest row read."""
    c, w = net.config, part(weights, "mtp.")
    layer = part(w, "layers.0.")
    embedded = norm(weights[MODEL + "embed_tokens.weight"][following], w["pre_fc_norm_embedding.weight"], 1e-6)
    inputs, outputs = residual, []
    for _ in range(3):
        rows = inputs.shape[1]
        cos, sin = rope_tables(c.rope, rows, inputs.dtype, "cpu")
        e = F.linear(embedded[:, :rows], w["fc_embedding.weight"]).unsqueeze(-2)
        h = norm(inputs, w["pre_fc_norm_hidden.weight"], 1e-6).unflatten(-1, (c.hc_count, -1))
        state = (F.linear(h, w["fc_hidden.weight"]) + e).flatten(-2)
        x, inject = read(c, part(layer, "attn_hyper_connection."), state)
        y, *_ = attention(c, part(layer, "self_attn."), x, cos, sin, [], None, torch.tensor(True))
        state = write(state, y, inject, 0.0)
        x, inject = read(c, part(layer, "mlp_hyper_connection."), state)
        state = write(state, experts(c, part(layer, "mlp."), x)[0], inject, 0.0)
        outputs.append(read(c, part(w, "hyper_connection_mixer."), state)[0][0, -1])
        inputs = torch.cat((inputs, state[:, -1:]), 1)
    return outputs


@pytest.mark.parametrize("rows", [1, 15, 16, 37])
def test_the_chunk_form_is_the_recurrence(rows: int) -> None:
    make = torch.Generator().manual_seed(rows)
    q, k = (F.normalize(torch.randn(2, rows, 3, 8, generator=make, dtype=torch.double), dim=-1) for _ in "qk")
    v = torch.randn(2, rows, 3, 5, generator=make, dtype=torch.double)
    decay = -torch.rand(2, rows, 3, generator=make, dtype=torch.double)
    beta = torch.rand(2, rows, 3, generator=make, dtype=torch.double)
    state, want = torch.zeros(2, 3, 8, 5, dtype=torch.double), []
    for t in range(rows):
        state = state * decay[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        want.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    got = gated_delta_rule(q, k, v, decay, beta, chunk_rows=16)
    assert torch.allclose(got, torch.stack(want, 1), atol=1e-12)


def test_the_chunk_form_has_the_right_gradients() -> None:
    make = torch.Generator().manual_seed(0)
    shape = (1, 11, 2, 3)
    inputs = [torch.randn(shape, generator=make, dtype=torch.double, requires_grad=True) for _ in "qkv"]
    inputs += [(-torch.rand(shape[:3], generator=make, dtype=torch.double)).requires_grad_()]
    inputs += [torch.rand(shape[:3], generator=make, dtype=torch.double).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *t: gated_delta_rule(*t, chunk_rows=4), inputs)


def test_identical_keys_do_not_upset_the_inverse() -> None:
    """Powers of the triangular matrix would reach 1e17 here; joining blocks stays exact."""
    k = torch.ones(1, 64, 1, 4) / 2
    v = torch.randn(1, 64, 1, 4, generator=torch.Generator().manual_seed(0))
    got = gated_delta_rule(k, k, v, torch.zeros(1, 64, 1), torch.ones(1, 64, 1))
    assert torch.allclose(got, v, atol=1e-4)


def test_repeated_tokens_keep_batch_rows_apart(tiny: ModelConfig, tiny_weights: Weights, tokens: Tensor) -> None:
    net = Network(tiny, tokens.device)
    with torch.no_grad():
        both, _, _ = net.target(tiny_weights, tokens, Mode())
        alone, _, _ = net.target(tiny_weights, tokens[1:], Mode())
    assert torch.allclose(both[1:], alone, atol=1e-5)


def test_index_loss_reaches_the_indexer_alone(tiny: ModelConfig, tiny_weights: Weights, tokens: Tensor) -> None:
    weights = {name: w.clone().requires_grad_() for name, w in tiny_weights.items()}
    _, _, extra = Network(tiny, tokens.device).target(weights, tokens, Mode(dense=True))
    extra[2].backward()
    touched = {name for name, w in weights.items() if w.grad is not None and w.grad.abs().sum() > 0}
    assert touched == {name for name in weights if ".indexer." in name and not name.startswith("mtp.")}
