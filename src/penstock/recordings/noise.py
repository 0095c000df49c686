"""Updates that differ because their gradient is rounding alone, and what they change in the steps after.

A bias before a normalization has a gradient of zero, and so has that of an attention's keys. What is computed of it is
rounding, another one in another order of sums, and an optimizer that divides by its size makes a whole update of it. The
normalization takes the shift away again, so the outputs between the two differ, and those after do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from math import prod, sqrt
from statistics import median

from penstock.recordings.bounds import NOISE, SLACK, Bounds
from penstock.recordings.files import Key, Kind, Recording
from penstock.recordings.fingerprint import Fingerprint
from penstock.recordings.likeness import difference, distance, size_of


class Noise:
    """Parameters whose updates the rounding of their gradients explains."""

    def __init__(self, reference: Recording, run: Recording, bounds: Bounds) -> None:
        self._reference, self._run, self._bounds = reference, run, bounds
        self.updates: set[Key] = set()

    @property
    def names(self) -> set[str]:
        """Names of the parameters that have such an update."""
        return {key.name for key in self.updates}

    def explains(
        self, key: Key, q: Fingerprint, r: Fingerprint, updates: tuple[list[float], list[float]] | None
    ) -> bool:
        """Return whether a tensor differs by no more than the rounding of such gradients makes of it.

        Args:
            q, r: tensor in the run and in the reference.
            updates: projections of what the step adds to a parameter in the run and in the reference; None if the reference
                adds nothing.
        """
        if key.kind != Kind.PARAMETER:
            return key.kind in (Kind.OUTPUT, Kind.BUFFER) and self._follows(key, q, r)
        if updates is None:
            before = self._shifts(key.step - 1).get(key.name, 0.0)
            return before > 0 and before == self._shift(key)
        if not self._explains_update(key, *updates):
            return False
        self.updates.add(key)
        return True

    def _explains_update(self, key: Key, ours: list[float], theirs: list[float]) -> bool:
        # An optimizer's state has the gradients before, too.
        apart = [self._apart(Key(step, Kind.GRADIENT, -1, key.name)) for step in range(key.step + 1)]
        if apart[-1] is None:
            return False
        size = size_of([a - b for a, b in zip(ours, theirs, strict=True)])
        # Of values spread around zero such a part changes sign, which is its square root of a norm.
        part = max(each for each in apart if each is not None)
        return size <= SLACK * sqrt(part) * max(size_of(ours), size_of(theirs))

    def _apart(self, gradient: Key) -> float | None:
        """Return the relative difference of a gradient that is rounding alone; None if it is not."""
        q, r = self._run.whole.get(gradient), self._reference.whole.get(gradient)
        if q is None or r is None:
            return None
        rounding = self._bounds.rounding_of(gradient, self._usual.get(gradient.step, 0.0))
        apart = distance(q, r)
        return apart if rounding >= NOISE and apart <= rounding else None

    def _follows(self, key: Key, q: Fingerprint, r: Fingerprint) -> bool:
        """Return whether an output or a buffer is shifted by no more than such parameters are, and the shift goes away.

        The output of a parameter's own module has the shift in any case, and the others until a later output agrees.
        """
        shifts = self._shifts(key.step - 1)
        shift = size_of(difference(q, r)) / sqrt(prod(r.shape))
        if key.kind == Kind.BUFFER:  # such as a mean, of the parameters' own shape
            return shift <= SLACK * max(shifts.values(), default=0.0)
        outputs = self._outputs[key.step, key.microbatch]
        place = outputs.index(key)
        above = {n: of for n, of in shifts.items() if self._first(outputs, n.rpartition(".")[0]) <= place}
        # Both are estimates, and each row has the same shift, which is one number alone to a projection of rows.
        if shift > SLACK**2 * max(above.values(), default=0.0):
            return False
        own = any(name.rpartition(".")[0] == key.name for name in above)
        return own or any(map(self._agrees, outputs[place + 1 :]))

    def _first(self, outputs: Sequence[Key], owner: str) -> int:
        """Return the place of the first output of a module, of one within it or around it."""
        related = (
            n
            for n, key in enumerate(outputs)
            if f"{owner}.".startswith(f"{key.name}.") or key.name.startswith(f"{owner}.")
        )
        return next(related, 0)

    def _shifts(self, step: int) -> dict[str, float]:
        """Return the shifts of the parameters with such an update until the end of a step."""
        names = {key.name for key in self.updates if key.step <= step}
        return {name: self._shift(Key(step, Kind.PARAMETER, -1, name)) for name in names}

    def _shift(self, key: Key) -> float:
        """Return the root mean square of a parameter's difference."""
        q, r = self._run.whole.get(key), self._reference.whole.get(key)
        return 0.0 if q is None or r is None else size_of(difference(q, r)) / sqrt(prod(r.shape))

    def _agrees(self, key: Key) -> bool:
        return distance(self._run.whole[key], self._reference.whole[key]) <= self._bounds.of_value(key, True)

    @cached_property
    def _outputs(self) -> dict[tuple[int, int], list[Key]]:
        """Outputs that both have of each microbatch of a step, in the order in which the reference made them."""
        found: dict[tuple[int, int], list[Key]] = defaultdict(list)
        entries = self._reference.entries
        for key in sorted(self._reference.whole.keys() & self._run.whole, key=lambda k: entries[k][0].order):
            if key.kind == Kind.OUTPUT:
                found[key.step, key.microbatch].append(key)
        return found

    @cached_property
    def _usual(self) -> dict[int, float]:
        """Median differences of the gradients of each step, relative to the largest one beside each."""
        found: dict[int, list[float]] = defaultdict(list)
        for key, r in self._reference.whole.items():
            q = self._run.whole.get(key)
            if key.kind == Kind.GRADIENT and q is not None and r.norm:
                found[key.step].append(distance(q, r) * r.norm / self._bounds.largest(key))
        return {step: median(values) for step, values in found.items()}
