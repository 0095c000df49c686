"""The callbacks that a config names: services in ``train.loggers`` (TensorBoard, Weights & Biases), own code in
``train.callbacks``."""

from __future__ import annotations

import importlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.base.current_folder import current_folder_last
from penstock.base.errors import ConfigError, first_line
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
from penstock.train.config.config import Config
from penstock.train.config.fields import LOGGERS, names_in

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

    Needs `penstock-torch[tensorboard]`.
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

    Needs `penstock-torch[wandb]`.
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


def require_loggers(config: Config) -> None:
    """Raise ConfigError if a service of ``train.loggers`` is not installed."""
    for name in names_in(config.train.loggers):
        missing = [module for module in LOGGERS[name] if find_spec(module) is None]
        if missing:
            raise ConfigError(
                f"train.loggers names {name}, but {missing[0]} is not installed: pip install 'penstock-torch[{name}]'"
            )


def find_callbacks(config: Config) -> list[Callback]:
    """Return new callbacks, first the services of ``train.loggers``; call `require_loggers` before."""
    services: dict[str, type[Callback]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    callbacks = [services[name]() for name in names_in(config.train.loggers)]
    for name in names_in(config.train.callbacks):
        callbacks += _load(name)
    return callbacks


def _load(name: str) -> list[Callback]:
    """Call the function ``MODULE:FUNCTION`` (a class is one, too), and return the callbacks that it returns."""
    module_name, _, attribute = name.partition(":")
    where = f"train.callbacks names {name}, but"
    try:
        with current_folder_last():
            function = importlib.import_module(module_name)
            for part in attribute.split("."):
                function = getattr(function, part)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"{where} there is no module {error.name}, neither installed nor in the current folder"
            ) from error
        raise ConfigError(f"{where} {module_name} cannot be imported: {first_line(error)}") from error
    except AttributeError as error:
        raise ConfigError(f"{where} {first_line(error)}") from error
    except Exception as error:
        raise ConfigError(
            f"{where} {module_name} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{where} it is {function!r:.80}, no function; name a function that returns a Callback"
        )
    try:
        made = function()
    except Exception as error:
        raise ConfigError(
            f"{where} calling it failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    callbacks = list(made) if isinstance(made, Iterable) and not isinstance(made, Callback) else [made]
    if not all(isinstance(each, Callback) for each in callbacks):
        raise ConfigError(f"{where} it returned {made!r:.80}; return a penstock.Callback or a list of them")
    return callbacks
