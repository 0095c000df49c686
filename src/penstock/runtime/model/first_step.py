"""Check of a model with a forward of its own in its first training step: the layers have its loss and its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.encoding import encode
from penstock.base.errors import PenstockError, SplitError, first_line
from penstock.base.host import memory
from penstock.forward.loss_reach import modules_called, names_in
from penstock.forward.own_layers import ModelLayers
from penstock.forward.sample_check import check_sample, without_values
from penstock.parallel.dtensor import is_dtensor
from penstock.runtime.batch.work import LocalBatch
from penstock.runtime.model.pipeline_model import gather_state
from penstock.runtime.weights.parameters import LocalParameters
from penstock.runtime.workers.world import World
from penstock.stage.compute.output_loss import OutputLoss
from penstock.stage.compute.runner import LossFunction
from penstock.stage.devices import place_of, places_of
from penstock.stage.layers import Layer
from penstock.stage.structures import dumps, loads
from penstock.stage.values import Message, StageState, flatten, unpack

_Outcome = tuple[str | None, str | None]
"""Refusal, and reason why nothing was compared; None where it does not apply."""

_SHARDED = "its parameters are DTensors, which it was given with"
_SPREAD = (
    "its parameters are on the devices of several ranks; penstock.split(model, x) compares it before that"
)


class FirstStepCheck:
    """Check of a model's layers against the model itself, on the first microbatch of a run.

    In processes the first pipeline's rank of the last stage checks. It gets the weights of the other ranks and the input
    for as long as the check takes. Where axes of the mesh divide layers, it compares the layers as they were before, with
    whole weights; of divided samples, its part is a sample of fewer tokens.

    Args:
        layers: layers as they were given; axes have not yet divided them.
        checker: rank that checks.
    """

    def __init__(
        self,
        layers: ModelLayers,
        loss_fn: LossFunction,
        *,
        stages: Sequence[int],
        world: World | None,
        checker: int,
        autocast: torch.dtype | None,
    ) -> None:
        self._stages, self._world = stages, world
        self._own_loss = layers.loss_fn
        self._takes_target = self._own_loss is not None and not isinstance(self._own_loss, OutputLoss)
        self._checks = world is None or (world.is_first and world.rank == checker)
        self._divided = world is not None and world.layers_wait
        self._parts_of_samples = world is not None and world.sample_parts.count > 1
        self._autocast = autocast
        self._sharded = any(map(is_dtensor, layers.model.parameters()))
        self._model: nn.Module = layers.model
        self._layers: Sequence[Layer] = layers
        if self._divided and self._checks and not self._sharded:
            self._model, self._layers = without_values(layers.model, layers)
        inside = {id(module) for module in layers.model.modules()}
        reaches = self._own_loss is None and any(id(module) in inside for module in modules_called(loss_fn))
        self._loss_reads = names_in(loss_fn) if reaches else set()

    def run(self, batch: LocalBatch, parameters: LocalParameters) -> None:
        """Check the layers, after a step whose gradients no optimizer has used yet; every process of the run calls it."""
        world = self._world
        if world is None:
            refusal, skipped = self._alone(batch, parameters)
        else:
            # Divided weights are made whole by all processes that have a part.
            takes_part = world.is_first or self._divided
            outcome = self._in_processes(world, batch, parameters) if takes_part else (None, None)
            outcomes = world.gather(outcome, "run", "check the split of the model")
            refusal, skipped = next((found for found in outcomes if any(found)), (None, None))
        if refusal is not None:
            raise SplitError(refusal)
        if skipped is not None and (world is None or (world.is_first and world.rank == 0)):
            name = type(self._model).__name__
            warnings.warn(
                f"the first step did not check that the layers of {name} give its loss and gradients: {skipped}. Check them "
                "with a small sample, penstock.split(model, x, y), and give those layers to the Pipeline; or leave it out "
                "with ExecutionOptions(check_split=False)",
                RuntimeWarning,
                stacklevel=4,
            )

    def _alone(self, batch: LocalBatch, parameters: LocalParameters) -> _Outcome:
        if self._sharded:
            return None, _SHARDED
        if len(places_of(p for _, p in parameters.named_parameters())) > 1:
            return None, _SPREAD
        if reason := self._too_large(0, parameters):
            return None, reason
        return self._compare(lambda: (batch.inputs[0], _own(parameters)), batch.targets[0], parameters)

    def _in_processes(self, world: World, batch: LocalBatch, parameters: LocalParameters) -> _Outcome:
        """Return the outcome on the rank that checks; the other processes send it what it lacks, and return none."""
        skipped, sent = _SHARDED if self._sharded else None, None
        if batch.inputs and world.is_first and not self._checks:
            leaves, structure = flatten(batch.inputs[0])
            try:
                sent = leaves, None if structure is None else dumps(structure)
                encode(sent)
            except (TypeError, PenstockError) as error:
                sent, skipped = None, str(error)
        if self._checks and skipped is None:
            here = 0 if self._divided else sum(p.nbytes for _, p in parameters.named_parameters())
            skipped = self._too_large(sum(p.nbytes for p in self._model.parameters()) - here, parameters)
        found = world.gather((sent, skipped), "run" if self._divided else "pipeline")
        if reasons := [reason for _, reason in found if reason is not None]:
            return None, reasons[0]
        # A process that checks has its own undivided weights as they are.
        sends = self._divided or not self._checks
        own = parameters.own_state() | parameters.non_persistent_buffers() if sends else {}
        own = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        gathered = gather_state(own, world, self._checks)
        if not self._checks:
            return None, None

        def everything() -> tuple[Any, dict[str, Tensor]]:
            here = {} if self._divided else _own(parameters)
            device = place_of(p for _, p in parameters.named_parameters()) or torch.device("cpu")
            whole = {name: value.to(device) for name, value in gathered.items()} | here
            if batch.inputs:
                return batch.inputs[0], whole
            leaves, text = next(one for one, _ in found if one is not None)
            moved = tuple(x.to(device) if isinstance(x, Tensor) else x for x in leaves)
            structure = None if text is None else loads(text)
            return unpack(Message(moved, structure, (False,) * len(moved))), whole

        return self._compare(everything, batch.targets[0], parameters)

    def _compare(
        self,
        gather: Callable[[], tuple[Any, dict[str, Tensor]]],
        target: Any,
        parameters: LocalParameters,
    ) -> _Outcome:
        """Compare on the microbatch and with the weights that a function returns."""
        name = type(self._model).__name__
        try:
            value, tensors = gather()
            tensors |= {n: tensors[first] for n, first in parameters.tied_names.items() if first in tensors}
            value, named = (value.value, value.named) if isinstance(value, StageState) else (value, {})
            check_sample(
                self._model, self._layers, self._own_loss, (value, target), named,
                own_loss=self._takes_target, loss_reads=self._loss_reads, stages=self._stages, tensors=tensors,
                autocast=self._autocast,
            )  # fmt: skip
        except SplitError as error:
            return f"in the first step {error}. No weight was changed", None
        except (torch.OutOfMemoryError, MemoryError) as error:
            return None, f"it does not fit into memory ({first_line(error)})"
        except Exception as error:  # the user's code, which ran in the layers
            if self._parts_of_samples:
                why = f"{type(error).__name__}: {first_line(error)}"
                return None, f"the model failed on the part of the first sample that this process has ({why})"
            return (
                f"the first step compares the layers of {name} with {name} itself, which failed on the first microbatch: "
                f"{type(error).__name__}: {error}. Let {name} run on it alone, or leave the comparison out with "
                "ExecutionOptions(check_split=False)"
            ), None
        return None, None

    def _too_large(self, missing: int, parameters: LocalParameters) -> str | None:
        """Return why the check does not fit into the host's memory; None if it does."""
        gradients = sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        # 2: the gradients of the model itself, and of its layers.
        needed, free = missing + 2 * gradients, memory()
        on_host = not any(p.is_cuda for _, p in parameters.named_parameters())
        if free is None or not on_host or needed <= free.available:
            return None
        return f"it takes {needed:,} bytes, and {free.available:,} are free"


def _own(parameters: LocalParameters) -> dict[str, Tensor]:
    state = parameters.state_dict() | parameters.non_persistent_buffers()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
