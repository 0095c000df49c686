"""Checkpoints of a run: saving them, and resuming from one whose config and data are still the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from penstock.base.errors import ConfigError, DataError, PenstockError, StoppedError, TransportError
from penstock.checkpoint.checkpoints import Checkpoints, Loaded
from penstock.checkpoint.find import (
    FOLDER,
    is_checkpoint,
    is_whole,
    path_of,
    read_manifest,
    step_of,
    steps_in,
)
from penstock.checkpoint.manifest import Manifest
from penstock.huggingface.model_folder import INDEX, WEIGHTS
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.trace.metrics_writer import final_values
from penstock.train.callbacks.callback import Callback, SaveEvent
from penstock.train.config import file as config_file
from penstock.train.config.config import Config
from penstock.train.data.digest import DataDigest
from penstock.train.run_folder import AUTO, keep_config
from penstock.train.run_log import Reporter

SET_ASIDE = ".set-aside"
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, without weights and optimizer.

    Attributes:
        loss: loss of the last step that had a finite one, in nats per token; NaN if there is none.
        final: the last line of the run's metrics if the run had ended and has no steps left; else None.
    """

    done: int = 0
    loss: float = math.nan
    skipped_in_a_row: int = 0
    final: Mapping[str, Any] | None = None
    has_state: bool = True


class RunCheckpointer:
    """Checkpointer that saves a run and resumes it; a context manager around the steps.

    Every process has one.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        *,
        data: DataDigest,
        pipe: Pipeline,
        optimizer: PipelineOptimizer,
        run_group: RunGroup,
        reporter: Reporter,
        callbacks: Callback,
    ) -> None:
        self._run = run
        self._config = config
        self._data = data
        self._run_group = run_group
        self._reporter = reporter
        self._callbacks = callbacks
        self._checkpoints = Checkpoints(
            run / FOLDER,
            pipe,
            optimizer,
            keep_last=config.train.keep_last,
            keep_every=config.train.keep_every,
            config=asdict(config),
        )

    def resume(self) -> RunProgress:
        """Load the checkpoint that ``train.resume`` names, if it is set.

        Returns:
            The progress of the run. All steps may be done: then only files that are missing are written.
        """
        train = self._config.train
        if not train.resume:
            return RunProgress()
        path = Path(train.resume).expanduser()
        self._run_group.decide(lambda: self._require_newest_same(path))
        loaded = self._checkpoints.load(path) if is_checkpoint(path) else self._checkpoints.load_newest()
        final = self._run_group.decide(lambda: final_values(self._run))
        if loaded is None:
            if (
                final is not None
                and final.get("step") == train.steps
                and self._run_group.decide(self._has_weights)
            ):
                self._reporter.say(
                    f"the run {self._run} is finished: all its steps are done, and it has its weights"
                )
                return RunProgress(train.steps, final=final, has_state=False)
            if train.resume != AUTO:
                raise ConfigError(
                    f"the run {self._run} has no checkpoint to resume from: it ended before its first one, or had "
                    "train.checkpoint_every=0; train it again as a new run"
                )
            if final is not None:
                raise ConfigError(
                    f"the run {self._run} is finished and has no checkpoint to resume from; give another train.name, or "
                    "delete the folder to train it again"
                )
            self._reporter.say("no checkpoint to resume from: the run starts at its first step")
            self._run_group.decide(lambda: keep_config(self._run, self._config))
            return RunProgress()
        self._require_same(loaded.path, read_manifest(loaded.path))
        self._require_same_data(loaded)
        for problem in loaded.refused:
            self._reporter.say(f"refused: {problem}")
        self._reporter.say(f"resuming from {loaded.path}")
        if loaded.step > train.steps:
            raise ConfigError(
                f"train.steps must be at least {loaded.step}, the step of {loaded.path}, got {train.steps}; give more steps"
            )
        progress = _progress_of(loaded)
        self._run_group.decide(lambda: self._go_back(loaded.step))
        if final is not None and final.get("step") == loaded.step == train.steps:
            self._reporter.say(
                f"all {train.steps} steps are done; only what is missing of the run is written"
            )
            return replace(progress, final=final)
        return progress

    def _has_weights(self) -> bool:
        """Return whether the run's folder has its weights; raise if they belong to another config."""
        if not any((self._run / name).is_file() for name in (WEIGHTS, INDEX)):
            return False
        kept = asdict(config_file.load(self._run / "config.toml"))
        if changed := config_changes(kept, self._config, knows_data=True):
            raise ConfigError(
                f"{self._run} is finished and a different run: {'; '.join(changed)}. Give another train.name"
            )
        return True

    def _go_back(self, step: int) -> None:
        """Rename the checkpoints of later steps, which will be repeated, and write the config."""
        for later, path in steps_in(self._run / FOLDER):
            if later > step:
                renamed = path.with_name(path.name + SET_ASIDE)
                number = 1
                while renamed.exists():
                    number += 1
                    renamed = path.with_name(f"{path.name}{SET_ASIDE}-{number}")
                path.rename(renamed)
                self._reporter.say(f"set aside: {renamed}")
        keep_config(self._run, self._config)

    def _require_newest_same(self, chosen: Path) -> None:
        """Raise if the newest checkpoint is of another run, before its state is found not to fit this optimizer."""
        newest = [path for _, path in steps_in(self._run / FOLDER)][:1]
        for path in [chosen] if is_checkpoint(chosen) else newest:
            try:
                manifest = read_manifest(path)
            except DataError:
                return  # an earlier one may be sound
            self._require_same(path, manifest)

    def _require_same(self, path: Path, manifest: Manifest) -> None:
        extra = manifest.values.get("extra")
        knows_data = isinstance(extra, dict) and "data" in extra
        changed = config_changes(manifest.config, self._config, knows_data=knows_data)
        if changed:
            raise ConfigError(
                f"{path} belongs to a different run: {'; '.join(changed)}. Resume with the old values, or start a new run"
            )

    def _require_same_data(self, loaded: Loaded) -> None:
        """Raise if the data differs from the checkpoint's, or report that the difference is accepted."""
        if "data" not in loaded.extra:
            self._reporter.say(
                f"{loaded.path} has no digest of its data, so it is unknown if the data is the same"
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
                f"the data is not what {loaded.path} was made with: {'; '.join(changes)}. Restore the data, or train "
                "on the new data with  --set data.changed=accept : the run is another one from here on"
            )
        self._reporter.say(f"data accepted that {loaded.path} was not made with: {'; '.join(changes)}")

    def saves(self, done: int) -> bool:
        """Return whether a step is saved: every ``train.checkpoint_every``-th one and the last, unless that is 0."""
        train = self._config.train
        return bool(train.checkpoint_every) and (done % train.checkpoint_every == 0 or done == train.steps)

    def after_step(self, progress: RunProgress) -> None:
        """Save the steps that are saved; a failed save is reported, and the run continues."""
        if not self._checkpoints.writing:
            self.wait()
        if self.saves(progress.done):
            self.wait()
            self._save(progress)

    def stop(self, progress: RunProgress) -> StoppedError:
        """Save the run unless this step is saved, and return the error to raise; every process calls this."""
        done = progress.done
        if not done:
            return StoppedError(
                f"stopped before the first step, so there is nothing to save; {self._resume_hint()}"
            )
        self.wait()
        path = path_of(self._run / FOLDER, done)
        if not self._run_group.decide(lambda: is_whole(path)):
            try:
                self._save(progress)
                self._announce(self._checkpoints.wait())
            except PenstockError as error:
                raise PenstockError(
                    f"stopped after step {done}, but {error}; {self._resume_hint()}"
                ) from error
        return StoppedError(f"stopped after step {done}, saved in {path}; {self._resume_hint()}")

    def _resume_hint(self) -> str:
        return f"resume with  penstock train --resume {self._run}"

    def _save(self, progress: RunProgress) -> None:
        extra: dict[str, Any] = {"skipped_in_a_row": progress.skipped_in_a_row, "data": self._data.values()}
        if math.isfinite(progress.loss):
            extra["loss"] = progress.loss
        self._checkpoints.save(extra)

    def wait(self) -> None:
        """Wait until the last save is complete, and tell the callbacks; a failed one is reported."""
        try:
            self._announce(self._checkpoints.wait())
        except PenstockError as error:
            self._reporter.say(f"{error}. Training continues")

    def _announce(self, written: Path | None) -> None:
        """Tell of a checkpoint that is complete."""
        if written is not None:
            _LOGGER.info("checkpoint complete: %s", written)
            self._callbacks.on_save(SaveEvent(step_of(written), written))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TransportError):
            return  # a save needs all processes, so an unfinished one cannot succeed
        try:
            self.wait()
        finally:
            self._checkpoints.close()


def _progress_of(loaded: Loaded) -> RunProgress:
    loss, skipped = loaded.extra.get("loss", math.nan), loaded.extra.get("skipped_in_a_row", 0)
    if not isinstance(loss, int | float) or type(skipped) is not int or skipped < 0:
        raise DataError(
            f"{loaded.path} is of no run of penstock train: its loss is {loss!r:.40}, its steps skipped in a row are "
            f"{skipped!r:.40}"
        )
    return RunProgress(loaded.step, float(loss), skipped)


_NUMERIC_KEYS = {"train": ("seed", "batch", "accumulate", "reduction"), "runtime": ("precision",)}
"""Keys that change the numbers; so do all of ``[model]``, ``[optim]`` and ``[data]`` but ``data.changed``."""
_PATHS = ("path", "held_out_path")


def config_changes(before: dict[str, Any], config: Config, *, knows_data: bool) -> list[str]:
    """Return the keys that change a run's numbers and differ from a checkpoint's config, a phrase each.

    Args:
        knows_data: whether the checkpoint has a digest of its data. The data may then have moved: the digest tells whether
            it is the same.
    """
    before, now = dict(before), asdict(config)
    for key in _PATHS if knows_data else ():
        if key == "path" or (now["data"][key] and _shown(before, "data", key) != "''"):
            del now["data"][key]
    changes: list[str] = []
    for section in ("model", "data", "optim", "train", "runtime"):
        for key, value in now[section].items():
            if _changes_numbers(section, key) and (old := _shown(before, section, key)) != repr(value):
                changes.append(f"{section}.{key} was {_words(old)} and is {_words(repr(value))}")
    return changes


def _changes_numbers(section: str, key: str) -> bool:
    keys = _NUMERIC_KEYS.get(section)
    return (section, key) != ("data", "changed") if keys is None else key in keys


def _words(shown: str) -> str:
    return "not set" if shown == "None" else shown


def _shown(config: dict[str, Any], section: str, key: str) -> str:
    """Return a value of a checkpoint's config; its default, if the key is newer than the checkpoint."""
    table = config.get(section)
    default = getattr(getattr(Config(), section), key)
    return repr(table.get(key, default)) if isinstance(table, dict) else "not known"
