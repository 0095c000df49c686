"""Reasons for the best plan of a search, and what would change it."""

from __future__ import annotations

from dataclasses import replace

from penstock.base.errors import PenstockError
from penstock.plan.cluster import Cluster, LinkSpeed
from penstock.plan.explore.rejections import SAME, Reason, value_text
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.prediction import Prediction, predict
from penstock.plan.stage_costs import layer_times, stage_costs
from penstock.profile.model_profile import Profile

# Share of a step from which its limit is named.
_SHOWN_SHARE = 0.001


def grouped_reasons(result: SearchResult, most: int | None = None) -> list[tuple[str, str, str]]:
    """Return (chosen value, other values, reason) rows; values of a dimension with the same reason share a row.

    The chosen value is empty in all but the first row of a dimension. With `most`, these are at most so many rows, of
    different dimensions: the quickest layouts' rows, simulated ones first.
    """
    chosen = result.best.layout.as_dict()
    rows, nearest = [], []
    for dimension, by_value in result.rejections.items():
        values_by_reason: dict[str, list[str]] = {}
        for value, reason in by_value.items():
            values_by_reason.setdefault(reason.text, []).append(value)
        name = f"{dimension}={value_text(chosen[dimension])}"
        if slower := [reason for reason in by_value.values() if reason.slower > SAME]:
            least = min(slower, key=_nearness)
            row = (name, ", ".join(values_by_reason[least.text]), least.text)
            nearest.append((_nearness(least), row))
        for text, values in values_by_reason.items():
            rows.append((name, ", ".join(values), text))
            name = ""
    return rows if most is None else [row for _, row in sorted(nearest)[:most]]


def _nearness(reason: Reason) -> tuple[bool, float]:
    return not reason.exact, reason.slower


def time_shares(profile: Profile, cluster: Cluster, plan: Prediction, sequence: int) -> dict[str, float]:
    """Return the shares of a step that compute, recompute, links, the bubble, and optimizer and overhead take.

    Links are collectives within layers, waits for messages, and reductions that are not hidden.
    """
    costs, program = plan.costs, plan.program
    assert costs is not None, "the best plans are predicted in full"
    assert program is not None, "the best plans are predicted in full"
    at = plan.layout.with_values(split=costs.counts)
    alone = replace(cluster, node=LinkSpeed(), network=LinkSpeed())
    quick = stage_costs(layer_times(profile, alone, at, sequence), at, program.schedule.placement)
    both = [(each.forward + each.backward + each.again, each.again) for each in (costs, quick)]
    (work, _), (unlinked, repeated) = ((float(total.sum()), float(again.sum())) for total, again in both)
    pipeline = plan.parts["pipeline"] / plan.step_seconds
    busy = pipeline * (1 - plan.bubble) / work if work else 0.0
    waits = pipeline * plan.causes.get("communication", 0.0)
    return {
        "compute": busy * (unlinked - repeated),
        "recompute": busy * repeated,
        "links": busy * (work - unlinked)
        + waits
        + (plan.parts["reduction"] + plan.parts["sharding"]) / plan.step_seconds,
        "bubble": pipeline * plan.bubble - waits,
        "optimizer": (plan.parts["optimizer"] + plan.parts["overhead"]) / plan.step_seconds,
    }


def limits_text(profile: Profile, cluster: Cluster, plan: Prediction, sequence: int) -> str:
    """Return sentences about what takes the time of a step, and about the memory."""
    shares = time_shares(profile, cluster, plan, sequence)
    shares["recompute to save memory"] = shares.pop("recompute")
    (first, most), *rest = sorted(shares.items(), key=lambda item: -item[1])
    then = ", ".join(f"{name} {share:.1%}" for name, share in rest if share >= _SHOWN_SHARE)
    full = plan.peak_bytes / plan.capacity
    return (
        f"Limited by {first}: {most:.1%} of the time{f' ({then})' if then else ''}. Memory: {full:.0%} full."
    )


def left_out_text(result: SearchResult) -> str:
    """Return sentences about what a search did not compare."""
    given = "; ".join(result.not_compared)
    return f"Not compared, unless --fix or --layout asks for it: {given}. No plan has offloading."


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
