"""Traces that a run keeps in its folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.base.errors import DataError
from penstock.runtime.pipeline import Pipeline
from penstock.trace.events import API, Trace
from penstock.trace.expert_load import EXPERTS
from penstock.trace.folder import save_step


class KeptTraces:
    """Writer of the traces of a run's first step, its last, and every N-th; other steps cost nothing.

    Args:
        steps: number of the last step.
        every: steps between two traces; 0 for the first and the last alone.
        writes: whether this process writes, one of the run's.
        api: the API that the run uses, in whose words its report gives advice; see `API`.
    """

    def __init__(
        self, run: Path, steps: int, every: int, writes: bool, say: Callable[[str], None], *, api: str
    ) -> None:
        self._run, self._steps, self._every = run, steps, every
        self._writes, self._say, self._api = writes, say, api
        self._began = False

    def due(self, step: int) -> bool:
        """Return whether the trace of a step will be kept; it then needs `Pipeline.tracing`."""
        return not self._began or step == self._steps or (self._every > 0 and step % self._every == 0)

    def after(self, step: int, pipe: Pipeline) -> Trace | None:
        """Save the trace of a step if it is due; every process calls this after every step, before an evaluation.

        With several replicas only the first one's trace is saved; processes of the others return at once, or after the
        tokens of divided experts are counted.

        Returns:
            The trace, on the process that writes; None if none was due. A failed write is told, and training continues.
        """
        due, self._began = self.due(step), True
        if not due:
            return None
        load = pipe.gather_expert_load()
        if not pipe.is_first:
            return None
        trace = pipe.gather_trace()
        assert trace is not None, "a step has just been done"
        if not self._writes:
            return None
        experts = {} if load is None else {EXPERTS: load.tokens}
        trace = replace(trace, info={**trace.info, API: self._api, **experts})
        try:
            save_step(self._run, step, trace)
        except DataError as error:
            self._say(f"{error}. Training continues")
        return trace
