from __future__ import annotations

import dataclasses

import pytest

from penstock.train.config.config import Config, from_mapping
from penstock.train.config.optimizers import fine_tuning_note


def test_nothing_given_is_the_default_which_passes_its_own_checks():
    assert from_mapping({}) == Config()
    tables = dataclasses.asdict(Config()).items()
    everything = {name: {k: v for k, v in table.items() if v is not None} for name, table in tables}
    assert from_mapping(everything) == Config()


def test_bounds_that_are_allowed():
    given = {"train": {"steps": 2**31 - 1, "name": "a" * 255}, "optim": {"warmup": 1.0, "beta1": 0.0}}
    config = from_mapping({**given, "runtime": {"timeout": 31536000}})
    assert config.train.steps == 2**31 - 1
    # A whole number serves where a fraction is meant.
    assert isinstance(config.runtime.timeout, float)


def test_another_optimizer_has_the_defaults_of_torch():
    sgd, ours = from_mapping({"optim": {"name": "SGD"}}).optim, from_mapping({}).optim
    adam = from_mapping({"optim": {"name": "Adam", "lr": 0.5}}).optim
    assert (sgd.lr, sgd.weight_decay) == (1e-3, 0.0)
    assert (adam.lr, adam.weight_decay, adam.beta2) == (0.5, 0.0, 0.999)
    assert (ours.lr, ours.weight_decay, ours.beta2) == (4e-3, 0.1, 0.95)


def test_fine_tuning_has_defaults_of_its_own():
    def tuned(**optim: object):
        return from_mapping({"model": {"path": "a"}, "optim": optim}).optim

    found = tuned(clip=0.5)
    assert (found.lr, found.weight_decay, found.beta2, found.warmup) == (2e-5, 0.01, 0.999, 0.05)
    assert tuned(name="NAdam").lr == 2e-5
    assert tuned(lr=4e-3).lr == 4e-3
    assert tuned(name="SGD", lr=0.01).lr == 0.01
    assert from_mapping({"model": {"config": "config.json"}}).optim.lr == 4e-3
    end = ", weight decay 0.01 (none for norms, biases and embeddings); set [optim] for others"
    assert fine_tuning_note(found) == (
        f"fine-tuning with AdamW: learning rate 2e-05 (warm-up over 5% of the steps, then cosine to 5% of it){end}"
    )
    assert "then constant)" in fine_tuning_note(tuned(lr_schedule="constant"))


@pytest.mark.parametrize(
    ("batch", "dp", "microbatches"),
    [(16, 1, 8), (8, 1, 8), (1, 1, 1), (9, 1, 3), (12, 2, 6), (4, 4, 4), (20, 10, 10)],
)
def test_a_batch_has_as_many_microbatches_as_it_allows(batch: int, dp: int, microbatches: int):
    config = from_mapping({"train": {"batch": batch}, "parallel": {"dp": dp}})
    assert config.schedule.microbatches == microbatches
    assert from_mapping({"train": {"batch": 8}, "schedule": {"microbatches": 2}}).schedule.microbatches == 2


def test_optimizers_of_whole_matrices_run_on_replicas_and_cut_matrices():
    optim, parallel = {"name": "Adafactor", "matrices": "Muon"}, {"dp": 2, "tp": 2, "zero": True}
    assert from_mapping({"optim": optim, "parallel": parallel}).optim.matrices == "Muon"
