from __future__ import annotations

import dataclasses

import pytest

from penstock.errors import ConfigError
from penstock.train.config.config import Config, from_mapping, resolve


def test_nothing_given_is_the_default():
    assert from_mapping({}) == Config()


def test_the_defaults_pass_their_own_checks():
    everything = {
        name: {k: v for k, v in t.items() if v is not None} for name, t in vars_of(Config()).items()
    }
    assert from_mapping(everything) == Config()


def vars_of(config: Config) -> dict[str, dict[str, object]]:
    return dataclasses.asdict(config)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"modle": {}}, r"no section \[modle\] \(did you mean 'model'"),
        ({"model": {"widht": 3}}, r"no key model.widht \(did you mean 'width'"),
        ({"model": 3}, "model is a section"),
        ({"model": {"width": "128"}}, "model.width must be a whole number, not '128'"),
        ({"model": {"width": 1.5}}, "model.width must be a whole number"),
        ({"train": {"steps": True}}, "train.steps must be a whole number, not True"),
        ({"train": {"steps": 0}}, "train.steps must be at least 1"),
        ({"train": {"steps": -4}}, "train.steps must be at least 1"),
        ({"train": {"steps": 2**40}}, r"below 2\^31, not 1099511627776"),
        ({"optim": {"lr": "fast"}}, "optim.lr must be a number"),
        ({"optim": {"lr": 0}}, "optim.lr must be more than 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr must be a finite number"),
        ({"optim": {"lr": 10**400}}, "optim.lr must be a finite number"),
        ({"optim": {"beta1": 1.0}}, "optim.beta1 must be from 0 to 1, 1 excluded"),
        ({"data": {"held_out": 1.0}}, "data.held_out must be between 0 and 1"),
        ({"data": {"path": ["a"]}}, "data.path must be text in quotes"),
        ({"data": {"path": "a\0b"}}, "without NUL"),
        (
            {"runtime": {"timeout": 1e10}},
            r"runtime.timeout must be more than 0 and at most 31536000 \(a year\)",
        ),
        ({"train": {"name": " "}}, "train.name must be a plain name without a path"),
        ({"train": {"name": "../up"}}, "train.name must be a plain name without a path"),
        ({"parallel": {"pp": 0}}, "parallel.pp must be at least 1"),
        ({"runtime": {"timeout": -1.0}}, "runtime.timeout must be more than 0"),
        ({"model": {"width": 100, "heads": 3}}, "model.width 100 does not divide into 3 heads"),
        ({"model": {"width": 12, "heads": 4}}, "of an even size"),
        ({"model": {"heads": 4, "kv_heads": 3}}, "must be a multiple of model.kv_heads 3"),
        ({"train": {"batch": 10}, "schedule": {"microbatches": 4}}, "10 does not divide into 4 equal"),
        ({"model": {"path": "a", "config": "b"}}, "model.path and model.config are both given"),
        ({"model": {"path": "a", "width": 64}}, "model.width is one of Penstock's own model"),
        ({"optim": {"warmup": 1.5}}, "optim.warmup must be from 0 to 1"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(tables: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        from_mapping(tables)


def test_a_whole_number_serves_where_a_fraction_is_meant():
    assert from_mapping({"runtime": {"timeout": 5}}).runtime.timeout == 5.0
    assert isinstance(from_mapping({"runtime": {"timeout": 5}}).runtime.timeout, float)


def test_unset_ranks_are_two_threads_or_the_processes_there_are():
    assert resolve(Config(), None).parallel.pp == 2
    assert resolve(Config(), 5).parallel.pp == 5
    assert resolve(from_mapping({"parallel": {"pp": 3}}), None).parallel.pp == 3
    assert resolve(from_mapping({"parallel": {"pp": 3}}), 3).parallel.pp == 3


def test_ranks_that_are_not_the_processes_are_refused():
    with pytest.raises(ConfigError, match=r"parallel.pp is 3, but 2 processes were started"):
        resolve(from_mapping({"parallel": {"pp": 3}}), 2)


def test_unset_virtual_stages_are_the_familys():
    def virtual_stages(**schedule: str) -> int | None:
        return resolve(from_mapping({"schedule": schedule}), None).parallel.virtual_stages

    assert virtual_stages() == 1
    assert virtual_stages(name="interleaved-1f1b") == 2
    assert virtual_stages(name="mine.csv") == 1


def test_an_unset_prompt_suits_the_vocabulary():
    assert resolve(Config(), None).sample.prompt == "def "
    assert resolve(from_mapping({"model": {"vocabulary": 1000}}), None).sample.prompt == "0"
    assert resolve(from_mapping({"sample": {"prompt": ""}}), None).sample.prompt == ""


def test_the_learning_rate_is_of_fine_tuning_where_the_weights_are_given():
    assert from_mapping({}).optim.lr == 4e-3
    assert from_mapping({"model": {"config": "config.json"}}).optim.lr == 4e-3
    assert from_mapping({"model": {"path": "a"}, "optim": {"clip": 0.5}}).optim.lr == 2e-5
    assert from_mapping({"model": {"path": "a"}, "optim": {"lr": 4e-3}}).optim.lr == 4e-3
