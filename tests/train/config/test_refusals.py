"""What a config must not say, and the line that says so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config.config import from_mapping

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modle": {}}, "no key modle (did you mean model?)"),
    ({"lr": 0.1}, "no key lr (did you mean optim.lr?)"),
    ({"nothing_like_it": 3}, "no key nothing_like_it; `penstock config` prints"),
    ({"model.widht": 3}, "no key model.widht (did you mean model.width?)"),
    ({"model": 3}, "model must be a table, got 3"),
    ({"model.width": "128"}, "model.width must be a valid integer, got '128'"),
    ({"model.width": 1.5}, "model.width must be a valid integer"),
    ({"train.steps": True}, "train.steps must be a valid integer, got True"),
    ({"train.steps": 0}, "train.steps must be greater than or equal to 1, got 0"),
    ({"train.steps": 2**31}, "train.steps must be less than 2147483648, got 2147483648"),
    ({"train.steps": 16**5000}, "2147483648, got a number of too many digits"),
    ({"train.name": " "}, "train.name must be a plain name without a path"),
    ({"train.name": "../up"}, "a plain name without a path, of at most 255 bytes"),
    ({"train.name": "a" * 256}, "train.name must be a plain name without a path"),
    ({"train.loggers": "tensorboard, aim"}, "names out of tensorboard, wandb, with commas between"),
    *(
        ({"train.callbacks": name}, "train.callbacks must be MODULE:FUNCTION, or several with commas between")
        for name in ("own_hooks", "own_hooks.f", "a b:c", ":f", "m:", "m:f,n")
    ),
    ({"optim.lr": "fast"}, "optim.lr must be a valid number, got 'fast'"),
    ({"optim.lr": 0}, "optim.lr must be greater than 0, got 0"),
    ({"optim.lr": float("nan")}, "optim.lr must be a finite number"),
    ({"optim.lr": 10**400}, "optim.lr must be a valid number"),
    ({"optim.beta1": 1.0}, "optim.beta1 must be less than 1, got 1.0"),
    ({"optim.warmup": 1.5}, "optim.warmup must be less than or equal to 1, got 1.5"),
    ({"data.format": "json"}, "data.format must be 'auto', 'text', 'tokens' or 'datasets'"),
    ({"data.path": ["a"]}, "data.path must be a valid string, got ['a']"),
    ({"data.path": "a\0b"}, "data.path must match pattern"),
    ({"data.path": "a\ud800b"}, "data.path must be a valid string"),
    ({"runtime.timeout": 31536001}, "runtime.timeout must be less than or equal to 31536000"),
    ({"runtime.recompute": "all"}, "runtime.recompute must be 'none', 'full' or 'auto', got 'all'"),
    ({"schedule.split": "mesured"}, "schedule.split must be 'even' or 'measured', got 'mesured'"),
    ({"parallel.sequence_parallel": 1}, "parallel.sequence_parallel must be a valid boolean, got 1"),
    ({"parallel.order": "pp,dp"}, "parallel.order must be pp, dp and tp once each"),
    ({"parallel.order": "pp,dp,tp,cp,cp"}, "parallel.order must be pp, dp and tp once each, and cp or"),
    # The sizes of the model.
    ({"model.path": "a", "model.config": "b"}, "model.path and model.config are both given"),
    ({"model.path": "a", "model.width": 64}, "model.width belongs to Penstock's own model"),
    ({"model.width": 100, "model.heads": 3}, "model.width 100 does not divide into 3 heads"),
    ({"model.width": 12, "model.heads": 4}, "does not divide into 4 heads of an even size"),
    ({"model.heads": 4, "model.kv_heads": 3}, "model.heads 4 must be a multiple of model.kv_heads 3"),
    ({"model.shared_hidden": 8}, "model.shared_hidden is 8, and model.experts is 0"),
    ({"model.experts": 4, "model.experts_per_token": 5}, "must be at most model.experts 4"),
    ({"model.experts": 4, "model.hidden": 20}, "model.hidden 20 must be a multiple of 8"),
    ({"model.experts": 4, "runtime.compile": "block"}, "runtime.compile is 'block', and torch"),
    (
        {"model.experts": 4, "parallel.tp": 2, "parallel.sequence_parallel": True},
        "not divide the tokens of model.experts 4",
    ),
    # Shares that do not divide, with those that would.
    ({"train.batch": 10, "schedule.microbatches": 4}, "10 does not divide into 4 equal"),
    ({"parallel.dp": 3}, "train.batch 16 does not divide over parallel.dp 3: every replica"),
    ({"parallel.dp": 3}, "of the batch; take 18, or another multiple of 3"),
    ({"parallel.dp": 3, "schedule.microbatches": 8}, "take a multiple of 3, or parallel.dp = 1"),
    ({"parallel.dp": 12, "schedule.microbatches": 8}, "take a multiple of 12, or parallel.dp = 4"),
    (
        {"parallel.sequence_parallel": True, "parallel.tp": 3},
        "which parallel.sequence_parallel needs; take a multiple of 3",
    ),
    ({"parallel.cp": 3, "data.sequence": 128}, "into 2 x parallel.cp = 6 chunks; take a multiple of 6"),
    (
        {"parallel.cp": 2, "parallel.tp": 2, "parallel.sequence_parallel": True},
        "cannot be used with parallel.cp = 2: it divides the same tokens",
    ),
    ({"parallel.cp": 2, "runtime.compile": "block"}, "runtime.compile cannot be used with parallel.cp = 2"),
    ({"parallel.cp": 2, "train.reduction": "sum"}, "train.reduction cannot be used with parallel.cp = 2"),
    (
        {"parallel.cp": 2, "model.experts": 4, "model.hidden": 64, "model.auxiliary_loss": 0.1},
        "model.auxiliary_loss cannot be used",
    ),
    # Keys that exclude or need each other.
    ({"train.steps": 3, "train.epochs": 1.5}, "train.steps is 3 and train.epochs is 1.5; give one"),
    ({"data.held_out": 0.1, "data.held_out_path": "x"}, "data.held_out is 0.1 and data.held_out_path"),
    ({"runtime.recompute": "auto"}, "'auto' needs memory"),
    ({"runtime.memory": 10}, "bytes of activations that a rank may hold, and nothing else does"),
    # Optimizers and their arguments.
    ({"optim.name": "sgd"}, "got 'sgd' (did you mean 'SGD'?)"),
    ({"optim.name": "AdmaW"}, "got 'AdmaW' (did you mean 'AdamW'"),
    ({"optim.name": "Optimizer"}, "optim.name must be one of"),
    ({"optim.name": "LBFGS"}, "optim.name cannot be LBFGS: it runs the model itself"),
    ({"optim.name": "Muon"}, "optim.name cannot be Muon: it updates matrices only"),
    ({"optim.name": "SparseAdam"}, "cannot be SparseAdam: it takes sparse gradients only"),
    ({"optim.matrices": "Moun"}, "got 'Moun' (did you mean 'Muon'?)"),
    ({"optim.matrices": "adamw"}, "got 'adamw' (did you mean 'AdamW'?)"),
    ({"optim.name": "SGD", "optim.beta2": 0.5}, "optim.beta2 belongs to optimizers of Adam's"),
    ({"optim.name": "Rprop", "optim.weight_decay": 0.1}, "must be 0 with Rprop, which has none"),
    ({"optim.name": "SGD", "model.path": "a"}, "optim.lr must be given with model.path"),
    ({"optim.arguments": {"betas": [0.9, 0.9]}}, "keys of its own; set optim.beta1 and optim.beta2"),
    ({"optim.arguments": {"amsgrad": "yes"}}, "amsgrad must be true or false, got 'yes'"),
    ({"optim.arguments": {"foreach": 1}}, "optim.arguments.foreach must be true or false, got 1"),
]
OF_SGD: list[tuple[Any, str]] = [
    ({"momentun": 0.9}, "no argument 'momentun' of SGD (did you mean 'momentum'"),
    ({"params": 0.9}, "no argument 'params' of SGD"),
    ({"lr": 0.9}, "optim.arguments.lr has keys of its own; set optim.lr"),
    ({"momentum": -1.0}, "SGD refuses its arguments: Invalid momentum value: -1.0"),
    ({"momentum": "a"}, "optim.arguments.momentum must be a number, got 'a'"),
    ({"dampening": True}, "optim.arguments.dampening must be a number, got True"),
    (3, "optim.arguments must be a table, got 3"),
]
REFUSED += [({"optim.name": "SGD", "optim.arguments": given}, said) for given, said in OF_SGD]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said[:50] for _, said in REFUSED])
def test_what_is_refused_is_said_with_what_is_allowed(given: dict[str, Any], said: str):
    tables: dict[str, Any] = {}
    for name, value in given.items():
        section, _, key = name.partition(".")
        if key:
            tables.setdefault(section, {})[key] = value
        else:
            tables[section] = value
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_mapping(tables)


def test_many_bad_keys_are_one_line():
    with pytest.raises(ConfigError) as stopped:
        from_mapping({"train": {"steps": 0, "batch": "8", "stepz": 3}, "optim": {"lr": "x" * 1000}})
    assert "\n" not in str(stopped.value)
    assert len(str(stopped.value)) < 300
