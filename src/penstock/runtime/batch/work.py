"""Data of a step: its options, a pipeline's microbatches, each rank's work, and the result."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from penstock.base.errors import ConfigError, PenstockError
from penstock.parallel.participant import Losses
from penstock.stage.compute.runner import LossWeight
from penstock.stage.microbatches import on_device
from penstock.stage.values import Message, StageState, flatten, leaves_of, share


class Call(Enum):
    """Call of `Pipeline` that runs a step, by its method's name."""

    STEP = "step"
    EVALUATE = "evaluate"
    LOG_PROBS = "log_probs"


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of one step, the same on every rank.

    Attributes:
        number: training steps done before it.
        timed: whether its ops are timed; None where that costs nothing.
        probes: whether it is a part of the check that the first step ends with, which has forwards only.
    """

    call: Call = Call.STEP
    microbatches: int = 1
    outputs: bool = False
    input_grads: bool = False
    check_finite: bool = True
    number: int = 0
    reduces: bool = True
    loss_scale: float = 1.0
    timed: bool | None = None
    probes: bool = False

    @property
    def trains(self) -> bool:
        """True if the step computes gradients."""
        return self.call is Call.STEP and not self.probes

    @property
    def log_probs(self) -> bool:
        """True if the step computes log probabilities of classes in place of losses."""
        return self.call is Call.LOG_PROBS


@dataclass(frozen=True, kw_only=True)
class LocalBatch:
    """One pipeline's share of a batch, split into microbatches.

    Attributes:
        first: number of the first microbatch within the global batch.
        start: rows of the global batch before it, as far as they are known.
        target_tensors: tensors of the whole target, if tensors of the batch share memory; None if they do not.
        digest: digest of the batch that this process was given, if other processes may have been given another one.
        apart: whether no two microbatches can be joined: they were given as such, or there is one of one row.
    """

    inputs: Sequence[object] = ()
    targets: Sequence[object] = ()
    weights: Sequence[LossWeight] = ()
    rows_in: tuple[int, ...] = ()
    rows_out: tuple[int, ...] = ()
    first: int = 0
    start: int = 0
    target_tensors: Sequence[Tensor] | None = None
    ignore_index: int = -100
    digest: int | None = None
    apart: bool = False

    def on_device(self, device: torch.device, inputs: bool, targets: bool) -> LocalBatch:
        """Return the batch with its inputs, its targets or both on a device; what stays is another rank's."""
        return replace(
            self,
            inputs=[on_device(value, device) for value in self.inputs] if inputs else self.inputs,
            targets=[on_device(value, device) for value in self.targets] if targets else self.targets,
        )

    def ignored_index(self, number: int) -> int | None:
        """Return the ignored index if no target of a microbatch counts, by its number in the global batch.

        In rows of labels that the loss may shift, the first one does not count either.
        """
        if not self.targets:
            return None
        ignored = [each == self.ignore_index for each in class_targets(self.targets[number - self.first])]
        nothing = any(bool(each.all()) or (each.dim() == 2 and bool(each[:, 1:].all())) for each in ignored)
        return self.ignore_index if nothing else None


class Refused:
    """The error that is in place of a batch, once."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]

    def take(self) -> Exception:
        """Return the error; it is no longer kept, or frames of its traceback would keep it and their pipeline."""
        return self._errors.pop()


def class_targets(target: object) -> list[Tensor]:
    """Return the leaves of a target that may have an ignored index: tensors of integers."""
    integers = (torch.int64, torch.int32, torch.int16)
    return [leaf for leaf in leaves_of(target) if isinstance(leaf, Tensor) and leaf.dtype in integers]


@dataclass(kw_only=True)
class Work:
    """One rank's share of a step; the executor fills in the results.

    Attributes:
        outputs, grads: outputs and input gradients of this rank, by microbatch number in the global batch.
    """

    batch: LocalBatch = field(default_factory=LocalBatch)
    options: StepOptions = field(default_factory=StepOptions)
    has_graph: bool = False
    flags: int = 0
    losses: Losses = field(init=False)
    outputs: dict[int, object] = field(default_factory=dict)
    grads: dict[int, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.losses = Losses(rows_in=self.batch.rows_in, rows_out=self.batch.rows_out)

    def input(self, microbatch: int) -> Message:
        """Return a microbatch as the first stage takes it."""
        value = self.batch.inputs[microbatch]
        every, structure = flatten(value)
        wants_grads = self.options.input_grads  # then each leaf gets its own
        leaves: Sequence[Any] = every
        if self.batch.target_tensors is not None:
            leaves, structure = share(
                every, structure, outside=self.batch.target_tensors, once=not wants_grads
            )
        if not wants_grads:
            return Message(tuple(leaves), structure, (False,) * len(leaves))
        # Named values come after the batch, and get no gradients.
        count = len(flatten(value.value)[0] if isinstance(value, StageState) else every)
        needs_grad = tuple(
            n < count and isinstance(leaf, Tensor) and leaf.is_floating_point()
            for n, leaf in enumerate(leaves)
        )
        return Message(
            tuple(leaf.detach() if needs else leaf for leaf, needs in zip(leaves, needs_grad, strict=True)),
            structure,
            needs_grad,
        )


class Ends(NamedTuple):
    """Ranks that hold the ends of a pipeline."""

    local: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        loss: 0-d tensor, the microbatches' losses reduced by the pipeline's `reduction` (default mean); the same number on
            every rank. None from an evaluation without targets.
        losses: shape (microbatches,), by microbatch id; the same on every rank.
        parts: the terms of `loss` by name, reduced in the same way: ``"loss"`` if `loss_fn` returns one tensor, its own
            names if it returns several, and the names given to `add_loss` in layers.
    """

    loss: Tensor | None
    losses: Tensor | None
    parts: Mapping[str, Tensor]
    _outputs: tuple[Any, ...] | str = field(repr=False)
    _input_grads: tuple[Any, ...] | str = field(repr=False)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Outputs of the last stage by microbatch id, on the ranks that hold it (``pipe.holds_last``).

        Raises:
            ConfigError: if they were not asked for, or are on other ranks; says on which.
        """
        return _held(self._outputs)

    @property
    def input_grads(self) -> tuple[Any, ...]:
        """Gradients of the inputs by microbatch id, on the ranks that hold the first stage (``pipe.holds_first``).

        Each is a tensor, or a tuple with one for each floating-point leaf of the input.

        Raises:
            ConfigError: if they were not asked for, or are on other ranks; says on which.
        """
        return _held(self._input_grads)

    def __iter__(self) -> NoReturn:
        raise PenstockError(
            "a step returns one StepResult: take result.loss, and result.outputs after pipe.step(..., outputs=True)"
        )


class _BackwardDone:
    """The `backward` of a step's loss. A pickle of the loss is read as one of a plain tensor."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise PenstockError("pipe.step has filled .grad of all parameters; leave loss.backward() out")

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # which torch.load takes with weights_only=True


def _held(values: tuple[Any, ...] | str) -> tuple[Any, ...]:
    """Return values; raise if a text says why there are none."""
    if isinstance(values, str):
        raise ConfigError(values)
    return values


def _or_reason(
    name: str,
    values: Sequence[Any],
    options: StepOptions,
    local: Sequence[int],
    end: str,
    ranks: Sequence[int],
) -> tuple[Any, ...] | str:
    """Return values that some ranks have, or the text that says why this process has none."""
    if not getattr(options, name):
        return f"result.{name} was not asked for; call pipe.{options.call.value}(..., {name}=True)"
    if not set(local) & set(ranks):
        holds = (
            f"rank {ranks[0]}, which holds"
            if len(ranks) == 1
            else f"ranks {', '.join(map(str, ranks))}, which hold"
        )
        return (
            f"result.{name} is on {holds} the {end} stage, and this is rank {local[0]}; read it there only, as in "
            f"`if pipe.holds_{end}:`"
        )
    return tuple(values)


def step_result(works: Sequence[Work], microbatches: int, ends: Ends) -> StepResult:
    """Join the work of this process's ranks to the result of a step."""
    losses = Losses()
    outputs: dict[int, object] = {}
    grads: dict[int, Any] = {}
    for work in works:
        losses.update(work.losses)
        outputs.update(work.outputs)
        grads.update(work.grads)
    order = range(microbatches)
    total: Tensor | None = None
    values: Tensor | None = None
    parts: dict[str, Tensor] = {}
    if losses.total:
        values = torch.stack([losses.total[n] for n in order])
        weights = [losses.weights[n] for n in order]
        total = reduced(values, weights)
        for name in sorted({name for terms in losses.parts.values() for name in terms}):
            column = torch.stack([losses.parts[n].get(name, values.new_zeros(())) for n in order])
            parts[name] = reduced(column, weights)
    options = works[0].options
    if total is not None and options.trains:
        total.backward = _BackwardDone()  # type: ignore[method-assign]
    by_id = [outputs[n] for n in sorted(outputs)]
    leaves = [g[0] if len(g := grads[n].leaves) == 1 else g for n in sorted(grads)]
    return StepResult(
        total,
        values,
        parts,
        _or_reason("outputs", by_id, options, ends.local, "last", ends.last),
        _or_reason("input_grads", leaves, options, ends.local, "first", ends.first),
    )


def reduced(losses: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of the microbatches' losses; losses of weight 0 may be NaN, and are left out."""
    if len(set(weights)) == 1:
        return losses.sum() if weights[0] == 1.0 else losses.mean()
    terms = (losses[n] * weight for n, weight in enumerate(weights) if weight)
    return sum(terms, losses.new_zeros(()))
