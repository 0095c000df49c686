"""Reasons why a search rejected the other values of each dimension of a layout."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.plan.cluster import Cluster
from penstock.plan.explore.search_space import Order
from penstock.plan.prediction import Prediction
from penstock.plan.rank_devices import needs_text
from penstock.plan.run_layout import Layout

_SHARDING = ("shard", "window", "sequence_parallel", "split")
GROUPS = "devices"
"""Dimension of the groups of unlike devices that a layout is on."""
DIMENSIONS = ("pp", "dp", "tp", "ep", "cp", "v", "microbatch", "schedule", "recompute", *_SHARDING)

SAME = 1e-9
"""Share below which a difference in seconds is rounding."""
# Each of these layouts may cost a prediction in `smallest_layout`.
_MOST_BOUNDS = 48


@dataclass
class _Seen:
    """Figures of all layouts with one value of one dimension."""

    seconds: float = math.inf
    bound: float = math.inf
    smallest: float = math.inf


class Smallest(NamedTuple):
    """Of the layouts that do not fit, the one that needs the least memory.

    Attributes:
        layout: the layout.
        size: bytes that its fullest device needs; of unlike ones, as if it were of the first group.
        exact: False if the bytes are a lower bound.
    """

    layout: Layout
    size: float
    exact: bool


class Reason(NamedTuple):
    """Reason why a value of a dimension was rejected.

    Attributes:
        text: the reason in words.
        slower: share by which layouts with the value are slower, or at least so much; infinite if none fits or can run.
        exact: True if the best layout with the value was simulated.
    """

    text: str
    slower: float = math.inf
    exact: bool = False


@dataclass
class Rejections:
    """Outcome of every layout of a search, by dimension and value."""

    smallest: Smallest | None = None
    _bounds: list[tuple[float, int, Layout]] = field(default_factory=list)
    _noted: int = 0
    _seen: dict[str, dict[Any, _Seen]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_Seen))
    )

    def add_plan(self, plan: Prediction) -> None:
        """Note a layout that fits."""
        for seen in self._values(vars(plan.layout)):
            seen.seconds = min(seen.seconds, plan.step_seconds)

    def add_too_large(self, layout: Layout, size: float, exact: bool = True) -> None:
        """Note a layout that does not fit, and the bytes that it needs, or needs at least."""
        for seen in self._values(dict(vars(layout))):
            seen.smallest = min(seen.smallest, size)
        known = self.smallest
        if known is None or (size < known.size if exact == known.exact else exact):
            self.smallest = Smallest(layout, size, exact)
        if not exact:
            # The heap's first entry is the largest of the least.
            heapq.heappush(self._bounds, (-size, self._noted, layout))
            self._noted += 1
            if len(self._bounds) > _MOST_BOUNDS:
                heapq.heappop(self._bounds)

    def least_bounds(self) -> list[tuple[float, Layout]]:
        """Return (bound on the bytes, layout) of layouts that do not fit by their bound, the least first."""
        return sorted(((-size, layout) for size, _, layout in self._bounds), key=lambda pair: pair[0])

    def add_bound(self, layout: Layout, orders: Sequence[Order], bound: float) -> None:
        """Note a layout that cannot be quicker than `bound`; without orders, its schedule is open."""
        values = dict(vars(layout))
        if not orders:
            values.pop("schedule"), values.pop("v"), values.pop("split")
        for order in orders or (None,):
            chosen = values if order is None else {**values, "schedule": order.name}
            for seen in self._values(chosen):
                seen.bound = min(seen.bound, bound)

    def reasons(self, best: Prediction, cluster: Cluster) -> dict[str, dict[str, Reason]]:
        """Return, for every dimension, the reason against each value other than the best plan's."""
        chosen = vars(best.layout)
        return {
            dimension: {
                value_text(value): _reason(seen, best.step_seconds, cluster)
                for value, seen in sorted(self._seen[dimension].items(), key=lambda item: _order(item[0]))
                if value != chosen[dimension] and None not in (value, chosen[dimension])
            }
            for dimension in DIMENSIONS
        }

    def _values(self, values: dict[str, Any]) -> list[_Seen]:
        # Of unlike devices, layouts have numbers of blocks of their own, which are no choice to compare.
        return [
            self._seen[key][values[key]]
            for key in DIMENSIONS
            if key in values and not isinstance(values[key], tuple)
        ]


def value_text(value: Any) -> str:
    """Return a value as in the text of a layout."""
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _order(value: Any) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by size, and before text."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return (not number, value if number else 0, str(value))


def _reason(seen: _Seen, best: float, cluster: Cluster) -> Reason:
    slower = min(seen.seconds, seen.bound) / best - 1
    if seen.seconds < math.inf and seen.seconds <= seen.bound:
        return Reason(f"{slower:.1%} slower" if slower > SAME else "as fast", slower, True)
    if seen.bound < math.inf:
        return Reason(f"at least {slower:.1%} slower", slower)
    if seen.smallest < math.inf:
        return Reason(f"does not fit: at least {needs_text(cluster, seen.smallest)}")
    return Reason("cannot run")
