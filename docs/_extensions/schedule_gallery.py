"""Gallery of schedules: a page with a picture for every family of the catalogue, written before the pages are read.

``docs/gallery.md`` has the text, and a fenced ``{gallery}`` where the table of all families is to be.

A new family of the catalogue gets its page by itself. All schedules have the same counts and costs, so that pictures and
figures can be compared. Files that would not change are left alone; Sphinx then reads only what is new.
"""

from __future__ import annotations

import inspect
import re
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from sphinx.application import Sphinx

from penstock.schedule.check import brief, check
from penstock.schedule.families import FAMILIES, CatalogueFamily
from penstock.schedule.families.closed_forms import Setting
from penstock.schedule.schedule import Schedule
from penstock.show.picture import PictureStyle, draw_picture
from penstock.simulate.costs import Costs
from penstock.simulate.metrics import Metrics, measure
from penstock.simulate.simulator import simulate
from penstock.trace.events import Trace

RANKS, MICROBATCHES = 4, 8
PAPER = re.compile(r"\b(\d{4}\.\d{5})\b")
STYLE = PictureStyle(title="", width=10)
TABLE = """| | | makespan | bubble | peak activations |
|---|---|---|---|---|
{rows}

```{{toctree}}
:hidden:

{pages}
```
"""
MARK = "```{gallery}\n```"
PAGE = """# {title}

{about}

```{{image}} {name}.svg
:alt: Timeline of {name} on {ranks} ranks with {microbatches} microbatches
```

| | |
|---|---|
| published in | {source} |
| needs | {needs} |
| stages per rank | {stages} |
| options | {options} |
| gradients | {gradients} |
| makespan | {makespan}; no order with this placement and these costs takes less than {bound} |
| bubble | {bubble} |
| bubble's formula | {bubble_formula} |
| peak activations | {peak} |
| peak's formula | {peak_formula} |

In the formulas, p is the number of ranks, m of microbatches, v of stages per rank, and r the rank. F, B and W are the
seconds that a rank spends on the forward, the input gradient and the weight gradient of one microbatch. Activations are
counted in chunks, one microbatch on one stage, until the weight gradient is done.

```text
$ penstock schedule draw {name} -p {ranks} -m {microbatches} --costs 1,1,1 --out {name}.svg
$ penstock simulate {name} -p {ranks} -m {microbatches} --costs 1,1,1
```

```python
penstock.Pipeline(model, loss_fn, ranks={ranks}, schedule="{name}", microbatches={microbatches})
```
"""


class Entry(NamedTuple):
    """One family of the gallery, with its schedule for the gallery's counts."""

    family: CatalogueFamily
    schedule: Schedule
    trace: Trace
    figures: Metrics


def escaped(text: str) -> str:
    """Return text in which Markdown finds no markup."""
    return re.sub(r"([*_|<>])", r"\\\1", text)


def linked(text: str) -> str:
    """Return text with the numbers of papers as links to them."""
    return PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def number(value: object) -> str:
    """Return a number without needless digits."""
    return f"{float(Fraction(str(value))):g}"


def about(family: CatalogueFamily) -> str:
    """Return the first paragraph of a family's docstring, as Markdown."""
    paragraph = (inspect.getdoc(family.rule) or "").split("\n\n")[0]
    return linked(" ".join(paragraph.split()).replace("``", "`"))


def row(entry: Entry) -> str:
    """Return a family's row of the overview."""
    family, figures = entry.family, entry.figures
    chunks = int(figures.peak_activations.max())
    whole = number(Fraction(chunks * figures.ranks, figures.stages))
    name = family.name
    return (
        f"| [{name}](gallery/{name}.md) | [![{name}](gallery/{name}.svg)](gallery/{name}.md) "
        f"| {number(figures.makespan)} | {number(figures.bubble.max())} | {chunks} ({whole}) |"
    )


def page(entry: Entry) -> str:
    """Return the page of a family."""
    family, schedule, figures = entry.family, entry.schedule, entry.figures
    v = family.default_virtual_stages
    chosen = (
        f"from {family.least_virtual_stages} on, default {v}" if family.chooses_virtual_stages else str(v)
    )
    holders = len(schedule.placement.holders[0])
    copies = f"; every stage is on {'two' if holders == 2 else 'all'} ranks" if holders > 1 else ""
    expected = family.bubble.value(Setting(RANKS, MICROBATCHES, v))
    held = figures.peak_activations.tolist()
    options = [f"`{name}`" for name in family.options]
    return PAGE.format(
        title=family.name,
        name=family.name,
        about=about(family),
        ranks=RANKS,
        microbatches=MICROBATCHES,
        source=linked(family.source),
        needs=family.needs,
        stages=chosen + copies,
        options=", ".join(options) or "none",
        gradients="bit-equal to plain PyTorch"
        if family.in_order
        else "equal to plain PyTorch up to the order of summation",
        makespan=number(figures.makespan),
        bound=number(figures.lower_bound),
        bubble=f"{number(figures.bubble.max())}, {figures.bubble_of_makespan:.1%} of ranks × makespan"
        + ("" if expected is None else f"; {number(expected)} by the formula"),
        bubble_formula=escaped(family.bubble.text),
        peak=f"{brief(held)} chunks {'on every rank' if len(set(held)) == 1 else 'from rank 0 on'}",
        peak_formula=escaped(family.peak.text),
    )


def entries() -> list[Entry]:
    """Return all families of the catalogue with their schedules, proved and simulated."""
    made = []
    for family in FAMILIES.values():
        schedule = family.build(RANKS, MICROBATCHES)
        costs = Costs.of(schedule.placement, 1, 1, 1)
        trace = simulate(check(schedule).program, costs)
        made.append(Entry(family, schedule, trace, measure(schedule, costs, trace)))
    return made


def contents(folder: Path, made: list[Entry]) -> dict[str, bytes]:
    """Return the contents of every file of the gallery by name."""
    files = {}
    for entry in made:
        name = f"{entry.family.name}.svg"
        draw_picture(entry.trace, folder / name, STYLE)
        files[name] = (folder / name).read_bytes()
        files[f"{entry.family.name}.md"] = page(entry).encode()
    return files


def table(made: list[Entry]) -> str:
    """Return the table of all families, with the tree of their pages."""
    pages = "\n".join(f"gallery/{entry.family.name}" for entry in made)
    return TABLE.format(rows="\n".join(map(row, made)), pages=pages)


def write(app: Sphinx) -> None:
    """Write the gallery below the sources, and delete pages of families that are gone."""
    gallery = Path(app.srcdir) / "gallery"
    gallery.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        made = entries()
        files = contents(Path(folder), made)
    for stale in {path.name for path in gallery.iterdir()} - set(files):
        (gallery / stale).unlink()
    for name, content in files.items():
        path = gallery / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
    shown = table(made)

    def read(app: Sphinx, docname: str, source: list[str]) -> None:
        if docname == "gallery":
            source[0] = source[0].replace(MARK, shown)

    app.connect("source-read", read)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
