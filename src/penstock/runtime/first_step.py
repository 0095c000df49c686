"""Checks and choices of a pipeline after its first training step, once: its layers, its rows, what to recompute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from penstock.runtime.batch.arguments import arguments_of
from penstock.runtime.batch.splitter import BatchSplitter
from penstock.runtime.batch.work import LocalBatch, StepOptions, Work
from penstock.runtime.engine import Engine, Probe
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.model.first_step import FirstStepCheck
from penstock.runtime.model.row_check import RowCheck
from penstock.stage.compute.runner import LossFunction
from penstock.stage.layers import BatchNames
from penstock.stage.rng.random_state import RandomState


class FirstStep:
    """The checks that a pipeline has still to make after a training step.

    Args:
        names: names of the model's arguments, if it has a forward of its own.
        without_gradients: returns a context in which the stages are in evaluation mode.
        layers: check that the layers are the model, or None.
        rows: check that the rows of a batch do not depend on each other, or None.
        memory: bytes of activations that a rank may hold, if layers are chosen by them that are recomputed; or None.
        replicas: number of pipelines that share a batch.
    """

    def __init__(
        self,
        engine: Engine,
        local_stages: LocalStages,
        splitter: BatchSplitter,
        *,
        random: RandomState,
        loss_fn: LossFunction,
        names: BatchNames | None,
        without_gradients: Callable[[], AbstractContextManager[None]],
        layers: FirstStepCheck | None,
        rows: RowCheck | None,
        memory: int | None,
        replicas: int,
    ) -> None:
        self._engine, self._local_stages, self._splitter = engine, local_stages, splitter
        self._random, self._loss_fn, self._names = random, loss_fn, names
        self._without_gradients = without_gradients
        self._layers, self._rows, self._memory, self._replicas = layers, rows, memory, replicas

    def after(self, x: object, y: object, named: Mapping[str, object], work: Work) -> bool:
        """Do what is left, after a training step; every process of the run calls it.

        Returns:
            True if nothing is left.

        Raises:
            SplitError: if the layers are not the model, or rows depend on each other.
        """
        if self._layers is not None:
            with self._engine.calling("pipe.step()"):
                self._engine.wait_for_parameters(whole=True)  # it reads those of all processes
                self._layers.run(work.batch)
            self._layers = None
        # One microbatch for all processes is the whole batch.
        if self._rows is not None and (work.options.microbatches > 1 or self._replicas > 1):
            with self._local_stages.records_kept(), self._without_gradients():
                self._check_rows(self._rows, x, y, named, work)
            self._rows = None
        if self._memory is not None:
            self._engine.choose_recompute(self._memory)
            self._memory = None
        return self._rows is None

    def _check_rows(
        self, check: RowCheck, x: object, y: object, named: Mapping[str, object], work: Work
    ) -> None:
        inputs, target, others = arguments_of(self._names, self._loss_fn, x, y, named)
        together = self._splitter.split_together(inputs, target, others, work.batch)

        def forwards(part: LocalBatch, probe: Probe) -> list[Work]:
            options = StepOptions(microbatches=len(part.weights), number=work.options.number, probes=True)
            with self._random.watching():
                return self._engine.run_step(options, part, probe)

        check.run(together, forwards, self._splitter.warned_of_counts)
