"""Metrics and timelines for TensorBoard."""

from __future__ import annotations

import io
from typing import Any

from penstock.train.callbacks.callback import (
    Callback,
    EndEvent,
    EvaluateEvent,
    StartEvent,
    StepEvent,
    TraceEvent,
    numbers_of,
)


class TensorBoard(Callback):
    """Event files in the run's folder, under ``tensorboard``: ``tensorboard --logdir RUN``.

    Needs `penstock[tensorboard]`.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, event: StartEvent) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Values of later steps, which will be repeated, are hidden.
        self._writer = SummaryWriter(str(event.folder / "tensorboard"), purge_step=event.step + 1)

    def on_step(self, event: StepEvent) -> None:
        if event.logged:
            self._add(event)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        self._add(event)

    def on_trace(self, event: TraceEvent) -> None:
        from matplotlib.image import imread

        picture = imread(io.BytesIO(event.picture))[..., :3]
        self._writer.add_image("timeline", picture, event.step, dataformats="HWC")

    def on_end(self, event: EndEvent) -> None:
        if event.outcome == "done":
            self._add(event)
        self._writer.close()

    def _add(self, event: StepEvent | EvaluateEvent | EndEvent) -> None:
        for name, value in numbers_of(event).items():
            self._writer.add_scalar(name, value, event.step)
