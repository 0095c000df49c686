"""Lanes of the tests: which members of a parameter list run by default, and which in the slower lanes.

A list names first the members that reach a mechanism no other member reaches; the rest of the product is exhaustive:

    @pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", *slow("dualpipe"), *exhaustive("gpipe", "zb-v")])

A case of several lists is in the slowest lane of its members.
"""

from __future__ import annotations

from typing import Any

import pytest


def slow(*members: Any) -> list[Any]:
    """Return members whose cases run in ``make test-slow``; a tuple has the values of several arguments."""
    return [_marked(member, pytest.mark.slow) for member in members]


def exhaustive(*members: Any) -> list[Any]:
    """Return members whose cases run in ``make test-all`` alone; a tuple has the values of several arguments."""
    return [_marked(member, pytest.mark.exhaustive) for member in members]


def _marked(member: Any, mark: pytest.MarkDecorator) -> Any:
    values = member if isinstance(member, tuple) else (member,)
    return pytest.param(*values, marks=mark)
