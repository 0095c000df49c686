"""A model that processes train: uses of it that need weights of other processes warn, or are refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.runtime.pipeline import Pipeline
from tests.support import plain


def pipeline(net: nn.Module, **options: object) -> Pipeline:
    return Pipeline(net, nn.functional.mse_loss, microbatches=2, timeout=20, **options)


def warned(use) -> list[tuple[str, str]]:
    """Names of the files, and texts, of the warnings that a use gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    return [(Path(w.filename).name, str(w.message)) for w in caught if w.category is RuntimeWarning]


def use_after_a_step(rank: int) -> None:
    net = plain.model(2)
    x, y = plain.batch(0, 4)
    with pipeline(net) as pipe:
        pipe.evaluate(x, y)
        assert not warned(lambda: net(x)), "nothing has been trained"
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            pipe.step(x, y)
            optimizer.step()
            assert not warned(pipe.full_state_dict)
            copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
            uses = [lambda: net(x), net.state_dict, lambda m=copied: m(x), lambda m=pickled: m(x)]
            for use in uses:
                ((file, text),) = warned(use)
                assert file == "test_given_to_processes.py"
                assert "model.load_state_dict(pipe.full_state_dict())" in text
            net.load_state_dict(pipe.full_state_dict())
            assert not warned(lambda: net(x))
            assert not warned(net.state_dict)
            assert warned(lambda m=copied: m(x)), "the copy has the old weights"


def train_again_with_another_split(rank: int, loads: bool) -> str:
    net = plain.model(3)
    x, y = plain.batch(0, 4)
    with pipeline(net, split=[1, 2]) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(x, y)
        optimizer.step()
        whole = pipe.full_state_dict()
    if loads:
        net.load_state_dict(whole)
    try:
        with pipeline(net, split=[2, 1]) as pipe:
            pipe.step(x, y)
            assert all(torch.equal(value, whole[name]) for name, value in pipe.full_state_dict().items())
    except ConfigError as error:
        return str(error)
    return ""


def continue_with_the_same_split(rank: int) -> None:
    net = plain.model(2)
    x, y = plain.batch(0, 4)
    for _ in range(2):
        with pipeline(net) as pipe:
            pipe.step(x, y)


def test_uses_of_the_model_warn_until_it_has_all_weights(processes):
    processes.run(2, use_after_a_step)


def test_the_same_stages_may_train_on(processes):
    processes.run(2, continue_with_the_same_split)


@pytest.mark.parametrize("loads", [False, True])
def test_another_split_needs_the_weights_of_other_processes(processes, loads):
    for text in processes.run(2, train_again_with_another_split, loads):
        assert ("rank 0 has old weights of '1." in text) is not loads
        assert text == "" or not loads


def test_threads_train_the_model_itself():
    net = plain.model(2)
    x, y = plain.batch(0, 4)
    with pipeline(net, ranks=2) as pipe:
        pipe.step(x, y)
        assert not warned(lambda: net(x))
