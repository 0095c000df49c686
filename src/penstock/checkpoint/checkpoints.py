"""Public checkpoints of a pipeline and its optimizer, Penstock's or a plain one of torch, saved in the background."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim.lr_scheduler import LRScheduler

from penstock.base.counts import few, plural, require_count
from penstock.base.errors import ConfigError, DataError, PenstockError
from penstock.checkpoint.find import damage, is_checkpoint, path_of, read_manifest, steps_in
from penstock.checkpoint.frozen_weights import FrozenDigests
from penstock.checkpoint.manifest import Manifest, encode_value
from penstock.checkpoint.read import Prepared, load_into, prepare
from penstock.checkpoint.snapshot import HostBuffers, Snapshot, take_snapshot
from penstock.checkpoint.together import Together
from penstock.checkpoint.write import Facts, prune, write_checkpoint
from penstock.parallel.replicas.exchange import run_each
from penstock.runtime.optim import state as optimizer_state
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.groups import Named
from penstock.runtime.optim.main_weights import MainWeights
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.optim.state import StatefulOptimizer, common
from penstock.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        step: number of training steps done; the next batch belongs to this step.
        path: folder of the checkpoint.
        extra: the user's own values.
        refused: a message for each newer checkpoint that is damaged.
    """

    step: int
    path: Path
    extra: dict[str, Any]
    refused: tuple[str, ...]


class Checkpoints:
    """A folder of checkpoints of a pipeline and its optimizer, loadable at any split; a context manager.

    A load restores parameters, buffers, the optimizer, ``pipe.steps`` and torch's default generators. A save replaces a
    checkpoint of the same step. With several processes, each makes one `Checkpoints` with the same arguments and makes all
    calls; they share the folder. ::

        with Checkpoints("run/checkpoints", pipe, optimizer) as checkpoints:
            newest = checkpoints.load_newest() if resuming else None
            for step in range(newest.step if newest else 0, steps):
                pipe.step(*batch_of(step))
                optimizer.step()
                if (step + 1) % 100 == 0:
                    checkpoints.save()

    Args:
        folder: folder of one run's checkpoints, each a folder ``step-NUMBER``; created by the first save.
        pipe: pipeline to save; ``pipe.steps`` is the number of a checkpoint.
        optimizer: optimizer of the pipeline, saved with it: a `PipelineOptimizer`, or a torch optimizer over
            ``pipe.parameters()`` that has a state for each parameter (default none). Its groups must be the same on every
            rank, in the same order; a group may have no parameter on some ranks.
        scheduler: learning-rate scheduler of the optimizer, which you step yourself, saved with it (default none).
        keep_last: number of the newest checkpoints to keep after a save (default 3); 0 keeps all.
        keep_every: interval in steps; checkpoints whose step is a multiple are kept, too (default 0: none).
        keep_frozen: whether a save also writes the parameters that are not trained (default True). With False it writes a
            digest of each, and a load requires that the pipeline has the same ones, from the same base model.
        config: plain values that describe the run, stored in each checkpoint and not compared by a load (default none).
        timeout: seconds to wait for other processes during a save (default 600).

    Raises:
        ConfigError: on every process, if an argument cannot be used, or the optimizer's state cannot be kept by parameter
            name.
    """

    def __init__(
        self,
        folder: str | Path,
        pipe: Pipeline,
        optimizer: PipelineOptimizer | torch.optim.Optimizer | None = None,
        *,
        scheduler: LRScheduler | None = None,
        keep_last: int = 3,
        keep_every: int = 0,
        keep_frozen: bool = True,
        config: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            require_count(name, value, least=0)
        self.folder = Path(folder).expanduser()
        self.pipe = pipe
        self.optimizer = optimizer
        with pipe.calling("Checkpoints()"):
            self._optimizer = _with_state(pipe, optimizer, scheduler)
            self._together = Together(pipe.world, timeout)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._facts = Facts(pipe.schedule.stages, pipe.seed, _layout(pipe), dict(config or {}))
        self._host_buffers = HostBuffers()
        self._frozen = None if keep_frozen else FrozenDigests()
        self._thread: Thread | None = None
        self._written: Path | None = None
        self._target: Path | None = None
        self._failure: BaseException | None = None

    def save(self, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the state and write it in the background, after waiting for the previous save; every process calls it.

        Args:
            extra: your own numbers, texts, lists, dictionaries and tensors (default none).

        Raises:
            CallOrderError: if another rank makes another call; names both.
            ConfigError: on every process, if the state has a value that cannot be kept; nothing is written.
            PenstockError: if the previous save failed, as in `wait`; nothing is written.
        """
        self.wait()
        taken: list[Snapshot] = []

        def take() -> None:
            taken.append(
                take_snapshot(self.pipe, self._optimizer, extra or {}, self._host_buffers, self._frozen)
            )

        world = self.pipe.world
        with self.pipe.calling("Checkpoints.save()"):
            run_each(
                take, None if world is None else partial(world.gather, over="run", action="save a checkpoint")
            )
        (snapshot,) = taken
        self._target = path_of(self.folder, snapshot.step)
        self._thread = Thread(target=self._write, args=(snapshot,), name="penstock-checkpoint", daemon=True)
        self._thread.start()

    @property
    def writing(self) -> bool:
        """True while a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Path | None:
        """Wait until the last save is written.

        Returns:
            Path of the checkpoint; None if nothing has been saved since the last call.

        Raises:
            PenstockError: if the save failed; says why and where. Training can continue, and earlier checkpoints are
                unchanged.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        written, self._written = self._written, None
        if failure is not None:
            raise PenstockError(
                f"no checkpoint was written in {self._target}: {failure}; earlier checkpoints are unchanged"
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
            The checkpoint, with the defects of newer ones; None if there has never been a checkpoint.

        Raises:
            ConfigError: if it does not fit this model or optimizer.
            DataError: if there are checkpoints, but none is sound; names the defects of each.
        """
        self.wait()
        with self.pipe.calling("Checkpoints.load_newest()"):
            return self._load_newest()

    def _load_newest(self) -> Loaded | None:
        # Other processes may see a shared folder late; all of them try the same checkpoints in the same order.
        seen_by_leader = self._together.each(lambda: [str(path) for _, path in steps_in(self.folder)])[0]
        refused: list[str] = []
        for path in map(Path, seen_by_leader):
            prepared, wrong = self._prepare(path)
            if prepared is not None:
                return self._load(path, prepared, tuple(refused))
            refused.append("; ".join(wrong))
        if refused:
            raise DataError(f"no checkpoint in {self.folder} is sound: {'; '.join(refused)}")
        return None

    def load(self, path: str | Path) -> Loaded:
        """Load one checkpoint; every file is checked first.

        Args:
            path: folder of the checkpoint, ``step-NUMBER``.

        Raises:
            ConfigError: if it does not fit this model or optimizer.
            DataError: if it is damaged; names the files.
        """
        self.wait()
        path = Path(path).expanduser()
        if not is_checkpoint(path):
            raise ConfigError(f"{path} is not a checkpoint; their folders are called step-NUMBER")
        with self.pipe.calling("Checkpoints.load()"):
            prepared, wrong = self._prepare(path)
            if prepared is None:
                raise DataError("; ".join(wrong))
            return self._load(path, prepared, ())

    def _load(self, path: Path, prepared: Prepared, refused: tuple[str, ...]) -> Loaded:
        load_into(prepared, self.pipe, self._optimizer)
        return Loaded(prepared.step, path, prepared.extra, refused)

    def _prepare(self, path: Path) -> tuple[Prepared | None, list[str]]:
        """Read this process's part of a checkpoint; all processes accept or refuse it together."""
        manifest, wrong = self._check(path)
        if manifest is None or wrong:
            return None, wrong
        prepared: list[Prepared] = []

        def read() -> tuple[str, str]:
            try:
                prepared.append(prepare(path, manifest, self.pipe, self._optimizer))
            except DataError as error:
                return str(error), ""
            except ConfigError as error:
                return "", str(error)
            return "", ""

        answers = self._together.each(read)
        for _, unfit in answers:
            if unfit:
                raise ConfigError(unfit)
        wrong = list(dict.fromkeys(damaged for damaged, _ in answers if damaged))
        return (None, wrong) if wrong else (prepared[0], [])

    def _check(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """Return the manifest and the defects of the files; the processes divide the files among them, and agree."""
        rank, size = self._together.rank, self._together.size

        def check() -> tuple[Manifest | None, list[str]]:
            try:
                manifest = read_manifest(path)
            except DataError as error:
                return None, [str(error)]
            return manifest, damage(path, manifest, sorted(manifest.files)[rank::size])

        answers = self._together.each(check)
        wrong = list(dict.fromkeys(problem for _, problems in answers for problem in problems))
        return answers[rank][0], wrong

    def close(self) -> None:
        """Wait until the last save is written, and leave the process group.

        Raises:
            PenstockError: if the save failed, as in `wait`.
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
            error.add_note(str(failure))  # the error of the block comes first


def _with_state(
    pipe: Pipeline, optimizer: PipelineOptimizer | torch.optim.Optimizer | None, scheduler: LRScheduler | None
) -> StatefulOptimizer | None:
    """Return the optimizer with its state by parameter name; every process calls it."""
    made: list[StatefulOptimizer] = []

    def make() -> list[str]:
        """Return what must be the same on every process: the kind of optimizer, and the options of each group."""
        if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                "the scheduler must be one of the optimizer that is saved, which must be given, too; it is of another one"
            )
        if optimizer is None:
            return ["no optimizer"]
        if isinstance(optimizer, PipelineOptimizer):
            if scheduler is not None and optimizer.schedulers not in ([], [scheduler]):
                raise ConfigError(
                    "the PipelineOptimizer has a scheduler of its own; use that one or the other"
                )
            optimizer.schedulers = optimizer.schedulers if scheduler is None else [scheduler]
        made.append(
            optimizer
            if isinstance(optimizer, PipelineOptimizer)
            else TorchOptimizer(pipe, optimizer, scheduler)
        )
        groups = common(made[0])["groups"]
        return [type(optimizer).__name__, *map(repr, groups)]

    world = pipe.world
    exchange = None if world is None else partial(world.gather, over="run", action="compare the optimizers")
    kinds = run_each(make, exchange)
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            here, there = (
                f"{each[0]} with {plural(len(each) - 1, 'group')} ({'; '.join(each[1:])})"
                for each in (kinds[0], kind)
            )
            raise ConfigError(
                f"every rank must have the same optimizer with the same groups, empty ones included; rank 0 has {here}, and "
                f"rank {rank} has {there}"
            )
    return made[0] if made else None


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


_GLOBAL_STATE = {
    "LBFGS": "keeps one state for all parameters together",
    "ZeroRedundancyOptimizer": "keeps each replica's share of the state out of reach",
}


class TorchOptimizer:
    """An optimizer of ``torch.optim`` that the user steps, with the state of a `PipelineOptimizer`."""

    shards = None
    skipped = 0

    def __init__(
        self, pipe: Pipeline, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        self.pipe = pipe
        self.optimizers = {pipe.rank: optimizer}
        self.schedulers = [] if scheduler is None else [scheduler]
        self.main_weights = {pipe.rank: MainWeights([], copies=False)}
        self.steps = 0
        self._optimizer = optimizer
        _require_state_by_parameter(optimizer)
        if pipe.shards is not None:
            raise ConfigError(
                "this pipeline is updated by a PipelineOptimizer (zero=True); give that one to Checkpoints"
            )
        # What a save could not keep is refused now, not at the first save.
        self.parts(pipe.rank)
        for key in ("groups", "lr_scheduler"):
            encode_value(optimizer_state.common(self)[key], f"optimizer/{key}", lambda name, tensor: None)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of the pipeline."""
        scaler = self.pipe.scaler
        return scaler if isinstance(scaler, GradScaler) else None

    def parts(self, rank: int) -> list[Named]:
        """Return the (name, parameter) pairs of each group, which may have none."""
        names = {id(p): name for name, p in self.pipe.named_parameters()}
        groups = [group["params"] for group in self._optimizer.param_groups]
        strangers = [(n, p) for n, group in enumerate(groups) for p in group if id(p) not in names]
        kind = type(self._optimizer).__name__
        if strangers:
            number, first = strangers[0]
            raise ConfigError(
                f"{kind} has {plural(len(strangers), 'tensor')} that the pipeline does not train on rank {rank} (the first, "
                f"of shape {tuple(first.shape)}, is in group {number}); build it from pipe.parameters() or "
                "pipe.named_parameters(), after the pipeline"
            )
        given = {id(p) for group in groups for p in group}
        missing = [n for n, p in self.pipe.named_parameters() if p.requires_grad and id(p) not in given]
        if missing:
            raise ConfigError(
                f"{kind} does not have {few(missing, 4)}, which the pipeline trains; give it all of "
                "pipe.parameters(), in several groups if their options differ, or freeze the rest (requires_grad_(False))"
            )
        return [[(names[id(p)], p) for p in group] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process's parameters, as `PipelineOptimizer.state_dict` does."""
        return self._state(whole=True)

    def sharded_state(self) -> dict[str, Any]:
        """Return `state_dict` with this process's shards of tensors."""
        return self._state(whole=False)

    def _state(self, whole: bool) -> dict[str, Any]:
        parameters = {p for group in self._optimizer.param_groups for p in group["params"]}
        others = [key for key in self._optimizer.state if key not in parameters]
        if others:
            raise ConfigError(
                f"{type(self._optimizer).__name__} keeps state under {str(others[0])[:80]!r}, not under a parameter; "
                "keep it in optimizer.state[parameter], or in a group's options"
            )
        self.steps = self.pipe.steps
        return optimizer_state.collect(self, whole=whole)

    def give_state(self) -> None:
        """Do nothing: every replica has the whole state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, also a `PipelineOptimizer`'s, or nothing of it if it does not fit; gradients are dropped."""
        self.pipe.wait()
        optimizer_state.restore(self, state)
        self.pipe.zero_grad()


def _require_state_by_parameter(optimizer: object) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer or a penstock.PipelineOptimizer, got a {kind.__name__}"
        )
    why = next((_GLOBAL_STATE[base.__name__] for base in kind.__mro__ if base.__name__ in _GLOBAL_STATE), "")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if not why and closure is not None and closure.default is inspect.Parameter.empty:
        why = "runs the model itself, through a closure that a pipeline cannot give it"
    if why:
        raise ConfigError(
            f"{kind.__name__} {why}, so it cannot be saved by parameter name and continued at another layout; use an "
            "optimizer with a state for each parameter, such as AdamW or SGD"
        )
