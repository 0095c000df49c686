"""Split a step's batch into microbatches, and keep this pipeline's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from penstock.base.errors import BatchError
from penstock.parallel.sample_parts import SampleParts
from penstock.runtime.batch.arguments import BatchDims
from penstock.runtime.batch.digests import batch_digest
from penstock.runtime.batch.loss_weights import Reduction, count_valid, known_rows, loss_weights
from penstock.runtime.batch.work import LocalBatch, StepOptions, class_targets
from penstock.runtime.routing import ValueRoutes
from penstock.stage.compute.runner import LossWeight
from penstock.stage.compute.shifted_loss import next_targets
from penstock.stage.memory_groups import shares_memory
from penstock.stage.microbatches import Microbatches, on_device, require_divisible, split_batch
from penstock.stage.values import StageState, has_tensor, leaves_of


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
        self.reduction = partial(count_valid, ignore_index) if reduction == "valid" else reduction
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
        given, apart = (x, y), _given_apart(x, y, named)
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
        every_row = rows_in or rows_out
        return LocalBatch(
            inputs=inputs[local],
            targets=targets[local],
            weights=weights[local],
            rows_in=self._compared(x, rows_in[local]),
            rows_out=self._compared(y, rows_out[local]),
            first=self.replica * options.microbatches,
            start=sum(n or 0 for n in every_row[:begin]),
            target_tensors=self._target_tensors(x, y, named),
            ignore_index=self.ignore_index,
            digest=None if not self.compares or x is None or y is None
            else batch_digest(given, options.number, options.trains),
            apart=apart or every_row[local] == [1],
        )  # fmt: skip

    def split_together(
        self, x: object, y: object, named: Mapping[str, object], batch: LocalBatch, options: StepOptions
    ) -> list[LocalBatch]:
        """Split three microbatches from a batch: the first two of a step, or the halves of its only one, and both as one.

        Args:
            batch: this pipeline's share in the step, which is not `apart`.
            options: those of the forwards that they are for.

        Returns:
            The three, or fewer at a time if the step had fewer.
        """
        named = {
            name: Microbatches([value.parts[0]] * 3) if isinstance(value, Microbatches) else value
            for name, value in named.items()
        }
        rows = batch.rows_in or batch.rows_out
        count = len(batch.weights)
        cuts = [range(0)] * 3
        if rows:
            # Half of its rows, the larger one, where one microbatch is all that this pipeline has.
            size = rows[0] if count > 1 else (rows[0] + 1) // 2
            stop = sum(rows[:2])
            cuts = [range(size), range(size, stop), range(stop)]
        cuts = [range(batch.start + cut.start, batch.start + cut.stop) for cut in cuts]
        if self._shifts and not options.log_probs:
            y = next_targets(y, self.ignore_index)
        x, y, named = self._own_part(x, y, named)
        inputs, rows_in = self._inputs(x, named, cuts)
        targets, rows_out = self._targets(x, y, cuts, options, rows_in)
        weights = [LossWeight()] * 3
        if targets and not options.log_probs:
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

    def hint(self, named: Mapping[str, object]) -> str:
        """Return what to do if keyword inputs that were split are needed whole, as masks of (time, time) are; or nothing."""
        square = {
            name: tuple(value.shape)
            for name, value in named.items()
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == value.shape[1]
            if self._dims.of(name) == 0
        }
        if not square:
            return ""
        split = ", ".join(f"{name} of shape {shape}" for name, shape in square.items())
        return f". Split along dimension 0: {split}; to pass it unsplit, give the Pipeline dims={dict.fromkeys(square)}"

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Return values of each position of the whole target, which is one tensor, from those of its microbatches."""
        assert isinstance(self._dims.y, int), "the target was split along it"
        return torch.cat([*values], self._dims.y)

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
        return tuple(known_rows(rows))

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
            known = known_rows(rows)
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
        rows = known_rows(given_rows)
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
            if not has_tensor(value) or (dims is None and not isinstance(value, Microbatches)):
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


def _given_apart(x: object, y: object, named: Mapping[str, object]) -> bool:
    """Return whether a batch was given as microbatches, other than one keyword input for all of them."""
    parts = [value.parts for value in named.values() if isinstance(value, Microbatches)]
    differ = any(one is not other for each in parts for one, other in pairwise(each))
    return differ or isinstance(x, Microbatches) or isinstance(y, Microbatches)


def _tensors(*values: object) -> list[Tensor]:
    return [leaf for value in values for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def _unequal(what: str, rows: Sequence[int | None], rows_in: Sequence[int | None]) -> str:
    if None in rows or None in rows_in:
        return (
            f"the {what} has {list(rows)} rows by microbatch, and the input x has {list(rows_in)} (None where its tensors "
            "have no common number of rows), by which reduction='mean' weighs their losses; give the Pipeline "
            "reduction='sum', or a function that returns the weight of a microbatch's target"
        )
    return (
        f"the {what} has {sum(known_rows(rows))} rows ({list(rows)} by microbatch), and the input x has "
        f"{sum(known_rows(rows_in))} ({list(rows_in)}); both are split along dimension 0, the batch, unless "
        "Pipeline(dims=...) says otherwise. Of Microbatches they may differ with reduction='sum', or with a function that "
        "returns the weight of a microbatch's target"
    )
