"""Page of a comparison: a map of modules and parameters by microbatches, on which the first difference is marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.recordings.compare import Comparison
from penstock.recordings.files import Key, Kind
from penstock.show.page import fill_template

_LETTERS = {
    Kind.OUTPUT: "F",
    Kind.OUTPUT_GRADIENT: "B",
    Kind.SHARE: "W",
    Kind.GRADIENT: "G",
    Kind.PARAMETER: "U",
    Kind.BUFFER: "S",
}
_WORST = ("same", "rounded", "different")


def render_map(found: Comparison, title: str) -> str:
    """Return the page as HTML that loads nothing.

    Args:
        found: what two recordings have in common.
        title: heading.
    """
    meanings = (
        "F: output, B: its gradient, W: a microbatch's gradient of a parameter, G: the whole one, U: update, "
        "S: statistics and other buffers"
    )
    return fill_template(
        "difference.html",
        {},
        {},
        title=title,
        sentence="; ".join([found.sentence, *found.around]),
        notes=[*found.incomplete, *found.notes],
        letters=f"letters name what differs. {meanings}",
        steps=[_step(found, step) for step in sorted({key.step for key in found.verdicts})],
    )


def _step(found: Comparison, step: int) -> dict[str, Any]:
    keys = [key for key in found.verdicts if key.step == step]
    columns = sorted({key.microbatch for key in keys if key.microbatch >= 0})
    rows: dict[str, dict[int, list[Key]]] = {}
    for key in keys:
        rows.setdefault(key.name or "the model", {}).setdefault(key.microbatch, []).append(key)
    return {
        # A step without a difference is a sentence, so that the map of one that has some is in sight.
        "same": len(keys) if all(found.verdicts[key] == "same" for key in keys) else 0,
        "name": f"Step {step}" if step >= 0 else "Before the first step",
        "columns": [*columns, "update" if step >= 0 else "parameter"],
        "rows": [
            {"name": name, "cells": [_cell(found, of.get(column, ())) for column in (*columns, -1)]}
            for name, of in rows.items()
        ],
    }


def _cell(found: Comparison, keys: Sequence[Key]) -> dict[str, str]:
    """Return the look of a cell, the worst of its tensors', and letters for those that differ."""
    if not keys:
        return {"look": "", "text": ""}
    look = max((found.verdicts[key] for key in keys), key=_WORST.index)
    differ = dict.fromkeys(_LETTERS[key.kind] for key in keys if found.verdicts[key] == "different")
    first = found.first is not None and found.first.key in keys
    return {"look": f"{look} first" if first else look, "text": "".join(differ)}
