"""One step seen by torch's own profiler: every operator on every thread, as a Chrome trace a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Only under a private name does torch have a way to say that threads which are there already are meant, too.
from torch._C._profiler import _ExperimentalConfig as Experimental
from torch.profiler import ProfilerActivity, profile

FOLDER = "profile"
WARM = 10


class Profile:
    """Profiles the `WARM`-th step of a run, or its last if that comes before: caches and threads are warm by then.

    The step takes several times as long as others.

    Args:
        run: the run's folder; None profiles nothing.
        steps: the last step's number.
        rank: of this process.
    """

    def __init__(self, run: Path | None, steps: int, rank: int) -> None:
        self.run = run
        self.steps = steps
        self.rank = rank
        self._seen = 0

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Put this around every step; if it is the one, ``profile/step-000010.rank-0.json`` is there afterwards.

        Args:
            step: counted from 1.
        """
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
        ) as found:
            yield
        path = self.run / FOLDER / f"step-{step:06}.rank-{self.rank}.json"
        path.parent.mkdir(exist_ok=True)
        found.export_chrome_trace(str(path))
