"""The page docs/trust.md: every predicted value beside the measured one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap

from bench.comparison import Comparison, Row

PAGE = Path(__file__).parents[1] / "docs" / "trust.md"
_HEAD = """\
# Predictions beside published measurements

`python -m bench.published --write` prints these tables and writes this page. Nothing was measured here: all measurements are
published, each with its source in [bench/data/end_to_end.csv](../bench/data/end_to_end.csv). The predictions are those of
`penstock.plan.predict` for the same model, devices and layout, in closed form.

A preset of a cluster has about ten rates for its type of GPU. They are fitted to the rows without a remark, by a fit
that begins with rated values and lets outliers count little; `python -m bench.published --only fit` repeats it. Rows
that a layout cannot express are not here: vocabulary parallelism, and pipelines whose layout is not published.

Sources: SC21 is Megatron-LM (2104.04473, table 1), Korthikanti 2205.05198 (table 5 and figure 1), vTrain the validation
runs of 2312.12391, Vocabulary 2411.05288, Zero Bubble 2401.10241, NeMo the performance tables of NeMo and
Megatron-Bridge, Megatron-core the table of its repository, SimuMax its report on B200, and Llama 3 2407.21783.
"""
_WIDTH = 150
_RULE = "|---|---|---|---|---|---|---|"


def page_text(comparisons: Iterable[Comparison]) -> str:
    """Return the page of these sections."""
    return "\n".join([_HEAD, *(section_text(comparison) for comparison in comparisons)])


def section_text(comparison: Comparison) -> str:
    """Return one section of the page."""
    says = f"{comparison.says} `python -m bench.published --only {comparison.name}` prints this table."
    paragraph = wrap(says, _WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = [f"## {comparison.title}", "", *paragraph, ""]
    lines += ["| | rows | mean | median | largest |", "|---|---|---|---|---|"]
    for s in comparison.summaries:
        lines.append(f"| {s.group} | {s.rows} | {s.mean:.2%} | {s.median:.2%} | {s.largest:.2%} |")
    lines += ["", "| source | model | layout | predicted | measured | error | remark |", _RULE]
    lines += map("| {} |".format, map(" | ".join, map(_cells, comparison.rows)))
    return "\n".join([*lines, ""])


def _cells(row: Row) -> Iterator[str]:
    yield from (row.group, row.model, row.layout)
    yield f"{row.predicted:.4g} {row.unit}"
    yield f"{row.measured:.4g} {row.unit}"
    yield f"{row.error:+.1%}"
    yield "; ".join(filter(None, (row.remark, row.note)))


def write_page(comparisons: Iterable[Comparison]) -> Path:
    """Write the page, and return its path."""
    PAGE.write_text(page_text(comparisons))
    return PAGE.relative_to(PAGE.parents[1])
