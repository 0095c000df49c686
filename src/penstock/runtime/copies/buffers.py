"""Buffers that a forward changes, of stages with several copies (replicas, ranks that hold the same stage).

Every copy runs its own microbatches, and changes its buffers by them; plain PyTorch has one buffer, changed by all
microbatches in turn. After every training step all copies get the same values. Running statistics of batch normalization
get the values of plain PyTorch, if every copy's microbatches come after those of the copy before: an update
r ← (1 - m) r + m s is linear in r, so k updates that led a copy from b to a lead from any r to a + (1 - m)^k (r - b). For
other buffers the result cannot be known; if copies differ, the user's rule decides.

Only persistent buffers (in ``state_dict``) count. All else is scratch, and each copy keeps its own. A write to either
between two steps reaches all copies in the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ReplicaError
from penstock.runtime.options import BufferRule
from penstock.stage.compute.module_buffers import Mark
from penstock.stage.module import StageModule
from penstock.stage.same_values import same_values

Values = dict[str, Tensor]
"""Buffers of a copy of a stage that a step changed, by name in the whole model."""

Gather = Callable[[dict[int, Values]], dict[int, list[Values]]]
"""Function from the changes of this process's copy of each stage to the changes of all copies, first replica first."""

# BatchNorm1d, 2d and 3d have the forward of one base class.
_FORWARDS = (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)


class NamedBuffer(NamedTuple):
    """A buffer in a stage; `name` is its name in the whole model."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def value(self) -> Tensor:
        """The buffer now."""
        return self.owner.get_buffer(self.attribute)


def stage_buffers(module: StageModule, persistent: bool = True) -> list[NamedBuffer]:
    """Return a stage's persistent buffers, or its scratch buffers, each once."""
    buffers: dict[tuple[int, str], NamedBuffer] = {}
    for layer_name, layer in module.named_layers():
        saved = layer.state_dict(keep_vars=True).keys()
        for prefix, owner in layer.named_modules():
            for attribute, _ in owner.named_buffers(recurse=False):
                name = f"{prefix}.{attribute}" if prefix else attribute
                if (name in saved) == persistent:
                    buffer = NamedBuffer(f"{layer_name}.{name}", owner, attribute)
                    buffers.setdefault((id(owner), attribute), buffer)
    return list(buffers.values())


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module's buffers are running statistics, changed as PyTorch's batch normalization does."""
    return type(module).forward in _FORWARDS and getattr(module, "num_batches_tracked", None) is not None


class _StageCopy:
    """One copy of a stage, and the buffers that steps change in it."""

    def __init__(self, module: StageModule) -> None:
        self.buffers = {buffer.name: buffer for buffer in stage_buffers(module)}
        self.before: Values = {}
        self._scratch = {buffer.name: buffer for buffer in stage_buffers(module, persistent=False)}
        self._changing: dict[tuple[bool, ...], set[str]] = {}
        self._marks: dict[str, Mark] = {}
        self._scratch_marks: dict[str, Mark] = {}

    def _modes(self) -> tuple[bool, ...]:
        return tuple(buffer.owner.training for buffer in self.buffers.values())

    def _watched(self) -> Iterator[str]:
        """Yield all names in the first step in these modes, later those that it changed, and statistics in training."""
        changing = self._changing.get(self._modes())
        for name, buffer in self.buffers.items():
            if (
                changing is None
                or name in changing
                or (buffer.owner.training and is_batch_norm(buffer.owner))
            ):
                yield name

    def begin(self) -> None:
        self.before = {name: self.buffers[name].value.clone() for name in self._watched()}
        self.record()

    def record(self) -> None:
        """Record that every copy has these values now."""
        self._marks = {name: Mark(buffer.value) for name, buffer in self.buffers.items()}

    def record_scratch(self) -> None:
        """Record that scratch was written by forwards, and differs between copies."""
        self._scratch_marks = {name: Mark(value) for name, value in self._scratch_values().items()}

    def _scratch_values(self) -> Values:
        values = {name: buffer.owner._buffers.get(buffer.attribute) for name, buffer in self._scratch.items()}
        return {name: value for name, value in values.items() if value is not None}

    def written(self) -> Values:
        """Return all buffers written to since they were recorded."""
        scratch = self._scratch_values()
        marks = self._scratch_marks
        changed = {n: value for n, value in scratch.items() if n not in marks or not marks[n].holds(value)}
        return {n: self.buffers[n].value for n in self._written_names()} | changed

    def _written_names(self) -> list[str]:
        marks = self._marks
        return [n for n, buffer in self.buffers.items() if n not in marks or not marks[n].holds(buffer.value)]

    def changed(self) -> Values:
        """Return the persistent buffers that the step may have changed."""
        modes = self._modes()
        if modes not in self._changing:
            # By value, since the kernel of batch normalization does not count its writes.
            self._changing[modes] = {
                n for n, old in self.before.items() if not same_values(self.buffers[n].value, old, True)
            }
        watched = set(self._watched())
        names = [*(n for n in self.before if n in watched), *self._written_names()]
        return {n: self.buffers[n].value.detach() for n in dict.fromkeys(names)}

    def write(self, values: Values) -> None:
        with torch.no_grad():
            for name, value in values.items():
                buffer = self.buffers.get(name) or self._scratch[name]
                if buffer.value.shape == value.shape and buffer.value.dtype == value.dtype:
                    buffer.value.copy_(value)
                else:
                    setattr(buffer.owner, buffer.attribute, value.to(buffer.value.device, copy=True))


class BufferCopies:
    """Copies of a process's stages, whose buffers get the same values after every step.

    Args:
        stages: copies of each stage in this process by stage number, the first holder's copy first.
        rule: rule for buffers other than statistics of batch normalization, if copies differ. "refuse" ends the step;
            "mean" takes the mean over the copies that changed it (of integers the first); "first" takes the first.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[StageModule]],
        rule: BufferRule,
        gather: Gather | None = None,
        agree: Callable[[str], list[str]] | None = None,
    ) -> None:
        copies = {s: [_StageCopy(module) for module in modules] for s, modules in stages.items()}
        self._copies = {s: of_stage for s, of_stage in copies.items() if of_stage[0].buffers}
        self._several = [of_stage for of_stage in copies.values() if len(of_stage) > 1]
        self._rule = rule
        self._gather = gather
        self._agree = agree
        for copy in self._all():
            copy.record()
        self.record_scratch()

    def _all(self) -> Iterator[_StageCopy]:
        for copies in self._copies.values():
            yield from copies

    def sync(self) -> None:
        """Copy what was written to the first copy between steps (a loaded state, a reset) to the others in this process."""
        for first, *others in self._several:
            written = first.written()
            for other in others if written else ():
                other.write(written)
                other.record()
            first.record()

    def record_scratch(self) -> None:
        """Record after any step that scratch differs between copies."""
        for copies in self._several:
            for copy in copies:
                copy.record_scratch()

    def begin(self) -> None:
        """Remember the values before a training step."""
        for copy in self._all():
            copy.begin()

    def finish(self) -> None:
        """Give all copies the same values after a step, or refuse it on every process, unchanged; every process calls it."""
        changes: dict[int, list[Values]] = {
            s: [copy.changed() for copy in copies] for s, copies in self._copies.items()
        }
        if self._gather is not None:
            changes = self._gather({s: values[0] for s, values in changes.items()})
        problem, joined = "", {}
        for s, copies in self._copies.items():
            joined[s], refused = _join(copies[0], changes[s], self._rule)
            if refused and not problem:
                problem = (
                    f"buffer {refused!r} of stage {s} is no longer the same on its {len(changes[s])} copies: each was "
                    "changed by its own microbatches. Only the statistics of batch normalization can be joined to those "
                    "of plain PyTorch. Set buffers='mean' or buffers='first' in ParallelOptions, or register it with "
                    "persistent=False if it is scratch"
                )
        problems = [problem] if self._agree is None else self._agree(problem)
        if any(problems):
            self.restore()
            first = next(text for text in problems if text)
            # Processes exchange texts alone; the first word in quotes is the buffer's name.
            raise ReplicaError(first, first.split("'")[1])
        for s, copies in self._copies.items():
            for copy in copies:
                copy.write(joined[s])
                copy.before = {}
                copy.record()

    def restore(self) -> None:
        """Restore the buffers from before a failed step, so that the copies are equal."""
        for copy in self._all():
            copy.write(copy.before)
            copy.before = {}
            copy.record()


def _join(copy: _StageCopy, changes: Sequence[Values], rule: BufferRule) -> tuple[Values, str]:
    """Return the new values of every copy's buffers, and the name of the first that the rule refuses."""
    joined: Values = {}
    for name in dict.fromkeys(name for values in changes for name in values):
        buffer = copy.buffers[name]
        values = [change[name].to(buffer.value.device) for change in changes if name in change]
        if is_batch_norm(buffer.owner) and buffer.owner.training and name in copy.before:
            joined[name] = _join_statistics(copy, buffer, changes)
        elif len(values) == len(changes) and all(same_values(value, values[0], True) for value in values):
            continue
        elif rule == "refuse":
            return {}, name
        elif rule == "mean" and (values[0].is_floating_point() or values[0].is_complex()):
            joined[name] = torch.stack(values).mean(0)
        else:
            joined[name] = values[0]
    return joined, ""


def _join_statistics(copy: _StageCopy, buffer: NamedBuffer, changes: Sequence[Values]) -> Tensor:
    """Return a running statistic after the updates of all copies, one copy after the other."""
    counter = f"{buffer.name.removesuffix(buffer.attribute)}num_batches_tracked"
    before, counted = copy.before[buffer.name], int(copy.before[counter])
    updates = [int(values[counter]) - counted if counter in values else 0 for values in changes]
    if buffer.name == counter:
        return before + sum(updates)
    momentum: float | None = buffer.owner.momentum  # type: ignore[assignment]  # of an nn.Module
    # In float64, since differences of nearly equal statistics are added.
    start, joined = before.double(), before.double()
    total = counted
    for values, count in zip(changes, updates, strict=True):
        if buffer.name not in values or not count:
            continue
        after = values[buffer.name].to(start.device).double()
        if momentum is not None:
            joined = after + (1.0 - momentum) ** count * (joined - start)
        else:  # a cumulative mean
            added = after * (counted + count) - start * counted
            joined = (joined * total + added) / (total + count)
            total += count
    return joined.to(before.dtype)
