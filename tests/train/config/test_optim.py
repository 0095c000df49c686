"""The trainer's optimizers: weight decay, learning rate, and every optimizer of torch by its name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.optim import build_optimizer, lr_factor
from penstock.train.config.sections import ModelConfig, OptimConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.lanes import exhaustive

CONFIG = OptimConfig(lr=2.0, final_lr=0.1, warmup=0.3, weight_decay=0.3)


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    model = layers(ModelConfig(width=8, layers=1, heads=2, kv_heads=1, hidden=8))
    with Pipeline(model, next_token_loss, microbatches=1, ranks=1) as pipe:
        yield pipe


OTHERS = ("ASGD", "Adadelta", "Adagrad", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")


# One of Adam's kind, one without weight decay, and one of whole matrices.
@pytest.mark.parametrize("name", ["Adam", "Rprop", "Adafactor", *exhaustive(*OTHERS)])
def test_every_optimizer_steps_a_pipeline(pipe: Pipeline, name: str):
    optimizer = build_optimizer(pipe, from_mapping({"optim": {"name": name}}))
    tokens = torch.randint(256, (2, 9))
    before = [p.detach().clone() for p in pipe.parameters()]
    pipe.step(tokens[:, :-1], tokens[:, 1:])
    assert optimizer.step().applied
    assert type(optimizer.optimizers[0]).__name__ == name
    assert any(not torch.equal(p, old) for p, old in zip(pipe.parameters(), before, strict=True))


def test_arguments_reach_the_optimizer_as_torch_wants_them(pipe: Pipeline):
    config = from_mapping({"optim": {"name": "Rprop", "arguments": {"etas": [0.4, 1.1]}}})
    assert build_optimizer(pipe, config).optimizers[0].defaults["etas"] == (0.4, 1.1)


def test_matrices_decay_and_norms_and_embeddings_do_not(pipe: Pipeline):
    optimizer = build_optimizer(pipe, Config(optim=CONFIG))
    decaying, others = ({name for name, _ in part} for part in optimizer.parts(0))
    assert [g["weight_decay"] for g in optimizer.optimizers[0].param_groups] == [0.3, 0.0]
    norms = {
        f"{name}.weight" for name in ("blocks.0.attention_norm", "blocks.0.feed_forward_norm", "head.norm")
    }
    assert others == {"embedding.weight", *norms}
    assert decaying == {name for name, _ in pipe.named_parameters()} - others


def test_matrices_of_blocks_may_have_an_optimizer_of_their_own(pipe: Pipeline):
    given = {"matrices": "Muon", "matrices_lr": 0.5, "lr": 0.1, "weight_decay": 0.3, "warmup": 0.0}
    optimizer = build_optimizer(pipe, from_mapping({"optim": given}))
    matrices, decaying, others = ([name for name, _ in part] for part in optimizer.parts(0))
    assert [g["lr"] for g in optimizer.optimizers[0].param_groups] == [0.5, 0.1, 0.1]
    assert [g["weight_decay"] for g in optimizer.optimizers[0].param_groups] == [0.3, 0.3, 0.0]
    assert len(matrices) == 7
    assert all(name.startswith("blocks.0.") for name in matrices)
    assert decaying == ["head.output.weight"]
    assert "embedding.weight" in others


def test_the_rate_climbs_in_a_line_and_falls_along_a_cosine_or_a_line_or_not():
    rates = [lr_factor(step, 13, CONFIG) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[12] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    line = [lr_factor(step, 13, replace(CONFIG, lr_schedule="linear")) for step in range(13)]
    assert line == pytest.approx([0.25, 0.5, 0.75, 1.0, *(0.1 + 0.9 * n / 8 for n in range(8, -1, -1))])
    constant = [lr_factor(step, 13, replace(CONFIG, lr_schedule="constant")) for step in range(13)]
    assert constant == [0.25, 0.5, 0.75] + [1.0] * 10


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 1.0), (2, 0.5), (5, 1.0)])
def test_short_runs_have_a_rate_at_every_step(steps: int, warmup: float):
    config = OptimConfig(warmup=warmup)
    assert all(0 < lr_factor(step, steps, config) <= 1.0 for step in range(steps))
