"""The formulas that `bench.closed_forms` compares: some must be exact, some are published without a condition.

f, b, w are the times of a stage and F, B, W those of a rank; bw = b+w, c is the latency, N the group size. The formulas are
those of the papers named in `penstock.schedule.families`, of DualPipe's README and of the controllable-memory code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

from bench.closed_forms import EQUAL, Case, Form
from penstock.schedule.families.full_backward import legal_group, smallest_group
from penstock.schedule.families.round_trip import usual_groups

MIXES = (EQUAL, (10, 12, 6), (9, 14, 5), (12, 10, 8), (10, 10, 7), (20, 10, 5))
RANKS = (2, 3, 4, 5, 6, 8)
HEAVY_WEIGHTS = (10, 10, 13)
"""W > F, which the handcrafted zero-bubble schedules were not made for."""


def exact() -> Iterator[Form]:
    """Return the formulas that must be exact in every case."""
    for forms in (_fused, _looped, _split, _on_a_v, _two_way, _round_trips):
        yield from forms()


def conditional() -> Iterator[tuple[Form, str]]:
    """Return formulas as published, over more cases than they are correct for, with the correct condition."""
    heavy = _grid("zb-h1", mixes=(*MIXES, HEAVY_WEIGHTS))
    yield (
        Form(
            "zb-h1", "m(F+B+W) + (p-1)(F+B-W)", "makespan", heavy,
            lambda k: k.work + (k.p - 1) * (k.f + k.b - k.w),
        ),
        "holds for W <= F; beyond it the bubble stays at (p-1)B",
    )  # fmt: skip
    yield (
        Form(
            "v-half", "m(F+B+W) + (6p-3k-1)f", "makespan", _grid("v-half", v=2, mixes=(EQUAL,), counts=_steady),
            lambda k: k.work + (6 * k.p - 3 * _k_half(k) - 1) * k.f,
        ),
        "negative at p=2, k=4; the bound (p-1)f takes over",
    )  # fmt: skip
    waves = [Case(family="hanayo", p=p, m=p, v=2 * n) for p in (2, 4, 8) for n in (1, 2)]
    yield (
        Form("hanayo", "rate (2p-2)/(3pW+p-1), W = v/2, BW=2F, m=p", "makespan", waves, _quoted_for_hanayo),
        "this order is faster, with the bubble above: 33.3 % and not 40 % at p=4, W=1",
    )
    for family in ("dualpipe", "dualpipe-v"):
        yield (
            _at_the_turn(family, "(d-1)(f&b + bw - 3w)", lambda k, d: (d - 1) * (_pair(k) + k.bw - 3 * k.w)),
            "holds for b = f only; the general form is above",
        )


def _quoted_for_hanayo(k: Case) -> Fraction:
    return k.work / (1 - Fraction(2 * k.p - 2, 3 * k.p * (k.v // 2) + k.p - 1))


def _counts(p: int) -> tuple[int, ...]:
    """Return numbers of microbatches to try, from p on, multiples of p and others."""
    return tuple(sorted({p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p, 5 * p}))


def _grid(
    family: str, *, v: int = 1, mixes: Iterable[tuple[int, int, int]] = MIXES, latencies: Iterable[int] = (0,),
    ranks: Iterable[int] = RANKS, counts: Callable[[int], Iterable[int]] = _counts,
) -> list[Case]:  # fmt: skip
    return [
        Case(family=family, p=p, m=m, v=v, costs=mix, c=c)
        for p in ranks
        for m in counts(p)
        for mix in mixes
        for c in latencies
    ]


def _multiples(p: int) -> tuple[int, ...]:
    return (p, 2 * p, 3 * p, 5 * p)


def _steady(p: int) -> tuple[int, ...]:
    """Return enough microbatches for a V to reach its steady state."""
    return (2 * p, 2 * p + 1, 3 * p, 5 * p)


def _k_half(k: Case) -> int:
    return k.p + 1 if k.p % 2 else k.p + 2


def _few(p: int) -> tuple[int, ...]:
    return (1, 2, p, 2 * p, 3 * p + 1)


def _fused() -> Iterator[Form]:
    def filled(k: Case) -> int:
        return (k.m + k.p - 1) * (k.f + k.bw)

    for family in ("gpipe", "1f1b", "eager-1f1b"):
        yield Form(
            family,
            "(m+p-1)(F+BW)",
            "makespan",
            _grid(family, counts=lambda p: (*_few(p), *_counts(p))),
            filled,
        )
    for family in ("gpipe", "eager-1f1b"):
        cases = _grid(family, latencies=(1,), counts=_multiples)
        yield Form(
            family, "(m+p-1)(F+BW) + 2(p-1)c", "makespan", cases, lambda k: filled(k) + 2 * (k.p - 1) * k.c
        )
    yield Form(
        "1f1b", "(m+p-1)(F+BW) + [2m(p-1)/p + 2p-4]c", "makespan",
        _grid("1f1b", latencies=(1,), counts=_multiples),
        lambda k: filled(k) + (2 * k.m * (k.p - 1) // k.p + 2 * k.p - 4) * k.c,
    )  # fmt: skip
    peaks: dict[str, tuple[str, Callable[[Case, int], int]]] = {
        "gpipe": ("m", lambda k, r: k.m),
        "1f1b": ("min(p-r, m)", lambda k, r: min(k.p - r, k.m)),
        "eager-1f1b": ("min(2(p-r)-1, m)", lambda k, r: min(2 * (k.p - r) - 1, k.m)),
    }
    for family, (says, peak) in peaks.items():
        yield Form(family, says, "peak", _grid(family, mixes=(EQUAL,), counts=_few), _each(peak))


def _each(peak: Callable[[Case, int], int]) -> Callable[[Case], list[int]]:
    return lambda k: [peak(k, r) for r in range(k.p)]


def _looped() -> Iterator[Form]:
    def filled(k: Case) -> int:
        return k.work + (k.p - 1) * (k.f + k.bw)

    groups = [
        Case(family="interleaved-1f1b", p=p, m=m, v=v, costs=mix, group=n)
        for p, v in ((4, 2), (4, 3), (3, 2), (2, 4), (5, 3))
        for m in range(p, 21)
        for n in range(p, m + 1)
        if legal_group(p, m, n)
        for mix in (EQUAL, (9, 14, 5))
    ]
    default = [case for v in (2, 3, 4) for case in _grid("interleaved-1f1b", v=v)]
    yield Form("interleaved-1f1b", "m(F+BW) + (p-1)(f+bw), every legal N", "makespan", groups, filled)
    yield Form("interleaved-1f1b", "m(F+BW) + (p-1)(f+bw), N by default", "makespan", default, filled)
    yield Form(
        "interleaved-1f1b", "m(F+BW) + (p-1)(f+bw) + 2(pv-1)c", "makespan",
        [k for v in (2, 3, 4) for k in _grid("interleaved-1f1b", v=v, latencies=(1,), counts=_multiples)],
        lambda k: filled(k) + 2 * (k.p * k.v - 1) * k.c,
    )  # fmt: skip
    yield Form(
        "interleaved-1f1b", "min((v-1)N + 2(p-1-r) + 1, mv)", "peak",
        [k for k in groups if k.costs == EQUAL],
        _each(lambda k, r: min((k.v - 1) * (k.group or 0) + 2 * (k.p - 1 - r) + 1, k.m * k.v)),
    )  # fmt: skip
    bfs = [k for v in (1, 2, 3, 4) for k in _grid("breadth-first", v=v)]
    yield Form("breadth-first", "m(F+BW) + (p-1)(f+bw)", "makespan", bfs, filled)
    yield Form("breadth-first", "mv", "peak", bfs, _each(lambda k, r: k.m * k.v))
    zb = [k for v in (1, 2, 3, 4) for k in _grid("interleaved-zb", v=v)]
    yield Form(
        "interleaved-zb", "m(F+B+W) + (p-1)(f+b-w)", "makespan", zb,
        lambda k: k.work + (k.p - 1) * (k.f + k.b - k.w),
    )  # fmt: skip
    yield Form(
        "interleaved-zb", "(v-1)N + p", "peak", zb,
        _each(lambda k, r: min((k.v - 1) * smallest_group(k.p, k.m) + k.p, k.m * k.v)),
    )  # fmt: skip


def _split() -> Iterator[Form]:
    for metric in ("makespan", "longest"):
        yield Form(
            "zb-h1", "m(F+B+W) + (p-1)(F+B-W)", metric, _grid("zb-h1"),
            lambda k: k.work + (k.p - 1) * (k.f + k.b - k.w),
        )  # fmt: skip
    yield Form("zb-h1", "p", "peak", _grid("zb-h1", mixes=(EQUAL,)), _each(lambda k, r: k.p))
    wide = _grid("zb-h2", counts=lambda p: (2 * p - 1, 2 * p, 3 * p, 5 * p))
    yield Form(
        "zb-h2", "m(F+B+W) + (p-1)max(F+B-2W, 0)", "longest", wide,
        lambda k: k.work + (k.p - 1) * max(k.f + k.b - 2 * k.w, 0),
    )  # fmt: skip
    yield Form(
        "zb-h2", "m(F+B+W) + (p-1)max(F+B-2W, F)", "makespan", wide,
        lambda k: k.work + (k.p - 1) * max(k.f + k.b - 2 * k.w, k.f),
    )  # fmt: skip
    yield Form("zb-h2", "2p-1", "peak", wide, _each(lambda k, r: 2 * k.p - 1))


# Bubble and activations with F = B = W = 1 a chunk, from the controllable-memory code, steady from m = 2p on.
_V_MIN = {2: 3, 3: 5, 4: 11, 5: 15, 6: 17, 7: 23, 8: 27, 9: 29, 12: 41, 16: 59}
_V_HALF = {2: 1, 3: 5, 4: 5, 5: 11, 6: 11, 7: 17, 8: 17, 9: 23, 12: 29, 16: 41}


def _on_a_v() -> Iterator[Form]:
    v = _grid("zb-v", v=2, mixes=(EQUAL,), counts=_steady)
    yield Form("zb-v", "m(F+B+W) if f=b=w", "longest", v, lambda k: k.work)
    yield Form("zb-v", "m(F+B+W) + (p-1)f if f=b=w", "makespan", v, lambda k: k.work + (k.p - 1) * k.f)
    yield Form("zb-v", "2p", "peak", v, _each(lambda k, r: 2 * k.p))
    ranks = tuple(_V_MIN)
    half = _grid("v-half", v=2, mixes=(EQUAL,), ranks=ranks, counts=_steady)
    least = _grid("v-min", v=2, mixes=(EQUAL,), ranks=ranks, counts=_steady)

    def k_min(k: Case) -> int:
        return 2 * ((k.p + 4) // 3)

    yield Form(
        "v-half", "m(F+B+W) + max(6p-3k-1, p-1)f, k = p+2 or p+1", "makespan", half,
        lambda k: k.work + max(6 * k.p - 3 * _k_half(k) - 1, k.p - 1) * k.f,
    )  # fmt: skip
    yield Form("v-half", "the paper's code", "makespan", half, lambda k: k.work + _V_HALF[k.p] * k.f)
    yield Form(
        "v-min", "m(F+B+W) + (6p-3k-1)f, +4f if p mod 3 = 2, k = 2[(p+4)/3]", "makespan", least,
        lambda k: k.work + (6 * k.p - 3 * k_min(k) - 1 + (4 if k.p % 3 == 2 else 0)) * k.f,
    )  # fmt: skip
    yield Form("v-min", "the paper's code", "makespan", least, lambda k: k.work + _V_MIN[k.p] * k.f)
    for family, cases, most in (("v-half", half, _k_half), ("v-min", least, k_min)):
        yield Form(family, "k", "largest peak", cases, most)
    yield _at_the_turn("dualpipe-v", *_TURN)
    yield _at_the_turn("dualpipe-v", *_TURN_EARLY)
    most = [k for p in RANKS for m in _steady(p) for k in _pairs("dualpipe-v", p, m, MIXES)]
    yield Form("dualpipe-v", "2p+1", "largest peak", most, lambda k: 2 * k.p + 1)
    golden = {12: 264, 10: 236, 9: 222, 8: 208}
    cases = [Case(family="dualpipe-v", p=4, m=10, v=2, costs=(4, 4, 4), pair=pair) for pair in golden]
    yield Form("dualpipe-v", "PyTorch's golden file, timed", "makespan", cases, lambda k: golden[_pair(k)])


def _at_the_turn(family: str, says: str, bubble: Callable[[Case, int], int], early: bool = False) -> Form:
    """Return DualPipe's bubble on the rank where the pipes turn, d ranks from the end.

    Pairs have three lengths; or, if the outputs of a pair's halves leave early, they are as long as their halves.
    """
    two_way = family == "dualpipe"
    return Form(
        family,
        f"{says}, d = {'p/2' if two_way else 'p'}",
        "bubble of rank p/2-1" if two_way else "bubble of rank p-1",
        [
            k
            for p in ((2, 4, 6, 8) if two_way else RANKS)
            for m in (2 * p, 2 * p + 2, 4 * p)
            for k in _pairs(family, p, m, MIXES, early)
        ],
        lambda k: bubble(k, k.p // 2 if two_way else k.p),
    )


def _pair(k: Case) -> int:
    assert k.pair is not None, "a form of pairs over cases without"
    return k.pair


_TURN = (
    "max{(d-1)(f&b + f - 2w), (d-1)(f&b + b - 2w) - f}",
    lambda k, d: max((d - 1) * (_pair(k) + k.f - 2 * k.w), (d - 1) * (_pair(k) + k.b - 2 * k.w) - k.f),
)


_TURN_EARLY = (
    "max{(d-1)(f+b-w), 2(d-1)(f-w), (d-1)(2b-w) - f}, outputs early, f&b = f+bw",
    lambda k, d: max((d - 1) * (k.f + k.b - k.w), 2 * (d - 1) * (k.f - k.w), (d - 1) * (2 * k.b - k.w) - k.f),
    True,
)


def _pairs(
    family: str, p: int, m: int, mixes: Iterable[tuple[int, int, int]], early: bool = False
) -> Iterator[Case]:
    """Return costs of pairs equal to those of their halves, and less."""
    for mix in mixes:
        for saved in (0,) if early else (0, 1, mix[0] // 2):
            yield Case(
                family=family,
                p=p,
                m=m,
                v=1 if family == "dualpipe" else 2,
                costs=mix,
                pair=sum(mix) - saved,
                early=early,
            )


def _two_way() -> Iterator[Form]:
    even = (2, 4, 6, 8)
    yield _at_the_turn("dualpipe", *_TURN)
    yield _at_the_turn("dualpipe", *_TURN_EARLY)
    most = [k for p in even for m in (2 * p, 2 * p + 2, 4 * p) for k in _pairs("dualpipe", p, m, MIXES)]
    yield Form("dualpipe", "p+1", "largest peak", most, lambda k: k.p + 1)
    official = Case(family="dualpipe", p=8, m=20, costs=(1, 1, 1), pair=3)
    yield Form("dualpipe", "the official figure: 66 columns", "makespan", [official], lambda k: 66)
    # A slot is a forward or a backward: F = BW.
    slots = [Case(family="chimera", p=p, m=n * p, costs=(10, 5, 5)) for p in even for n in (1, 2, 3, 4)]
    yield Form("chimera", "2m+p-2 slots if F=BW", "makespan", slots, lambda k: (2 * k.m + k.p - 2) * k.f)
    yield Form("chimera", "p/2+1 .. p", "peak", slots, _each(lambda k, r: k.p // 2 + 1 + min(r, k.p - 1 - r)))
    double = [Case(family="chimera", p=p, m=p, costs=(10, 10, 10)) for p in even]
    yield Form(
        "chimera",
        "pF + (2p-2)BW if m=p, BW=2F",
        "makespan",
        double,
        lambda k: k.p * k.f + (2 * k.p - 2) * k.bw,
    )
    waves = [
        Case(family="hanayo", p=p, m=p, v=v, costs=mix)
        for p in RANKS
        for v in (2, 4)
        for mix in MIXES
        if mix[0] <= sum(mix[1:])
    ]
    yield Form(
        "hanayo",
        "m(F+BW) + (2p-2)bw if m=p, bw >= f",
        "makespan",
        waves,
        lambda k: k.work + (2 * k.p - 2) * k.bw,
    )
    twice = {4: 300, 6: 480, 8: 660}
    yield Form(
        "chimera", "two blocks one after the other, m=2p, BW=2F", "makespan",
        [Case(family="chimera", p=p, m=2 * p, costs=(10, 10, 10)) for p in twice], lambda k: twice[k.p],
    )  # fmt: skip


def _round_trips() -> Iterator[Form]:
    def makespan(k: Case) -> int:
        size, count = usual_groups(k.p, k.m)
        apart, rounds = k.p // count, k.m // (size * count)
        turn = (apart - 1) * k.f
        return k.work + rounds * (turn + (apart - 1) * k.bw) - (rounds - 1) * min(k.bw, turn)

    cases = [k for v in (1, 2, 3) for k in _grid("round-trip", v=v, ranks=(*RANKS, 9), counts=_whole_rounds)]
    says = "m(F+BW) + w(d-1)(f+bw) - (w-1)min(bw, (d-1)f), w rounds of K groups of N, d = p/K"
    yield Form("round-trip", says, "makespan", cases, makespan)
    many = [k for k in cases if k.costs == EQUAL and k.m > 2 * k.p and usual_groups(k.p, k.m)[1] < k.p]
    yield Form("round-trip", "KvN", "peak", many, _each(lambda k, r: 2 * k.p * k.v))


def _whole_rounds(p: int) -> tuple[int, ...]:
    return (2 * p, 4 * p, 6 * p)
