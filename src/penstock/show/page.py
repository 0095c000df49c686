"""The report page's text: everything beside the figures, as HTML in which all that came from outside is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from penstock.show.advice import over_plan
from penstock.show.colours import BUSY, CAUSES, KINDS
from penstock.show.page_data import MOST_CURVES, PageStep, Unit, amount
from penstock.trace.bubbles import bubble_fraction
from penstock.trace.events import Activity
from penstock.trace.join import present
from penstock.trace.memory_curve import peaks

MOST_ROWS = 64


def body(
    title: str,
    steps: Sequence[PageStep],
    unit: Unit,
    settings: str,
    problems: Sequence[str],
    *,
    curves: bool,
    memory: bool,
) -> str:
    """The page between its head and its scripts.

    Args:
        title: what the page is called.
        steps: at least one.
        unit: that times are shown in.
        settings: the resolved config, as text.
        problems: what could not be read.
        curves: whether there are training curves.
        memory: whether memory is known of any step.
    """
    parts = [
        _header(title, steps),
        _problems(problems),
        *_per_step(_first_look(step, unit) for step in steps),
    ]
    parts += ["<h2>Timeline</h2>", *_per_step(_legend(step) for step in steps), '<div id="time"></div>']
    hint = "Drag to move, ctrl and wheel to zoom, hover a block for its times; the box tool zooms to what you mark."
    if memory:
        hint += " The last chart is the memory that ranks hold (hover tells which); dashed is the plan, "
        hint += "the red line the limit."
        if any(step.trace.ranks > MOST_CURVES for step in steps):
            hint += f" Of more than {MOST_CURVES} ranks the one that holds most is drawn, and others spread evenly."
    parts += [f'<p class="hint">{hint}</p>', "<h2>Where every rank's time went</h2>", _causes(steps)]
    parts += ['<div id="bars"></div>', *_per_step(_table(step, unit) for step in steps)]
    parts += [*_per_step(_changes(step, unit) for step in steps)]
    if curves:
        parts += ["<h2>Training</h2>", '<div id="curves"></div>']
    parts += [*_per_step(_split(step) for step in steps)]
    if settings:
        parts.append(
            f"<details open><summary>Config, resolved</summary><pre>{escape(settings)}</pre></details>"
        )
    parts += [*_per_step(_orders(step) for step in steps)]
    return "\n".join(part for part in parts if part)


def first_shown(steps: Sequence[PageStep]) -> int:
    """The step that the page opens with: a run's last, since its first is warming up; the first of several simulations."""
    return len(steps) - 1 if steps[-1].trace.info.get("source") == "measured" else 0


def _per_step(texts: Iterable[str]) -> list[str]:
    """Sections of which the page shows the chosen step's; equal ones are there once."""
    where: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        where.setdefault(text, []).append(index)
    return [
        f'<section data-steps="{" ".join(map(str, at))}" hidden>{text}</section>'
        for text, at in where.items()
        if text
    ]


def _header(title: str, steps: Sequence[PageStep]) -> str:
    chosen = first_shown(steps)
    options = "".join(
        f'<option value="{n}"{" selected" if n == chosen else ""}>{escape(step.label)}</option>'
        for n, step in enumerate(steps)
    )
    chooser = f'<label>show <select id="step">{options}</select></label>' if len(steps) > 1 else ""
    return f"<header><h1>{escape(title)}</h1>{''.join(_per_step(map(_counts, steps)))}{chooser}</header>"


def _counts(step: PageStep) -> str:
    trace, program = step.trace, None if step.plan is None else step.plan.program
    words = [str(trace.info.get("schedule", "")), _many(trace.ranks, "rank")]
    if program is not None:
        words += [_many(program.schedule.stages, "stage"), _many(program.schedule.microbatches, "microbatch")]
    words += [str(trace.info.get("source", ""))]
    return f"<p>{escape(', '.join(word for word in words if word))}</p>"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<div class="problems"><b>Not everything could be read</b><ul>{items}</ul></div>'


def _first_look(step: PageStep, unit: Unit) -> str:
    trace = step.trace
    cards = [
        ("step", _time(step.split.makespan, unit)),
        ("of the ranks' time idle", f"{bubble_fraction(trace):.1%}"),
    ]
    if step.plan is not None and trace.info.get("source") == "measured":
        more = float(step.split.makespan) / float(step.plan.trace.end.max(initial=0) or 1) - 1
        cards.append(("against the plan", f"{more:+.1%}"))
    if trace.held is not None:
        cards.append(("most held by a rank", amount(trace, int(peaks(trace).max()))))
    if trace.info.get("clock_error"):
        cards.append(("error of the ranks' clocks", f"{float(str(trace.info['clock_error'])) * 1e6:.0f} µs"))
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in cards)
    said = [step.where]
    if step.plan is not None and step.advice is not None:
        said.append(step.advice.what)
        if trace.info.get("source") == "measured":
            said.append(over_plan(trace, step.plan))
    else:
        said.append(f"There is no plan to compare with: {step.unplanned}.")
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in said)
    return f'<div class="cards">{shown}</div><div class="say">{sentences}</div>'


def _legend(step: PageStep) -> str:
    there = {int(kind) for kind in np.unique(step.trace.kind)}
    swatches = "".join(
        f'<span><i data-colour="{c.full}"></i><i data-colour="{c.light}"></i> {c.letter} {c.meaning}</span>'
        for kind, c in KINDS.items()
        if kind in there
    )
    several = any(len(np.unique(step.trace.stage[rows])) > 1 for rows in step.trace.rank_slices())
    note = "<span>the lighter shade: every second stage of a rank</span>" if several else ""
    planned = step.plan is not None and step.trace.info.get("source") == "measured"
    above = "<span>above: measured; below: planned from the usual time of each op</span>" if planned else ""
    idle = "<span>pale: idle, in the colour of the cause below</span>"
    return f'<div class="legend">{swatches}{note}{idle}{above}</div>'


def _causes(steps: Sequence[PageStep]) -> str:
    there = [cause for cause in CAUSES if any(cause in step.split.causes for step in steps)]
    named = [(BUSY, "computing"), *(CAUSES[cause] for cause in there)]
    spans = "".join(f'<span><i data-colour="{colour}"></i> {meaning}</span>' for colour, meaning in named)
    return f'<div class="legend">{spans}</div>'


def _table(step: PageStep, unit: Unit) -> str:
    """Time by rank and cause; a cause that is nowhere has no column, and of very many ranks only the first are listed."""
    split, trace = step.split, step.trace
    causes = split.causes
    heads = ["rank", "computing", "idle", *(CAUSES[cause][1] for cause in causes)]
    held = None if trace.held is None else peaks(trace)
    heads += [] if held is None else ["most held"]
    rows, there = [], present(trace)
    whole = float(split.makespan) or 1.0
    for rank in there[:MOST_ROWS]:
        busy = float(split.busy[rank])
        times = [_part(busy, whole, unit), _part(whole - busy, whole, unit)]
        times += [_part(float(split.idle[cause][rank]), whole, unit) for cause in causes]
        times += [] if held is None else [amount(trace, int(held[rank]))]
        rows.append([str(rank), *times])
    mean = [np.mean(split.busy[there]), whole - np.mean(split.busy[there])] if there else []
    mean += [np.mean(split.idle[cause][there]) for cause in causes] if there else []
    rows.append(
        ["mean", *(_part(float(time), whole, unit) for time in mean), *([""] if held is not None else [])]
    )
    more = f'<p class="hint">and {len(there) - MOST_ROWS} ranks more</p>' if len(there) > MOST_ROWS else ""
    return f"<div class=wide>{_html_table(heads, rows)}</div>{more}"


def _part(time: float, whole: float, unit: Unit) -> str:
    """A time to the thousandth of the whole, and its share; whole numbers as they are."""
    if time <= 1e-9 * whole:
        return "–"
    shown = time * unit.each
    decimals = max(0, 2 - math.floor(math.log10(whole * unit.each)))
    text = f"{shown:.0f}" if shown == round(shown) else f"{shown:.{decimals}f}"
    return f"{text}{' ' if unit.name else ''}{unit.name} ({time / whole:.1%})"


def _changes(step: PageStep, unit: Unit) -> str:
    if step.advice is None:
        return ""
    now = step.advice.changes[0]
    rows = [
        [
            change.words[0].upper() + change.words[1:],
            _time(change.makespan, unit),
            f"{change.makespan / now.makespan - 1:+.1%}" if now.makespan else "",
            f"{change.bubble:.1%}",
            f"{change.memory:.3g}",
        ]
        for change in step.advice.changes
    ]
    heads = ["change", "step, simulated", "against now", "idle", "most microbatches' activations held"]
    return f"<h2>What if</h2><div class=wide>{_html_table(heads, rows, now=0)}</div>"


def _split(step: PageStep) -> str:
    split = step.trace.info.get("split")
    if not isinstance(split, list | tuple) or not all(isinstance(layers, list | tuple) for layers in split):
        return ""
    holders = {} if step.plan is None else dict(enumerate(step.plan.program.schedule.placement.holders))
    rows = [
        [
            str(stage),
            ", ".join(map(str, holders.get(stage, ()))),
            str(len(layers)),
            ", ".join(map(str, layers)),
        ]
        for stage, layers in enumerate(split)
    ]
    return f"<h2>Model and split</h2><div class=wide>{_html_table(['stage', 'rank', 'layers', 'which'], rows)}</div>"


def _orders(step: PageStep) -> str:
    if step.plan is None:
        return ""
    schedule = step.plan.program.schedule
    lines = "\n".join(f"rank {rank}: {schedule.text(rank)}" for rank in range(schedule.ranks))
    return f"<details><summary>Schedule, rank by rank</summary><pre>{escape(lines)}</pre></details>"


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], now: int | None = None) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in heads)
    lines = "".join(
        f"<tr{' class=now' if n == now else ''}>"
        + "".join(f"<td>{escape(word)}</td>" for word in row)
        + "</tr>"
        for n, row in enumerate(rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _time(time: Any, unit: Unit) -> str:
    return f"{float(time) * unit.each:.4g}{' ' if unit.name else ''}{unit.name}"


assert [int(kind) for kind in KINDS] == [int(kind) for kind in Activity], (
    "the script finds a kind's colour by number"
)
