"""Loggers of metrics beside ``metrics.jsonl``: TensorBoard and Weights & Biases, behind one small interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from penstock.errors import ConfigError
from penstock.train.config.config import Config
from penstock.train.config.fields import LOGGERS, logger_names


class Logger(Protocol):
    """A sink of numbers and pictures by step; steps never decrease."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step by name, such as ``train/loss``."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Log a picture, a PNG file that is deleted afterwards."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoard:
    """Event files in the run's folder, under ``tensorboard``: ``tensorboard --logdir RUN``.

    Args:
        run: folder of the run.
        done: number of steps done before; logged values of later steps are hidden.
    """

    def __init__(self, run: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=done + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[..., :3], step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, in the project ``penstock``; with ``WANDB_MODE=offline`` it stays in the run's folder.

    Raises:
        ConfigError: if the service rejects the run.
    """

    def __init__(self, run: Path, config: Config) -> None:
        import wandb

        try:
            self._run = wandb.init(project="penstock", name=run.name, dir=str(run), config=asdict(config))
        except wandb.Error as error:
            raise ConfigError(
                f"train.loggers names wandb, which says: {error}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()


def require_loggers(config: Config) -> None:
    """Raise ConfigError if a logger of the config is not installed."""
    for name in logger_names(config.train.loggers):
        missing = [module for module in LOGGERS[name] if find_spec(module) is None]
        if missing:
            raise ConfigError(
                f"train.loggers names {name}, but {missing[0]} is not installed: pip install 'penstock[{name}]'"
            )


def open_loggers(config: Config, run: Path, done: int) -> list[Logger]:
    """Open the loggers of a config that has passed `require_loggers`; `done` is the number of steps done.

    Raises:
        ConfigError: if Weights & Biases rejects the run.
    """
    names = logger_names(config.train.loggers)
    loggers: list[Logger] = []
    if "tensorboard" in names:
        loggers.append(TensorBoard(run, done))
    if "wandb" in names:
        loggers.append(WeightsAndBiases(run, config))
    return loggers
