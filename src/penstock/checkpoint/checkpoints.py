"""The user's object: a folder of checkpoints of a pipeline and its optimizer, written in the background."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from penstock.checkpoint.find import damage, is_checkpoint, read_manifest, steps_in
from penstock.checkpoint.format.manifest import Manifest
from penstock.checkpoint.read import Prepared, load_into, prepare
from penstock.checkpoint.snapshot import HostBuffers, Snapshot, take_snapshot
from penstock.checkpoint.together import Together
from penstock.checkpoint.write import Facts, prune, write_checkpoint
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: training steps done; the next batch is that of this step.
        path: of the checkpoint.
        extra: the user's own values.
        refused: newer ones that were not sound: what was wrong with each.
    """

    step: int
    path: Path
    extra: dict[str, Any]
    refused: tuple[str, ...]


class Checkpoints:
    """Saves a pipeline and its optimizer, and loads them at any split; a context manager.

    In processes every process makes one, with the same arguments, and makes all calls. They share the folder. ::

        with Checkpoints("run/checkpoints", pipe, optimizer) as checkpoints:
            first = checkpoints.load_newest().step if resuming else 0
            for step in range(first, steps):
                pipe.step(*batch_of(step))
                optimizer.step()
                if (step + 1) % 100 == 0:
                    checkpoints.save()

    Args:
        folder: of the checkpoints of one run, each a folder ``step-NUMBER`` in it; made by the first save.
        pipe: what is saved; ``pipe.steps`` is the number of a checkpoint.
        optimizer: its optimizer, if it is to be saved, too.
        keep_last: after a save the newest so many stay; 0 keeps all.
        keep_every: checkpoints whose step divides by it stay, too; 0 for none.
        config: plain values that are kept with each, and say which run it is.
        timeout: the longest a process waits for the others' part of a save, in seconds.
    """

    def __init__(
        self,
        folder: str | Path,
        pipe: Pipeline,
        optimizer: PipelineOptimizer | None = None,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        config: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} must be a whole number of at least 0, not {value!r}")
        self.folder = Path(folder).expanduser()
        self.pipe = pipe
        self.optimizer = optimizer
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._facts = Facts(pipe.schedule.stages, pipe.seed, _layout(pipe), dict(config or {}))
        self._together = Together(pipe.in_processes, timeout)
        self._host_buffers = HostBuffers()
        self._thread: Thread | None = None
        self._written: Path | None = None
        self._failure: BaseException | None = None

    def save(self, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the state as it is now and write it in the background; waits first until the save before is written.

        Args:
            extra: your own numbers, texts, lists, dictionaries and tensors.

        Raises:
            ConfigError: the state has something that cannot be kept; nothing is written then.
            PenstockError: the save before failed, as `wait`; nothing is written then, either.
        """
        self.wait()
        snapshot = take_snapshot(self.pipe, self.optimizer, extra or {}, self._host_buffers)
        self._thread = Thread(target=self._write, args=(snapshot,), name="penstock-checkpoint", daemon=True)
        self._thread.start()

    @property
    def writing(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait until the last save is written.

        Returns:
            The checkpoint; None if nothing has been saved since the last call.

        Raises:
            PenstockError: it could not be written; says why and where. Training can go on, and earlier checkpoints are as
                they were.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        written, self._written = self._written, None
        if failure is not None:
            raise PenstockError(
                f"no checkpoint was written in {self.folder}: {failure}; the earlier ones are as they were"
            ) from failure
        return written

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._written = write_checkpoint(self.folder, snapshot, self._facts, self._together)
            if self._together.leads:
                prune(self.folder, self.keep_last, self.keep_every)
        except BaseException as error:  # raised by `wait`, in the thread that trains
            self._failure = error

    def load_newest(self) -> Loaded | None:
        """Load the newest checkpoint of the folder that is complete and sound; every file is checked first.

        Returns:
            What was loaded, with what is wrong with newer ones; None if there has never been a checkpoint.

        Raises:
            ConfigError: it does not fit this model or optimizer.
            DataError: there are checkpoints, but none is sound; names what is wrong with each.
        """
        self.wait()
        there = self._agreed([str(path) for _, path in steps_in(self.folder)])
        refused: list[str] = []
        for path in map(Path, there):
            found, wrong = self._prepare(path)
            if found is not None:
                return self._load(path, found, tuple(refused))
            refused.append("; ".join(wrong))
        if refused:
            raise DataError(f"no checkpoint in {self.folder} is sound: {'; '.join(refused)}")
        return None

    def load(self, path: str | Path) -> Loaded:
        """Load this checkpoint and no other; every file is checked first.

        Raises:
            ConfigError: it does not fit this model or optimizer.
            DataError: it is damaged; names the files.
        """
        self.wait()
        path = Path(path).expanduser()
        if not is_checkpoint(path):
            raise ConfigError(f"{path} is no checkpoint; their folders are called step-NUMBER")
        found, wrong = self._prepare(path)
        if found is None:
            raise DataError("; ".join(wrong))
        return self._load(path, found, ())

    def _load(self, path: Path, found: Prepared, refused: tuple[str, ...]) -> Loaded:
        load_into(found, self.pipe, self.optimizer)
        return Loaded(found.step, path, found.extra, refused)

    def _prepare(self, path: Path) -> tuple[Prepared | None, list[str]]:
        """What is there to load; where it is damaged for one process it is for all, and nothing is loaded anywhere.

        Returns:
            What this process has to load, or None with what is wrong.

        Raises:
            ConfigError: on every process, if it does not fit the model or the optimizer of one.
        """
        manifest, wrong = self._check(path)
        if manifest is None or wrong:
            return None, wrong
        found: list[Prepared] = []

        def look() -> tuple[str, str]:
            try:
                found.append(prepare(path, manifest, self.pipe, self.optimizer))
            except DataError as error:
                return str(error), ""
            except ConfigError as error:
                return "", str(error)
            return "", ""

        answers = self._together.each(look)
        for _, unfit in answers:
            if unfit:
                raise ConfigError(unfit)
        wrong = list(dict.fromkeys(damaged for damaged, _ in answers if damaged))
        return (None, wrong) if wrong else (found[0], [])

    def _check(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """The manifest, and what is wrong with the files; the processes share the reading, and agree."""
        rank, size = self._together.rank, self._together.size

        def look() -> tuple[Manifest | None, list[str]]:
            try:
                manifest = read_manifest(path)
            except DataError as error:
                return None, [str(error)]
            return manifest, damage(path, manifest, sorted(manifest.files)[rank::size])

        answers = self._together.each(look)
        wrong = list(dict.fromkeys(problem for _, problems in answers for problem in problems))
        return answers[rank][0], wrong

    def _agreed(self, here: list[str]) -> list[str]:
        return self._together.each(lambda: here)[0]

    def close(self) -> None:
        """Wait until the last save is written, and leave the other processes.

        Raises:
            PenstockError: it could not be written, as `wait`.
        """
        try:
            self.wait()
        finally:
            self._together.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PenstockError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what ended the block comes first


def _layout(pipe: Pipeline) -> dict[str, Any]:
    schedule = pipe.schedule
    mesh = pipe.mesh
    return {
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": pipe.microbatches,
        "mesh": dataclasses.asdict(mesh) if mesh is not None else None,
        "in_processes": pipe.in_processes,
    }
