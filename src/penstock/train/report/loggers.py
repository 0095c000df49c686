"""Where a run's metrics go beside ``metrics.jsonl``: TensorBoard and Weights & Biases, through one small interface."""

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
    """Takes numbers and pictures by step; steps never go back."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers of a step by their names, as in ``train/loss``."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Keep a picture, a PNG file that is gone afterwards."""

    def close(self) -> None:
        """Write what is not written yet."""


class TensorBoard:
    """Event files in the run's folder, under ``tensorboard``: ``tensorboard --logdir RUN``.

    Args:
        run: the run's folder.
        done: steps done before; what was logged of later ones is not shown any more.
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
        ConfigError: the service does not take it.
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
    """Refuse a logger that is not installed.

    Raises:
        ConfigError: naming it, and how to get it.
    """
    for name in logger_names(config.train.loggers):
        absent = [module for module in LOGGERS[name] if find_spec(module) is None]
        if absent:
            raise ConfigError(
                f"train.loggers names {name}, but {absent[0]} is not installed: pip install 'penstock[{name}]'"
            )


def open_loggers(config: Config, run: Path, done: int) -> list[Logger]:
    """The loggers of a config, which `require_loggers` has let pass, for a run with so many steps done.

    Raises:
        ConfigError: Weights & Biases does not take the run.
    """
    names = logger_names(config.train.loggers)
    found: list[Logger] = []
    if "tensorboard" in names:
        found.append(TensorBoard(run, done))
    if "wandb" in names:
        found.append(WeightsAndBiases(run, config))
    return found
