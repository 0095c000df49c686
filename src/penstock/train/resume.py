"""Going on with a run: which one, whether its config is still that of the checkpoint, and saving on the way."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.errors import ConfigError, PenstockError
from penstock.runtime.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.train.checkpoint.checkpoints import Checkpoints, Loaded
from penstock.train.checkpoint.find import FOLDER, is_checkpoint, read_manifest, steps_in
from penstock.train.config import Config
from penstock.train.progress import Reporter
from penstock.train.run_folder import AUTO, keep_config

SET_ASIDE = ".set-aside"

_DECIDES = ("seed", "batch")
"""What of ``[train]`` decides the numbers, beside all of ``[model]``, ``[data]`` and ``[optim]``."""


class Keeper:
    """Saves a run as its config says, and loads what it goes on from; a context manager around the steps.

    Every process makes one.

    Args:
        run: the run's folder.
        config: resolved.
        pipe, optimizer: what is trained.
        reporter: where it is told what could not be saved, and what was refused.
    """

    def __init__(
        self, run: Path, config: Config, pipe: Pipeline, optimizer: PipelineOptimizer, reporter: Reporter
    ) -> None:
        self._run = run
        self._config = config
        self._leads = pipe.is_first and pipe.rank == 0
        self._reporter = reporter
        self._checkpoints = Checkpoints(
            run / FOLDER,
            pipe,
            optimizer,
            keep_last=config.train.keep_last,
            keep_every=config.train.keep_every,
            config=asdict(config),
        )

    def resume(self) -> int:
        """Load what ``train.resume`` means, if anything.

        Returns:
            Steps done; 0 for a new run.

        Raises:
            ConfigError: nothing sound is there, or it is of another model, of other data, of another optimizer; or
                there is nothing left to do.
        """
        train = self._config.train
        if not train.resume:
            return 0
        given = Path(train.resume).expanduser()
        chosen = given if is_checkpoint(given) else None
        newest = self._checkpoints.load(chosen) if chosen else self._checkpoints.load_newest()
        if newest is None:
            if train.resume != AUTO:
                raise ConfigError(f"the run {self._run} has no checkpoint to go on from")
            self._reporter.say("no checkpoint to go on from: the run starts at its first step")
            if self._leads:
                keep_config(self._run, self._config)
            return 0
        self._require_same(newest)
        for problem in newest.refused:
            self._reporter.say(f"refused: {problem}")
        self._reporter.say(f"going on from {newest.path}")
        if newest.step >= train.steps:
            raise ConfigError(
                f"{newest.path} is of step {newest.step}, and train.steps is {train.steps}; give more steps to go on"
            )
        if self._leads:
            self._set_aside(newest.step)
            keep_config(self._run, self._config)
        return newest.step

    def _require_same(self, loaded: Loaded) -> None:
        before, now = read_manifest(loaded.path).config, asdict(self._config)
        changed = [
            f"{section}.{key} was {_words(before, section, key)} and is {value!r}"
            for section in ("model", "data", "optim", "train")
            for key, value in now[section].items()
            if (section != "train" or key in _DECIDES) and _words(before, section, key) != repr(value)
        ]
        if changed:
            raise ConfigError(
                f"{loaded.path} is of another run: {'; '.join(changed)}. Go on with what it had, or start a new run"
            )

    def _set_aside(self, step: int) -> None:
        """Later checkpoints are of steps that will be done anew; they lose their names, and nothing else."""
        for later, path in steps_in(self._run / FOLDER):
            if later > step:
                place = path.with_name(path.name + SET_ASIDE)
                number = 1
                while place.exists():
                    number += 1
                    place = path.with_name(f"{path.name}{SET_ASIDE}-{number}")
                path.rename(place)
                self._reporter.say(f"set aside: {place}")

    def after_step(self, done: int) -> None:
        """After every step: save, if it is time to; what could not be written is told, and the run goes on."""
        every = self._config.train.checkpoint_every
        if every and done % every == 0:
            self._wait()
            self._checkpoints.save()

    def _wait(self) -> None:
        try:
            self._checkpoints.wait()
        except PenstockError as error:
            self._reporter.say(f"{error}. Training goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self._wait()
        finally:
            self._checkpoints.close()


def _words(config: dict[str, Any], section: str, key: str) -> str:
    table = config.get(section)
    return repr(table.get(key)) if isinstance(table, dict) else "not known"
