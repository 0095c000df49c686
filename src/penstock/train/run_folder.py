"""The folder a run leaves: config, metrics, weights, sample. Made only once everything else is known to be sound."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from penstock.atomic import write_text
from penstock.checkpoint.find import FOLDER, is_checkpoint
from penstock.errors import ConfigError
from penstock.run_lock import LOCK
from penstock.train.config import file as config_file
from penstock.train.config.config import Config, TrainConfig

AUTO = "auto"
"""What ``train.resume`` may be beside a path."""


def choose(config: TrainConfig) -> Path:
    """Where the run will be kept; nothing is written.

    Raises:
        ConfigError: the folder already exists; or, to go on with a run, there is none.
    """
    if config.resume:
        return run_of(config)
    path = Path(config.folder).expanduser() / (config.name or time.strftime("%Y-%m-%d-%H%M%S"))
    if os.path.lexists(path) and not _holds_only_a_lock(path):
        raise ConfigError(f"the run folder {path} already exists; choose another train.name or remove it")
    return path


def run_of(config: TrainConfig) -> Path:
    """The folder of the run that `resume` means.

    Raises:
        ConfigError: there is no such run, or ``auto`` without a name.
    """
    if config.resume == AUTO:
        if not config.name:
            raise ConfigError("train.resume = auto goes on with the run train.name, which is not set")
        return Path(config.folder).expanduser() / config.name
    given = Path(config.resume).expanduser()
    run = given.parent.parent if is_checkpoint(given) else given
    if not os.path.isfile(run / "config.toml"):
        raise ConfigError(
            f"train.resume is {given}, which is neither the folder of a run (there is no {run / 'config.toml'}) nor a "
            f"checkpoint in one (RUN/{FOLDER}/step-NUMBER)"
        )
    return run


def create(path: Path, config: Config) -> Path:
    """Make the folder, with the resolved config in it, and return it; to go on with a run, the folder may be there.

    Raises:
        ConfigError: it cannot be made, or someone else has made it meanwhile.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=bool(config.train.resume) or _holds_only_a_lock(path))
        if not (path / "config.toml").exists():
            keep_config(path, config)
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error
    return path


def _holds_only_a_lock(path: Path) -> bool:
    """Whether a run is about to begin in it, or would have begun had its process not died before."""
    try:
        return os.listdir(path) == [LOCK]
    except OSError:
        return False


def keep_config(path: Path, config: Config) -> None:
    """Write the resolved config into the run's folder, without what is said for one start only."""
    kept = replace(
        config, train=replace(config.train, resume=""), data=replace(config.data, changed="refuse")
    )
    write_text(path / "config.toml", config_file.dump(kept))
