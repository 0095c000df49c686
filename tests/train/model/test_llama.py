from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from penstock.stage.module import StageModule
from penstock.stage.split import split_layers
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import Attention, layers, next_token_loss, rotary_table, rotate

CONFIG = ModelConfig(vocabulary=11, width=24, layers=3, heads=6, kv_heads=2, hidden=20)
EXPERTS = {"experts": 4, "expert_hidden": 8, "shared_hidden": 8}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + CONFIG.norm_epsilon) * weight


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """One head's vector at a position, as complex numbers turned by their angles."""
    half = len(x) // 2
    angle = torch.tensor([position * CONFIG.rotary_base ** (-2 * i / len(x)) for i in range(half)])
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angle)
    return torch.cat((turned.real, turned.imag))


def reference(model: StageModule, tokens: list[int]) -> torch.Tensor:
    """The decoder written out for one sequence, position by position and head by head."""
    weights = dict(model.whole_model_parameters())
    size = CONFIG.width // CONFIG.heads
    stream = weights["embedding.weight"][tokens]
    for n in range(CONFIG.layers):
        w = {k.removeprefix(f"blocks.{n}."): v for k, v in weights.items() if k.startswith(f"blocks.{n}.")}
        x = rms_norm(stream, w["attention_norm.weight"])
        query, key, value = (x @ w[f"attention.{part}.weight"].T for part in ("query", "key", "value"))
        rows = []
        for t in range(len(tokens)):
            heads = []
            for h in range(CONFIG.heads):
                shared = h // (CONFIG.heads // CONFIG.kv_heads)
                mine, theirs = slice(h * size, h * size + size), slice(shared * size, shared * size + size)
                q = rotated(query[t, mine], t)
                scores = torch.stack([q @ rotated(key[s, theirs], s) for s in range(t + 1)]) / math.sqrt(size)
                heads.append(torch.softmax(scores, 0) @ value[: t + 1, theirs])
            rows.append(torch.cat(heads) @ w["attention.output.weight"].T)
        stream = stream + torch.stack(rows)
        x = rms_norm(stream, w["feed_forward_norm.weight"])
        gate = x @ w["feed_forward.gate.weight"].T
        up = x @ w["feed_forward.up.weight"].T
        stream = stream + (gate * torch.sigmoid(gate) * up) @ w["feed_forward.down.weight"].T
    return rms_norm(stream, weights["head.norm.weight"]) @ weights["head.output.weight"].T


def test_the_decoder_equals_the_formulas_written_out():
    model = StageModule(layers(CONFIG, seed=3))
    with torch.no_grad():
        for name, parameter in model.whole_model_parameters():
            if "norm" in name:  # ones would hide a forgotten weight
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    batch = torch.tensor([[1, 5, 2, 2, 9, 0, 7], [3, 3, 10, 4, 8, 6, 1]])
    expected = torch.stack([reference(model, row.tolist()) for row in batch])
    torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)


def test_a_token_is_blind_to_what_follows():
    model = StageModule(layers(CONFIG))
    tokens = torch.randint(11, (1, 9))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    same = torch.isclose(model(tokens), model(changed), rtol=1e-6, atol=1e-6).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 4


def test_grouped_queries_equal_attention_with_each_key_head_repeated():
    grouped = Attention(CONFIG)
    full = Attention(ModelConfig(vocabulary=11, width=24, layers=3, heads=6, kv_heads=6, hidden=20))
    state = grouped.state_dict()
    for part in ("key", "value"):
        by_head = state[f"{part}.weight"].view(CONFIG.kv_heads, 4, CONFIG.width)
        state[f"{part}.weight"] = by_head.repeat_interleave(3, 0).reshape(-1, CONFIG.width)
    full.load_state_dict(state)
    x = torch.randn(2, 7, CONFIG.width)
    torch.testing.assert_close(grouped(x), full(x))


def test_rotation_makes_scores_depend_on_distance_only():
    query, key = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    cosine, sine = (part.double() for part in rotary_table(40, 4, 10_000.0, torch.device("cpu")))

    def score(at: int, other: int) -> float:
        q = rotate(query.expand(1, 40, 1, 4), cosine, sine)[0, at, 0]
        return float(q @ rotate(key.expand(1, 40, 1, 4), cosine, sine)[0, other, 0])

    assert score(5, 2) == pytest.approx(score(38, 35), abs=1e-6)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_a_table_made_while_generating_serves_training():
    with torch.inference_mode():
        cosine, _ = rotary_table(3, 6, 123.0, torch.device("cpu"))
    assert not cosine.is_inference()
    assert cosine.shape == (3, 1, 3)


def test_names_and_roles():
    blocks = [(f"blocks.{n}", "block") for n in range(3)]
    named = [(layer.name, layer.role) for layer in layers(CONFIG)]
    assert named == [("embedding", "embedding"), *blocks, ("head", "head")]


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_initial_weights_do_not_depend_on_the_split_or_the_order_of_building(experts: dict[str, int]):
    config = replace(CONFIG, **experts)
    whole = dict(StageModule(layers(config, seed=5)).whole_model_parameters())
    parts = [StageModule(run) for run in reversed(split_layers(layers(config, seed=5), 3))]
    split = {name: p for part in parts for name, p in part.whole_model_parameters()}
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], p) for name, p in whole.items())
    other = dict(StageModule(layers(config, seed=6)).whole_model_parameters())
    assert not torch.equal(other["embedding.weight"], whole["embedding.weight"])


def test_what_is_added_to_the_stream_starts_smaller_with_depth():
    wide = ModelConfig(width=128, layers=8, heads=4, kv_heads=4, hidden=128)
    block = layers(wide)[1].build()
    assert block.attention.query.weight.std().item() == pytest.approx(1 / math.sqrt(128), rel=0.05)
    assert block.attention.output.weight.std().item() == pytest.approx(1 / math.sqrt(128 * 16), rel=0.05)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(1 / math.sqrt(128 * 16), rel=0.05)
    assert torch.equal(block.attention_norm.weight, torch.ones(128))
    mixture = layers(replace(wide, experts=4, expert_hidden=64, shared_hidden=256))[1].build().feed_forward
    for weight, columns, added in (
        (mixture.router.weight, 128, 1),
        (mixture.experts.gate_up_proj, 128, 1),
        (mixture.experts.down_proj, 64, 24),
        (mixture.shared.gate.weight, 128, 1),
        (mixture.shared.down.weight, 256, 24),
    ):
        assert weight.std().item() == pytest.approx(1 / math.sqrt(columns * added), rel=0.1)


def test_the_loss_is_the_mean_over_all_tokens():
    logits, target = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = -torch.log_softmax(logits, -1).gather(-1, target[..., None]).mean()
    torch.testing.assert_close(next_token_loss(logits, target), expected)


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_weights_in_bfloat16_make_the_whole_decoder_compute_in_it_and_each_gets_a_gradient(
    experts: dict[str, int],
):
    model = StageModule(layers(replace(CONFIG, **experts))).bfloat16()
    logits = model(torch.randint(11, (2, 9)))
    next_token_loss(logits.float(), torch.randint(11, (2, 9))).backward()
    assert logits.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())
