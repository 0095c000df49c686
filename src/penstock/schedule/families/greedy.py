"""Zero-bubble lists built by rules, timed and improved: the search kernels of zb-auto.

There is one stage per rank. A rank's list has its ops as numbers, 0 for F, 1 for I, 2 for W. Microbatches follow from
counting, because every kind takes them in order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.schedule.jit import choose
from penstock.schedule.ops import Kind

KINDS = np.array([Kind.F, Kind.I, Kind.W], np.int8)
Floats = npt.NDArray[np.float64]
Lists = npt.NDArray[np.int8]
Score = tuple[float, float]
"""The largest time from a rank's first op to its last, and the makespan, in seconds."""

CONSTRUCTIONS = 1_000
"""About how many constructions one search tries: compiling them pays off for that many."""

_ROUNDING = 1e-9
"""Tolerance of the memory limit: sums of parts of an activation may miss a whole number by this much."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Counts, costs and memory limit of the lists to build.

    Attributes:
        forward, input_gradient, weight_gradient: float64, seconds on each stage, shape (ranks,).
        latency: seconds a message takes between neighbouring ranks.
        limit: activations a rank may hold.
        kept: the part of an activation that stays from I to W.
    """

    microbatches: int
    forward: Floats
    input_gradient: Floats
    weight_gradient: Floats
    latency: float
    limit: float
    kept: float

    @property
    def ranks(self) -> int:
        return len(self.forward)

    @cached_property
    def seconds(self) -> Floats:
        """Costs of F, I and W on each rank, shape (3, ranks)."""
        return np.stack([self.forward, self.input_gradient, self.weight_gradient])

    @property
    def max_ahead(self) -> int:
        """Largest number of microbatches a rank can have in flight."""
        return int(min(self.limit + _ROUNDING, self.microbatches))

    @property
    def head(self) -> Floats:
        """Earliest time at which the first activation can reach each rank."""
        return np.concatenate([[0.0], np.cumsum(self.forward + self.latency)[:-1]])

    @property
    def round_trip(self) -> Floats:
        """Seconds from the start of a microbatch's forward on a rank until its gradient can be back there."""
        down = np.cumsum((self.forward + self.latency)[::-1])[::-1] - self.latency
        up = np.cumsum((self.input_gradient + self.latency)[::-1])[::-1]
        down[:-1] += up[1:]
        return down

    @property
    def lower_bound(self) -> Score:
        """Score that no order can beat.

        Until its first gradient is back a rank has only forwards to run, as many as it may hold. After the last
        gradient leaves a rank, the input gradients of the ranks before it and the first rank's weight half remain.
        """
        m, f, b, w = self.microbatches, self.forward, self.input_gradient, self.weight_gradient
        span = m * (f + b + w) + np.maximum(0.0, self.round_trip - self.max_ahead * f)
        chain = m * (f + b) + np.concatenate([[0.0], np.cumsum(b + self.latency)[:-1]]) + w[0]
        return float(span.max()), float((self.head + np.maximum(span, chain)).max())

    def fits(self, lists: Lists) -> bool:
        """Return whether no rank ever holds more than the limit."""
        change = np.array([1.0, self.kept - 1.0, -self.kept])
        return bool(np.cumsum(change[lists], axis=1).max() <= self.limit + _ROUNDING)


@dataclass(frozen=True, eq=False)
class Policy:
    """Rules by which each rank decides what to run next; columns of shape (ranks,).

    Attributes:
        ahead: int64, microbatches the rank may have in flight.
        slack: the part of a W by which the W may delay the op that the rank waits for.
        patience: how long a rank waits for the kind it prefers while it could run the other, as a part of the
            other's time; with infinity it takes them strictly in turn.
        backward_first: bool, whether the rank prefers an input gradient to a forward.
    """

    ahead: npt.NDArray[np.int64]
    slack: Floats
    patience: Floats
    backward_first: npt.NDArray[np.bool_]

    @property
    def table(self) -> Floats:
        """The four columns for the kernel, shape (4, ranks)."""
        table = np.empty((4, len(self.ahead)))
        table[0], table[1], table[2], table[3] = self.ahead, self.slack, self.patience, self.backward_first
        return table


def construct(problem: Problem, policy: Policy) -> tuple[Score, Lists]:
    """Let every rank decide by the policy, in the order of time; the score is infinite if the ranks deadlock."""
    lists = np.zeros((problem.ranks, 3 * problem.microbatches), np.int8)
    kernel = choose(_construct, CONSTRUCTIONS * lists.size)
    limit = problem.limit + _ROUNDING
    return kernel(problem.seconds, problem.latency, limit, problem.kept, policy.table, lists), lists


def score(problem: Problem, lists: Lists) -> Score:
    """Time the lists with every op as early as possible."""
    ends = np.empty((2, problem.ranks, problem.microbatches))
    longest, makespan = choose(_time, lists.size)(problem.seconds, problem.latency, lists, ends)
    return float(longest), float(makespan)


def improve(problem: Problem, lists: Lists, first: int, bound: float, moves: int) -> Lists:
    """Return a copy of the lists with single ops moved a few places, where that does no harm.

    Args:
        lists: complete lists that fit the memory limit.
        first: index in `Score` of the measure to minimise.
        bound: largest value allowed for the other measure.
    """
    lists = lists.copy()
    kernel = choose(_improve, (moves + 1) * lists.size)
    limit = problem.limit + _ROUNDING
    kernel(problem.seconds, problem.latency, limit, problem.kept, lists, first, bound, moves)
    return lists


def _construct(
    seconds: Floats, latency: float, limit: float, kept: float, policy: Floats, lists: Lists
) -> Score:
    p, m = lists.shape[0], lists.shape[1] // 3
    ahead, slack, patience, backward_first = policy
    free = np.zeros(p)
    begun = np.full(p, np.inf)
    ends = np.full((2, p, m), np.inf)
    count = np.zeros((p, 3), np.int64)
    left = lists.size
    events = [(0.0, 0)]
    while len(events) > 0:
        now, rank = heapq.heappop(events)
        # The rank has become busy since this event was made; the end of its op is another event.
        if now < free[rank]:
            continue
        i, j, k = count[rank, 0], count[rank, 1], count[rank, 2]
        forward = gradient = np.inf
        may_forward = i < m and i - j < ahead[rank]
        if may_forward:
            forward = _arrival(0, rank, i, ends, latency)
        if j < i:
            gradient = _arrival(1, rank, j, ends, latency)
        room = (i - j) + kept * (j - k) + 1 <= limit
        pending = j > k
        gradient_first = backward_first[rank] > 0 or not may_forward
        wait = np.inf
        if patience[rank] < np.inf:
            wait = patience[rank] * seconds[0 if gradient_first else 1, rank]
        chosen, awaited = _prefer(now, forward, gradient, gradient_first, room or pending, wait)
        if chosen == 0 and not room:
            chosen = 2
        if chosen < 0:
            weight = seconds[2, rank]
            if pending and (j == m or now + weight <= awaited + slack[rank] * weight):
                chosen = 2
            else:
                if awaited < np.inf:
                    heapq.heappush(events, (awaited, rank))
                continue
        if begun[rank] == np.inf:
            begun[rank] = now
        lists[rank, i + j + k] = chosen
        free[rank] = now + seconds[chosen, rank]
        heapq.heappush(events, (free[rank], rank))
        if chosen < 2:
            ends[chosen, rank, count[rank, chosen]] = free[rank]
            receiver = rank + 1 if chosen == 0 else rank - 1
            if 0 <= receiver < p:
                heapq.heappush(events, (free[rank] + latency, receiver))
        count[rank, chosen] += 1
        left -= 1
    if left > 0:
        return np.inf, np.inf
    return (free - begun).max(), free.max()


def _arrival(kind: int, rank: int, n: int, ends: Floats, latency: float) -> float:
    """Return when a rank's n-th F or I has its input, infinite if the op that yields it has no end yet."""
    sender = rank - 1 if kind == 0 else rank + 1
    if 0 <= sender < ends.shape[1]:
        return float(ends[kind, sender, n] + latency)
    return 0.0 if kind == 0 else float(ends[0, rank, n])


def _prefer(
    now: float, forward: float, gradient: float, gradient_first: bool, may_start: bool, wait: float
) -> tuple[int, float]:
    """Choose between a free rank's next forward and its next input gradient.

    Args:
        now, forward, gradient: the present time, and the times at which the two can start, in seconds.
        may_start: whether memory allows the forward, maybe after a W.
        wait: seconds to wait for the preferred kind while the other is ready; infinite to take no other.

    Returns:
        The kind to run now, -1 for none, and the time up to which the rank then waits.
    """
    chosen = -1
    awaited = min(gradient, forward)
    if gradient_first:
        if gradient <= now:
            chosen = 1
        elif forward <= now and may_start and wait < np.inf and gradient - now >= wait:
            chosen = 0
    else:
        if wait == np.inf:
            awaited = forward
        if forward <= now and may_start:
            chosen = 0
        elif gradient <= now and wait < np.inf and forward - now >= wait:
            chosen = 1
    if awaited <= now:
        # The op that is ready is held back for the preferred one.
        awaited = max(gradient, forward)
    return chosen, awaited


def _improve(  # noqa: PLR0917 - numba takes no keyword-only parameters
    seconds: Floats,
    latency: float,
    limit: float,
    kept: float,
    lists: Lists,
    first: int,
    bound: float,
    moves: int,
) -> None:
    ends = np.empty((2, lists.shape[0], lists.shape[1] // 3))
    best = lists.copy()
    times = _time(seconds, latency, lists, ends)
    value = times[first]
    best_times = (times[first], times[1 - first])
    saved = lists[0].copy()
    # Always the same, because every process of a run must build the same schedule.
    seed = 1
    for _ in range(moves):
        seed, rank, source, target = _draw_move(seed, lists)
        if target < 0 or target >= lists.shape[1] or lists[rank, source] == lists[rank, target]:
            continue
        row = lists[rank]
        saved[:] = row
        _move(row, source, target)
        times = (np.inf, np.inf)
        if _fits(row, limit, kept):
            times = _time(seconds, latency, lists, ends)
        if times[first] <= value and times[1 - first] <= bound:
            value = times[first]
            if (times[first], times[1 - first]) < best_times:
                best_times = (times[first], times[1 - first])
                best[:] = lists
        else:
            row[:] = saved
    lists[:] = best


def _draw_move(seed: int, lists: Lists) -> tuple[int, int, int, int]:
    """Return the next seed, a rank, a place in its list and one at most 3 places away, maybe outside the list."""
    # The constants of C's rand: the same numbers compiled and as plain Python.
    # The low bits of such a generator soon repeat, so they are shifted out.
    seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
    rank = (seed >> 8) % lists.shape[0]
    seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
    source = (seed >> 8) % lists.shape[1]
    seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
    distance = 1 + (seed >> 8) % 3
    return seed, rank, source, source + distance if (seed >> 16) % 2 else source - distance


def _move(row: Lists, source: int, target: int) -> None:
    kind = row[source]
    toward = 1 if target > source else -1
    for n in range(source, target, toward):
        row[n] = row[n + toward]
    row[target] = kind


def _fits(row: Lists, limit: float, kept: float) -> bool:
    """Return whether a rank's list is in order (F, I, W of each microbatch) and within the memory limit."""
    forwards = gradients = weights = 0
    for kind in row:
        if kind == 0:
            forwards += 1
        elif kind == 1:
            gradients += 1
        else:
            weights += 1
        held = (forwards - gradients) + kept * (gradients - weights)
        if gradients > forwards or weights > gradients or held > limit:
            return False
    return True


def _time(seconds: Floats, latency: float, lists: Lists, ends: Floats) -> Score:
    """Return the score of lists with every op as early as possible, infinite if the ranks deadlock.

    Args:
        ends: room for the ends of F and I, shape (2, ranks, microbatches); what it has does not matter.
    """
    p, size = lists.shape
    clock = np.zeros(p)
    begun = np.zeros(p)
    count = np.zeros((p, 3), np.int64)
    place = np.zeros(p, np.int64)
    ran = True
    while ran:
        ran = False
        for rank in range(p):
            while place[rank] < size:
                kind = lists[rank, place[rank]]
                n = count[rank, kind]
                start = clock[rank]
                # Constant indices compile to faster code than `ends[kind]`.
                if kind == 0:
                    if rank > 0:
                        if count[rank - 1, 0] <= n:
                            break
                        start = max(start, ends[0, rank - 1, n] + latency)
                    clock[rank] = ends[0, rank, n] = start + seconds[0, rank]
                elif kind == 1:
                    if rank == p - 1:
                        start = max(start, ends[0, rank, n])
                    else:
                        if count[rank + 1, 1] <= n:
                            break
                        start = max(start, ends[1, rank + 1, n] + latency)
                    clock[rank] = ends[1, rank, n] = start + seconds[1, rank]
                else:
                    clock[rank] = start + seconds[2, rank]
                if place[rank] == 0:
                    begun[rank] = start
                count[rank, kind] = n + 1
                place[rank] += 1
                ran = True
    if place.min() < size:
        return np.inf, np.inf
    return (clock - begun).max(), clock.max()
