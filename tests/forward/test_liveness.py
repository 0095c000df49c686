"""Names that statements read, assign, surely assign, and need from before."""

from __future__ import annotations

import ast

import pytest

from penstock.forward.liveness import assigned, live_before, own_returns, reads, surely_assigned


def body(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = y + z", {"y", "z"}),
        ("x += y", {"x", "y"}),
        ("x[i] = y", {"x", "i", "y"}),
        ("y = [a * k for a in b]", {"k", "b"}),
        ("f = lambda a: a + c", {"c"}),
        ("def f(a, b=d):\n    return a + e", {"d", "e"}),
    ],
)
def test_reads(text: str, expected: set[str]):
    assert reads(*body(text)) == expected


@pytest.mark.parametrize(
    ("text", "maybe", "surely"),
    [
        ("x, (y, *z) = f()", {"x", "y", "z"}, {"x", "y", "z"}),
        ("if c:\n    x = 1\nelse:\n    x = y = 2", {"x", "y"}, {"x"}),
        ("if c:\n    raise E\nelse:\n    x = 1", {"x"}, {"x"}),
        ("for i in a:\n    x = i", {"i", "x"}, set()),
        ("with f() as g:\n    x = 1", {"g", "x"}, {"g", "x"}),
        ("x: int", {"x"}, set()),
        ("y = [x for x in a]\nif (z := y): pass", {"y", "z"}, {"y"}),
        ("return x", set(), None),
        ("if c:\n    return 1\nelse:\n    return 2", set(), None),
    ],
)
def test_assigns(text: str, maybe: set[str], surely: set[str] | None):
    assert assigned(body(text)) == maybe
    assert surely_assigned(body(text)) == surely


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("x = y\nz = x", {"z"}, {"y"}),
        ("if c:\n    x = 1", {"x"}, {"c", "x"}),
        ("if c:\n    x = 1\nelse:\n    x = 2", {"x"}, {"c"}),
        ("for i in a:\n    t = i + s\n    s = t", {"s"}, {"a", "s"}),
        ("while x > 1:\n    x = x / n", {"x"}, {"x", "n"}),
        ("x = 1\nif c:\n    continue\ny = 2", {"y"}, {"c", "y"}),
        ("try:\n    x = f()\nexcept E:\n    x = g()", {"x"}, {"f", "g", "E", "x"}),
        ("return x + y", {"z"}, {"x", "y"}),
    ],
)
def test_lives(text: str, after: set[str], expected: set[str]):
    assert live_before(body(text), after) == expected


def test_returns_of_inner_functions_do_not_count():
    statements = body("def f():\n    return 1\nif c:\n    return f()")
    assert len(own_returns(statements)) == 1
