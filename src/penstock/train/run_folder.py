"""The folder a run leaves: config, metrics, weights, sample. Made only once everything else is known to be sound."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from penstock.errors import ConfigError
from penstock.show.picture import draw_picture
from penstock.trace.events import Trace
from penstock.train import config_file
from penstock.train.checkpoint.find import FOLDER, is_checkpoint
from penstock.train.config import Config, TrainConfig
from penstock.train.loggers import Logger

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
    if path.exists():
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
    if not (run / "config.toml").is_file():
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
        path.mkdir(exist_ok=bool(config.train.resume))
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error
    if not (path / "config.toml").exists():
        keep_config(path, config)
    return path


def keep_config(path: Path, config: Config) -> None:
    """Write the resolved config into the run's folder."""
    kept = replace(config, train=replace(config.train, resume=""))
    replace_text(path / "config.toml", config_file.dump(kept))


def replace_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then rename, so that there is always a whole one."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text, "utf-8")
    os.replace(unfinished, path)


class Metrics:
    """``metrics.jsonl``: one JSON object a line, on disk as soon as it is written.

    Args:
        path: of the run folder; None writes nothing, as on every rank but the first.
        loggers: get the same numbers, named ``kind/key``, and are closed with it.

    Attributes:
        writes: whether anything is written here.
    """

    def __init__(self, path: Path | None, loggers: Sequence[Logger] = ()) -> None:
        self.writes = path is not None
        self._loggers = loggers
        self._path = path / "metrics.jsonl" if path else None
        self._file: TextIO | None = self._path.open("a", encoding="utf-8") if self._path else None

    def go_back(self, step: int) -> None:
        """Drop the lines of later steps, the last one of a finished run, and a line that was cut short."""
        if self._file is None or self._path is None:
            return
        self._file.close()
        lines = self._path.read_text("utf-8", errors="replace").splitlines(keepends=True)
        replace_text(self._path, "".join(line for line in lines if _is_until(line, step)))
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: int | float | None) -> None:
        """Append a line; `kind` is ``train``, ``held_out`` or ``final``."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")
            self._file.flush()
        step = values.get("step")
        if isinstance(step, int):
            named = {f"{kind}/{key}": v for key, v in values.items() if key != "step" and v is not None}
            for logger in self._loggers:
                logger.scalars(step, named)

    def timeline(self, step: int, trace: Trace) -> None:
        """Give the loggers the picture of a step's timeline; without any nothing is drawn."""
        if not self._loggers:
            return
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            path = Path(folder) / "timeline.png"
            draw_picture(trace, path)
            for logger in self._loggers:
                logger.picture(step, "timeline", path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        for logger in self._loggers:
            logger.close()


def _is_until(line: str, step: int) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return line.endswith("\n") and entry["kind"] != "final" and bool(entry.get("step", 0) <= step)
