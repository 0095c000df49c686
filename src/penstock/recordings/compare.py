"""Comparison of two recordings: the first tensor, in the order of computation, that differs by more than rounding."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from math import isfinite
from statistics import median
from typing import Literal

import torch

from penstock.base.counts import few
from penstock.base.errors import ConfigError, DataError
from penstock.recordings.bounds import AFTER, Bounds
from penstock.recordings.files import Entry, Key, Kind, Recording, kept_values, read
from penstock.recordings.fingerprint import Fingerprint, divided
from penstock.recordings.likeness import (
    describe,
    difference,
    distance,
    factor_in_words,
    factor_text,
    fit,
    same_bits,
    size_of,
    sums_in_words,
)
from penstock.recordings.noise import Noise

Verdict = Literal["same", "rounded", "different"]

_UNTOLD = "differs"
"""Words for a difference after the first, which mostly follows from it."""
_MISSING = "was not computed; the reference has it"
_SAME_FACTOR = 3e-6
"""Relative difference up to which two factors count as one: some roundings of float32."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        key: its place.
        what: how it differs, and what that looks like.
        size: norm of the difference over the norm of the reference, estimated from projections; infinity if there is no such
            number.
        allowed: the largest such number that another order of sums explains.
    """

    key: Key
    what: str
    size: float
    allowed: float

    def __str__(self) -> str:
        by = f" by {self.size:.2g} of its norm" if self.what == _UNTOLD and isfinite(self.size) else ""
        return f"{self.key}, {self.what}{by}"


@dataclass
class Comparison:
    """Result of `compare`: what agrees, and where the run differs.

    Attributes:
        differences: all differences in the order of computation; what follows from the first differs, too.
        notes: what could not be compared, a line each.
        verdicts: place of each tensor that was compared, in the order of computation → "same", "rounded" or "different".
        alike: names of other parameters whose gradients lack, or have twice, what the first one's does.
        incomplete: what a recording lacks that its run should have made, such as files of processes, a line each.
    """

    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdicts: dict[Key, Verdict] = field(default_factory=dict)
    alike: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    @property
    def same(self) -> int:
        """Number of tensors with the same bits."""
        return self._count("same")

    @property
    def rounded(self) -> int:
        """Number of tensors that differ by no more than another order of sums explains."""
        return self._count("rounded")

    @property
    def before(self) -> int:
        """Number of tensors that agree before any differs."""
        return sum(1 for _ in takewhile(lambda verdict: verdict != "different", self.verdicts.values()))

    def _count(self, verdict: Verdict) -> int:
        return sum(each == verdict for each in self.verdicts.values())

    @property
    def sentence(self) -> str:
        """The first difference, or how many tensors agree, in words."""
        if self.first is not None:
            others = len(self.differences) - 1
            after = f"; {others} after it differ, too" if others else ""
            return f"{self.first}; {self.before} tensors before it agree{after}"
        bits = f"{self.same} with the same bits" if self.rounded else "all with the same bits"
        rounded = f", {self.rounded} to the order of sums" if self.rounded else ""
        return f"{len(self.verdicts)} tensors agree: {bits}{rounded}"

    @property
    def around(self) -> list[str]:
        """Facts around the first difference: the tensor before it, other microbatches, parameters like it."""
        return [] if self.first is None else list(self._around(self.first.key))

    def _around(self, key: Key) -> Iterator[str]:
        beside = [
            k for k in self.verdicts if (k.step, k.kind, k.microbatch) == (key.step, key.kind, key.microbatch)
        ]
        at = beside.index(key) if key in beside else 0
        if key.microbatch >= 0 and at and self.verdicts[beside[at - 1]] != "different":
            yield f"before it, {beside[at - 1].place} agrees"
        same = [k for k in self.verdicts if replace(k, microbatch=key.microbatch) == key]
        if key.microbatch >= 0 and len(same) > 1:
            wrong = sorted(k.microbatch for k in same if self.verdicts[k] == "different")
            which = f"in {few(wrong)}, counted from 0, of {len(same)} microbatches"
            yield f"it differs {which if len(wrong) < len(same) else f'in all {len(same)} microbatches'}"
        if self.alike:
            yield f"the same holds for {few(self.alike)}"

    @property
    def counts(self) -> str:
        """Numbers of tensors that differ, by kind, in words."""
        of_kind = Counter(k.kind for k in self.verdicts)
        different = Counter(k.kind for k, verdict in self.verdicts.items() if verdict == "different")
        return ", ".join(f"{different[kind]} of {of_kind[kind]} {kind.plural}" for kind in sorted(of_kind))

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of computation; None if there is none."""
        return self.differences[0] if self.differences else None

    @property
    def good(self) -> bool:
        """True if nothing differs by more than rounding, and nothing that should be there is missing."""
        return not self.differences and not self.incomplete

    def __str__(self) -> str:
        incomplete = [f"incomplete: {'; '.join(self.incomplete)}"] if self.incomplete else []
        around = [f"  {'; '.join(self.around)}"] if self.around else []
        counts = [f"  differ in all: {self.counts}"] if self.differences else []
        return "\n".join([*incomplete, self.sentence, *around, *counts, *self.notes])


def compare(
    reference: str | os.PathLike[str],
    run: str | os.PathLike[str],
    *,
    exact: str | os.PathLike[str] | None = None,
    scale: float = 1.0,
    bits: bool = False,
) -> Comparison:
    """Compare a run's recording with that of a reference.

    Tensors are aligned by name, microbatch and step, and looked at in the order of computation: outputs before gradients,
    gradients before updates, within each as the reference computed them. One with the same bits agrees. Another agrees if
    it differs by no more than the order of sums explains: four times what the reference differs from itself in float64, or,
    without that, a fixed relative difference for its dtype. Parts of a tensor that several processes have count as one.

    Args:
        reference: folder of the recording of a loop that is right, such as plain PyTorch.
        run: folder of the recording in question.
        exact: folder of a recording of the reference in float64, with the same data.
        scale: factor by which the run's losses are larger before their backward, as with a loss scale, or where the
            reference divides losses by the microbatches and the run divides gradients (default 1.0).
        bits: whether other bits are a difference, also where rounding explains them (default False).

    Raises:
        ConfigError: if `scale` is not above 0.
        DataError: if a folder has no recording, a file is damaged, or the two have nothing in common.
    """
    if not 0 < scale < float("inf"):
        raise ConfigError(f"scale must be a number above 0, got {scale!r}")
    exactly = None if exact is None else read(exact)
    return compare_recordings(read(reference), read(run), exact=exactly, scale=scale, bits=bits)


def compare_recordings(
    reference: Recording,
    run: Recording,
    *,
    exact: Recording | None = None,
    scale: float = 1.0,
    bits: bool = False,
) -> Comparison:
    """Compare two recordings that were read, as `compare` does."""
    return _Compared(reference, run, exact, scale, bits).result()


class _Compared:
    def __init__(
        self, reference: Recording, run: Recording, exact: Recording | None, scale: float, bits: bool
    ) -> None:
        self._reference, self._run = reference, run
        self._scale, self._bits, self._exact = scale, bits, exact
        self._found = Comparison()
        self._rounded_gradients: set[str] = set()
        self._parts: Counter[str] = Counter()
        self._require_common()
        self._bounds = Bounds(reference.whole, exact)
        self._noise = Noise(reference, run, self._bounds)

    def _require_common(self) -> None:
        if any(key.name for key in self._reference.entries.keys() & self._run.entries.keys()):
            return
        names = [sorted({k.name for k in r.entries} - {""})[:3] for r in (self._reference, self._run)]
        raise DataError(
            f"{self._reference.folder} and {self._run.folder} have no tensor in common: the first names are "
            f"{', '.join(names[0]) or 'none'} and {', '.join(names[1]) or 'none'}; record the same model, with the same "
            "microbatches"
        )

    def result(self) -> Comparison:
        found = self._found
        self._note_what_is_missing()
        for key in self._in_order():
            judged = self._judge(key)
            if isinstance(judged, Difference):
                found.differences.append(judged)
                found.verdicts[key] = "different"
            elif judged is not None:
                found.verdicts[key] = judged
        self._look_past_a_common_factor()
        self._look_for_a_module_that_was_not_called()
        self._look_for_gradients_like_the_first()
        updated = {k for k, v in found.verdicts.items() if v == "rounded" and k.kind == Kind.PARAMETER}
        loose = len(updated - self._noise.updates)
        if loose and self._exact is None and not self._bits and not found.differences:
            found.notes.append(
                f"{loose} updates have other bits, and without --exact may differ by {AFTER:.0%} of their size in each "
                "step so far: what a wrong setting of an optimizer changes may be less; record the reference in float64, too"
            )
        if self._noise.updates:
            found.notes.append(
                "updates differ as their gradients do, which are rounding alone, and show no wrong setting of an optimizer: "
                f"{few(sorted(self._noise.names))}"
            )
        if self._own_buffers:
            found.notes.append(
                f"{len(self._own_buffers)} buffers are not compared, since each process has statistics of its own: "
                f"{few(self._own_buffers)}"
            )
        if self._parts:
            parts = few(sorted(self._parts))
            found.notes.append(
                f"{self._parts.total()} tensors are parts of the reference's, and not compared: {parts}"
            )
        return found

    def _look_past_a_common_factor(self) -> None:
        """Put the gradient first that differs in itself, where clipping by the norm has changed all others with it."""
        found = self._found.differences
        if not found or found[0].key.kind != Kind.GRADIENT:
            return
        step = found[0].key.step
        gradients = [d for d in found if (d.key.step, d.key.kind) == (step, Kind.GRADIENT)]
        factors = {d.key: self._factor(d.key) for d in gradients}
        known = [factor for factor in factors.values() if factor is not None]
        if len(known) < 2:
            return
        common = median(known)
        own = [d for d in gradients if (f := factors[d.key]) is None or abs(f / common - 1) > _SAME_FACTOR]
        count = len(gradients) - len(own)
        if count < 2 or not own:
            return
        first = own[0]
        ours, theirs = self._run.whole.get(first.key), self._reference.whole.get(first.key)
        what = first.what
        if what == _UNTOLD and ours is not None and theirs is not None:
            what = describe(first.key, ours, theirs, self._reference.whole, first.size, first.allowed)
        by = factor_text(common)
        others = f"; {count} other gradients are {by} of the reference's, as clipping by the norm makes them"
        found.remove(first)
        found.insert(0, replace(first, what=what + others))

    def _look_for_a_module_that_was_not_called(self) -> None:
        """Put the output first that a module of the run should have made before the first that differs."""
        first, entries = self._found.first, self._reference.entries
        if first is None or first.key.kind != Kind.OUTPUT or first.key not in entries:
            return
        names, _ = self._of_run
        called = [name for kind, name in names if kind == Kind.OUTPUT]
        updated = [name for kind, name in names if kind == Kind.PARAMETER]
        before = [
            key
            for key in entries
            if (key.step, key.kind, key.microbatch) == (first.key.step, first.key.kind, first.key.microbatch)
            and entries[key][0].order < entries[first.key][0].order
            and not any(f"{name}.".startswith(f"{key.name}.") for name in called)
            and any(name.startswith(f"{key.name}.") for name in updated)
        ]
        if before:
            # A module's output comes after those of the modules within it.
            outer = min(
                (k for k in before if f"{before[0].name}.".startswith(f"{k.name}.")),
                key=lambda k: len(k.name),
            )
            self._found.differences.insert(0, Difference(outer, _MISSING, float("inf"), 0.0))
            self._found.verdicts[outer] = "different"

    def _look_for_gradients_like_the_first(self) -> None:
        """Find the parameters whose gradients lack, or have twice, the same microbatch's."""
        first = self._found.first
        if first is None or first.key.kind != Kind.GRADIENT:
            return
        words = {
            d.key.name: sums_in_words(d.key, q, self._reference.whole)
            for d in self._found.differences
            if (d.key.step, d.key.kind) == (first.key.step, Kind.GRADIENT)
            and (q := self._run.whole.get(d.key)) is not None
        }
        own = words.pop(first.key.name, "")
        self._found.alike = [name for name, text in words.items() if own and text == own]

    def _factor(self, key: Key) -> float | None:
        """Return the factor by which a gradient is a multiple of the reference's; None if it is none."""
        ours, theirs = self._run.whole.get(key), self._reference.whole.get(key)
        return None if ours is None or theirs is None else fit(ours.projections, theirs.projections)

    def _in_order(self) -> Iterator[Key]:
        """Yield the places of tensors in the order of computation; gradients in the order in which a backward made them."""
        entries = self._reference.entries
        shares = {
            (key.step, key.name): of[0].order
            for key, of in reversed(entries.items())
            if key.kind == Kind.SHARE
        }
        places = {
            key: (key.step, key.kind, shares.get((key.step, key.name), of[0].order), of[0].order)
            for key, of in entries.items()
        }
        last = len(entries)
        for key in self._run.entries:
            if key not in entries and self._should_be(key, self._reference):
                # A further call comes after the first one of its module; others after all of their kind.
                places[key] = places.get(replace(key, call=0), (key.step, key.kind, last, last))
        yield from sorted(places, key=places.__getitem__)

    def _should_be(self, key: Key, other: Recording) -> bool:
        """Return whether a tensor that one side alone has is a difference, and not a part that the other did not record."""
        if key.kind == Kind.SHARE:
            return False
        names, places = self._of_run if other is self._run else self._of_reference
        complete = not other.cut_off
        if key.kind in (Kind.GRADIENT, Kind.PARAMETER):
            parameter = Key(key.step, Kind.PARAMETER, -1, key.name)
            # A parameter that a side never updates belongs to a module that it runs.
            known = parameter in other.entries or (
                complete and (Kind.OUTPUT, key.name.rpartition(".")[0]) in names
            )
            # A step whose update was recorded on one side has one on the other, too, if it had a forward there.
            updated = key.kind == Kind.PARAMETER and any(
                (step, kind) == (key.step, Kind.OUTPUT) for step, kind, _ in places
            )
            return known and ((key.step, key.kind, -1) in places or (complete and updated))
        ended = complete and (key.step, Kind.PARAMETER, -1) in places
        # Once a step has ended, a microbatch that had a forward has had its backward.
        seen = Kind.OUTPUT if key.kind == Kind.OUTPUT_GRADIENT and ended else key.kind
        return (key.kind, key.name) in names and (key.step, seen, key.microbatch) in places

    @cached_property
    def _of_run(self) -> tuple[set[tuple[Kind, str]], set[tuple[int, Kind, int]]]:
        return _places(self._run)

    @cached_property
    def _of_reference(self) -> tuple[set[tuple[Kind, str]], set[tuple[int, Kind, int]]]:
        return _places(self._reference)

    @cached_property
    def _own_buffers(self) -> list[str]:
        """Names of buffers of modules whose statistics are each process's own, as in DistributedDataParallel."""
        buffers = {key: of for key, of in self._run.entries.items() if key.kind == Kind.BUFFER}
        own = {key.name.rpartition(".")[0] for key, of in buffers.items() if _disagreeing(of) is not None}
        return sorted({key.name for key in buffers if key.name.rpartition(".")[0] in own})

    @cached_property
    def _run_is_cut(self) -> bool:
        """True if processes of the run have other modules: the whole of each is a stage, and not the model."""
        names: dict[int, set[str]] = defaultdict(set)
        for key, of in self._run.entries.items():
            for entry in of:
                names[entry.process].add(key.name)
        return any(of_process != names[min(names)] for of_process in names.values())

    @cached_property
    def _shares(self) -> list[dict[tuple[int, str], set[int]]]:
        """Microbatches with a gradient of their own, by step and parameter, of the reference and of the run."""
        both = []
        for recording in (self._reference, self._run):
            found: dict[tuple[int, str], set[int]] = defaultdict(set)
            for key in recording.entries:
                if key.kind == Kind.SHARE:
                    found[key.step, key.name].add(key.microbatch)
            both.append(found)
        return both

    def _judge(self, key: Key) -> Verdict | Difference | None:
        """Compare a tensor; return None if that cannot be done."""
        if (not key.name and self._run_is_cut) or key.name in self._own_buffers:
            return None
        if key.kind == Kind.SHARE and len({frozenset(of[key.step, key.name]) for of in self._shares}) > 1:
            return None  # a backward of several microbatches at once has their sum
        ours, theirs = self._run.entries.get(key), self._reference.entries.get(key)
        if ours is None or theirs is None:
            if theirs is not None and not self._should_be(key, self._run):
                return None
            cut = [each for each in (self._run, self._reference) if each.cut_off]
            if any(key.step >= max(each.steps, default=-1) for each in cut):
                return None  # it was not written
            if key.kind == Kind.OUTPUT_GRADIENT and not any(
                e.of.squares or e.of.nonfinite for e in ours or theirs or ()
            ):
                return None  # of a microbatch that does not count, such as one without a valid token
            missing = _MISSING if ours is None else "is not in the reference"
            return Difference(key, missing, float("inf"), 0.0)
        if (apart := _disagreeing(ours)) is not None:
            return Difference(
                key, f"is not the same on processes {apart[0]} and {apart[1]}", float("inf"), 0.0
            )
        q, r = self._run.whole.get(key), self._reference.whole.get(key)
        if q is None or r is None or self._divided(q, r):
            self._parts[key.name] += 1
            return None
        if self._scale != 1.0 and key.kind in (Kind.OUTPUT_GRADIENT, Kind.SHARE):
            q = divided(q, self._scale)
        if same_bits(q, r):
            return "same"
        return self._judge_other_bits(key, q, r)

    def _judge_other_bits(self, key: Key, q: Fingerprint, r: Fingerprint) -> Verdict | Difference:
        size = distance(q, r)
        allowed = 0.0 if self._bits else self._bounds.of_value(key, bool(self._rounded_gradients))
        updates = None if self._bits else self._updates(key, q, r)
        factor = ""
        if updates is not None:
            ours, theirs = updates
            same_gradient = (
                replace(key, kind=Kind.GRADIENT) in self._run.entries
                and key.name not in self._rounded_gradients
            )
            of_update = self._bounds.of_update(key, theirs, same_gradient)
            factor = factor_in_words(ours, theirs, of_update)
            if size <= allowed or key.name in self._noise.names:
                size = size_of([a - b for a, b in zip(ours, theirs, strict=True)]) / size_of(theirs)
                allowed = of_update
        comparable = q.shape == r.shape and q.dtype == r.dtype and not (q.nonfinite or r.nonfinite)
        if comparable and size <= allowed and not self._bits:
            if key.kind == Kind.GRADIENT:
                self._rounded_gradients.add(key.name)
            return "rounded"
        if comparable and not self._bits and self._noise.explains(key, q, r, updates):
            return "rounded"
        # What a difference looks like is told of the first alone; the others follow from it.
        what = _UNTOLD
        if not self._found.differences:
            others = self._reference.whole
            what = f"its update {factor}" if factor else describe(key, q, r, others, size, allowed)
            what += self._largest(key)
        return Difference(key, what, size, allowed)

    def _largest(self, key: Key) -> str:
        """Name the place of the largest difference, if both recordings kept the tensor."""
        ours, theirs = (kept_values(of.entries[key]) for of in (self._run, self._reference))
        if ours is None or theirs is None or ours.shape != theirs.shape or not ours.numel():
            return ""
        apart = (
            (ours.to(torch.complex128 if ours.is_complex() else torch.float64) - theirs).abs().nan_to_num()
        )
        at = [int(n) for n in torch.unravel_index(apart.argmax(), apart.shape)]
        place = f"at {at}" if at else "in its one number"
        count = int((ours != theirs).sum())
        return (
            f"; {count} of {ours.numel()} numbers differ, most {place}: {ours[*at].item():.6g}, and the reference's "
            f"{theirs[*at].item():.6g}"
        )

    def _updates(self, key: Key, q: Fingerprint, r: Fingerprint) -> tuple[list[float], list[float]] | None:
        """Return projections of what a step adds to a parameter in the run and in the reference; None if that is unknown."""
        before = replace(key, step=key.step - 1)
        was, should = self._run.whole.get(before), self._reference.whole.get(before)
        if key.kind != Kind.PARAMETER or was is None or should is None:
            return None
        if any(of.nonfinite or of.shape != r.shape for of in (q, r, was, should)):
            return None
        theirs = difference(r, should)
        return (difference(q, was), theirs) if size_of(theirs) else None

    def _divided(self, q: Fingerprint, r: Fingerprint) -> bool:
        """Return whether the run's tensor has other rows, as where processes divide samples or experts."""
        if q.shape == r.shape or len(q.shape) != len(r.shape) or q.dtype != r.dtype:
            return False
        return len({entry.process for of in self._run.entries.values() for entry in of}) > 1

    def _note_what_is_missing(self) -> None:
        notes, incomplete = self._found.notes, self._found.incomplete
        kinds = [{key.kind for key in each.entries} for each in (self._reference, self._run)]
        for recording, has, other in zip((self._reference, self._run), kinds, kinds[::-1], strict=True):
            incomplete += [f"{recording.folder / name} was cut off" for name in recording.cut_off]
            if recording.missing:
                incomplete.append(
                    f"{recording.folder} has no {few(recording.missing)} of other processes of its run"
                )
            if Kind.OUTPUT in other - has:
                incomplete.append(
                    f"{recording.folder} has no output of a module; record what runs, such as the Pipeline in the place "
                    "of its model, around at least one step"
                )
        steps = set(self._reference.steps) ^ set(self._run.steps)
        if steps:
            notes.append(f"recorded on one side only: steps {few(sorted(steps))}")
        for ours, theirs in ((self._reference, self._run), (self._run, self._reference)):
            # A pipeline has no buffers that are in no state.
            names = (
                {k.name for k in ours.entries if k.kind != Kind.BUFFER}
                - {k.name for k in theirs.entries}
                - {""}
            )
            if names:
                notes.append(f"recorded in {ours.folder} only: {few(sorted(names))}")
            # Names that both have, in a microbatch that one has not.
            microbatches = {
                (k.step, k.microbatch) for k in ours.entries if k.microbatch >= 0 and k.kind == Kind.OUTPUT
            } - {(k.step, k.microbatch) for k in theirs.entries}
            numbers = sorted({number for step, number in microbatches if step in theirs.steps})
            if numbers:
                notes.append(f"recorded in {ours.folder} only: microbatches {few(numbers)}")
        calls = [_calls(recording) for recording in (self._reference, self._run)]
        for name in calls[0].keys() & calls[1].keys():
            if calls[0][name] != calls[1][name]:
                notes.append(
                    f"{name} is called {calls[0][name]} times for a microbatch in the reference, and {calls[1][name]} times "
                    "in the run"
                )


def _places(recording: Recording) -> tuple[set[tuple[Kind, str]], set[tuple[int, Kind, int]]]:
    keys = recording.entries
    return {(key.kind, key.name) for key in keys}, {(key.step, key.kind, key.microbatch) for key in keys}


def _calls(recording: Recording) -> dict[str, int]:
    """Return the number of calls of each module for a microbatch."""
    found: dict[str, int] = {}
    for key in recording.entries:
        if key.kind == Kind.OUTPUT:
            found[key.name] = max(found.get(key.name, 0), key.call + 1)
    return found


def _disagreeing(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """Return two processes that have other values of the same part; None if there are none."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], Entry] = {}
    for entry in entries:
        other = first.setdefault((entry.of.start, entry.of.size), entry)
        if not same_bits(other.of, entry.of) and entry.key.kind >= Kind.GRADIENT:
            return other.process, entry.process
    return None
