"""Tensors that share memory are found exactly; a model that writes into one of them gets the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.base.errors import PenstockError
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.memory_groups import groups_of
from penstock.stage.values import pack, unpack
from tests.support.lanes import exhaustive
from tests.zoo.case import Case
from tests.zoo.judge import judge
from tests.zoo.piped import piped, piped_many
from tests.zoo.record import Run

WIDTH, MICROBATCHES = 6, 4


def sharing(one: Tensor, other: Tensor, size: int) -> bool:
    """Whether two views of a storage of some elements have one in common, by their values."""
    numbers = torch.arange(size)
    sets = [
        set(numbers.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())
        for t in (one, other)
    ]
    return bool(sets[0] & sets[1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_views_share_memory_if_an_element_is_in_both(data: st.DataObject):
    storage = torch.zeros(60)
    views = []
    for _ in range(2):
        shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        strides = data.draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
        offset = data.draw(st.integers(0, 20))
        views.append(storage.as_strided(shape, strides, offset))
    assert (groups_of(views, {}) == [1, 1]) == sharing(*views, 60)


def test_groups_are_joined_by_common_tensors_and_links():
    a, b = torch.zeros(8), torch.zeros(8)
    assert groups_of([a, b], {}) == [0, 0]
    assert groups_of([a[:4], a[4:]], {}) == [0, 0]
    assert len({*groups_of([a[:4], b, a[3:6], a[5:]], {})}) == 2
    linked = {a.data_ptr(): "key", b.data_ptr(): "key"}
    assert groups_of([a, b, torch.zeros(2)], linked)[0] == groups_of([a, b, torch.zeros(2)], linked)[1] != 0
    assert groups_of([a[:4], a[4:], b], {}, [a[5:]]) == [0, -1, 0]
    assert groups_of([torch.zeros(0), torch.zeros(0)], {}) == [0, 0]


def test_one_tensor_at_two_places_is_sent_once():
    x = torch.ones(3, requires_grad=True) * 2
    message, roots = pack({"a": x, "b": (x, 1), "c": torch.zeros(2)})
    assert len(message.leaves) == 3
    assert len(roots) == 1
    value: Any = unpack(message)
    assert value["a"] is value["b"][0]
    assert value["b"][1] == 1


SHARES = r"value\[1\], which shares memory with value\[0\].*clone\(\)"

# Kinds of the zoo, with the refusal of a write where the model is cut.
WAYS = {
    "one_tensor_twice_and_written": "",
    "parts_of_one_tensor": "",
    "views_that_are_read": "",
    "view_written": SHARES,
    "detached_and_written": SHARES,
}

# One graph; a cut before the layer that writes; recomputation without a cut.
LAYOUTS: list[Any] = [
    {"ranks": 1},
    {"schedule": "zb-h1"},
    {"ranks": 1, "recompute": "full"},
    *exhaustive(
        {"ranks": 3},
        {"recompute": "full"},
        {"schedule": "gpipe", "recompute": 2},
        {"schedule": "dualpipe"},
    ),
]


def require(case: Case, runs: list[Run], refusal: str) -> None:
    verdict = judge(case, runs)
    if refusal:
        assert verdict.outcome == "refused", verdict
        assert re.search(refusal, verdict.why, re.S)
    else:
        assert verdict.outcome in ("bit-equal", "bounded"), verdict


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_into_shared_memory_is_that_of_plain_pytorch_or_refused(way: str, layout: dict[str, Any]):
    case = Case(seed=1, kinds=("mlp", way), habit="evaluate", **layout)
    # Within one graph nothing is cut, and any write is that of plain PyTorch.
    require(case, [piped(0, case)], "" if layout == {"ranks": 1} else WAYS[way])


def in_a_process(rank: int, texts: list[str], shared_memory: str) -> list[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_SHARED_MEMORY", shared_memory)
        return piped_many(rank, texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared_memory", "options"), [("1", {"schedule": "zb-h1"}), ("0", {"recompute": "full"})], ids=str
)
def test_processes_give_the_same(processes: LocalProcesses, shared_memory: str, options: dict[str, Any]):
    cases = [Case(seed=1, kinds=("mlp", way), transport="processes", **options) for way in WAYS]
    runs = processes.run(2, in_a_process, [case.text() for case in cases], shared_memory)
    for n, case in enumerate(cases):
        require(case, [run[n] for run in runs], WAYS[case.kinds[1]])


def batch(steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(steps)
    x, y = torch.randn(2, 8, WIDTH, generator=generator)
    return x, y


class Pass(nn.Module):
    """Passes its value on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value: Any) -> Any:
        return value


class TakesNamed(nn.Module):
    def __init__(self, writes: Callable[[Tensor, Tensor], object] | None = None) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        if self.writes is not None:
            self.writes(x, extra)
        return self.inner(x) + extra


class Gives(nn.Module):
    gives = ("extra",)

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        penstock.give("extra", x)
        return x.relu_() if self.writes else x


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.add_(1))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def write_first(x: Tensor, extra: Tensor) -> None:
    x.add_(1)


def write_second(x: Tensor, extra: Tensor) -> None:
    extra.add_(1)


WRITERS: dict[str, Callable[[], list[nn.Module]]] = {
    "next stage": lambda: [Gives(), Writes(), nn.Identity(), TakesNamed()],
    "skip": lambda: [Gives(), nn.Identity(), Writes(), nn.Identity(), TakesNamed()],
    "giver": lambda: [Gives(writes=True), nn.Identity(), TakesNamed(), nn.Identity()],
    "taker": lambda: [Gives(), nn.Identity(), TakesNamed(write_second), nn.Identity()],
}


@pytest.mark.parametrize(
    ("writer", "first"),
    [
        ("next stage", None),
        ("skip", None),
        *((writer, count) for writer in ("giver", "taker") for count in (1, 3)),
    ],
)
def test_a_write_into_a_value_that_was_given_is_refused(writer: str, first: int | None):
    """However the model is cut: into a stage of each layer, or two of which the first has so many."""
    net = WRITERS[writer]()
    cut = {"ranks": 2, "split": [(0, first), (first, 4)]} if first else {"ranks": len(net)}
    x, y = batch(0)
    with (
        penstock.Pipeline(net, mean_square, microbatches=MICROBATCHES, **cut) as pipe,
        pytest.raises(PenstockError, match=r"writes? in place|wrote in place"),
    ):
        pipe.step(x, y)


def test_a_given_value_may_be_read():
    torch.manual_seed(0)
    net = [Gives(), nn.Linear(WIDTH, WIDTH), nn.Identity(), TakesNamed()]
    x, y = batch(0)
    losses = []
    for ranks in (1, 4):
        with penstock.Pipeline(net, mean_square, ranks=ranks, microbatches=MICROBATCHES) as pipe:
            losses += [pipe.step(x, y).losses for _ in range(2)]
    assert all(torch.equal(each, losses[0]) for each in losses)


@pytest.mark.parametrize("write", [write_first, write_second])
def test_a_write_into_a_keyword_input_that_is_x_is_refused(write: Callable[[Tensor, Tensor], object]):
    torch.manual_seed(0)
    x, y = batch(0)
    with penstock.Pipeline(
        [TakesNamed(write), TakesNamed()], mean_square, ranks=2, microbatches=MICROBATCHES
    ) as pipe:
        with pytest.raises(PenstockError, match=r"named value|shares memory"):
            pipe.step(x, y, extra=x)
        with pytest.raises(PenstockError, match=r"named value|shares memory"):
            pipe.step(x, y, extra=x[:, :1])


def test_a_write_into_an_input_that_is_the_target_is_refused():
    x, y = batch(0)
    for ranks in (1, 2):
        net = nn.Sequential(Writes(), Pass())
        with penstock.Pipeline(net, mean_square, ranks=ranks, microbatches=MICROBATCHES) as pipe:
            before = x.clone()
            for target in (x, x.view(4, 2, WIDTH).flatten(0, 1)):
                with pytest.raises(PenstockError, match=r"its input, which shares memory with the target"):
                    pipe.step(x, target)
            pipe.step(x, y)
            assert torch.equal(x, before)


def target_is_input(rank: int, writes: bool) -> str:
    """Take a step whose input, which the first stages pass on, is the target; return the error, or what differs."""
    x, _ = batch(0)
    torch.manual_seed(0)
    net = nn.Sequential(Pass(), Pass(), Writes() if writes else nn.Linear(WIDTH, WIDTH), Pass())
    plain = copy.deepcopy(net)
    with penstock.Pipeline(net, mean_square, ranks=2, microbatches=MICROBATCHES) as pipe:
        try:
            seen = pipe.step(x, x).losses
        except PenstockError as error:
            return str(error)
    expected = [mean_square(plain(part), part).detach() for part in x.chunk(MICROBATCHES)]
    return "" if torch.equal(seen, torch.stack(expected)) else f"{seen} for {expected}"


def test_an_input_that_is_the_target_may_be_read_and_is_not_written_behind_a_cut():
    assert "shares memory with the target" in target_is_input(0, True)
    assert target_is_input(0, False) == ""


@pytest.mark.slow
def test_processes_do_the_same_with_an_input_that_is_the_target(processes: LocalProcesses):
    for found in processes.run(2, target_is_input, True):
        assert "shares memory with the target" in found
    assert processes.run(2, target_is_input, False) == ["", ""]


class TakesTwo(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, value: dict[str, Tensor]) -> Tensor:
        if self.writes:
            value["a"].add_(1)
        return self.inner(value["a"]) + value["b"]


@pytest.mark.parametrize("input_grads", [False, True])
def test_one_tensor_at_two_places_of_the_batch(input_grads: bool):
    x, y = batch(0)
    for writes in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(TakesTwo(writes), Pass())
        with penstock.Pipeline(net, mean_square, ranks=2, microbatches=MICROBATCHES) as pipe:
            if writes and input_grads:
                with pytest.raises(
                    PenstockError, match=r"value\['a'\], which shares memory with value\['b'\]"
                ):
                    pipe.step({"a": x, "b": x}, y, input_grads=True)
                continue
            result = pipe.step({"a": x, "b": x}, y, input_grads=input_grads)
            with pytest.raises(PenstockError) if writes else pytest.raises(ZeroDivisionError):
                pipe.step({"a": x, "b": x[:, :1]}, y)
                raise ZeroDivisionError
        expected = []
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            one = part.clone()
            expected.append(mean_square(net({"a": one, "b": one}), target).detach())
        assert torch.equal(result.losses, torch.stack(expected))
        if input_grads:
            assert len(result.input_grads[0]) == 2
