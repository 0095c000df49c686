"""Reasons for the best plan of a search, and what would change it."""

from __future__ import annotations

from dataclasses import replace

from penstock.base.errors import PenstockError
from penstock.plan.cluster import Cluster, LinkSpeed
from penstock.plan.explore.rejections import value_text
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.prediction import Prediction, predict
from penstock.plan.profile.model_profile import Profile


def grouped_reasons(result: SearchResult) -> list[tuple[str, str, str]]:
    """Return (chosen value, other values, reason) rows; values of a dimension with the same reason share a row.

    The chosen value is empty in all but the first row of a dimension.
    """
    chosen = result.best.layout.as_dict()
    rows = []
    for dimension, by_value in result.rejections.items():
        values_by_reason: dict[str, list[str]] = {}
        for value, reason in by_value.items():
            values_by_reason.setdefault(reason, []).append(value)
        name = f"{dimension}={value_text(chosen[dimension])}"
        for reason, values in values_by_reason.items():
            rows.append((name, ", ".join(values), reason))
            name = ""
    return rows


def changes(
    profile: Profile, cluster: Cluster, result: SearchResult, sequence: int, batch: int
) -> list[tuple[str, Prediction | None]]:
    """Return the best of a search's plans under other bandwidth, memory and batch; None where none of them fits."""
    device = cluster.device
    less = replace(cluster, device=replace(device, memory=device.memory * 0.75))
    cases = (
        ("half the bandwidth of the links", _with_links(cluster, 0.5), batch),
        ("twice the bandwidth of the links", _with_links(cluster, 2.0), batch),
        ("3/4 of the memory", less, batch),
        ("twice the batch", cluster, 2 * batch),
    )
    return [
        (text, _best_under(profile, changed, result, sequence, samples)) for text, changed, samples in cases
    ]


def _best_under(
    profile: Profile, cluster: Cluster, result: SearchResult, sequence: int, batch: int
) -> Prediction | None:
    plans = []
    for plan in result.plans:
        try:
            plans.append(predict(profile, cluster, plan.layout, sequence=sequence, batch=batch))
        except PenstockError:
            continue  # this layout does not allow the change
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step_seconds, default=None)


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, node=_faster(cluster.node, factor), network=_faster(cluster.network, factor))


def _faster(link: LinkSpeed, factor: float) -> LinkSpeed:
    reduce_bandwidth = None if link.reduce_bandwidth is None else link.reduce_bandwidth * factor
    return replace(link, bandwidth=link.bandwidth * factor, reduce_bandwidth=reduce_bandwidth)
