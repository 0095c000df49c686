"""The folder a run leaves: config, metrics, weights, sample. Made only once everything else is known to be sound."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from penstock.errors import ConfigError
from penstock.show.picture import draw_picture
from penstock.trace.events import Trace
from penstock.train import config_file
from penstock.train.config import Config, TrainConfig
from penstock.train.loggers import Logger


def choose(config: TrainConfig) -> Path:
    """Where the run will be kept; nothing is written.

    Raises:
        ConfigError: the folder already exists.
    """
    path = Path(config.folder).expanduser() / (config.name or time.strftime("%Y-%m-%d-%H%M%S"))
    if path.exists():
        raise ConfigError(f"the run folder {path} already exists; choose another train.name or remove it")
    return path


def create(path: Path, config: Config) -> Path:
    """Make the folder, with the resolved config in it, and return it.

    Raises:
        ConfigError: it cannot be made, or someone else has made it meanwhile.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error
    (path / "config.toml").write_text(config_file.dump(config), "utf-8")
    return path


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
        self._file: TextIO | None = (path / "metrics.jsonl").open("w", encoding="utf-8") if path else None

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
