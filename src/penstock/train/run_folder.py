"""The folder of a run: config, metrics, weights, sample. It is created once everything else has been checked."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from penstock.base.atomic import write_text
from penstock.base.errors import ConfigError, os_errors_as
from penstock.base.run_lock import LOCK
from penstock.checkpoint.find import FOLDER, is_checkpoint
from penstock.train.config import file as config_file
from penstock.train.config.config import Config
from penstock.train.config.sections import TrainConfig

AUTO = "auto"
"""Value of ``train.resume`` that means the run named ``train.name``."""


def choose(config: TrainConfig) -> Path:
    """Return the folder of the run, without creating it."""
    if config.resume:
        return run_of(config)
    path = Path(config.folder).expanduser() / (config.name or time.strftime("%Y-%m-%d-%H%M%S"))
    if os.path.lexists(path) and not _holds_only_a_lock(path):
        raise ConfigError(f"the run folder {path} already exists; choose another train.name or remove it")
    return path


def run_of(config: TrainConfig) -> Path:
    """Return the folder of the run that ``train.resume`` names."""
    if config.resume == AUTO:
        if not config.name:
            raise ConfigError("train.resume = auto resumes the run train.name, which is not set")
        return Path(config.folder).expanduser() / config.name
    path = Path(config.resume).expanduser()
    run = path.parent.parent if is_checkpoint(path) else path
    if not os.path.isfile(run / "config.toml"):
        raise ConfigError(
            f"train.resume is {path}, which is neither the folder of a run (there is no {run / 'config.toml'}) nor a "
            f"checkpoint in one (RUN/{FOLDER}/step-NUMBER)"
        )
    return run


def create(path: Path, config: Config) -> Path:
    """Create the folder with the resolved config in it, and return it; the folder of a resumed run may exist."""
    with os_errors_as(ConfigError, f"cannot make the run folder {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=bool(config.train.resume) or _holds_only_a_lock(path))
        if not (path / "config.toml").exists():
            keep_config(path, config)
    return path


def _holds_only_a_lock(path: Path) -> bool:
    """Return whether the run in the folder has not begun yet, perhaps because its process died before."""
    try:
        return os.listdir(path) == [LOCK]
    except OSError:
        return False


def keep_config(path: Path, config: Config) -> None:
    """Write the resolved config into the run's folder, without the keys that apply to one start only."""
    kept = replace(
        config, train=replace(config.train, resume=""), data=replace(config.data, changed="refuse")
    )
    write_text(path / "config.toml", config_file.dump(kept))
