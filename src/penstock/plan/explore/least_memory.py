"""Layout with the least memory, for a search in which nothing fits."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.plan.explore.rejections import Rejections, Smallest
from penstock.plan.explore.search_space import Space
from penstock.plan.prediction import predict


def smallest_layout(space: Space, rejections: Rejections) -> Smallest | None:
    """Return the layout that needs the least memory of those that do not fit; None if all fit.

    Layouts with the least bounds are predicted in full, since their bounds leave out what the schedule keeps.
    """
    known = rejections.smallest
    for bound, layout in rejections.least_bounds():
        if known is not None and known.exact and bound >= known.size:
            break
        try:
            plan = predict(space.profile, space.cluster, layout, sequence=space.sequence, batch=space.batch)
        except PenstockError:
            continue  # the schedule does not allow the counts
        if known is None or not known.exact or plan.peak_bytes < known.size:
            known = Smallest(plan.layout, plan.peak_bytes, True)
    return known
