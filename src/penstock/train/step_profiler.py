"""Profile of one step of a run by torch's profiler.

It has every operator on every thread, as a Chrome trace for each process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig as Experimental
from torch.profiler import ProfilerActivity, profile

FOLDER = "profile"
WARM = 10


class StepProfiler:
    """Profiler of the `WARM`-th step of a run, when caches and threads are warm, or the last step of a shorter run.

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
        # torch includes threads that exist already only by this private option.
        with profile(
            activities=activities, experimental_config=Experimental(profile_all_threads=True), acc_events=True
        ) as profiler:
            yield
        path = self.run / FOLDER / f"step-{step:06}.rank-{self.rank}.json"
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
