"""What replicas compare, with replicas in threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.base.errors import ConfigError, PeerError
from penstock.parallel.replicas.replica_checks import (
    StepReport,
    exchange_reports,
    first_replicas,
    require_equal_models,
    require_same_step,
)
from tests.support.beside import Line


class Reducer:
    """The exchange of numbers between two replicas."""

    def __init__(self, line: Line, rank: int) -> None:
        self.rank, self.size = rank, line.size
        self._line = line

    def exchange(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        every = self._line.swap(self.rank, numbers)
        return lambda: every


def on_both(call: Callable[[Reducer], object]) -> list[object]:
    """Return what a call returns on each replica, or the error that it raises."""
    line = Line(2)
    return line.run(lambda rank: call(Reducer(line, rank)))


ONE = [("a", torch.zeros(2, 3)), ("b", torch.ones(4))]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            ONE[:1],
            "the number of parameters that require a gradient: replica 0 has 2, replica 1 has 1; build the same",
        ),
        (
            [ONE[0], ("c", ONE[1][1])],
            "name, shape, dtype or requires_grad: replica 1 from replica 0 first at parameter 1, here ",
        ),
        (
            [("a", torch.zeros(3, 2)), ONE[1]],
            "name, shape, dtype or requires_grad: replica 1 from replica 0 first at parameter 0",
        ),
        (
            [ONE[0], ("b", torch.ones(4).half())],
            "name, shape, dtype or requires_grad: replica 1 from replica 0 first at parameter 1",
        ),
        (
            [ONE[0], ("b", ONE[1][1].clone().requires_grad_())],
            "name, shape, dtype or requires_grad: replica 1 from replica 0 first at parameter 1",
        ),
        (
            [ONE[0], ("b", 2 * ONE[1][1])],
            "initial values: replica 1 from replica 0 first at parameter 1, here 'b'",
        ),
    ],
)
def test_the_first_difference_between_models_is_named_on_both(other, message):
    for error in on_both(lambda reducer: require_equal_models(reducer, other if reducer.rank else ONE)):
        assert isinstance(error, ConfigError)
        assert f"the replicas' models differ in {message}" in str(error)


def test_equal_models_pass():
    same = [(name, value.clone()) for name, value in ONE]
    assert on_both(lambda reducer: require_equal_models(reducer, same if reducer.rank else ONE)) == [
        None,
        None,
    ]


def reported(*reports: StepReport) -> list[object]:
    def report(reducer: Reducer) -> None:
        require_same_step(reducer, exchange_reports(reducer, reports[reducer.rank])())

    return on_both(report)


def test_replicas_at_the_same_step_go_on_and_others_do_not():
    assert reported(StepReport(3, late=1), StepReport(3)) == [None, None]
    for error in reported(StepReport(3), StepReport(4)):
        assert "replica 0 is at step 3, replica 1 is at step 4; one of them left out a step" in str(error)


def test_the_others_are_told_of_a_failure_and_the_failed_one_raises_its_own():
    there, here = reported(StepReport(3, failed=1), StepReport(3))
    assert there is None
    assert isinstance(here, PeerError)
    assert "replica 0 failed" in str(here)


def test_all_get_the_numbers_of_the_first_replica():
    assert on_both(lambda reducer: first_replicas(reducer, [reducer.rank + 5, 7])) == [[5, 7], [5, 7]]
