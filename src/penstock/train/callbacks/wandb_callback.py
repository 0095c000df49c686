"""Metrics and timelines for Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.train.callbacks.callback import Outcome, StartEvent
from penstock.train.callbacks.metrics_receiver import MetricsReceiver

if TYPE_CHECKING:
    import numpy as np


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
