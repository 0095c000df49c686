"""Split a step's batch into microbatches, weight their losses, and find out whether processes were given the same batch."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from penstock.base.errors import BatchError, ConfigError
from penstock.forward.loss_reach import modules_called, parts_of, passed_numbers
from penstock.parallel.checksums import checksums
from penstock.parallel.dtensor import local
from penstock.parallel.replicas.replica_checks import digest
from penstock.parallel.sample_parts import SampleParts
from penstock.runtime.batch.work import LocalBatch, StepOptions, class_targets
from penstock.runtime.routing import ValueRoutes
from penstock.stage.compute.runner import LossWeight
from penstock.stage.compute.shifted_loss import next_targets
from penstock.stage.layers import BatchNames
from penstock.stage.memory_groups import shares_memory
from penstock.stage.microbatches import Dims, Microbatches, on_device, require_divisible, split_batch
from penstock.stage.values import StageState, has_tensor, leaves_of

Reduction = str | Callable[[Any], object]
"""``"mean"``, ``"sum"``, ``"valid"``, or a function from a microbatch's target to its weight."""

FULL_STEPS = 3
"""First training steps in which every number of a batch counts; later, a sample of them does."""

_SAMPLE = 4096
"""Most numbers in the sample of a tensor."""

_EVERY = 100
"""Training steps from one sample to the next, if reading it has to wait for a device."""


def require_reduction(reduction: object) -> Reduction:
    """Return a valid `reduction`."""
    if callable(reduction) or (isinstance(reduction, str) and reduction in ("mean", "sum", "valid")):
        return reduction
    raise ConfigError(
        "reduction must be 'mean', 'sum', 'valid' or a function that returns the weight of a microbatch's target, got "
        f"{reduction!r}"
    )


def ignore_index_of(loss_fn: object, reduction: object) -> int:
    """Return the target that a loss function ignores, or -100 as in torch.

    It is the ``ignore_index`` of the function, of a partial's arguments, of a module that it calls, or a number that its
    source passes on by that keyword.
    """
    found: set[int | None] = set()
    for part in (*parts_of(loss_fn), *(inner for m in modules_called(loss_fn) for inner in m.modules())):
        index = part.keywords.get("ignore_index") if isinstance(part, partial) else None
        index = getattr(part, "ignore_index", None) if index is None else index
        if isinstance(index, int):
            found.add(index)
        if (
            reduction == "valid"
            and isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss)
            and part.weight is not None
        ):
            raise ConfigError(
                "reduction='valid' counts targets, and the loss function weighs classes; give reduction a function from a "
                "microbatch's target to the sum of its targets' weights"
            )
    found = found or passed_numbers(loss_fn, "ignore_index") or {-100}
    if len(found) == 1 and (only := next(iter(found))) is not None:
        return only
    problem = (
        "the loss function passes an ignore_index on in its code, where its value is not seen"
        if found == {None}
        else f"the loss function has {len(found)} different values of ignore_index"
    )
    remedy = (
        "give it an attribute ignore_index (loss_fn.ignore_index = ...), or reduction a function from a microbatch's target "
        "to the number of its targets that count"
    )
    if reduction == "valid":
        raise ConfigError(f"{problem}, so reduction='valid' cannot count the targets; {remedy}")
    if reduction == "mean":
        warnings.warn(
            f"{problem}. Where microbatches have different numbers of targets that count, the mean of their losses is not "
            f"the loss of the batch; {remedy}",
            RuntimeWarning,
            stacklevel=3,
        )
    return -100


def counted_by(loss_fn: object, ignore_index: int) -> Callable[[object], float]:
    """Return a function from a target to what a mean of a loss function divides by, as far as it is known.

    It is the number of targets that are not ignored, or the sum of their classes' weights, which a module or a partial has.
    Targets without one tensor of integers all count 1.
    """
    parts = [*parts_of(loss_fn), *(inner for m in modules_called(loss_fn) for inner in m.modules())]
    found = [part.weight for part in parts if isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss)]
    found += [part.keywords.get("weight") for part in parts if isinstance(part, partial)]
    weights = [weight for weight in found if isinstance(weight, Tensor) and weight.dim() == 1]

    def count(target: object) -> float:
        tensors = class_targets(target)
        if len(tensors) != 1:
            return 1.0
        counting = tensors[0][tensors[0] != ignore_index]
        return (
            float(weights[0].to(counting.device)[counting].sum())
            if len(weights) == 1
            else float(counting.numel())
        )

    return count


def _count_valid(ignore_index: int, target: object) -> int:
    """Return the number of a target's entries that are not ignored."""
    tensors = class_targets(target)
    if len(tensors) != 1:
        raise BatchError(
            f"reduction='valid' counts the entries of one tensor of integers that are not {ignore_index}, and the target y "
            f"has {len(tensors)} such tensors; give reduction a function from a microbatch's target to its weight"
        )
    return int((tensors[0] != ignore_index).sum())


def require_no_graph(values: Iterable[tuple[str, object]]) -> None:
    """Raise if arguments of a step require a gradient, since gradients do not leave the pipeline."""
    for name, value in values:
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(value)):
            raise BatchError(
                f"{name} requires a gradient, which the pipeline would not pass on; detach it, or, for x, ask for "
                "input_grads=True and give the gradients in the result to torch.autograd.backward(x, ...)"
            )


def arguments_of(
    names: BatchNames | None, loss_fn: object, x: object, y: object, named: Mapping[str, object]
) -> tuple[object, object, Mapping[str, object]]:
    """Return x, y and the keyword inputs of a step, where the batch may be a mapping, or some of it be given by its names.

    Args:
        names: names of the model's arguments; None if it has none, so that a mapping is a value like any other.
    """
    if names is None:
        return x, y, named
    target = names.target
    if target is None and (target := _second_parameter(loss_fn)) in (names.first, *names.others):
        target = None  # the model's own argument has the name
    if y is None and isinstance(x, Mapping) and names.first in x:
        known = sorted({names.first, *names.others, *([] if target is None else [target])})
        if strange := [key for key in x if key not in known]:
            raise BatchError(
                f"the batch has {strange[0]!r}, which is neither an argument of the model nor the target; its keys may be "
                f"{', '.join(map(repr, known))}. The target has the name of the loss function's second parameter, unless "
                "that is an argument of the model; otherwise call pipe.step(x, y, NAME=...)"
            )
        if twice := sorted(x.keys() & named.keys()):
            raise BatchError(
                f"{twice[0]} is given twice: in the batch, and as a keyword input; leave one out"
            )
        named = {**x, **named}
        x = None
    others = dict(named)
    if x is None:
        x = others.pop(names.first, None)
    if y is None and target is not None:
        y = others.pop(target, None)
    return x, y, others


def classes_of(x: object, y: object, own_target: object, loss_fn: object, own_loss: object) -> object:
    """Return the classes at the positions of the output for `Pipeline.log_probs`, or None on a rank without them.

    Args:
        own_target: target that is given with the model's arguments, by its name.
        loss_fn, own_loss: loss function of the pipeline, and the model's own; None if it has none.
    """
    shifts, own_shifts = (getattr(loss, "without_shift", None) is not None for loss in (loss_fn, own_loss))
    if own_target is not None and (y is not None or not shifts):
        raise BatchError(
            "log_probs takes y, the class at each position of the output, in place of the loss function's target, which the "
            "loss may shift; leave the target out of the batch, log_probs(batch, y)"
        )
    y = own_target if y is None else y
    if y is None or (isinstance(y, Tensor) and y.dtype == torch.int64 and y.dim() == 2):
        if own_target is not None:
            return next_targets(y, -100)
        if (shifts or own_shifts) and isinstance(x, Tensor) and y is not None and x.shape == y.shape:
            counts = y != -100
            if counts.any() and torch.equal(x[counts], y[counts]):
                raise BatchError(
                    "y equals the tokens x, so each would be judged at its own position, and this model's output predicts "
                    "the next one; call log_probs(ids[:, :-1], ids[:, 1:]), or log_probs({'input_ids': ids, 'labels': ids}) "
                    "with the model's own loss, which shifts the labels"
                )
        return y
    got = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
    raise BatchError(f"y must be an int64 tensor of shape (batch, tokens) for log_probs, got {got}")


def _second_parameter(function: object) -> str | None:
    try:
        parameters = [*inspect.signature(function).parameters.values()]  # type: ignore[arg-type]  # raises
    except (TypeError, ValueError):  # a function written in C
        return None
    return (
        parameters[1].name
        if len(parameters) > 1 and parameters[1].kind is parameters[1].POSITIONAL_OR_KEYWORD
        else None
    )


@dataclass(frozen=True)
class BatchDims:
    """Dimensions along which the values of a batch are split.

    Attributes:
        named: those of keyword inputs; dimension 0 where a name is missing.
    """

    x: Dims = 0
    y: Dims = 0
    named: Mapping[str, Dims] = field(default_factory=dict)

    @staticmethod
    def given(dims: Mapping[str, Dims] | None, names: BatchNames | None, routes: ValueRoutes) -> BatchDims:
        """Return the dimensions that a user gave by name: "x", "y", or the names of the model's arguments."""
        if dims is None:
            return BatchDims()
        first, target = (None, None) if names is None else (names.first, names.target)
        if not isinstance(dims, Mapping) or not all(isinstance(name, str) for name in dims):
            raise ConfigError(f"dims must be a mapping such as {{'x': 1, 'y': 1}}, got {dims!r}")
        known = {"x", "y", *routes.inputs, *filter(None, (first, target))}
        if strange := sorted(dims.keys() - known):
            raise ConfigError(
                f"dims has {strange[0]!r}, and the model has no input of that name; there may be {', '.join(sorted(known))}"
            )
        x, y = dims.get("x", dims.get(first or "x", 0)), dims.get("y", dims.get(target or "y", 0))
        if x is None or y is None:
            raise ConfigError(
                "dims must be a dimension for x and y, which are split; None is for keyword inputs"
            )
        return BatchDims(x, y, {n: dim for n, dim in dims.items() if n in routes.inputs})

    def of(self, name: str) -> Dims:
        """Return the dimension of a keyword input."""
        return self.named.get(name, 0)


class BatchSplitter:
    """Splitter of each step's batch for one pipeline."""

    def __init__(
        self,
        *,
        replicas: int,
        sample_parts: SampleParts,
        shifts: bool,
        device: torch.device | None,
        reduction: Reduction,
        ignore_index: int,
        counts: Callable[[object], float],
        routes: ValueRoutes,
        holds_first: bool,
        holds_last: bool,
        compares: bool,
        takes_target: bool,
        dims: BatchDims,
    ) -> None:
        self.replicas, self.replica = replicas, sample_parts.replica
        self._parts, self._shifts = sample_parts, shifts
        self.device = device
        self.reduction = partial(_count_valid, ignore_index) if reduction == "valid" else reduction
        # Of a part's target among those of the same samples; none for a sum.
        self.weight = self.reduction if callable(self.reduction) else counts if reduction == "mean" else None
        self.ignore_index, self._counts = ignore_index, counts
        # One replica warns for all, since each splits the whole batch.
        self._compares_counts = reduction == "mean" and self.replica == 0
        self.warned_of_counts = False
        self.routes = routes
        self.holds_first, self.holds_last = holds_first, holds_last
        self.compares = compares
        self._takes_target, self._dims = takes_target, dims

    def microbatches(self, options: StepOptions) -> int:
        """Return the number of microbatches of the whole batch, of all replicas."""
        return options.microbatches * self.replicas // self._parts.count

    def split(self, x: object, y: object, named: Mapping[str, object], options: StepOptions) -> LocalBatch:
        """Split a step's batch into microbatches, and keep this pipeline's."""
        parts, count = self._parts.count, self.microbatches(options)
        given = (x, y)
        if self._shifts and not options.log_probs:
            y = next_targets(y, self.ignore_index)
        whole_target = y
        x, y, named = self._own_part(x, y, named)
        inputs, rows_in = self._inputs(x, named, count)
        targets, rows_out = self._targets(x, y, count, options, rows_in)
        # Each loss is divided by this number, so that the gradients add up to those of the mean.
        weights = [LossWeight(divisor=count * parts)] * count
        if targets and not options.log_probs:
            weights = self._weights(targets, whole_target, rows_out, options.loss_scale)
            if self._compares_counts and self._takes_target and count > 1:
                whole = split_batch(whole_target, count, "the target y", None, self._dims.y)[0]
                self.warned_of_counts = not self._compare_counts(whole, rows_out)
                self._compares_counts = not self.warned_of_counts
        begin = self.replica // parts * options.microbatches
        local = slice(begin, begin + options.microbatches)
        rows_before = (rows_in or rows_out)[:begin]
        return LocalBatch(
            inputs=inputs[local],
            targets=targets[local],
            weights=weights[local],
            rows_in=self._compared(x, rows_in[local]),
            rows_out=self._compared(y, rows_out[local]),
            first=self.replica * options.microbatches,
            start=sum(n or 0 for n in rows_before),
            target_tensors=self._target_tensors(x, y, named),
            ignore_index=self.ignore_index,
            digest=None if not self.compares or x is None or y is None
            else batch_digest(given, options.number, options.trains),
        )  # fmt: skip

    def split_together(
        self, x: object, y: object, named: Mapping[str, object], batch: LocalBatch
    ) -> list[LocalBatch] | str:
        """Split three microbatches from a batch: the first two of a step, or the halves of its only one, and both as one.

        Args:
            batch: this pipeline's share in the step.

        Returns:
            The three, or fewer at a time if the step had fewer; or why there are none, on this rank.
        """
        unknown = "the batch was given as Microbatches, so where two are joined is not known"
        if isinstance(x, Microbatches) or isinstance(y, Microbatches):
            return unknown
        every = dict(named)
        for name, value in named.items():
            if isinstance(value, Microbatches):
                if any(one is not other for one, other in pairwise(value.parts)):
                    return unknown
                every[name] = Microbatches([value.parts[0]] * 3)  # the same one for all
        named = every
        rows = batch.rows_in or batch.rows_out
        count = len(batch.weights)
        cuts = [range(0)] * 3
        if rows:
            # Half of its rows, the larger one, where one microbatch is all that this pipeline has.
            size = rows[0] if count > 1 else (rows[0] + 1) // 2
            stop = sum(rows[:2])
            if size == stop:
                return "its microbatches have one row"
            cuts = [range(size), range(size, stop), range(stop)]
        cuts = [range(batch.start + cut.start, batch.start + cut.stop) for cut in cuts]
        if self._shifts:
            y = next_targets(y, self.ignore_index)
        x, y, named = self._own_part(x, y, named)
        inputs, rows_in = self._inputs(x, named, cuts)
        targets, rows_out = self._targets(x, y, cuts, StepOptions(), rows_in)
        weights = [LossWeight()] * 3
        if targets:
            # A part of the samples' tokens has other shares of what counts than the whole samples.
            reduction = self.weight if self._parts.count > 1 and self.weight is not None else self.reduction
            try:
                weights[:2] = loss_weights(targets[:2], rows_out[:2], reduction)
            except BatchError:  # nothing counts in the two, though something does in the step
                weights[:2] = [LossWeight(factor=0.0)] * 2
        size = min(count, 3)
        return [
            LocalBatch(
                inputs=inputs[part],
                targets=targets[part],
                weights=weights[part],
                rows_in=self._compared(x, rows_in[part]),
                rows_out=self._compared(y, rows_out[part]),
                first=self.replica * size,
                target_tensors=self._target_tensors(x, y, named),
                ignore_index=self.ignore_index,
            )
            for part in (
                {3: [slice(3)], 2: [slice(2), slice(1, 3)], 1: [slice(1), slice(1, 2), slice(2, 3)]}[size]
            )
        ]

    def _inputs(
        self, x: object, named: Mapping[str, object], cuts: int | Sequence[range]
    ) -> tuple[list[object], list[int | None]]:
        if not self.holds_first:
            return [], []
        if x is None:
            raise BatchError("the rank of the first stage needs the input x")
        if named or self.routes.required:
            self.routes.check_given(named)
        inputs, rows = split_batch(x, cuts, "the input x", self.device, self._dims.x)
        return (self._with_named(inputs, cuts, rows, named) if named else inputs), rows

    def _targets(
        self,
        x: object,
        y: object,
        cuts: int | Sequence[range],
        options: StepOptions,
        rows_in: list[int | None],
    ) -> tuple[list[object], list[int | None]]:
        if not self.holds_last:
            return [], []
        count = cuts if isinstance(cuts, int) else len(cuts)
        if not self._takes_target and not options.log_probs:
            if y is not None:
                raise BatchError(
                    "a target y was given, and the loss is of the output alone: loss_fn(output), or the model's own "
                    "forward(x); leave y out"
                )
            if x is not None:
                rows_in = rows_in or split_batch(x, cuts, "the input x", None, self._dims.x)[1]
            elif self.reduction == "mean":
                raise BatchError(
                    "the rank of the last stage needs the input x for its number of rows, since the loss takes no target; "
                    "give it x, or the Pipeline reduction='sum'"
                )
            return [()] * count, rows_in
        if y is None and (options.trains or options.log_probs):
            raise BatchError("the rank of the last stage needs the target y")
        if y is None:
            return [], []
        targets, rows = split_batch(y, cuts, "the target y", self.device, self._dims.y)
        differ = self.reduction != "mean" and (isinstance(x, Microbatches) or isinstance(y, Microbatches))
        if rows_in and rows != rows_in and not differ:
            raise BatchError(_unequal("target y", rows, rows_in))
        return targets, rows

    def _compared(self, value: object, rows: Sequence[int | None]) -> tuple[int, ...]:
        """Return the rows that ranks compare; none of `Microbatches` whose rows no weight depends on."""
        if isinstance(value, Microbatches) and self.reduction != "mean":
            return ()
        return tuple(_known_rows(rows))

    def _target_tensors(self, x: object, y: object, named: Mapping[str, object]) -> list[Tensor] | None:
        shares = self.holds_first and shares_memory(_tensors(x, *named.values(), y))
        return _tensors(y) if shares else None

    def _own_part(
        self, x: object, y: object, named: Mapping[str, object]
    ) -> tuple[object, object, Mapping[str, object]]:
        """Return this process's part of the samples."""
        others = {f"the keyword input {name}": value for name, value in named.items()}
        own = self._parts.cut({"the input x": x, "the target y": y, **others}, self._parts.index)
        return own["the input x"], own["the target y"], dict(zip(named, list(own.values())[2:], strict=True))

    def _weights(
        self, targets: Sequence[object], whole: object, rows: Sequence[int | None], scale: float
    ) -> list[LossWeight]:
        """Return the weights of the microbatches of all replicas, for the tokens of this process."""
        count, parts, what = len(targets), self._parts.count, "the target y"
        if parts == 1:
            return loss_weights(targets, rows, self.reduction, scale)
        every: list[object] = []
        for index in range(parts):
            every += split_batch(self._parts.cut({what: whole}, index)[what], count, what, None)[0]
        own = slice(self._parts.index * count, (self._parts.index + 1) * count)
        if self.reduction == "mean" and len(set(counts := [self._counts(each) for each in every])) > 1:
            known = _known_rows(rows)
            # Parts weigh by what counts in them, and microbatches by their rows.
            totals = [sum(counts[n::count]) for n in range(count)]
            shares = [c / t if t else 1 / parts for c, t in zip(counts[own], totals, strict=True)]
            return [
                LossWeight(n / sum(known) * share, scale=scale)
                for n, share in zip(known, shares, strict=True)
            ]
        return loss_weights(every, list(rows) * parts, self.reduction, scale)[own]

    def _compare_counts(self, targets: Sequence[object], given_rows: Sequence[int | None]) -> bool:
        """Warn if microbatches that weigh by their rows have other shares of the targets that count, and return False."""
        rows = _known_rows(given_rows)
        for leaves in zip(*map(class_targets, targets), strict=True):
            ignored = [int((leaf == self.ignore_index).sum()) for leaf in leaves]
            counts = [leaf.numel() - n for leaf, n in zip(leaves, ignored, strict=True)]
            total, share = sum(counts), sum(rows)
            if any(ignored) and any(c * share != r * total for c, r in zip(counts, rows, strict=True)):
                warnings.warn(
                    f"the microbatches have {counts} targets that are not {self.ignore_index} (ignore_index), but each "
                    "weighs as much as its rows, so loss and gradients are not those of the whole batch. Give the Pipeline "
                    "reduction='valid', which weighs each by these counts; reduction=penstock.valid_tokens if the loss "
                    "shifts the labels; or a function that returns a target's weight. This is said once",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return False
        return True

    def _with_named(
        self,
        inputs: Sequence[object],
        cuts: int | Sequence[range],
        rows_in: Sequence[int | None],
        named: Mapping[str, object],
    ) -> list[object]:
        by_name: dict[str, Sequence[object]] = {}
        for name, value in named.items():
            dims = self._dims.of(name)
            if not has_tensor(value) or dims is None:
                if type(value).__name__ == "BlockMask":
                    raise BatchError(
                        f"the keyword input {name} is a BlockMask of FlexAttention, which holds a function and cannot go to "
                        "another stage; give the tensors that it is made from, such as document numbers, and call "
                        "create_block_mask in the layers"
                    )
                if dims is not None:
                    require_divisible(value, f"the keyword input {name}")
                by_name[name] = [on_device(value, self.device)] * len(inputs)
                continue
            by_name[name], rows = split_batch(value, cuts, f"the keyword input {name}", self.device, dims)
            if rows != rows_in and not isinstance(value, Microbatches):
                raise BatchError(
                    f"{_unequal(f'keyword input {name}', rows, rows_in)}; to pass it unsplit, give the Pipeline "
                    f"dims={{{name!r}: None}}"
                )
        return [StageState(x, {k: v[n] for k, v in by_name.items()}, {}) for n, x in enumerate(inputs)]


def _tensors(*values: object) -> list[Tensor]:
    return [leaf for value in values for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def _unequal(what: str, rows: Sequence[int | None], rows_in: Sequence[int | None]) -> str:
    if None in rows or None in rows_in:
        return (
            f"the {what} has {list(rows)} rows by microbatch, and the input x has {list(rows_in)} (None where its tensors "
            "have no common dimension 0), by which reduction='mean' weighs their losses; give the Pipeline "
            "reduction='sum', or a function that returns the weight of a microbatch's target"
        )
    return (
        f"the {what} has {sum(_known_rows(rows))} rows ({list(rows)} by microbatch), and the input x has "
        f"{sum(_known_rows(rows_in))} ({list(rows_in)}); both are split along dimension 0, the batch, unless "
        "Pipeline(dims=...) says otherwise. Of Microbatches they may differ with reduction='sum', or with a function that "
        "returns the weight of a microbatch's target"
    )


def _known_rows(rows: Sequence[int | None]) -> list[int]:
    """Return the rows of microbatches, which must be known, as where losses are weighed by them."""
    if None in rows:
        raise BatchError(
            f"the microbatches have {list(rows)} rows (None where their tensors have no common dimension 0), by which "
            "reduction='mean' weighs their losses; give the Pipeline reduction='sum', or a function that returns the weight "
            "of a microbatch's target"
        )
    return [n for n in rows if n is not None]


def loss_weights(
    targets: Sequence[object], given_rows: Sequence[int | None], reduction: Reduction, scale: float = 1.0
) -> list[LossWeight]:
    """Return the weights of the microbatches' losses."""
    count = len(targets)
    if reduction == "sum":
        return [LossWeight(scale=scale)] * count
    if reduction == "mean":
        rows = _known_rows(given_rows)
        if len(set(rows)) == 1:
            return [LossWeight(divisor=count, scale=scale)] * count
        return [LossWeight(n / sum(rows), scale=scale) for n in rows]
    assert callable(reduction)
    counts = [_number(reduction(target)) for target in targets]
    total = sum(counts)
    if not all(math.isfinite(n) and n >= 0 for n in counts) or total == 0:
        raise BatchError(
            f"reduction counted {counts} for the microbatches; it must return numbers of at least 0, not all 0. If the "
            "whole batch has no target that counts, leave it out"
        )
    if len(set(counts)) == 1:
        return [LossWeight(divisor=count, scale=scale)] * count  # with the bits of the mean
    return [LossWeight(n / total, scale=scale) for n in counts]


def _number(count: object) -> float:
    if isinstance(count, Tensor):
        return float(count.item()) if count.numel() == 1 else math.nan
    return float(count) if isinstance(count, int | float) else math.nan


def batch_digest(values: Iterable[object], number: int, trains: bool) -> int | None:
    """Return a digest of a step's batch; None if it has no plain tensor, or is not to be compared in this step."""
    return digest_of(values) if trains and number < FULL_STEPS else sample_digest_of(values, number)


def digest_of(values: Iterable[object]) -> int | None:
    """Return a digest of all numbers of the tensors in some values; None if there is no plain tensor."""
    plain = _plain_tensors(values)
    return digest(repr(checksums(plain)).encode()) if plain else None


def sample_digest_of(values: Iterable[object], number: int = 0) -> int | None:
    """Return a digest of the tensors' shapes and of a sample of their numbers; it takes microseconds.

    None if there is no plain tensor, or if reading them has to wait for a device and `number` is not a multiple of 100.
    """
    plain = _plain_tensors(values)
    if not plain or (number % _EVERY and any(leaf.device.type != "cpu" for leaf in plain)):
        return None
    found = 0
    for leaf in plain:
        found = crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
        found = crc32(_sample(leaf), found)
    return found


def _plain_tensors(values: Iterable[object]) -> list[Tensor]:
    leaves = [leaf for value in values for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested]


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of numbers that are spread over a tensor, with every row among them if there are not too many."""
    sample = local(tensor.detach())
    while sample.numel() > _SAMPLE:
        longest = max(range(1, sample.dim()), key=lambda d: sample.shape[d], default=0)
        dim = longest if sample.shape[longest] > 1 else 0
        step = min(math.ceil(sample.numel() / _SAMPLE), sample.shape[dim])
        sample = sample[(slice(None),) * dim + (slice(step // 2, None, step),)]
    sample = sample.resolve_conj().resolve_neg()
    if sample.is_complex():
        sample = torch.view_as_real(sample)
    return sample.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
