"""Bubble and peak memory of each family as formulas from the literature, with their values.

The bubble is the makespan minus a rank's work, m(F+B+W), with free communication. F, B (the input gradient) and W are
seconds a rank spends on one microbatch, in all its chunks. Memory counts activations in chunks, one microbatch on one
stage, from F until the whole backward is done. Formulas were checked against the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from penstock.schedule.families.controllable import half_limit, third_limit
from penstock.schedule.families.full_backward import smallest_group
from penstock.schedule.families.round_trip import usual_groups


@dataclass(frozen=True)
class Setting:
    """Counts and times that a closed form depends on."""

    # Ranks, microbatches, virtual stages.
    p: int
    m: int
    v: int
    # Seconds of F, I and W of a microbatch on a rank.
    f: Fraction = Fraction(1)
    b: Fraction = Fraction(1)
    w: Fraction = Fraction(1)

    @property
    def equal(self) -> bool:
        return self.f == self.b == self.w


@dataclass(frozen=True)
class Bubble:
    """Idle seconds of a rank in a step."""

    text: str
    value: Callable[[Setting], Fraction | None]  # None if the formula does not apply or there is none


@dataclass(frozen=True)
class Peak:
    """Peak of the activations that rank r holds, in chunks."""

    text: str
    # Of the setting and r; None if the formula does not apply or there is none.
    value: Callable[[Setting, int], int | None]


def _full_pipe(s: Setting) -> Fraction | None:
    if s.m < s.p and s.v > 1:
        return None
    return (s.p - 1) * (s.f + s.b + s.w) / s.v


def _weights_fill(s: Setting) -> Fraction | None:
    if s.v == 1:
        return (s.p - 1) * (s.f + s.b) - (min(s.m, s.p) - 1) * min(s.f, s.w)
    return (s.p - 1) * (s.f + s.b - min(s.f, s.w)) / s.v if s.m >= s.p else None


def _staircase(s: Setting) -> Fraction | None:
    return (s.p - 1) * s.f / s.v if s.equal and s.m >= 2 * s.p - 1 else None


def _two_way(s: Setting) -> Fraction | None:
    full = s.b + s.w
    if s.m == s.p or (s.m % s.p == 0 and s.f == full):
        return (s.p - 2) * max(s.f, full)
    return None


def _waves(s: Setting) -> Fraction | None:
    full = s.b + s.w
    if s.m == s.p or (s.m % s.p == 0 and s.f == full):
        return (2 * s.p - 2) * max(s.f, full) / s.v
    return None


def _pairs(s: Setting, turns: int) -> Fraction | None:
    if s.m < 2 * s.p or not s.f == s.b >= s.w:
        return None
    pair, full = s.f + s.b + s.w, s.b + s.w
    return turns * (pair + full - 3 * s.w) / s.v


def _dualpipe(s: Setting) -> Fraction | None:
    return _pairs(s, s.p // 2 - 1) if s.m % 2 == 0 else None


def _v_half(s: Setting) -> Fraction | None:
    if not s.equal or s.m < 2 * s.p:
        return None
    return max(6 * s.p - 3 * half_limit(s.p) - 1, s.p - 1) * s.f / s.v


def _v_min(s: Setting) -> Fraction | None:
    if not s.equal or s.m < 2 * s.p:
        return None
    ops = 6 * s.p - 3 * third_limit(s.p) - 1 + (4 if s.p % 3 == 2 else 0)
    return max(ops, s.p - 1) * s.f / s.v


def _interleaved_peak(s: Setting, r: int) -> int:
    group = smallest_group(s.p, s.m)
    return min((s.v - 1) * group + 2 * (s.p - 1 - r) + 1, s.m * s.v)


def _interleaved_zb_peak(s: Setting, r: int) -> int:
    return min((s.v - 1) * smallest_group(s.p, s.m) + s.p, s.m * s.v)


def _rounds(s: Setting) -> tuple[int, int, int, int] | None:
    """Return N, K, d and w of `round_trip`; None if they do not fit the microbatches."""
    size, count = usual_groups(s.p, s.m)
    apart = s.p // count
    return None if s.m % (size * count) else (size, count, apart, s.m // (size * count))


def _round_trips(s: Setting) -> Fraction | None:
    rounds = _rounds(s)
    if rounds is None or rounds[0] < rounds[2]:
        return None
    _, _, apart, count = rounds
    full = s.b + s.w
    # A round begins where the one before ends first: in the time of one backward there.
    return (count * (apart - 1) * (s.f + full) - (count - 1) * min(full, (apart - 1) * s.f)) / s.v


def _round_trip_peak(s: Setting, r: int) -> int | None:
    if (rounds := _rounds(s)) is None:
        return None
    size, count, apart, turns = rounds
    # The last stage holds one microbatch at a time; a rank may have it in every round, or in some.
    always = apart == 1 or (turns == 1 and (r + 1) % apart == 0)
    return (count * s.v - 1) * size + 1 if always else count * s.v * size


_ALL = "(p-1)(F+B+W)"

BUBBLES = {
    "gpipe": Bubble(_ALL, _full_pipe),
    "1f1b": Bubble(_ALL, _full_pipe),
    "eager-1f1b": Bubble(_ALL, _full_pipe),
    "interleaved-1f1b": Bubble("(p-1)(F+B+W)/v, m ≥ p", _full_pipe),
    "breadth-first": Bubble("(p-1)(F+B+W)/v, m ≥ p", _full_pipe),
    "zb-h1": Bubble("(p-1)(F+B-W), m ≥ p, W ≤ F", _weights_fill),
    "zb-h2": Bubble("(p-1)F, longest 0; F=B=W, m ≥ 2p-1", _staircase),
    "zb-auto": Bubble("at least (p-1)F; least for its memory and costs", lambda s: None),
    "interleaved-zb": Bubble("(p-1)(F+B-W)/v, m ≥ p, W ≤ F", _weights_fill),
    "zb-v": Bubble("(p-1)F/2, longest 0; F=B=W, m ≥ 2p-1", _staircase),
    "v-half": Bubble("(6p-3k-1)F/2, k = peak; F=B=W, m ≥ 2p", _v_half),
    "v-min": Bubble("(6p-3k-1)F/2, +2F if p mod 3 = 2, k = peak; F=B=W, m ≥ 2p", _v_min),
    "searched": Bubble("least found for its memory and costs", lambda s: None),
    "dualpipe": Bubble("(p/2-1)(F&B+B+W-3W); F=B≥W, m ≥ 2p even", _dualpipe),
    "dualpipe-v": Bubble("(p-1)(F&B+B+W-3W)/2; F=B≥W, m ≥ 2p", lambda s: _pairs(s, s.p - 1)),
    "chimera": Bubble("(p-2)F; F=B+W, p divides m", _two_way),
    "hanayo": Bubble("(2p-2)F/v; F=B+W, p divides m", _waves),
    "round-trip": Bubble(
        "(w(d-1)(F+B+W) - (w-1)min(B+W, (d-1)F))/v, d = p/K, w = m/(K·N) whole, N ≥ d", _round_trips
    ),
}

PEAKS = {
    "gpipe": Peak("m", lambda s, r: s.m),
    "1f1b": Peak("min(p-r, m)", lambda s, r: min(s.p - r, s.m)),
    "eager-1f1b": Peak("min(2(p-r)-1, m)", lambda s, r: min(2 * (s.p - r) - 1, s.m)),
    "interleaved-1f1b": Peak("(v-1)N + 2(p-1-r) + 1, N = group size", _interleaved_peak),
    "breadth-first": Peak("m·v", lambda s, r: s.m * s.v),
    "zb-h1": Peak("min(p, m)", lambda s, r: min(s.p, s.m)),
    "zb-h2": Peak("min(2p-1, m)", lambda s, r: min(2 * s.p - 1, s.m)),
    "zb-auto": Peak("at most its limit, 2p unless given", lambda s, r: None),
    "interleaved-zb": Peak("(v-1)N + p, N = group size", _interleaved_zb_peak),
    "zb-v": Peak("2p, m ≥ 2p-1", lambda s, r: 2 * s.p if s.m >= 2 * s.p - 1 else None),
    "v-half": Peak("p+2, p odd: p+1; m ≥ 2p", lambda s, r: half_limit(s.p) if s.m >= 2 * s.p else None),
    "v-min": Peak("at most 2⌊(p+4)/3⌋", lambda s, r: None),
    "searched": Peak("at most its limit", lambda s, r: None),
    "dualpipe": Peak("p+1, m ≥ 2p even", lambda s, r: s.p + 1 if s.m >= 2 * s.p and s.m % 2 == 0 else None),
    "dualpipe-v": Peak("2p+1, m ≥ 2p", lambda s, r: 2 * s.p + 1 if s.m >= 2 * s.p else None),
    "chimera": Peak(
        "p/2+1+min(r, p-1-r), p divides m",
        lambda s, r: s.p // 2 + 1 + min(r, s.p - 1 - r) if s.m % s.p == 0 else None,
    ),
    "hanayo": Peak("(v-1)p+1+r, m ≥ p", lambda s, r: (s.v - 1) * s.p + 1 + r if s.m >= s.p else None),
    "round-trip": Peak("K·v·N, (K·v-1)N + 1 if always with the last stage; K groups of N", _round_trip_peak),
}
