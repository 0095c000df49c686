"""Check of a model with a forward of its own in its first training step: the layers have its loss and its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.base.encoding import encode
from penstock.base.errors import PenstockError, SplitError, first_line
from penstock.base.host import memory
from penstock.forward.loss_reach import modules_called, names_in
from penstock.forward.own_layers import ModelLayers
from penstock.forward.sample_check import check_sample
from penstock.parallel.dtensor import is_dtensor
from penstock.runtime.batch.work import LocalBatch
from penstock.runtime.model.pipeline_model import gather_state
from penstock.runtime.weights.parameters import LocalParameters
from penstock.runtime.workers.world import World
from penstock.stage.compute.output_loss import OutputLoss
from penstock.stage.compute.runner import LossFunction
from penstock.stage.structures import dumps, loads
from penstock.stage.values import Message, StageState, flatten, unpack

_Outcome = tuple[str | None, str | None]
"""Refusal, and reason why nothing was compared; None where it does not apply."""

_SHARDED = "processes divide its matrices, experts or samples"


class FirstStepCheck:
    """Check of a model's layers against the model itself, on the first microbatch of a run.

    In processes the first pipeline's rank of the last stage checks. It gets the weights of the other ranks and the input
    for as long as the check takes.
    """

    def __init__(
        self,
        layers: ModelLayers,
        loss_fn: LossFunction,
        *,
        stages: Sequence[int],
        parameters: LocalParameters,
        world: World | None,
        checker: int,
        autocast: torch.dtype | None,
    ) -> None:
        self._layers, self._stages, self._parameters, self._world = layers, stages, parameters, world
        self._own_loss = layers.loss_fn is not None
        self._takes_target = self._own_loss and not isinstance(layers.loss_fn, OutputLoss)
        self._checker, self._autocast = checker, autocast
        inside = {id(module) for module in layers.model.modules()}
        reaches = not self._own_loss and any(id(module) in inside for module in modules_called(loss_fn))
        self._loss_reads = names_in(loss_fn) if reaches else set()

    def run(self, batch: LocalBatch) -> None:
        """Check the layers, after a step whose gradients no optimizer has used yet; every process of the run calls it."""
        world = self._world
        if world is None:
            refusal, skipped = self._alone(batch)
        elif world.layers_wait:
            refusal, skipped = None, _SHARDED
        else:
            outcome = self._in_processes(world, batch) if world.is_first else (None, None)
            outcomes = world.gather(outcome, "run", "check the split of the model")
            refusal, skipped = next((found for found in outcomes if any(found)), (None, None))
        if refusal is not None:
            raise SplitError(refusal)
        if skipped is not None and (world is None or (world.is_first and world.rank == 0)):
            name = type(self._layers.model).__name__
            warnings.warn(
                f"the first step did not check that the layers of {name} give its loss and gradients: {skipped}. Check them "
                "with a small sample, penstock.split(model, x, y), and give those layers to the Pipeline; or leave it out "
                "with ExecutionOptions(check_split=False)",
                RuntimeWarning,
                stacklevel=4,
            )

    def _alone(self, batch: LocalBatch) -> _Outcome:
        if self._sharded():
            return None, _SHARDED
        if reason := self._too_large(0):
            return None, reason
        return self._compare(lambda: (batch.inputs[0], self._own()), batch.targets[0])

    def _in_processes(self, world: World, batch: LocalBatch) -> _Outcome:
        """Return the outcome on the rank that checks; the pipeline's other ranks send it what it lacks, and return none."""
        checks = world.rank == self._checker
        skipped, sent = _SHARDED if self._sharded() else None, None
        if batch.inputs and not checks:
            leaves, structure = flatten(batch.inputs[0])
            try:
                sent = leaves, None if structure is None else dumps(structure)
                encode(sent)
            except (TypeError, PenstockError) as error:
                sent, skipped = None, str(error)
        if checks and skipped is None:
            here = sum(p.nbytes for _, p in self._parameters.named_parameters())
            skipped = self._too_large(sum(p.nbytes for p in self._layers.model.parameters()) - here)
        found = world.gather((sent, skipped))
        if reasons := [reason for _, reason in found if reason is not None]:
            return None, reasons[0]
        own = {} if checks else self._parameters.own_state() | self._parameters.non_persistent_buffers()
        own = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        gathered = gather_state(own, world, checks)
        if not checks:
            return None, None

        def everything() -> tuple[Any, dict[str, Tensor]]:
            here = self._own()
            device = next((value.device for value in here.values()), torch.device("cpu"))
            whole = {name: value.to(device) for name, value in gathered.items()} | here
            if batch.inputs:
                return batch.inputs[0], whole
            leaves, text = next(one for one, _ in found if one is not None)
            moved = tuple(x.to(device) if isinstance(x, Tensor) else x for x in leaves)
            structure = None if text is None else loads(text)
            return unpack(Message(moved, structure, (False,) * len(moved))), whole

        return self._compare(everything, batch.targets[0])

    def _own(self) -> dict[str, Tensor]:
        state = self._parameters.state_dict() | self._parameters.non_persistent_buffers()
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def _sharded(self) -> bool:
        return any(is_dtensor(p) for _, p in self._parameters.named_parameters())

    def _compare(self, gather: Callable[[], tuple[Any, dict[str, Tensor]]], target: Any) -> _Outcome:
        """Compare on the microbatch and with the weights that a function returns."""
        name = type(self._layers.model).__name__
        try:
            value, tensors = gather()
            tensors |= {
                n: tensors[first] for n, first in self._parameters.tied_names.items() if first in tensors
            }
            value, named = (value.value, value.named) if isinstance(value, StageState) else (value, {})
            check_sample(
                self._layers.model, self._layers, self._layers.loss_fn, (value, target), named,
                own_loss=self._takes_target, loss_reads=self._loss_reads, stages=self._stages, tensors=tensors,
                autocast=self._autocast,
            )  # fmt: skip
        except SplitError as error:
            return f"in the first step {error}. No weight was changed", None
        except (torch.OutOfMemoryError, MemoryError) as error:
            return None, f"it does not fit into memory ({first_line(error)})"
        except Exception as error:  # the user's code, which ran in the layers
            return (
                f"the first step compares the layers of {name} with {name} itself, which failed on the first microbatch: "
                f"{type(error).__name__}: {error}. Let {name} run on it alone, or leave the comparison out with "
                "ExecutionOptions(check_split=False)"
            ), None
        return None, None

    def _too_large(self, missing: int) -> str | None:
        """Return why the check does not fit into the host's memory; None if it does."""
        gradients = sum(p.nbytes for p in self._layers.model.parameters() if p.requires_grad)
        # 2: the gradients of the model itself, and of its layers.
        needed, free = missing + 2 * gradients, memory()
        on_host = not any(p.is_cuda for _, p in self._parameters.named_parameters())
        if free is None or not on_host or needed <= free.available:
            return None
        return f"it takes {needed:,} bytes, and {free.available:,} are free"
