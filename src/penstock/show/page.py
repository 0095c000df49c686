"""The report page's text, rendered from templates that escape everything that came from outside.

Its content security policy lets the browser run and load nothing but what the page brought itself. Scripts run by the digest
of their text. Style sheets apply by a nonce that is drawn for each page, since Bokeh makes some at run time. The network is
never asked for anything, no text becomes code (no ``eval``), and neither attributes nor forms do anything. So even text from
a trace or a config that got past the escaping would remain text.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from penstock.base.atomic import write_bytes
from penstock.base.counts import plural
from penstock.base.errors import ConfigError, os_errors_as
from penstock.show.analysis import StepAnalysis
from penstock.show.blocks import several_stages
from penstock.show.figures import library
from penstock.show.page_data import MAX_CURVES, drawn_ranks, styles
from penstock.show.palette import BUSY, CAUSES, KINDS
from penstock.show.report_page import RunFacts, numbered, overview_table
from penstock.show.units import Unit, amount, decimals, finite
from penstock.trace.bubbles import bubble_fraction
from penstock.trace.events import API, Trace
from penstock.trace.expert_load import EXPERTS
from penstock.trace.join import merged_halves

MAX_ROWS = 64

_ENVIRONMENT = Environment(
    loader=PackageLoader("penstock.show"),
    autoescape=True,
    # A value that a template misses is an error, not an empty place.
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
# The filter `tojson` also escapes what could end a script element.
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}


def render(
    steps: Sequence[StepAnalysis],
    unit: Unit,
    facts: RunFacts,
    data: Mapping[str, Any],
    figures: Mapping[str, Any],
    **values: Any,
) -> str:
    """Return the whole page as HTML, which reloads itself every ``reload_seconds`` of the further `values` (0: never)."""
    causes = [cause for cause in CAUSES if any(cause in step.bubbles.causes for step in steps)]
    return fill_template(
        "page.html",
        data,
        figures,
        steps=[_view(step, unit) for step in steps],
        # A run's last, since its first warms up; the first of several simulations.
        first_shown=len(steps) - 1 if steps[-1].measured else 0,
        overview=overview_table(steps, unit) if len(steps) > 1 else None,
        numbered=numbered(steps),
        ranks=max(step.trace.ranks for step in steps),
        max_curves=MAX_CURVES,
        memory=any(step.trace.held is not None for step in steps),
        causes=[(BUSY, "computing"), *((CAUSES[cause].colour, CAUSES[cause].meaning) for cause in causes)],
        tiles=facts.tiles,
        facts=facts.lines,
        shared=_shared,
        **values,
    )


def fill_template(
    template: str,
    data: Mapping[str, Any],
    figures: Mapping[str, Any],
    **values: Any,
) -> str:
    """Return a page from one of the templates, with its scripts, its style and the policy that allows no other script.

    The template escapes further `values`.
    """
    early, *own = (_source(name) for name in ("nonce.js", "memory.js", "page.js", "live.js"))
    sources = [f"\n{source}\n" for source in (early, *library(), "".join(own))]
    nonce = secrets.token_urlsafe(16)
    return _ENVIRONMENT.get_template(template).render(
        data={"styles": styles(), **data},
        figures=figures,
        policy=_policy(sources, nonce),
        nonce=nonce,
        style=_source("page.css"),
        scripts=sources,
        **values,
    )


def write_page(path: str | Path, text: str) -> Path:
    """Write a page, complete or not at all, and return its path."""
    path = Path(path)
    with os_errors_as(ConfigError, f"cannot write the page {path}"):
        # File names in the text may hold bytes that are no UTF-8.
        write_bytes(path, text.encode(errors="replace"))
    return path


def _policy(scripts: Iterable[str], nonce: str) -> str:
    """Return the policy for a ``meta`` element, which must come before everything it applies to.

    `nonce` is random text that the page's style elements carry.
    """
    digests = " ".join(dict.fromkeys(f"'sha256-{_digest(script)}'" for script in scripts))
    rules = (
        "default-src 'none'",
        f"script-src {digests}",
        f"style-src 'nonce-{nonce}'",
        "img-src data: blob:",  # Bokeh's icons, and what its save tool makes
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _source(name: str) -> str:
    return files("penstock.show").joinpath("templates", name).read_text("utf-8")


def _shared(section: Callable[[object], str], steps: Sequence[object]) -> list[tuple[str, list[int]]]:
    """Render a section for every step, and return each different text with the numbers of its steps."""
    numbers: dict[str, list[int]] = {}
    for number, step in enumerate(steps):
        numbers.setdefault(section(step), []).append(number)
    return [(text, shown_in) for text, shown_in in numbers.items() if text.strip()]


def _view(step: StepAnalysis, unit: Unit) -> dict[str, object]:
    """Return everything that the template shows of one step."""
    trace = step.trace
    schedule = None if step.plan is None else step.plan.program.schedule
    return {
        "label": step.label,
        "counts": _counts(step),
        "cards": _cards(step, unit),
        "sentences": step.sentences,
        "to_try": step.to_try,
        "kinds": [style for kind, style in KINDS.items() if (trace.kind == kind).any()],
        "several_stages": several_stages(trace),
        "causes": [(CAUSES[cause].colour, CAUSES[cause].meaning) for cause in step.bubbles.causes],
        "merged": step.measured and bool(merged_halves(trace).any()),
        "unsplit": _unsplit(trace),
        "memory_ranks": [] if step.peaks is None or not step.peaks.any() else drawn_ranks(step),
        "limit": finite(trace.info.get("limit")) is not None,
        "above_plan": step.plan is not None and step.measured,
        "times": _times(step, unit),
        "changes": _changes(step, unit),
        "worse": _worse(step),
        "split": _split(step),
        "experts": _experts(trace),
        "orders": [f"rank {rank}: {schedule.text(rank)}" for rank in range(schedule.ranks)]
        if schedule
        else [],
    }


def _counts(step: StepAnalysis) -> str:
    trace, program = step.trace, None if step.plan is None else step.plan.program
    words = [str(trace.info.get("schedule", "")), plural(trace.ranks, "rank")]
    if program is not None:
        words += [
            plural(program.schedule.stages, "stage"),
            plural(program.schedule.microbatches, "microbatch"),
        ]
    words.append(str(trace.info.get("source", "")))
    return ", ".join(word for word in words if word)


def _cards(step: StepAnalysis, unit: Unit) -> list[tuple[str, str]]:
    trace = step.trace
    cards = [
        (unit.text(step.bubbles.makespan), "step"),
        (f"{bubble_fraction(trace):.1%}", "of the ranks' time idle"),
    ]
    if step.plan is not None and step.measured:
        more = float(step.bubbles.makespan) / float(step.plan.trace.end.max(initial=0) or 1) - 1
        cards.append((f"{more:+.1%}", "against the plan"))
    if step.peaks is not None:
        cards.append((amount(trace, int(step.peaks.max())), "most held by a rank"))
    if clock_error := finite(trace.info.get("clock_error")):
        cards.append((f"{clock_error * 1e6:.0f} µs", "error of the ranks' clocks"))
    return cards


def _unsplit(trace: Trace) -> list[str]:
    """Return the names of the layers whose backward could not be split."""
    names = trace.info.get("whole_backward", [])
    return [str(name) for name in names] if isinstance(names, list) else []


def _times(step: StepAnalysis, unit: Unit) -> dict[str, object]:
    """Return time by rank and cause as a table without empty columns; of very many ranks it has the first only."""
    bubbles, held, ranks = step.bubbles, step.peaks, step.ranks
    causes = bubbles.causes
    heads = ["rank", "computing", "idle", *(CAUSES[cause].meaning for cause in causes)]
    heads += [] if held is None else ["most held"]
    makespan = float(bubbles.makespan) or 1.0
    times = np.stack(
        [bubbles.busy, makespan - bubbles.busy, *(bubbles.idle[cause] for cause in causes)], axis=1
    )
    rows = []
    for rank in ranks[:MAX_ROWS]:
        memory = [] if held is None else [amount(step.trace, int(held[rank]))]
        rows.append([str(rank), *(_share(time, makespan, unit) for time in times[rank]), *memory])
    means = times[ranks].mean(axis=0) if ranks else ()
    rows.append(["mean", *(_share(time, makespan, unit) for time in means), *([] if held is None else [""])])
    return {"heads": heads, "rows": rows, "omitted": max(0, len(ranks) - MAX_ROWS)}


def _share(time: Any, makespan: float, unit: Unit) -> str:
    """Return a time to the thousandth of the makespan, whole numbers without decimals, and its share of it."""
    if time <= 1e-9 * makespan:
        return "–"
    shown = float(time) * unit.scale
    places = 0 if shown == round(shown) else decimals(makespan * unit.scale)
    return f"{unit.text(time, f'.{places}f')} ({float(time) / makespan:.1%})"


def _changes(step: StepAnalysis, unit: Unit) -> list[list[object]]:
    """Return the present order and the changes that make it shorter: times, memory, and the lines that make them.

    Without a change that helps there is no row; the step's sentences say so.
    """
    if step.advice is None or not step.advice.proposed:
        return []
    now = step.advice.changes[0]
    return [
        [
            change.words[0].upper() + change.words[1:],
            unit.text(change.makespan),
            f"{change.makespan / now.makespan - 1:+.1%}" if now.makespan else "",
            f"{change.bubble:.1%}",
            _memory(step, change.memory),
            change.lines.of(step.trace.info.get(API)),
        ]
        for change in (now, *step.advice.better)
    ]


def _worse(step: StepAnalysis) -> str:
    """Return a sentence on the changes that were simulated and do not help; empty if there are none."""
    count = 0 if step.advice is None else len(step.advice.changes) - 1 - len(step.advice.better)
    if count < 2:
        return (
            "One other change within the same memory was simulated; it does not make the step shorter."
            if count
            else ""
        )
    return f"{count} other changes within the same memory were simulated; none makes the step shorter."


def _memory(step: StepAnalysis, memory: float) -> str:
    if step.peaks is not None and not step.peaks.any():
        return ""  # nothing is kept
    counted = step.peaks is None or step.trace.info.get("held", "bytes") != "bytes"
    return f"{memory:.3g} activations" if counted else amount(step.trace, round(memory))


def _split(step: StepAnalysis) -> list[list[str]]:
    split = step.trace.info.get("split")
    if not isinstance(split, list | tuple) or not all(isinstance(layers, list | tuple) for layers in split):
        return []
    holders = {} if step.plan is None else dict(enumerate(step.plan.program.schedule.placement.holders))
    return [
        [
            str(stage),
            ", ".join(map(str, holders.get(stage, ()))),
            str(len(layers)),
            ", ".join(map(str, layers)),
        ]
        for stage, layers in enumerate(split)
    ]


def _experts(trace: Trace) -> list[list[str]]:
    """Return a row of every layer whose experts are divided: its tokens, and how even its experts were."""
    layers = trace.info.get(EXPERTS)
    rows = []
    for name, tokens in list(layers.items())[:MAX_ROWS] if isinstance(layers, dict) else ():
        counts = [finite(count) for count in tokens] if isinstance(tokens, list) else []
        known = [count for count in counts if count is not None]
        if not sum(known) or len(known) < len(counts):
            continue
        mean, most, least = sum(known) / len(known), max(known), min(known)
        largest = f"{known.index(most)}: {most:,.0f} ({most / mean:.2f} x)"
        smallest = f"{known.index(least)}: {least:,.0f} ({least / mean:.2f} x)"
        rows.append([str(name), f"{sum(known):,.0f}", f"{mean:,.1f}", largest, smallest])
    return rows
