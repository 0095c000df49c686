"""The trainer's optimizer: weight decay and learning rate."""

from __future__ import annotations

import math

import pytest

from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.optim import build_optimizer, lr_factor
from penstock.train.config.sections import ModelConfig, OptimConfig
from penstock.train.model.llama import layers, next_token_loss

CONFIG = OptimConfig(lr=2.0, final_lr=0.1, warmup=0.3, weight_decay=0.3)


def test_matrices_decay_and_norms_and_embeddings_do_not():
    model = layers(ModelConfig(width=8, layers=1, heads=2, kv_heads=1, hidden=8))
    with Pipeline(model, next_token_loss, microbatches=1, ranks=1) as pipe:
        optimizer = build_optimizer(pipe, Config(optim=CONFIG))
        decaying, others = ({name for name, _ in part} for part in optimizer.parts(0))
        assert [g["weight_decay"] for g in optimizer.optimizers[0].param_groups] == [0.3, 0.0]
        assert others == {
            "embedding.weight",
            "blocks.0.attention_norm.weight",
            "blocks.0.feed_forward_norm.weight",
            "head.norm.weight",
        }
        assert decaying == {name for name, _ in pipe.named_parameters()} - others


def test_matrices_of_blocks_may_have_an_optimizer_of_their_own():
    model = layers(ModelConfig(width=8, layers=1, heads=2, kv_heads=1, hidden=8))
    given = {"optim": {"matrices": "Muon", "matrices_lr": 0.5, "lr": 0.1, "weight_decay": 0.3, "warmup": 0.0}}
    with Pipeline(model, next_token_loss, microbatches=1, ranks=1) as pipe:
        optimizer = build_optimizer(pipe, from_mapping(given))
        matrices, decaying, others = ([name for name, _ in part] for part in optimizer.parts(0))
        assert [g["lr"] for g in optimizer.optimizers[0].param_groups] == [0.5, 0.1, 0.1]
        assert [g["weight_decay"] for g in optimizer.optimizers[0].param_groups] == [0.3, 0.3, 0.0]
        assert len(matrices) == 7
        assert all(name.startswith("blocks.0.") for name in matrices)
        assert decaying == ["head.output.weight"]
        assert "embedding.weight" in others


def test_the_rate_climbs_in_a_line_and_falls_along_a_cosine():
    rates = [lr_factor(step, 13, CONFIG) for step in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[8] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[12] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 1.0), (2, 0.5), (5, 1.0)])
def test_short_runs_have_a_rate_at_every_step(steps: int, warmup: float):
    config = OptimConfig(warmup=warmup)
    assert all(0 < lr_factor(step, steps, config) <= 1.0 for step in range(steps))
