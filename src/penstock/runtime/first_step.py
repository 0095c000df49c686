"""Checks and choices of a pipeline after its first steps, once: its layers, its rows, what to recompute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from penstock.runtime.batch.arguments import Arguments
from penstock.runtime.batch.splitter import BatchSplitter
from penstock.runtime.batch.work import LocalBatch, Work
from penstock.runtime.consensus import APART
from penstock.runtime.engine import Engine, Probe
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.model.first_step import FirstStepCheck
from penstock.runtime.model.row_check import RowCheck
from penstock.runtime.weights.parameters import LocalParameters
from penstock.stage.rng.random_state import RandomState


class FirstStep:
    """The checks that a pipeline has still to make after a step.

    Rows are compared after the first training step whose microbatches can be joined, and also after the first such
    evaluation before it, which may have other inputs.

    Args:
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
        parameters: LocalParameters,
        random: RandomState,
        layers: FirstStepCheck | None,
        rows: RowCheck | None,
        memory: int | None,
        replicas: int,
    ) -> None:
        self._engine, self._local_stages, self._splitter = engine, local_stages, splitter
        self._parameters, self._random, self._evaluated = parameters, random, False
        self._layers, self._rows, self._memory, self._replicas = layers, rows, memory, replicas

    def before(self) -> None:
        """Do what must come before a step."""
        if self._rows is not None:
            self._rows.before()

    def after(
        self,
        arguments: Callable[[], Arguments],
        work: Work,
        without_gradients: Callable[[], AbstractContextManager[None]],
    ) -> bool:
        """Do what is left, after a step; every process of the run calls it.

        Args:
            arguments: function that returns the step's x, y and keyword inputs.
            without_gradients: returns a context in which the stages are in evaluation mode. Not kept, or its pipeline would
                be in a circle of references, and its threads not end with it.

        Returns:
            True if nothing is left.

        Raises:
            SplitError: if the layers are not the model, or rows depend on each other.
        """
        trains = work.options.trains
        if trains and self._layers is not None:
            with self._engine.calling("pipe.step()"):
                self._engine.wait_for_parameters(whole=True)  # it reads those of all processes
                self._layers.run(work.batch, self._parameters)
            self._layers = None
        # One microbatch for all processes is the whole batch. All processes have the same flags.
        cuts = (work.options.microbatches > 1 or self._replicas > 1) and not work.flags & APART
        if self._rows is not None and cuts and (trains or not self._evaluated):
            with self._local_stages.records_kept(), without_gradients():
                self._check_rows(self._rows, arguments(), work)
            self._rows, self._evaluated = None if trains else self._rows, True
        if trains and self._memory is not None:
            self._engine.choose_recompute(self._memory)
            self._memory = None
        return self._layers is None and self._rows is None and self._memory is None

    def _check_rows(self, check: RowCheck, arguments: Arguments, work: Work) -> None:
        options = replace(work.options, outputs=False, input_grads=False, loss_scale=1.0, probes=True)
        together = self._splitter.split_together(*arguments, work.batch, options)

        def forwards(part: LocalBatch, probe: Probe) -> list[Work]:
            with self._random.watching():
                return self._engine.run_step(replace(options, microbatches=len(part.weights)), part, probe)

        step = "step" if work.options.trains else "evaluation"
        check.run(together, forwards, self._splitter.warned_of_counts, step)
