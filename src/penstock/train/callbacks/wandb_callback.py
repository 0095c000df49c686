"""Metrics and timelines for Weights & Biases."""

from __future__ import annotations

import io
from typing import Any

from penstock.errors import ConfigError
from penstock.train.callbacks.callback import (
    Callback,
    EndEvent,
    EvaluateEvent,
    StartEvent,
    StepEvent,
    TraceEvent,
    numbers_of,
)


class WeightsAndBiases(Callback):
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

    def on_step(self, event: StepEvent) -> None:
        if event.logged:
            self._run.log(numbers_of(event), step=event.step)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        self._run.log(numbers_of(event), step=event.step)

    def on_trace(self, event: TraceEvent) -> None:
        import wandb
        from matplotlib.image import imread

        picture = imread(io.BytesIO(event.picture))[..., :3]
        self._run.log({"timeline": wandb.Image(picture)}, step=event.step)

    def on_end(self, event: EndEvent) -> None:
        if event.outcome == "done":
            self._run.log(numbers_of(event), step=event.step)
        self._run.finish(exit_code=0 if event.outcome == "done" else 1)
