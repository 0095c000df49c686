"""A job on every process: what one raises, all raise."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import ConfigError, PenstockError, SplitError
from penstock.parallel.replicas.exchange import run_each
from tests.support.beside import Line


def raised(*errors: Exception | None) -> list[Any]:
    """Return what each of two processes raises or returns, whose jobs raise these errors or return their rank."""
    line = Line(2)

    def run(rank: int) -> Any:
        def job() -> int:
            if (error := errors[rank]) is not None:
                raise error
            return rank

        return run_each(job, lambda report: line.swap(rank, report))

    return line.run(run)


def test_all_get_the_results_of_all():
    assert raised(None, None) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("first", "second", "kinds"),
    [
        (ConfigError("first"), PenstockError("second"), [ConfigError, ConfigError]),
        (PenstockError("first"), ConfigError("second"), [PenstockError, PenstockError]),
        # Of errors about what was given, each process keeps the kind of its own.
        (ConfigError("first"), SplitError("second"), [ConfigError, SplitError]),
    ],
)
def test_the_first_error_is_raised_everywhere_and_keeps_what_each_has_met(first, second, kinds):
    one, other = raised(first, second)
    assert one is first
    assert [type(one), type(other)] == kinds
    assert str(other) == "first"
    assert other.__cause__ is second


def test_an_error_of_one_is_raised_by_the_others():
    one, other = raised(None, ConfigError("second"))
    assert (type(one), str(one), one.__cause__) == (ConfigError, "second", None)
    assert str(other) == "second"


def test_an_error_of_the_operating_system_names_its_file():
    for error in raised(None, FileNotFoundError(2, "No such file", "a.txt")):
        assert type(error) is PenstockError
        assert "a.txt" in str(error)
