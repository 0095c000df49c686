"""Bounds on how much a tensor may differ from the reference's: what the order of sums explains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from statistics import median

from penstock.base.errors import DataError
from penstock.recordings.files import Key, Kind, Recording
from penstock.recordings.fingerprint import Fingerprint
from penstock.recordings.likeness import difference, distance, size_of

SLACK = 4.0
"""A run may be so many times as far from the reference as the reference is from itself in float64."""
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Relative differences that rounding explains where no reference in float64 says more: sums through some dozen layers."""
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative error of one addition."""
_MOST = 0.1
"""Largest relative difference that is ever taken for rounding."""
_OTHER = 0.3
"""Distance from outputs in float64 in the first step that other data or weights have, and bfloat16 and routers have not."""
_UPDATE, AFTER = 1e-4, 2e-2
"""Relative differences of updates that rounding explains: of gradients with the same bits, and of others in the first step.

Weights that differ make the next step's gradients differ more, so the second is allowed once for each step until then.
"""
NOISE = 0.1
"""Part of a gradient that is rounding from which on its update tells nothing of the optimizer: Adam divides by the size."""
AFTER_ROUNDING = 100.0
"""Factor on `ROUNDING` once a gradient has other bits: an optimizer such as Adam divides by its size."""
_GRADIENTS = (Kind.OUTPUT_GRADIENT, Kind.SHARE, Kind.GRADIENT)


class Bounds:
    """Relative differences that the order of sums explains.

    Args:
        reference: whole tensors of the reference.
        exact: its recording in float64; None for fixed bounds by dtype.

    Raises:
        DataError: if `exact` is a recording of something else, which would allow anything.
    """

    def __init__(self, reference: Mapping[Key, Fingerprint], exact: Recording | None) -> None:
        self._reference = reference
        self._exact: Mapping[Key, Fingerprint] = {} if exact is None else exact.whole
        if exact is not None:
            self._require_same(exact)

    def _require_same(self, exact: Recording) -> None:
        apart = [
            distance(self._reference[key], whole)
            for key, whole in self._exact.items()
            if (key.step, key.kind, whole.dtype) == (0, Kind.OUTPUT, "float64") and key in self._reference
        ]
        if apart and median(apart) <= _OTHER:
            return
        why = (
            f"its outputs are {median(apart):.2g} of their norm away"
            if apart
            else "it has none of its outputs"
        )
        raise DataError(
            f"{exact.folder} is not the reference in float64: {why}; record model.double() on the same data"
        )

    def of_value(self, key: Key, after_rounding: bool) -> float:
        """Return the largest relative difference of a tensor.

        Args:
            after_rounding: whether a gradient before it has other bits than the reference's.
        """
        r = self._reference[key]
        if not r.norm or (
            key.kind == Kind.BUFFER and r.dtype not in UNIT
        ):  # a buffer of whole numbers counts
            return 0.0
        if key in self._exact:
            usual = self._usual[key.step, key.kind]
            return SLACK * (max(distance(r, self._exact[key]), usual) + UNIT.get(r.dtype, 0.0))
        # Gradients of float32 are rounded as autocast's outputs are.
        allowed = max(ROUNDING.get(r.dtype, 0.0), self._least_precise)
        if after_rounding and (key.kind == Kind.PARAMETER or key.step > 0):
            allowed *= AFTER_ROUNDING
        allowed = min(allowed, _MOST)
        if key.kind in _GRADIENTS:
            # A gradient that is a small difference of large numbers, such as that of a key's bias, is rounding of these.
            allowed += allowed * self.largest(key) / r.norm
        return allowed

    def of_update(self, key: Key, update: list[float], same_gradient: bool) -> float:
        """Return the largest difference of what a step adds to a parameter, relative to that in the reference.

        A weight may be large beside its update, so a wrong update changes it by less than rounding would explain.

        Args:
            update: projections of the reference's update; it is not zero.
            same_gradient: whether the gradients so far have the reference's bits.
        """
        r, size = self._reference[key], size_of(update)
        # An update is rounded as the weight is. Adam divides a gradient by its size, so that of a small one may be far off.
        rounding = SLACK * UNIT.get(r.dtype, 0.0) * r.norm / size
        exact, begun = self._exact.get(key), self._exact.get(replace(key, step=key.step - 1))
        if exact is not None and begun is not None:
            apart = [a - b for a, b in zip(difference(exact, begun), update, strict=True)]
            return rounding + SLACK * max(size_of(apart) / size, _UPDATE)
        return rounding + (_UPDATE if same_gradient else AFTER * (key.step + 1))

    def rounding_of(self, gradient: Key, usual: float) -> float:
        """Return how large the rounding of a parameter's gradient is, relative to its norm.

        A bias before a normalization has a gradient of zero, so what is computed of it is rounding alone.

        Args:
            usual: what gradients of this step usually differ by, relative to the largest one beside each.
        """
        r = self._reference[gradient]
        if not r.norm:
            return 0.0
        if gradient in self._exact:
            return SLACK * distance(r, self._exact[gradient])
        # Sums of 16 bits are rounded more, unless the other gradients show that these are not in another order.
        rounding = max(SLACK * ROUNDING.get(r.dtype, 0.0), min(SLACK * usual, self._least_precise))
        return rounding * self.largest(gradient) / r.norm

    @cached_property
    def _usual(self) -> dict[tuple[int, Kind], float]:
        """Distances from float64 that are usual in each step and kind, since one tensor's may be small by chance.

        They are the largest of outputs and updates. A gradient that is nearly zero may be rounding alone, as far from
        float64 as it is large, so of gradients they are larger than 95% of all.
        """
        found: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for key, exact in self._exact.items():
            ours = self._reference.get(key)
            if ours is not None and ours.norm:
                found[key.step, key.kind].append(distance(ours, exact))
        return {
            (step, kind): sorted(values)[len(values) * 19 // 20 if kind in _GRADIENTS else -1]
            for (step, kind), values in found.items()
        }

    @cached_property
    def _least_precise(self) -> float:
        """Relative difference that rounding explains in the least precise dtype of the reference."""
        dtypes = {of.dtype for of in self._reference.values()}
        return max((ROUNDING[dtype] for dtype in dtypes & ROUNDING.keys()), default=0.0)

    def largest(self, key: Key) -> float:
        """Return the largest norm of a gradient of the same step and microbatch near a module."""
        return self._norms.get(_near(key), 0.0)

    @cached_property
    def _norms(self) -> dict[tuple[int, Kind, int, str], float]:
        found: dict[tuple[int, Kind, int, str], float] = defaultdict(float)
        for key, of in self._reference.items():
            if key.kind in _GRADIENTS:
                found[_near(key)] = max(found[_near(key)], of.norm)
        return found


def _near(key: Key) -> tuple[int, Kind, int, str]:
    """Return what a gradient has in common with those of its module and of the modules beside it."""
    return key.step, key.kind, key.microbatch, key.name.rsplit(".", 2)[0]
