"""Receivers of metrics and timelines: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.train.callbacks.callback import (
    Callback,
    EndEvent,
    EvaluateEvent,
    Outcome,
    StartEvent,
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


class TensorBoard(MetricsReceiver):
    """Event files in the run's folder, under ``tensorboard``: ``tensorboard --logdir RUN``.

    Needs `penstock[tensorboard]`.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, event: StartEvent) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Values of later steps, which will be repeated, are hidden.
        self._writer = SummaryWriter(str(event.folder / "tensorboard"), purge_step=event.step + 1)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def log_timeline(self, pixels: np.ndarray, step: int) -> None:
        self._writer.add_image("timeline", pixels, step, dataformats="HWC")

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


class WeightsAndBiases(MetricsReceiver):
    """A run of Weights & Biases in the project ``penstock``; with ``WANDB_MODE=offline`` it stays in the run's folder.

    Needs `penstock[wandb]`.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def on_start(self, event: StartEvent) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project="penstock", name=event.folder.name, dir=str(event.folder), config=dict(event.config)
            )
        except wandb.Error as error:
            raise ConfigError(
                f"train.loggers names wandb, which says: {error}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def log_timeline(self, pixels: np.ndarray, step: int) -> None:
        import wandb

        self._run.log({"timeline": wandb.Image(pixels)}, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome == "done" else 1)
