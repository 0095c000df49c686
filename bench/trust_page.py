"""Predicted values beside measured ones: every row in bench/PUBLISHED.md, their errors by source in docs/trust.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import wrap

from bench.comparison import Comparison, Row

_ROOT = Path(__file__).parents[1]
PAGE, TABLES = _ROOT / "docs" / "trust.md", _ROOT / "bench" / "PUBLISHED.md"
_PAGE_HEAD = """\
# Predictions beside published measurements

How far `penstock plan` is from steps and bytes that others have measured and published, by source. The predictions
are those of `penstock.plan.predict` for the same model, devices and layout, in closed form. Each row, its source and
the reasons of the largest errors stand in `bench/PUBLISHED.md` of the repository. `python -m bench.published --write`
writes both.

- A preset has about ten rates for its GPU, fitted to rows without a remark (in brackets). *Each model left out* shows
  foresight: rates of other models.
- Believe a step within a few percent where a layout like it is published (`tp` within a node, no sharded weights),
  and the order of layouts rather than their times elsewhere. Take sharded weights over hundreds of devices as lower
  bounds. No rate is fitted to a mixture of experts.
- Beyond what is published, a plan's interval is wider, and its page says so. For machines of your own, first measure
  them: `penstock doctor --measure cluster.toml`.

| | source | rows | mean | median | largest |
|---|---|---|---|---|---|
"""
_TABLES_HEAD = """\
# Predictions beside published measurements: every row

`python -m bench.published --write` prints these tables and writes this page and [docs/trust.md](../docs/trust.md).
Nothing was measured here: all measurements are published, each with its source in
[data/end_to_end.csv](data/end_to_end.csv).

A preset of a cluster has about ten rates for its type of GPU. They are fitted to the rows without a remark, by a fit
that begins with rated values and lets outliers count little; `python -m bench.published --only fit` repeats it. Rows
that a layout cannot express are not here: vocabulary parallelism, and pipelines whose layout is not published.

Sources: SC21 is Megatron-LM (2104.04473, table 1), Korthikanti 2205.05198 (table 5 and figure 1), vTrain the
validation runs of 2312.12391, Vocabulary 2411.05288, Zero Bubble 2401.10241, NeMo the performance tables of NeMo and
Megatron-Bridge, Megatron-core the table of its repository, SimuMax its report on B200, and Llama 3 2407.21783.
"""
_WIDTH = 150
_RULE = "|---|---|---|---|---|---|---|"


def summary_lines(comparison: Comparison) -> Iterator[str]:
    """Yield one section's lines of docs/trust.md."""
    for s in comparison.summaries:
        yield f"| {comparison.title} | {s.group} | {s.rows} | {s.mean:.1%} | {s.median:.1%} | {s.largest:.1%} |"


def section_text(comparison: Comparison) -> str:
    """Return one section of bench/PUBLISHED.md."""
    says = f"{comparison.says} `python -m bench.published --only {comparison.name}` prints this table."
    paragraph = wrap(says, _WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = [f"## {comparison.title}", "", *paragraph, ""]
    lines += ["| source | model | layout | predicted | measured | error | remark |", _RULE]
    lines += map("| {} |".format, map(" | ".join, map(_cells, comparison.rows)))
    return "\n".join([*lines, ""])


def _cells(row: Row) -> Iterator[str]:
    yield from (row.group, row.model, row.layout)
    yield f"{row.predicted:.4g} {row.unit}"
    yield f"{row.measured:.4g} {row.unit}"
    yield f"{row.error:+.1%}"
    yield "; ".join(filter(None, (row.remark, row.note)))


def write_pages(comparisons: Iterable[Comparison]) -> None:
    """Write both pages."""
    comparisons = list(comparisons)
    lines = [line for comparison in comparisons for line in summary_lines(comparison)]
    PAGE.write_text(_PAGE_HEAD + "\n".join([*lines, ""]))
    TABLES.write_text("\n".join([_TABLES_HEAD, *map(section_text, comparisons)]))
