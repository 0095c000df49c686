"""The traces that a run keeps, and a profile of one step by torch's profiler.

The profile has every operator on every thread, as a Chrome trace for each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig as Experimental
from torch.profiler import ProfilerActivity, profile

from penstock.base.errors import DataError
from penstock.runtime.pipeline import Pipeline
from penstock.trace.folder import save_step
from penstock.train.callbacks.callback import Callback, TraceEvent

# torch includes threads that exist already only by this private option.

FOLDER = "profile"
WARM = 10


class StepProfiler:
    """StepProfiler of the `WARM`-th step of a run, when caches and threads are warm, or the last step of a shorter run.

    The step takes several times as long as others.
    """

    def __init__(self, run: Path | None, steps: int, rank: int) -> None:
        self.run = run
        self.steps = steps
        self.rank = rank
        self._seen = 0

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Wrap a step, counted from 1; the profiled one leaves ``profile/step-000010.rank-0.json``."""
        self._seen += 1
        wanted = self._seen == WARM or (step == self.steps and self._seen < WARM)
        if self.run is None or not wanted:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(
            activities=activities, experimental_config=Experimental(profile_all_threads=True)
        ) as profiler:
            yield
        path = self.run / FOLDER / f"step-{step:06}.rank-{self.rank}.json"
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))


class Traces:
    """Writer of the traces of a run's first step, its last, and every N-th; other steps cost nothing."""

    def __init__(
        self,
        run: Path,
        steps: int,
        every: int,
        writes: bool,
        callbacks: Callback,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.run = run
        self.steps = steps
        self.every = every
        self._writes = writes
        self._callbacks = callbacks
        self._say = say
        self._began = False

    def after(self, step: int, pipe: Pipeline) -> None:
        """Save the trace of a step if it is due; every process calls this after every step, before an evaluation.

        With several replicas only the first one's trace is saved; processes of the others return at once.
        """
        first, self._began = not self._began, True
        due = first or step == self.steps or (self.every and step % self.every == 0)
        if not due or not pipe.is_first:
            return
        trace = pipe.gather_trace()
        assert trace is not None, "a step has just been done"
        if self._writes:
            try:
                save_step(self.run, step, trace)
            except DataError as error:
                self._say(f"{error}. Training continues")
            self._callbacks.on_trace(TraceEvent(step, trace))
