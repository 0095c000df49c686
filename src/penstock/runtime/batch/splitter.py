"""A step's batch, cut for the ranks of this process, and how much of each microbatch's loss counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import BatchError, ConfigError
from penstock.parallel.data.replica_checks import digest
from penstock.runtime.batch.work import Work
from penstock.runtime.consensus import Losses
from penstock.runtime.copies.replica_check import checksums
from penstock.runtime.routing import ValueRoutes
from penstock.stage.compute.runner import LossWeight
from penstock.stage.values import Microbatches, StageState, has_tensor, leaves_of, slices

Reduction = str | Callable[[object], object]
"""``"mean"``, ``"sum"``, or a function from a microbatch's target to how much it counts."""


COMPARED = 3
"""The first steps in which the processes of a pipeline compare the batches they were given."""


def digest_of(given: Iterable[object]) -> int | None:
    """Return a number that differs where the values' tensors do; None if there is no plain tensor."""
    leaves = [leaf for value in given for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    plain = [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]
    return digest(repr(checksums(plain)).encode()) if plain else None


class Cut(NamedTuple):
    """This pipeline's part of a batch, by microbatch.

    Attributes:
        inputs: what the first stage takes.
        targets, shares: what the last one compares with, and how much it counts.
        rows_in, rows_out: rows of both; empty where they are not known.
        first: the number in the global batch of what is microbatch 0 here.
        given: input and target, where other processes of the pipeline may have been given others.
    """

    inputs: list[object]
    targets: list[object]
    shares: list[LossWeight]
    rows_in: tuple[int, ...]
    rows_out: tuple[int, ...]
    first: int
    given: tuple[object, object] | None = None

    def work(self, outputs: bool, input_grads: bool, finite: bool, turn: int, reduces: bool) -> Work:
        """A rank's work on it; see `Work`."""
        losses = Losses(rows_in=self.rows_in, rows_out=self.rows_out)
        return Work(
            self.inputs,
            self.targets,
            self.shares,
            outputs,
            input_grads,
            finite,
            turn,
            self.first,
            reduces,
            digest_of(self.given) if self.given is not None and turn < COMPARED else None,
            losses=losses,
        )


def require_reduction(reduction: object) -> Reduction:
    """Check what a user gave.

    Raises:
        ConfigError: it is none.
    """
    if callable(reduction) or (isinstance(reduction, str) and reduction in ("mean", "sum")):
        return reduction
    raise ConfigError(
        f"reduction must be 'mean', 'sum' or a function of a microbatch's target that counts, not {reduction!r}"
    )


def require_no_graph(values: Mapping[str, object]) -> None:
    """Refuse arguments of a step through which a gradient would have to leave the pipeline.

    Args:
        values: by name.

    Raises:
        BatchError: a tensor in one of them requires a gradient; names it.
    """
    for name, value in values.items():
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(value)):
            raise BatchError(
                f"{name} requires a gradient, which the pipeline would not pass on; detach it, or, for x, ask for "
                "input_grads=True and give the gradients in the result to torch.autograd.backward(x, ...)"
            )


class Cutter:
    """Cuts the batches of one pipeline.

    Args:
        microbatches: how many of the global batch are this pipeline's.
        replicas: how many pipelines share the global batch.
        replica: which of them this is.
        device: where the parts are to be; None leaves them.
        reduction: how the microbatches' losses make the step's.
        wires: the named values that the layers take.
    """

    def __init__(
        self,
        microbatches: int,
        replicas: int,
        replica: int,
        device: torch.device | None,
        reduction: Reduction,
        wires: ValueRoutes,
    ) -> None:
        self.microbatches = microbatches * replicas
        self.own = slice(replica * microbatches, (replica + 1) * microbatches)
        self.device = device
        self.reduction = reduction
        self.wires = wires

    def cut(
        self,
        x: object,
        y: object,
        named: Mapping[str, object],
        first: bool,
        last: bool,
        trains: bool,
        scale: float,
    ) -> Cut:
        """Cut a step's batch.

        Args:
            x, y, named: as the user gave them.
            first, last: whether this process has the first and the last stage.
            trains: whether a target is needed.
            scale: the loss scale.

        Raises:
            BatchError: what is needed is missing, cannot be cut, or does not fit the rest.
        """
        inputs: list[object] = []
        targets: list[object] = []
        shares = [LossWeight(divisor=self.microbatches)] * self.microbatches
        rows: list[int] = []
        found: list[int] = []
        if first:
            if x is None:
                raise BatchError("the rank of the first stage needs the input x")
            self.wires.check_given(named)
            inputs, rows = slices(x, self.microbatches, "the input x", self.device)
            if named:
                inputs = self._with_named(inputs, rows, named)
        if last and y is None and trains:
            raise BatchError("the rank of the last stage needs the target y")
        if last and y is not None:
            targets, found = slices(y, self.microbatches, "the target y", self.device)
            if rows and found != rows:
                raise BatchError(_unequal("target y", found, rows))
            shares = shares_of(targets, found, self.reduction, scale)
        own = self.own
        several = trains and not (first and last) and x is not None and y is not None
        return Cut(
            inputs[own],
            targets[own],
            shares[own],
            tuple(rows[own]),
            tuple(found[own]),
            own.start,
            (x, y) if several else None,
        )

    def _with_named(
        self, inputs: Sequence[object], rows: Sequence[int], named: Mapping[str, object]
    ) -> list[object]:
        by_name: dict[str, Sequence[object]] = {}
        for name, value in named.items():
            if not has_tensor(value):
                by_name[name] = [value] * len(inputs)
                continue
            by_name[name], found = slices(value, self.microbatches, f"the keyword input {name}", self.device)
            if found != rows and not isinstance(value, Microbatches):
                raise BatchError(
                    f"{_unequal(f'keyword input {name}', found, rows)}; wrap what is not to be cut in "
                    "penstock.Microbatches"
                )
        return [StageState(x, {k: v[n] for k, v in by_name.items()}, {}) for n, x in enumerate(inputs)]


def _unequal(what: str, found: Sequence[int], rows: Sequence[int]) -> str:
    return (
        f"the {what} has {sum(found)} rows ({list(found)} by microbatch), and the input x has {sum(rows)} "
        f"({list(rows)}); both are cut along dimension 0, the batch"
    )


def shares_of(
    targets: Sequence[object], rows: Sequence[int], reduction: Reduction, scale: float = 1.0
) -> list[LossWeight]:
    """How much of each microbatch's loss counts.

    Args:
        targets, rows: by microbatch.
        reduction: "mean" weighs by rows, which for equal ones is a division by their number; "sum" adds; a function
            counts.
        scale: the loss scale.

    Raises:
        BatchError: counts that are not finite, are negative, or are all 0.
    """
    many = len(rows)
    if reduction == "sum":
        return [LossWeight(scale=scale)] * many
    if reduction == "mean":
        if len(set(rows)) == 1:
            return [LossWeight(divisor=many, scale=scale)] * many
        return [LossWeight(n / sum(rows), scale=scale) for n in rows]
    assert callable(reduction)
    counts = [_number(reduction(target)) for target in targets]
    total = sum(counts)
    if not all(math.isfinite(n) and n >= 0 for n in counts) or total == 0:
        raise BatchError(
            f"reduction counted {counts} for the microbatches; it must return numbers of at least 0, not all 0"
        )
    return [LossWeight(n / total, scale=scale) for n in counts]


def _number(count: object) -> float:
    if isinstance(count, Tensor):
        return float(count.item()) if count.numel() == 1 else math.nan
    return float(count) if isinstance(count, int | float) else math.nan
