"""Metrics and timelines for TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.train.callbacks.callback import Outcome, StartEvent
from penstock.train.callbacks.metrics_receiver import MetricsReceiver

if TYPE_CHECKING:
    import numpy as np


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
