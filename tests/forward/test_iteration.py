"""Rounds of loops over modules, and tests that are known when a model is split."""

from __future__ import annotations

import ast

import pytest

from penstock.forward.frames import forward_frame
from penstock.forward.iteration import GIVEN, UNKNOWN, rounds, static_value
from tests.support.own_models import WithAdapters

FRAME = forward_frame(WithAdapters())


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("self.blocks[1:3]", ["self.blocks.1", "self.blocks.2"]),
        ("enumerate(self.blocks[::2], 5)", ["(5, self.blocks.0)", "(6, self.blocks.2)"]),
        (
            "zip(self.blocks[2:], self.adapters)",
            ["(self.blocks.2, self.adapters.0)", "(self.blocks.3, self.adapters.1)"],
        ),
        ("reversed(self.blocks[:2])", ["self.blocks.1", "self.blocks.0"]),
        ("range(len(self.blocks) - 2, 4)", ["2", "3"]),
        ("blocks", None),
        ("range(n)", None),
        ("self.head.children()", None),
        ("zip(self.blocks, self.adapters[1:], strict=True)", None),
        ("zip(self.blocks, blocks)", None),
        ("zip()", None),
    ],
)
def test_rounds(text: str, expected: list[str] | None):
    found = rounds(FRAME, expression(text), {})
    assert (None if found is None else [ast.unparse(e) for e in found]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y is None", False),
        ("y is not None and z is None", True),
        ("y", GIVEN),
        ("not z", True),
        ("w or z is None", UNKNOWN),
        ("w and z", UNKNOWN),
        ("z and w", False),
        ("len(self.blocks) // 2 == 2", True),
        ("self.training", UNKNOWN),
        ("3 < y", UNKNOWN),
    ],
)
def test_static_values(text: str, expected: object):
    assert static_value(FRAME, expression(text), {"y": GIVEN, "z": None}) is expected
