"""Predicted values beside measured ones, and their errors by group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Row:
    """One predicted value beside the measured one.

    Attributes:
        group: source, and what else rows are summarized by.
        model, layout: model and layout.
        unit: unit of both values.
        predicted, measured: the values.
        remark: reason why the row is not in its group's summary but in one of its own; empty if it is.
        note: further remark, which changes no summary.
    """

    group: str
    model: str
    layout: str
    unit: str
    predicted: float
    measured: float
    remark: str = ""
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Summary:
    """Sizes of the errors of a group's rows.

    Attributes:
        group: the group, with the remark that its rows share.
        rows: number of rows.
        mean, median, largest: of the errors' sizes, as shares.
    """

    group: str
    rows: int
    mean: float
    median: float
    largest: float

    def __str__(self) -> str:
        count = f"{self.rows} row{'s' * (self.rows != 1)}"
        return f"{self.group}: {count}, mean {self.mean:.2%}, median {self.median:.2%}, largest {self.largest:.2%}"


@dataclass(frozen=True)
class Comparison:
    """Rows of one section.

    Attributes:
        name: name of the section on the command line.
        title: title of the section on a page.
        says: sentences about how the rows are predicted, and the targets.
        rows: the rows.
    """

    name: str
    title: str
    says: str
    rows: tuple[Row, ...]

    @property
    def summaries(self) -> list[Summary]:
        """One summary for each group of rows, and one for each remark within it."""
        summaries = []
        for group, remark in dict.fromkeys((row.group, row.remark) for row in self.rows):
            sizes = [abs(row.error) for row in self.rows if (row.group, row.remark) == (group, remark)]
            name = f"{group} ({remark})" if remark else group
            summaries.append(
                Summary(name, len(sizes), float(np.mean(sizes)), float(np.median(sizes)), max(sizes))
            )
        return summaries


def table_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a comparison's lines for a terminal."""
    yield f"{comparison.name}: {comparison.title}"
    first, second = (max(len(getattr(row, key)) for row in comparison.rows) for key in ("group", "model"))
    for row in comparison.rows:
        remark = "; ".join(filter(None, (row.remark, row.note)))
        values = f"{row.predicted:9.3f} {row.measured:9.3f} {row.unit:3} {row.error:+8.2%}"
        layout = f"{row.layout} ({remark})" if remark else row.layout
        yield f"  {row.group:{first}} {row.model:{second}} {values}  {layout}"
    for summary in comparison.summaries:
        yield f"  {summary}"
