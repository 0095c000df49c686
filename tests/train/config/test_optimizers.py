"""Optimizers by name, and the defaults that depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.optim import build_optimizer
from penstock.train.config.optimizers import fine_tuning_note
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

USABLE = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


def optim(**keys: Any) -> dict[str, Any]:
    return {"optim": keys}


@pytest.mark.parametrize("name", USABLE)
def test_every_optimizer_steps_a_pipeline(name: str):
    config = from_mapping(optim(name=name))
    model = layers(ModelConfig(width=8, layers=1, heads=2, kv_heads=1, hidden=8))
    tokens = torch.randint(256, (2, 9))
    with Pipeline(model, next_token_loss, microbatches=1, ranks=1) as pipe:
        optimizer = build_optimizer(pipe, config)
        before = [p.detach().clone() for p in pipe.parameters()]
        pipe.step(tokens[:, :-1], tokens[:, 1:])
        assert optimizer.step().applied
        assert type(optimizer.optimizers[0]).__name__ == name
        assert any(not torch.equal(p, old) for p, old in zip(pipe.parameters(), before, strict=True))


def test_another_optimizer_has_the_defaults_of_torch():
    sgd, adam = from_mapping(optim(name="SGD")).optim, from_mapping(optim(name="Adam", lr=0.5)).optim
    assert (sgd.lr, sgd.weight_decay) == (1e-3, 0.0)
    assert (adam.lr, adam.weight_decay, adam.beta2) == (0.5, 0.0, 0.999)
    ours = from_mapping({}).optim
    assert (ours.lr, ours.weight_decay, ours.beta2) == (4e-3, 0.1, 0.95)


def test_fine_tuning_has_defaults_of_its_own():
    tuned = from_mapping({"model": {"path": "a"}}).optim
    assert (tuned.lr, tuned.weight_decay, tuned.beta2, tuned.warmup) == (2e-5, 0.01, 0.999, 0.05)
    assert from_mapping({"model": {"path": "a"}, **optim(name="NAdam")}).optim.lr == 2e-5
    assert from_mapping({"model": {"path": "a"}, **optim(name="SGD", lr=0.01)}).optim.lr == 0.01
    with pytest.raises(ConfigError, match=r"optim.lr must be given with model.path and optim.name = SGD"):
        from_mapping({"model": {"path": "a"}, **optim(name="SGD")})
    assert fine_tuning_note(tuned) == (
        "fine-tuning with AdamW: learning rate 2e-05 (warm-up over 5% of the steps, then cosine to 5% of it), weight decay "
        "0.01 (none for norms, biases and embeddings); set [optim] for others"
    )


def test_arguments_reach_the_optimizer_as_torch_wants_them():
    config = from_mapping(optim(name="Rprop", arguments={"etas": [0.4, 1.1]}))
    with Pipeline(layers(ModelConfig(layers=1)), next_token_loss, microbatches=1, ranks=1) as pipe:
        assert build_optimizer(pipe, config).optimizers[0].defaults["etas"] == (0.4, 1.1)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (optim(name="sgd"), r"optim.name must be one of .*, got 'sgd' \(did you mean 'SGD'\?\)"),
        (optim(name="AdmaW"), r"got 'AdmaW' \(did you mean 'AdamW'"),
        (optim(name="Optimizer"), "optim.name must be one of"),
        (optim(name="LBFGS"), "optim.name cannot be LBFGS: it runs the model itself, several times a step"),
        (
            optim(name="Muon"),
            "optim.name cannot be Muon: it updates matrices only, .* set optim.matrices to it",
        ),
        (
            optim(matrices="Moun"),
            r"optim.matrices must be one of .*, Muon, .*, got 'Moun' \(did you mean 'Muon'\?\)",
        ),
        (
            optim(matrices="adamw"),
            r"optim.matrices must be one of .*, got 'adamw' \(did you mean 'AdamW'\?\)",
        ),
        (optim(name="SparseAdam"), "optim.name cannot be SparseAdam: it takes sparse gradients only"),
        (
            optim(name="SGD", arguments={"momentun": 0.9}),
            r"no argument 'momentun' of SGD \(did you mean 'momentum'",
        ),
        (optim(name="SGD", arguments={"params": 0.9}), "no argument 'params' of SGD"),
        (optim(name="SGD", arguments={"lr": 0.9}), "optim.arguments.lr has keys of its own; set optim.lr"),
        (optim(arguments={"betas": [0.9, 0.9]}), "set optim.beta1 and optim.beta2"),
        (
            optim(name="SGD", arguments={"momentum": -1.0}),
            "SGD refuses its arguments: Invalid momentum value: -1.0",
        ),
        (
            optim(name="SGD", arguments={"momentum": "a"}),
            "optim.arguments.momentum must be a number, got 'a'",
        ),
        (optim(name="SGD", arguments=3), "optim.arguments must be a table of names and values, got 3"),
        (optim(arguments={"amsgrad": "yes"}), "optim.arguments.amsgrad must be true or false, got 'yes'"),
        (optim(arguments={"foreach": 1}), "optim.arguments.foreach must be true or false, got 1"),
        (
            optim(name="SGD", arguments={"dampening": True}),
            "optim.arguments.dampening must be a number, got True",
        ),
        ({"schedule": {"split": "mesured"}}, "schedule.split must be 'even' or 'measured', got 'mesured'"),
        ({"runtime": {"recompute": "all"}}, "runtime.recompute must be 'none', 'full' or 'auto', got 'all'"),
        (
            optim(name="SGD", beta2=0.5),
            "optim.beta2 belongs to optimizers of Adam's kind, but optim.name is SGD",
        ),
        (
            optim(name="Rprop", weight_decay=0.1),
            "optim.weight_decay must be 0 with Rprop, which has none, got 0.1",
        ),
        ({"runtime": {"recompute": "auto"}}, "'auto' needs memory"),
        ({"runtime": {"memory": 10}}, "'auto' needs memory, .* and nothing else does"),
    ],
)
def test_what_cannot_train_is_refused_by_name(tables: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        from_mapping(tables)


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2, "zero": True}])
def test_optimizers_of_whole_matrices_run_on_replicas_or_cut_matrices(parallel: dict[str, Any]):
    given = {**optim(name="Adafactor", matrices="Muon"), "parallel": parallel}
    assert from_mapping(given).optim.matrices == "Muon"


@pytest.mark.parametrize(
    ("batch", "dp", "microbatches"),
    [
        (16, 1, 8),
        (8, 1, 8),
        (4, 1, 4),
        (1, 1, 1),
        (6, 1, 6),
        (9, 1, 3),
        (12, 2, 6),
        (4, 4, 4),
        (20, 10, 10),
        (7, 1, 7),
    ],
)
def test_a_batch_has_as_many_microbatches_as_it_allows(batch: int, dp: int, microbatches: int):
    config = from_mapping({"train": {"batch": batch}, "parallel": {"dp": dp}})
    assert config.schedule.microbatches == microbatches
    assert from_mapping({"train": {"batch": 8}, "schedule": {"microbatches": 2}}).schedule.microbatches == 2


def test_a_batch_that_replicas_cannot_share_is_refused():
    with pytest.raises(
        ConfigError, match=r"train.batch 16 does not divide over parallel.dp 3: .* take 18, or"
    ):
        from_mapping({"train": {"batch": 16}, "parallel": {"dp": 3}})


def test_the_general_defaults_are_those_of_the_section():
    assert from_mapping({}) == Config()
