from __future__ import annotations

import math

import pytest
import torch

from penstock.stage.stage import StageModule
from penstock.train.config import ModelConfig, OptimConfig
from penstock.train.models.llama import layers
from penstock.train.optim import build_optimizer, learning_rate, set_learning_rate

CONFIG = OptimConfig(lr=2.0, final_lr=0.1, warmup=0.3, weight_decay=0.3)


def test_matrices_decay_and_norms_and_embeddings_do_not():
    model = StageModule(layers(ModelConfig(width=8, layers=1, heads=2, kv_heads=1, hidden=8)))
    names = {id(p): name for name, p in model.whole_model_parameters()}
    groups = build_optimizer(model.whole_model_parameters(), CONFIG).param_groups
    by_decay = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert by_decay[0.0] == {
        "embedding.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.feed_forward_norm.weight",
        "head.norm.weight",
    }
    assert by_decay[0.3] == set(names.values()) - by_decay[0.0]


def test_a_rank_with_only_one_kind_has_one_group():
    only = [("blocks.0.norm.weight", torch.nn.Parameter(torch.ones(3)))]
    assert len(build_optimizer(only, CONFIG).param_groups) == 1


def test_the_rate_climbs_in_a_line_and_falls_along_a_cosine():
    rates = [learning_rate(step, 13, CONFIG) for step in range(13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2))))
    assert rates[12] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 1.0), (2, 0.5), (5, 1.0)])
def test_short_runs_have_a_rate_at_every_step(steps: int, warmup: float):
    config = OptimConfig(lr=2.0, warmup=warmup)
    assert all(0 < learning_rate(step, steps, config) <= 2.0 for step in range(steps))


def test_the_rate_is_set_in_every_group():
    model = StageModule(layers(ModelConfig(width=8, layers=1, heads=2, kv_heads=1, hidden=8)))
    optimizer = build_optimizer(model.whole_model_parameters(), CONFIG)
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
