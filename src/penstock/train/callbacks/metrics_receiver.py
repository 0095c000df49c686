"""A base of callbacks that pass metrics and timelines on to a service."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from penstock.train.callbacks.callback import (
    Callback,
    EndEvent,
    EvaluateEvent,
    Outcome,
    StepEvent,
    TraceEvent,
    numbers_of,
)

if TYPE_CHECKING:
    import numpy as np


class MetricsReceiver(Callback, ABC):
    """A callback that logs the numbers of an event by their names for charts (`numbers_of`), and timelines as pictures."""

    @abstractmethod
    def log(self, numbers: dict[str, float], step: int) -> None:
        """Log the numbers of a step."""

    @abstractmethod
    def log_timeline(self, pixels: np.ndarray, step: int) -> None:
        """Log the timeline of a step: RGB of shape (height, width, 3), from 0 to 1."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """End the record of the run."""

    def on_step(self, event: StepEvent) -> None:
        if event.logged:
            self.log(numbers_of(event), event.step)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        self.log(numbers_of(event), event.step)

    def on_trace(self, event: TraceEvent) -> None:
        from matplotlib.image import imread

        self.log_timeline(imread(io.BytesIO(event.picture))[..., :3], event.step)

    def on_end(self, event: EndEvent) -> None:
        if event.outcome == "done":
            self.log(numbers_of(event), event.step)
        self.close(event.outcome)
