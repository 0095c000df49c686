"""Going on with a run: which one, whether its config is still that of the checkpoint, and saving on the way."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.checkpoint.checkpoints import Checkpoints, Loaded
from penstock.checkpoint.find import FOLDER, is_checkpoint, is_whole, path_of, read_manifest, steps_in
from penstock.errors import ConfigError, DataError, PenstockError, StoppedError, TransportError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.train.config.config import Config
from penstock.train.data.digest import DataDigest
from penstock.train.report.metrics_writer import is_finished
from penstock.train.report.progress import Reporter
from penstock.train.run_folder import AUTO, keep_config

SET_ASIDE = ".set-aside"

_DECIDES = ("seed", "batch")
"""What of ``[train]`` decides the numbers, beside ``[model]``, ``[data]`` (but for ``changed``) and ``[optim]``."""


@dataclass(frozen=True)
class RunProgress:
    """Where a run stands, beside weights and optimizer.

    Attributes:
        done: steps done; the next batch is that of this step.
        loss: of the last step that had one that is a number.
        skipped_in_a_row: how many steps before the next were skipped, one after another.
    """

    done: int = 0
    loss: float = math.nan
    skipped_in_a_row: int = 0


class RunCheckpointer:
    """Saves a run as its config says, and loads what it goes on from; a context manager around the steps.

    Every process makes one.

    Args:
        run: the run's folder.
        config: resolved.
        data: digest of what is trained on.
        pipe, optimizer: what is trained.
        run_group: the processes.
        reporter: where it is told what could not be saved, and what was refused.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        data: DataDigest,
        pipe: Pipeline,
        optimizer: PipelineOptimizer,
        run_group: RunGroup,
        reporter: Reporter,
    ) -> None:
        self._run = run
        self._config = config
        self._data = data
        self._run_group = run_group
        self._reporter = reporter
        self._checkpoints = Checkpoints(
            run / FOLDER,
            pipe,
            optimizer,
            keep_last=config.train.keep_last,
            keep_every=config.train.keep_every,
            config=asdict(config),
        )

    def resume(self) -> RunProgress:
        """Load what ``train.resume`` means, if anything.

        Returns:
            Where the run stands. All steps may be done, if it ended before its last files were written.

        Raises:
            ConfigError: nothing sound is there, or it is of another model, of other data, of another optimizer; or
                there is nothing left to do.
            DataError: it says nothing that a run would say.
        """
        train = self._config.train
        if not train.resume:
            return RunProgress()
        given = Path(train.resume).expanduser()
        chosen = given if is_checkpoint(given) else None
        newest = self._checkpoints.load(chosen) if chosen else self._checkpoints.load_newest()
        if newest is None:
            if train.resume != AUTO:
                raise ConfigError(f"the run {self._run} has no checkpoint to go on from")
            if self._run_group.decide(lambda: is_finished(self._run)):
                raise ConfigError(
                    f"the run {self._run} is finished and has no checkpoint to go on from; give another train.name, or "
                    "delete the folder to train it again"
                )
            self._reporter.say("no checkpoint to go on from: the run starts at its first step")
            self._run_group.decide(lambda: keep_config(self._run, self._config))
            return RunProgress()
        self._require_same(newest)
        self._require_same_data(newest)
        for problem in newest.refused:
            self._reporter.say(f"refused: {problem}")
        self._reporter.say(f"going on from {newest.path}")
        finished = self._run_group.decide(lambda: is_finished(self._run))
        if newest.step > train.steps or (newest.step == train.steps and finished):
            raise ConfigError(
                f"{newest.path} is of step {newest.step}, and train.steps is {train.steps}; give more steps to go on"
            )
        standing = _standing(newest)
        self._run_group.decide(lambda: self._go_back(newest.step))
        return standing

    def _go_back(self, step: int) -> None:
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
        keep_config(self._run, self._config)

    def _require_same(self, loaded: Loaded) -> None:
        before, now = read_manifest(loaded.path).config, asdict(self._config)
        if "data" in loaded.extra:  # its digest says whether data that lies elsewhere now is the same
            del now["data"]["path"]
        changed = [
            f"{section}.{key} was {_words(before, section, key)} and is {value!r}"
            for section in ("model", "data", "optim", "train")
            for key, value in now[section].items()
            if _decides(section, key) and _words(before, section, key) != repr(value)
        ]
        if changed:
            raise ConfigError(
                f"{loaded.path} is of another run: {'; '.join(changed)}. Go on with what it had, or start a new run"
            )

    def _require_same_data(self, loaded: Loaded) -> None:
        """Refuse other data than the checkpoint was made with, or say that it is accepted."""
        if "data" not in loaded.extra:
            self._reporter.say(
                f"{loaded.path} has no digest of its data; whether it is the same now is not known"
            )
            return
        try:
            before = DataDigest.from_values(loaded.extra["data"])
        except DataError as error:
            raise DataError(f"{loaded.path} does not say which data it is of: {error}") from error
        changes = self._data.changes(before)
        if not changes:
            return
        if self._config.data.changed == "refuse":
            raise ConfigError(
                f"the data is not what {loaded.path} was made with: {'; '.join(changes)}. Put the data back; or go on with "
                f"what is there now with  --set data.changed=accept : the run is another one from here on"
            )
        self._reporter.say(f"data accepted that {loaded.path} was not made with: {'; '.join(changes)}")

    def after_step(self, standing: RunProgress) -> None:
        """After every step: save, if it is time to; what could not be written is told, and the run goes on."""
        every = self._config.train.checkpoint_every
        if every and standing.done % every == 0:
            self._wait()
            self._save(standing)

    def stop(self, standing: RunProgress) -> StoppedError:
        """Save the run where it stands, unless it just has been, and see it on the disk; every process calls it.

        Returns:
            What to raise.

        Raises:
            PenstockError: it could not be saved; names what there is to go on from.
        """
        done = standing.done
        if not done:
            return StoppedError(f"stopped before the first step, so there is nothing to save; {self._how()}")
        self._wait()
        path = path_of(self._run / FOLDER, done)
        if not self._run_group.decide(lambda: is_whole(path)):
            try:
                self._save(standing)
                self._checkpoints.wait()
            except PenstockError as error:
                raise PenstockError(f"stopped after step {done}, but {error}; {self._how()}") from error
        return StoppedError(f"stopped after step {done}, saved in {path}; {self._how()}")

    def _how(self) -> str:
        return f"go on with  penstock train --resume {self._run}"

    def _save(self, standing: RunProgress) -> None:
        extra: dict[str, Any] = {"skipped_in_a_row": standing.skipped_in_a_row, "data": self._data.values()}
        if math.isfinite(standing.loss):
            extra["loss"] = standing.loss
        self._checkpoints.save(extra)

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
        if isinstance(error, TransportError):
            return  # a save needs all processes; what is not on the disk yet will not be
        try:
            self._wait()
        finally:
            self._checkpoints.close()


def _decides(section: str, key: str) -> bool:
    return key in _DECIDES if section == "train" else (section, key) != ("data", "changed")


def _words(config: dict[str, Any], section: str, key: str) -> str:
    table = config.get(section)
    return repr(table.get(key)) if isinstance(table, dict) else "not known"


def _standing(newest: Loaded) -> RunProgress:
    """What the run itself has put into the checkpoint.

    Raises:
        DataError: it is not what a run puts there.
    """
    loss, skipped = newest.extra.get("loss", math.nan), newest.extra.get("skipped_in_a_row", 0)
    if not isinstance(loss, int | float) or type(skipped) is not int or skipped < 0:
        raise DataError(
            f"{newest.path} is of no run of penstock train: its loss is {loss!r:.40}, its steps skipped in a row are "
            f"{skipped!r:.40}"
        )
    return RunProgress(newest.step, float(loss), skipped)
