"""The callbacks that a config names: services in ``train.loggers``, own code in ``train.callbacks``."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.util import find_spec

from penstock.current_folder import current_folder_last
from penstock.errors import ConfigError, first_line
from penstock.train.callbacks.callback import Callback
from penstock.train.callbacks.receivers import TensorBoard, WeightsAndBiases
from penstock.train.config.config import Config
from penstock.train.config.fields import LOGGERS, names_in


def require_loggers(config: Config) -> None:
    """Raise ConfigError if a service of ``train.loggers`` is not installed."""
    for name in names_in(config.train.loggers):
        missing = [module for module in LOGGERS[name] if find_spec(module) is None]
        if missing:
            raise ConfigError(
                f"train.loggers names {name}, but {missing[0]} is not installed: pip install 'penstock[{name}]'"
            )


def find_callbacks(config: Config) -> list[Callback]:
    """Return new callbacks, those of ``train.loggers`` first; call `require_loggers` before.

    Raises:
        ConfigError: if a name in ``train.callbacks`` leads to no callback.
    """
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
