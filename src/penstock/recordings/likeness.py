"""Words for a tensor that differs: by a factor, another one's values, a sum that lacks a term, some of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor, hypot, log10, sqrt

from penstock.recordings.files import Key, Kind
from penstock.recordings.fingerprint import Fingerprint, groups_of

_MOST = 64
"""Largest numerator and denominator of a factor that is told as a ratio."""
_ALIKE = 1e-4
"""Relative distance of projections up to which one is a multiple of the other."""
_OF_BFLOAT16 = (0.0008, 0.004)
"""Relative norms of differences that rounding a tensor to bfloat16 makes, from once to a few times: up to 2**-9 a value."""


def distance(one: Fingerprint, other: Fingerprint) -> float:
    """Return the norm of the difference over the norm of the other, as the projections tell; infinity if they cannot."""
    if one.shape != other.shape or one.nonfinite or other.nonfinite:
        return float("inf")
    apart = size_of(difference(one, other))
    size = other.norm or one.norm
    return apart / size if size else 0.0


def same_bits(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two tensors have the same shape, dtype and bits.

    Two digests may be the same though the upper bits of words differ, as where an even number of signs does; then the
    projections are not.
    """
    if (one.digest, one.shape, one.dtype) != (other.digest, other.shape, other.dtype):
        return False
    apart = size_of(difference(one, other))
    # True without projections, of values that are not finite.
    return not apart > _ALIKE * max(one.norm, other.norm)


def difference(one: Fingerprint, other: Fingerprint) -> list[float]:
    """Return the projections of the difference of two tensors."""
    return [a - b for a, b in zip(one.projections, other.projections, strict=True)]


def size_of(projections: Sequence[float]) -> float:
    """Return the norm of a tensor, as its projections tell."""
    return _norm(projections) / sqrt(len(projections))


def describe(
    key: Key,
    found: Fingerprint,
    reference: Fingerprint,
    others: Mapping[Key, Fingerprint],
    size: float,
    allowed: float,
) -> str:
    """Return in words how a tensor differs from the reference's.

    Args:
        others: all tensors of the reference.
        size, allowed: relative norm of the difference, and what rounding explains.
    """
    if found.shape != reference.shape:
        return f"has shape {found.shape}, and the reference's {reference.shape}"
    if found.nonfinite != reference.nonfinite:
        return f"has {found.nonfinite} values that are not finite, and the reference's {reference.nonfinite}"
    if found.dtype != reference.dtype:
        return f"is {found.dtype}, and the reference's {reference.dtype}"
    if not found.norm and reference.norm:
        return "is zero, and the reference's is not"
    if (same := _values_of_another(key, found, others)) is not None:
        return f"has the values that the reference has in {same}"
    likely = [
        factor_in_words(found.projections, reference.projections),
        sums_in_words(key, found, others),
        _multiple_of_another(key, found, others),
    ]
    what = next((words for words in likely if words), "")
    where = _where(found, reference, allowed)
    wide = found.dtype in ("float32", "float64")
    rounded = wide and allowed < _OF_BFLOAT16[0] <= size <= _OF_BFLOAT16[1]
    relative = (
        f"differs from the reference's by {size:.2g} of its norm; rounding explains {allowed:.1g}"
        if allowed
        else f"has other bits than the reference's, by {size:.2g} of its norm"
    )
    if rounded:
        relative += ", and rounding to bfloat16 would explain all of it"
    return "; ".join(words for words in (what, where, relative if not what else "") if words)


def factor_text(factor: float) -> str:
    """Return a factor with three digits, and with as many more as tell one near 1 from it."""
    off = abs(factor - 1)
    digits = 3 if not 0 < off < 0.01 else 2 - floor(log10(off))
    return f"{factor:.{min(digits, 10)}g}"


def factor_in_words(found: Sequence[float], reference: Sequence[float], alike: float = _ALIKE) -> str:
    """Return words for a factor between projections; empty if there is none.

    Args:
        alike: relative distance up to which one is a multiple of the other.
    """
    factor = fit(found, reference, alike)
    if factor is None or abs(factor - 1) < 10 * alike:
        return ""
    words = f"is {factor_text(factor)} of the reference's"
    for denominator in range(1, _MOST + 1):
        numerator = round(factor * denominator)
        if 0 < abs(numerator) <= _MOST and abs(numerator / denominator / factor - 1) < alike:
            return f"{words} (a factor of {Fraction(numerator, denominator)})"
    return words


def _values_of_another(key: Key, found: Fingerprint, others: Mapping[Key, Fingerprint]) -> str | None:
    """Return the place of the tensor in the reference that has a tensor's bits, the nearest by name; None without one."""
    alike = [other for other, of in others.items() if other != key and same_bits(of, found) and found.norm]
    if not alike:
        return None
    nearest = min(
        alike, key=lambda o: (o.name != key.name, o.kind != key.kind, o.step != key.step, abs(o.microbatch))
    )
    return str(nearest)


def _multiple_of_another(key: Key, found: Fingerprint, others: Mapping[Key, Fingerprint]) -> str:
    """Tell that a tensor is a multiple of the same one of another microbatch or step."""
    for other, of in others.items():
        if other != key and (other.name, other.kind) == (key.name, key.kind) and of.shape == found.shape:
            factor = fit(found.projections, of.projections)
            if factor is not None:
                return f"is {factor_text(factor)} of what the reference has in {other}"
    return ""


def sums_in_words(key: Key, found: Fingerprint, others: Mapping[Key, Fingerprint]) -> str:
    """Tell if a gradient is the sum of the microbatches' without one, or with one twice; empty if it is neither."""
    if key.kind != Kind.GRADIENT:
        return ""
    shares = {
        other.microbatch: of.projections
        for other, of in others.items()
        if (other.step, other.kind, other.name) == (key.step, Kind.SHARE, key.name)
    }
    if len(shares) < 2:
        return ""
    total = [sum(values) for values in zip(*shares.values(), strict=True)]
    for microbatch, share in shares.items():
        for sign, words in ((-1, "lacks what {} gives"), (1, "has what {} gives twice")):
            if fit(found.projections, [t + sign * s for t, s in zip(total, share, strict=True)]) is not None:
                return words.format(f"microbatch {microbatch}")
        if fit(found.projections, share) is not None:
            return f"is what microbatch {microbatch} alone gives"
    return ""


def _where(found: Fingerprint, reference: Fingerprint, allowed: float) -> str:
    """Tell which rows or columns differ, if others do not."""
    for words, ours, theirs, length in (
        ("indices {} of its first dimension", found.rows, reference.rows, reference.shape[:1]),
        ("indices {} of its second dimension", found.columns, reference.columns, reference.shape[1:2]),
    ):
        if len(ours) != len(theirs) or len(ours) < 2 or not length:
            continue
        bound = max(allowed, _ALIKE) * reference.norm / sqrt(len(ours)) / 10
        differ = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if abs(a - b) > bound]
        if 0 < len(differ) <= len(ours) // 2:
            groups = groups_of(length[0])
            return f"only {words.format(_ranges([groups[n] for n in differ]))} of {length[0]} differ"
    return ""


def _ranges(groups: Sequence[range]) -> str:
    """Name ranges of numbers, joined where one follows another."""
    joined: list[range] = []
    for group in groups:
        if joined and joined[-1].stop == group.start:
            joined[-1] = range(joined[-1].start, group.stop)
        else:
            joined.append(group)
    return ", ".join(f"{g.start}" if len(g) == 1 else f"{g.start} to {g.stop - 1}" for g in joined)


def fit(values: Sequence[float], base: Sequence[float], alike: float = _ALIKE) -> float | None:
    """Return the factor by which values are a multiple of others; None if they are none."""
    size = sum(b * b for b in base)
    if not size:
        return None
    factor = sum(a * b for a, b in zip(values, base, strict=True)) / size
    apart = _norm([a - factor * b for a, b in zip(values, base, strict=True)])
    return factor if factor and apart <= alike * _norm(values) else None


def _norm(values: Sequence[float]) -> float:
    return hypot(*values)
