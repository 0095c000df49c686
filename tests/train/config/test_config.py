from __future__ import annotations

import dataclasses

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config.config import Config, from_mapping


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
        (
            {"lr": 0.001},
            r"lr is outside of the sections \(did you mean 'optim.lr'\?\); write a key below its section: model",
        ),
        ({"steps": 3}, r"steps is outside of the sections \(did you mean 'train.steps'\?\)"),
        ({"nothing_like_it": 3}, "nothing_like_it is outside of the sections; write a key below its section"),
        ({"model": {"widht": 3}}, r"no key model.widht \(did you mean 'width'"),
        ({"model": 3}, "model must be a section with keys, got 3"),
        ({"model": {"width": "128"}}, "model.width must be a whole number, got '128'"),
        ({"model": {"width": 1.5}}, "model.width must be a whole number"),
        ({"train": {"steps": True}}, "train.steps must be a whole number, got True"),
        ({"train": {"steps": 0}}, "train.steps must be greater than or equal to 1, got 0"),
        ({"train": {"steps": -4}}, "train.steps must be greater than or equal to 1, got -4"),
        ({"train": {"steps": 2**40}}, "train.steps must be less than 2147483648, got 1099511627776"),
        (
            {"train": {"steps": 16**5000}},
            "train.steps must be less than 2147483648, got a number of too many digits",
        ),
        ({"optim": {"lr": "fast"}}, "optim.lr must be a finite number, got 'fast'"),
        ({"optim": {"lr": 0}}, "optim.lr must be greater than 0, got 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr must be a finite number"),
        ({"optim": {"lr": 10**400}}, "optim.lr must be a finite number"),
        ({"optim": {"beta1": 1.0}}, "optim.beta1 must be less than 1, got 1.0"),
        ({"data": {"format": "json"}}, "data.format must be 'auto', 'text', 'tokens' or 'datasets'"),
        ({"data": {"held_out": 1.0}}, "data.held_out must be less than 1, got 1.0"),
        ({"data": {"path": ["a"]}}, r"data.path must be text in quotes, got \['a'\]"),
        ({"data": {"path": "a\0b"}}, "data.path must be text without NUL"),
        ({"data": {"path": "a\ud800b"}}, "data.path must be text without NUL and without broken characters"),
        ({"data": {"changed": "ask"}}, "data.changed must be 'refuse' or 'accept', got 'ask'"),
        ({"runtime": {"timeout": 1e10}}, "runtime.timeout must be less than or equal to 31536000"),
        ({"train": {"name": " "}}, "train.name must be a plain name without a path"),
        ({"train": {"name": "../up"}}, "train.name must be a plain name without a path"),
        ({"parallel": {"pp": 0}}, "parallel.pp must be greater than or equal to 1"),
        ({"runtime": {"timeout": -1.0}}, "runtime.timeout must be greater than 0"),
        ({"model": {"width": 100, "heads": 3}}, "model.width 100 does not divide into 3 heads"),
        ({"model": {"width": 12, "heads": 4}}, "of an even size"),
        ({"model": {"heads": 4, "kv_heads": 3}}, "must be a multiple of model.kv_heads 3"),
        (
            {"model": {"experts": 4, "experts_per_token": 5}},
            "experts_per_token 5 must be at most model.experts 4",
        ),
        ({"model": {"shared_hidden": 8}}, "model.shared_hidden is 8, and model.experts is 0"),
        (
            {"model": {"experts": 4, "hidden": 20}},
            "model.hidden 20 must be a multiple of 8 with model.experts",
        ),
        ({"model": {"experts": 4}, "runtime": {"compile": "block"}}, "runtime.compile is 'block', and torch"),
        (
            {"model": {"experts": 4}, "parallel": {"tp": 2, "sequence_parallel": True}},
            "parallel.sequence_parallel does not divide the tokens of model.experts 4",
        ),
        ({"model": {"num_local_experts": 4}}, "did you mean 'model.experts'.*, as in model.experts=4"),
        ({"train": {"batch": 10}, "schedule": {"microbatches": 4}}, "10 does not divide into 4 equal"),
        ({"model": {"path": "a", "config": "b"}}, "model.path and model.config are both given"),
        ({"model": {"path": "a", "width": 64}}, "model.width belongs to Penstock's own model"),
        ({"optim": {"warmup": 1.5}}, "optim.warmup must be less than or equal to 1, got 1.5"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(tables: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        from_mapping(tables)


def test_many_bad_keys_are_one_line():
    with pytest.raises(ConfigError) as stopped:
        from_mapping({"train": {"steps": 0, "batch": "8", "stepz": 3}, "optim": {"lr": "x" * 1000}})
    assert "\n" not in str(stopped.value)
    assert len(str(stopped.value)) < 300


def test_a_whole_number_serves_where_a_fraction_is_meant():
    assert from_mapping({"runtime": {"timeout": 5}}).runtime.timeout == 5.0
    assert isinstance(from_mapping({"runtime": {"timeout": 5}}).runtime.timeout, float)


def test_the_learning_rate_is_of_fine_tuning_where_the_weights_are_given():
    assert from_mapping({}).optim.lr == 4e-3
    assert from_mapping({"model": {"config": "config.json"}}).optim.lr == 4e-3
    assert from_mapping({"model": {"path": "a"}, "optim": {"clip": 0.5}}).optim.lr == 2e-5
    assert from_mapping({"model": {"path": "a"}, "optim": {"lr": 4e-3}}).optim.lr == 4e-3
