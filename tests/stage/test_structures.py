"""Containers between stages: threads and processes accept the same ones, and rebuild them in the same way."""

from __future__ import annotations

import re
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from penstock.base.errors import PenstockError, StageShapeError, TransportError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.structures import dumps, loads, require_portable
from tests.support import plain


class Named(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Registered:
    a: Tensor
    b: Tensor


_pytree.register_dataclass(Registered)


@dataclass
class Unregistered:
    a: Tensor
    b: Tensor


def local_class() -> type:
    return namedtuple("Local", ["a", "b"])


CONTAINERS = {"named tuple": Named, "dataclass": Registered}
REFUSED = {
    "local named tuple": (local_class(), "made of Local, which another process could not find by that name"),
    "unregistered dataclass": (Unregistered, "a stage returned a Unregistered .*register_dataclass"),
}


class Makes(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(plain.WIDTH, plain.WIDTH)

    def forward(self, x: Tensor) -> object:
        return self.kind(self.inner(x), x)


class Takes(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, value: object) -> Tensor:
        assert type(value) is self.kind
        return value.a * value.b


def trained(rank: int, name: str) -> Tensor | str:
    torch.manual_seed(0)
    kind = {**CONTAINERS, **{key: kind for key, (kind, _) in REFUSED.items()}}[name]
    with Pipeline([Makes(kind), Takes(kind)], F.mse_loss, microbatches=2, ranks=2, timeout=300) as pipe:
        try:
            return pipe.step(*plain.batch(0, 4)).losses
        except PenstockError as error:
            return f"{error} {error.__cause__}"


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_arrives_as_what_it_was(name):
    assert isinstance(trained(0, name), Tensor)


@pytest.mark.parametrize("name", REFUSED)
def test_what_another_process_could_not_make_is_refused_in_threads_too(name):
    assert re.search(REFUSED[name][1], trained(0, name))


def all_trained(rank: int) -> list[Tensor | str]:
    torch.set_num_threads(1)
    return [trained(rank, name) for name in (*CONTAINERS, *REFUSED)]


@pytest.mark.slow
def test_processes_hand_over_and_refuse_the_same(processes: LocalProcesses):
    for found in processes.run(2, all_trained):
        for name, result in zip((*CONTAINERS, *REFUSED), found, strict=True):
            if name in CONTAINERS:
                assert torch.equal(result, trained(0, name))
            else:
                assert re.search(REFUSED[name][1], result)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3).max(0),
        OrderedDict(b=1, a=[2, (3,)]),
        deque([1, 2], maxlen=4),
        {1: 2, "x": {None: 3, 1.5: 4, (1, "y"): 5}},
        Named(torch.ones(1), torch.ones(1)),
        Registered(torch.ones(1), torch.ones(1)),
    ],
)
def test_a_structure_comes_back_from_its_text(value):
    structure = _pytree.tree_flatten(value)[1]
    require_portable(structure)
    assert loads(dumps(structure)) == structure


def test_a_key_that_is_no_plain_value_is_refused():
    with pytest.raises(StageShapeError, match="has a object for a key"):
        require_portable(_pytree.tree_flatten({object(): 1})[1])


@pytest.mark.parametrize(
    "text",
    [
        '[["class", "subprocess:Popen"], null, []]',
        '[["class", "builtins:print"], null, []]',
        '[["class", "collections:namedtuple"], ["class", "builtins:int"], []]',
        '[["class", "builtins:tuple"], ["enum", "builtins:int", "real"], []]',
    ],
)
def test_a_text_names_containers_only(text):
    with pytest.raises(TransportError):
        loads(text)
