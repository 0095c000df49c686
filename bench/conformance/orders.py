"""An order of ops as another project makes it, and the project that it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

Cells = list[list[str]]
"""Cells of a file of CSV, a list for every rank; an empty cell is an idle slot."""

_OP = re.compile(r"\d+[FBIW]\d+|\(.+\)OVERLAP_F_B")


class Order(NamedTuple):
    """One schedule of another project.

    Attributes:
        name: counts that it was made for.
        microbatches: number of microbatches that it was made for.
        cells: what is written into the file.
        ops: ops that are meant, a list for every rank, as Penstock writes them.
        rules: ops by our own rules, equal to `ops` where they stand in for the package.
        layers: layers of every stage, where the project says them; else each stage has one.
    """

    name: str
    microbatches: int
    cells: Cells
    ops: Cells
    rules: Cells
    layers: list[int] | None = None


class Project(NamedTuple):
    """Orders of one kind, and where they come from.

    Attributes:
        name: project and schedule.
        source: package with its version, or "rules" where the package is not installed and our own rules stand in for it.
        orders: its orders.
    """

    name: str
    source: str
    orders: list[Order]


def computing(cells: Cells) -> Cells:
    """Return the ops of compute among cells: without idle slots, messages, gathers and reductions."""
    return [[cell for cell in line if _OP.fullmatch(cell)] for line in cells]


def order_of(
    p: int, m: int, v: int, cells: Cells, *, ops: Cells | None = None, rules: Cells | None = None
) -> Order:
    """Return the order of p ranks, m microbatches and v stages a rank; what is left out is the ops among its cells."""
    ops = computing(cells) if ops is None else ops
    return Order(f"p={p} m={m} v={v}", m, cells, ops, ops if rules is None else computing(rules))


def counts(
    ranks: tuple[int, ...],
    microbatches: tuple[int, ...],
    virtual: tuple[int, ...] = (1,),
    quick: bool = False,
) -> Iterator[tuple[int, int, int]]:
    """Yield ranks, microbatches and stages a rank; one of each, the largest, if it is to be quick."""
    if quick:
        yield ranks[-1], microbatches[-1], virtual[-1]
    else:
        yield from product(ranks, microbatches, virtual)
