"""The report page of a training loop that calls a pipeline itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import PenstockError
from penstock.schedule.ops import Kind
from penstock.show.analysis import StepAnalysis
from penstock.trace.events import API, Trace
from penstock.trace.expert_load import EXPERTS, ExpertLoad

_MOST = 20
"""Steps that a page shows besides the first: a loop may ask for a page after each of its steps."""


class LoopReport:
    """The steps that a page shows: the first one that was asked for, and the last ones."""

    def __init__(self) -> None:
        self._steps: dict[int, Trace] = {}

    @staticmethod
    def require_step(trace: Trace | None) -> Trace:
        """Return the trace of the last call, of a pipeline's ranks together.

        Raises:
            PenstockError: if it was no training step; on all ranks, which have the same trace.
        """
        if trace is None or not np.isin(trace.kind, (Kind.B, Kind.I)).any():
            last = "no step has run" if trace is None else "the last call was an evaluation"
            raise PenstockError(
                f"{last}, so there is nothing to report; call pipe.report() after pipe.step()"
            )
        return trace

    def add(self, step: int, trace: Trace, load: ExpertLoad | None) -> None:
        """Add a step by its number, with the tokens of its experts."""
        experts = {} if load is None else {EXPERTS: load.tokens}
        self._steps[step] = replace(trace, info={**trace.info, API: "Pipeline", **experts})
        for number in sorted(self._steps)[1:-_MOST]:
            del self._steps[number]

    def write(self, path: str | Path, start: Mapping[str, Any]) -> Path:
        """Write the page with a start's entry (`start_of`), and return its path.

        Raises:
            ConfigError: if it cannot be written, or Bokeh is missing.
        """
        # The page's library is an optional dependency.
        from penstock.show.report import write
        from penstock.show.report_page import RunFacts, fact_lines

        steps = [StepAnalysis(f"step {number}", trace) for number, trace in sorted(self._steps.items())]
        return write(path, steps, title=start["layout"], facts=RunFacts(lines=fact_lines([start])))
