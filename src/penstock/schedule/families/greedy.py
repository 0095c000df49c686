"""Zero-bubble lists built by rules, timed, and improved: the engine room of zb-auto.

One stage a rank. A list is a rank's ops as numbers, 0 for F, 1 for I, 2 for W; microbatches follow from counting, as
every kind takes them in order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

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
"""About how many constructions a search tries, which is what compiling them pays for."""

_ROUNDING = 1e-9
"""Memory that is summed in parts of an activation may miss a whole number by this much."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be scheduled.

    Attributes:
        microbatches: how many.
        forward, input_gradient, weight_gradient: seconds a stage, shape (ranks,).
        latency: seconds from rank to rank.
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

    @property
    def most_ahead(self) -> int:
        """The most microbatches a rank can have in flight."""
        return int(min(self.limit + _ROUNDING, self.microbatches))

    @property
    def head(self) -> Floats:
        """When the first activation can reach each rank."""
        return np.concatenate([[0.0], np.cumsum(self.forward + self.latency)[:-1]])

    @property
    def round_trip(self) -> Floats:
        """Seconds from when a microbatch's forward starts on a rank to when its gradient can be back there."""
        down = np.cumsum((self.forward + self.latency)[::-1])[::-1] - self.latency
        up = np.cumsum((self.input_gradient + self.latency)[::-1])[::-1]
        down[:-1] += up[1:]
        return down

    @property
    def least(self) -> Score:
        """What no order goes below.

        Until its first gradient is back a rank has forwards to run only, as many as it may hold; and after the
        last gradient leaves a rank, those before it and the first rank's weight half are still to come.
        """
        m, f, b, w = self.microbatches, self.forward, self.input_gradient, self.weight_gradient
        span = m * (f + b + w) + np.maximum(0.0, self.round_trip - self.most_ahead * f)
        chain = m * (f + b) + np.concatenate([[0.0], np.cumsum(b + self.latency)[:-1]]) + w[0]
        return float(span.max()), float((self.head + np.maximum(span, chain)).max())

    def fits(self, lists: Lists) -> bool:
        """Whether no rank ever holds more than the limit."""
        change = np.array([1.0, self.kept - 1.0, -self.kept])
        return bool(np.cumsum(change[lists], axis=1).max() <= self.limit + _ROUNDING)


@dataclass(frozen=True, eq=False)
class Policy:
    """How each rank decides what to run next; columns of shape (ranks,).

    Attributes:
        ahead: int64, microbatches it may have in flight.
        slack: the part of a W by which the W may delay what the rank waits for.
        patience: how long a rank waits for the kind it prefers while it could run the other, as a part of the
            other's time; with infinity it takes them strictly in turn.
        backward_first: bool, whether it prefers an input gradient to a forward.
    """

    ahead: npt.NDArray[np.int64]
    slack: Floats
    patience: Floats
    backward_first: npt.NDArray[np.bool_]


def construct(problem: Problem, policy: Policy) -> tuple[Score, Lists]:
    """Let every rank decide by the policy, in the order of time; infinite if the ranks wait for each other."""
    p, m = problem.ranks, problem.microbatches
    lists = np.zeros((p, 3 * m), np.int8)
    kernel = choose(_construct, CONSTRUCTIONS * lists.size)
    score = kernel(
        p, m, problem.forward, problem.input_gradient, problem.weight_gradient, problem.latency,
        problem.limit + _ROUNDING, problem.kept, policy.ahead, policy.slack, policy.patience,
        policy.backward_first, lists,
    )  # fmt: skip
    return score, lists


def score(problem: Problem, lists: Lists) -> Score:
    """Time the lists, every op as soon as it can."""
    return _moved(problem, lists.copy(), 0, np.inf, 0)


def improve(problem: Problem, lists: Lists, first: int, bound: float, moves: int) -> Lists:
    """Try to move single ops a few places, and keep what does no harm.

    Args:
        problem: the costs.
        lists: where to start.
        first: what to make small: 0 the longest rank, 1 the makespan.
        bound: what the other must not exceed.
        moves: how many to try.
    """
    lists = lists.copy()
    _moved(problem, lists, first, bound, moves)
    return lists


def _moved(problem: Problem, lists: Lists, first: int, bound: float, moves: int) -> Score:
    kernel = choose(_improve, (moves + 1) * lists.size)
    longest, makespan = kernel(
        problem.ranks, problem.microbatches, problem.forward, problem.input_gradient,
        problem.weight_gradient, problem.latency, problem.limit + _ROUNDING, problem.kept, lists,
        first, bound, moves,
    )  # fmt: skip
    return float(longest), float(makespan)


def _construct(
    p: Any, m: Any, f: Any, b: Any, w: Any, latency: Any, limit: Any, kept: Any,
    ahead: Any, slack: Any, patience: Any, backward_first: Any, lists: Any,
) -> Any:  # fmt: skip
    never = np.inf
    free = np.zeros(p)
    begun = np.full(p, never)
    forward_end = np.full((p, m), never)
    gradient_end = np.full((p, m), never)
    count = np.zeros((p, 3), np.int64)
    left = 3 * m * p
    events = [(0.0, 0)]
    while len(events) > 0:
        now, r = heapq.heappop(events)
        if now < free[r]:
            continue
        i, j, k = count[r, 0], count[r, 1], count[r, 2]
        # When the next gradient and the next forward can start, never if that is not known yet.
        gradient = never
        if j < i:
            gradient = forward_end[r, j] if r == p - 1 else gradient_end[r + 1, j] + latency
        forward = never
        may_forward = i < m and i - j < ahead[r]
        if may_forward:
            forward = 0.0 if r == 0 else forward_end[r - 1, i] + latency
        room = (i - j) + kept * (j - k) + 1 <= limit
        pending = j > k
        chosen = -1
        awaited = gradient
        if not may_forward:
            if gradient <= now:
                chosen = 1
        elif backward_first[r]:
            awaited = min(gradient, forward)
            if gradient <= now:
                chosen = 1
            elif forward <= now and patience[r] < never and (room or pending):
                chosen = 0 if gradient - now >= patience[r] * f[r] else -1
        else:
            awaited = forward if patience[r] == never else min(gradient, forward)
            if forward <= now and (room or pending):
                chosen = 0
            elif gradient <= now and patience[r] < never and forward - now >= patience[r] * b[r]:
                chosen = 1
        if chosen == 0 and not room:
            chosen = 2
        if chosen < 0:
            if awaited <= now:
                # What could run is held back for what is preferred.
                awaited = max(gradient, forward)
            if pending and (j == m or now + w[r] <= awaited + slack[r] * w[r]):
                chosen = 2
            elif awaited < never:
                heapq.heappush(events, (awaited, r))
        if chosen < 0:
            continue
        if begun[r] == never:
            begun[r] = now
        lists[r, i + j + k] = chosen
        count[r, chosen] += 1
        left -= 1
        if chosen == 0:
            free[r] = forward_end[r, i] = now + f[r]
            if r < p - 1:
                heapq.heappush(events, (free[r] + latency, r + 1))
        elif chosen == 1:
            free[r] = gradient_end[r, j] = now + b[r]
            if r > 0:
                heapq.heappush(events, (free[r] + latency, r - 1))
        else:
            free[r] = now + w[r]
        heapq.heappush(events, (free[r], r))
    if left > 0:
        return never, never
    return (free - begun).max(), free.max()


def _improve(
    p: Any, m: Any, f: Any, b: Any, w: Any, latency: Any, limit: Any, kept: Any,
    lists: Any, first: Any, bound: Any, moves: Any,
) -> Any:  # fmt: skip
    size = 3 * m
    best = lists.copy()
    best_value = (np.inf, np.inf)
    value = np.inf
    saved = lists[0].copy()
    seed = 1
    r = -1
    forward_end = np.zeros((p, m))
    gradient_end = np.zeros((p, m))
    for move in range(moves + 1):
        legal = True
        if move > 0:
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            r = (seed >> 8) % p
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            source = (seed >> 8) % size
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            step = 1 + (seed >> 8) % 3
            target = source + step if (seed >> 16) % 2 else source - step
            if target < 0 or target >= size or lists[r, source] == lists[r, target]:
                continue
            saved[:] = lists[r]
            kind = lists[r, source]
            toward = 1 if target > source else -1
            for n in range(source, target, toward):
                lists[r, n] = lists[r, n + toward]
            lists[r, target] = kind
            forwards = gradients = weights = 0
            for n in range(size):
                if lists[r, n] == 0:
                    forwards += 1
                elif lists[r, n] == 1:
                    gradients += 1
                else:
                    weights += 1
                held = (forwards - gradients) + kept * (gradients - weights)
                if gradients > forwards or weights > gradients or held > limit:
                    legal = False
                    break
        longest = makespan = np.inf
        if legal:
            clock = np.zeros(p)
            begun = np.zeros(p)
            count = np.zeros((p, 3), np.int64)
            place = np.zeros(p, np.int64)
            ran = True
            while ran:
                ran = False
                for s in range(p):
                    while place[s] < size:
                        kind = lists[s, place[s]]
                        n = count[s, kind]
                        start = clock[s]
                        if kind == 0:
                            if s > 0:
                                if count[s - 1, 0] <= n:
                                    break
                                start = max(start, forward_end[s - 1, n] + latency)
                            clock[s] = start + f[s]
                            forward_end[s, n] = clock[s]
                        elif kind == 1:
                            if s == p - 1:
                                start = max(start, forward_end[s, n])
                            else:
                                if count[s + 1, 1] <= n:
                                    break
                                start = max(start, gradient_end[s + 1, n] + latency)
                            clock[s] = start + b[s]
                            gradient_end[s, n] = clock[s]
                        else:
                            clock[s] = start + w[s]
                        if place[s] == 0:
                            begun[s] = start
                        count[s, kind] = n + 1
                        place[s] += 1
                        ran = True
            if place.min() == size:
                longest = (clock - begun).max()
                makespan = clock.max()
        one = longest if first == 0 else makespan
        other = makespan if first == 0 else longest
        if one <= value and (other <= bound or move == 0):
            value = one
            if (one, other) < best_value:
                best_value = (one, other)
                best[:] = lists
        elif move > 0:
            lists[r] = saved
    lists[:] = best
    return (best_value[0], best_value[1]) if first == 0 else (best_value[1], best_value[0])
