"""Buffers that a forward changes, where a stage has several copies (replicas, ranks that hold the same stage).

Every copy sees its own microbatches, and changes its own buffers by them; plain PyTorch has one buffer, changed by all
microbatches in turn. After every training step all copies get the same values. For the running statistics of batch
normalisation those are what plain PyTorch has, if every copy's microbatches come after those of the copy before: an
update r ← (1 - m) r + m s is linear in r, so k updates that led a copy from b to a lead from any r to
a + (1 - m)^k (r - b). For other buffers nobody can know that; if copies differ, the user's rule decides.

Only persistent buffers count, those of ``state_dict``: others are scratch, and each copy keeps its own. What is written to
either between two steps holds for all copies in the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ReplicaError
from penstock.stage.module import StageModule

Rule = Literal["refuse", "mean", "first"]
Values = dict[str, Tensor]
"""By name in the whole model, the buffers that a copy of a stage has changed in a step."""

Gather = Callable[[dict[int, Values]], dict[int, list[Values]]]
"""From what this process's copy of each stage has changed to what every copy has, first replica first."""

_FORWARDS = (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)


def require_rule(rule: object) -> Rule:
    """Check what a user gave.

    Raises:
        ConfigError: it is no rule.
    """
    if rule not in ("refuse", "mean", "first"):
        raise ConfigError(f"buffers must be 'refuse', 'mean' or 'first', not {rule!r}")
    return rule


class _Place(NamedTuple):
    name: str
    owner: nn.Module
    inner: str

    @property
    def value(self) -> Tensor:
        return self.owner.get_buffer(self.inner)


def places_of(module: StageModule, persistent: bool = True) -> list[_Place]:
    """Where a stage has persistent buffers, or the others, each once."""
    found: dict[tuple[int, str], _Place] = {}
    for name, layer in module.named_layers():
        kept = layer.state_dict(keep_vars=True).keys()
        for path, owner in layer.named_modules():
            for inner, _ in owner.named_buffers(recurse=False):
                own = f"{path}.{inner}" if path else inner
                if (own in kept) == persistent:
                    found.setdefault((id(owner), inner), _Place(f"{name}.{own}", owner, inner))
    return list(found.values())


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module's buffers are running statistics, changed as PyTorch's own batch normalisation does."""
    return type(module).forward in _FORWARDS and getattr(module, "num_batches_tracked", None) is not None


class _Copy:
    """One copy of a stage: which of its buffers a step changes."""

    def __init__(self, module: StageModule) -> None:
        self.places = {place.name: place for place in places_of(module)}
        self._known: dict[tuple[bool, ...], set[str]] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._scratch = {place.name: place for place in places_of(module, persistent=False)}
        self._scratch_versions: dict[str, tuple[int, int]] = {}
        self.before: Values = {}

    def _modes(self) -> tuple[bool, ...]:
        return tuple(place.owner.training for place in self.places.values())

    def _watched(self) -> Iterator[str]:
        """All in the first step in these modes; then those that it changed, and all statistics in training mode."""
        known = self._known.get(self._modes())
        for name, place in self.places.items():
            if known is None or name in known or (place.owner.training and is_batch_norm(place.owner)):
                yield name

    def begin(self) -> None:
        self.before = {name: self.places[name].value.clone() for name in self._watched()}
        self.seen()

    def seen(self) -> None:
        """The values are now as every copy has them."""
        self._versions = {name: _version(place.value) for name, place in self.places.items()}

    def seen_scratch(self) -> None:
        """What a forward has left in buffers that are not persistent is this copy's own."""
        self._scratch_versions = {name: _version(t) for name, t in self._scratch_now().items()}

    def _scratch_now(self) -> Values:
        found = {name: place.owner._buffers.get(place.inner) for name, place in self._scratch.items()}
        return {name: value for name, value in found.items() if value is not None}

    def given(self) -> Values:
        """What somebody has written to since, of all buffers."""
        scratch = self._scratch_now()
        found = {n: t for n, t in scratch.items() if self._scratch_versions.get(n) != _version(t)}
        return {n: self.places[n].value for n in self.touched()} | found

    def touched(self) -> list[str]:
        """Those that somebody has written to since, as far as a tensor counts its writes."""
        return [n for n, p in self.places.items() if self._versions.get(n) != _version(p.value)]

    def changed(self) -> Values:
        modes = self._modes()
        if modes not in self._known:
            # By value, since the kernel of batch normalisation does not count its writes.
            self._known[modes] = {
                n for n, old in self.before.items() if not _equal(self.places[n].value, old)
            }
        names = [*(n for n in self.before if n in set(self._watched())), *self.touched()]
        return {n: self.places[n].value.detach() for n in dict.fromkeys(names)}

    def write(self, values: Values) -> None:
        with torch.no_grad():
            for name, value in values.items():
                place = self.places.get(name) or self._scratch[name]
                if place.value.shape == value.shape and place.value.dtype == value.dtype:
                    place.value.copy_(value)
                else:
                    setattr(place.owner, place.inner, value.to(place.value.device, copy=True))


class BufferCopies:
    """The copies of a process's stages, and how their buffers become the same.

    Args:
        stages: by number, the copies of the stage that are in this process, those of the first replica first.
        rule: for buffers that are no statistics of batch normalisation, where copies differ. "refuse" ends the step;
            "mean" takes the mean over the copies that changed it, of integers the first's; "first" takes the first's.
        gather: between processes; None where all copies are here.
        agree: gives every process's problem to all of them; None where no problem can be, or this process is alone.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[StageModule]],
        rule: Rule,
        gather: Gather | None = None,
        agree: Callable[[str], list[str]] | None = None,
    ) -> None:
        copies = {s: [_Copy(module) for module in modules] for s, modules in stages.items()}
        self._copies = {s: found for s, found in copies.items() if found[0].places}
        self._several = [found for found in copies.values() if len(found) > 1]
        self._rule = rule
        self._gather = gather
        self._agree = agree
        for copy in self._all():
            copy.seen()
        self.ran()

    def _all(self) -> Iterator[_Copy]:
        for copies in self._copies.values():
            yield from copies

    def level(self) -> None:
        """Before a step: what was written to the first copy in this process (a loaded state, a reset) holds for all."""
        for first, *others in self._several:
            given = first.given()
            for other in others if given else ():
                other.write(given)
                other.seen()
            first.seen()

    def ran(self) -> None:
        """After any step."""
        for copies in self._several:
            for copy in copies:
                copy.seen_scratch()

    def begin(self) -> None:
        """Before a training step."""
        for copy in self._all():
            copy.begin()

    def finish(self) -> None:
        """After a training step, on every process: give all copies the same values.

        Raises:
            ReplicaError: copies of a buffer differ and the rule is to refuse; the buffers are as before the step. In
                processes every one raises it.
        """
        told: dict[int, list[Values]] = {
            s: [c.changed() for c in copies] for s, copies in self._copies.items()
        }
        if self._gather is not None:
            told = self._gather({s: values[0] for s, values in told.items()})
        problem, name, joined = "", "", {}
        for s, copies in self._copies.items():
            joined[s], differs = _joined(copies[0], told[s], self._rule)
            if differs and not problem:
                name = differs
                problem = (
                    f"buffer {name!r} of stage {s} is no longer the same on its {len(told[s])} copies: each was changed by "
                    "its own microbatches. Only the statistics of batch normalisation can be joined to what plain PyTorch "
                    "has. Set buffers='mean' or buffers='first' in ParallelOptions, or register it with "
                    "persistent=False if it is scratch"
                )
        problems = [problem] if self._agree is None else self._agree(problem)
        if any(problems):
            self.restore()
            first = next(text for text in problems if text)
            raise ReplicaError(first, first.split("'")[1])
        for s, copies in self._copies.items():
            for copy in copies:
                copy.write(joined[s])
                copy.before = {}
                copy.seen()

    def restore(self) -> None:
        """After a failed step: the buffers are as before it, so that copies are the same."""
        for copy in self._all():
            copy.write(copy.before)
            copy.before = {}
            copy.seen()


def _joined(copy: _Copy, told: Sequence[Values], rule: Rule) -> tuple[Values, str]:
    """What every copy's buffers are to be, and the name of the first that nobody can know."""
    found: Values = {}
    for name in dict.fromkeys(name for values in told for name in values):
        place = copy.places[name]
        values = [one[name].to(place.value.device) for one in told if name in one]
        if is_batch_norm(place.owner) and place.owner.training and name in copy.before:
            found[name] = _statistics(copy, place, told)
        elif len(values) == len(told) and all(_equal(value, values[0]) for value in values):
            continue
        elif rule == "refuse":
            return {}, name
        elif rule == "mean" and (values[0].is_floating_point() or values[0].is_complex()):
            found[name] = torch.stack(values).mean(0)
        else:
            found[name] = values[0]
    return found, ""


def _statistics(copy: _Copy, place: _Place, told: Sequence[Values]) -> Tensor:
    """A running statistic after all copies' updates, one copy's after the other's."""
    prefix = place.name.removesuffix(place.inner)
    counter = f"{prefix}num_batches_tracked"
    before = copy.before[place.name]
    updates = [
        int(values[counter]) - int(copy.before[counter]) if counter in values else 0 for values in told
    ]
    if place.name == counter:
        return before + sum(updates)
    momentum: float | None = place.owner.momentum  # type: ignore[assignment]  # of an nn.Module
    start, found = before.double(), before.double()
    done = int(copy.before[counter])
    for values, count in zip(told, updates, strict=True):
        if place.name not in values or not count:
            continue
        after = values[place.name].to(start.device).double()
        if momentum is not None:
            found = after + (1.0 - momentum) ** count * (found - start)
        else:  # the mean of all that were seen
            own = int(copy.before[counter])
            added = after * (own + count) - start * own
            found = (found * done + added) / (done + count)
            done += count
    return found.to(before.dtype)


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit but for NaN, of which any two are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(torch.eq(one, other).logical_or(one.isnan() & other.isnan()).all())
