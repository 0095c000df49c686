"""Reasons for the best plan of a search, and what would change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import TypeVar

from penstock.base.errors import ConfigError, PenstockError
from penstock.plan.cluster import Between, Cluster, Host, LinkSpeed, each_group, joined, sized_name
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.rejections import GROUPS, SAME, Reason, value_text
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.explore.search_space import divisors
from penstock.plan.prediction import Prediction, predict
from penstock.plan.stage_costs import layer_times, stage_costs
from penstock.profile.model_profile import Profile
from penstock.show.units import size_text, time_text

_Speed = TypeVar("_Speed", LinkSpeed, Between, Host)
# Share of a step from which its limit is named.
_SHOWN_SHARE = 0.001
# Least seconds of a search under other conditions.
_AGAIN = 2.0


def grouped_reasons(result: SearchResult, most: int | None = None) -> list[tuple[str, str, str]]:
    """Return (chosen value, other values, reason) rows; values of a dimension with the same reason share a row.

    The chosen value is empty in all but the first row of a dimension. With `most`, these are at most so many rows, of
    different dimensions: the quickest layouts' rows, simulated ones first.
    """
    chosen = {**result.best.layout.as_dict(), GROUPS: sized_name(result.best.cluster)}
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


def time_shares(profile: Profile, plan: Prediction, sequence: int) -> dict[str, float]:
    """Return the shares of a step that compute, recompute, links, the bubble, and optimizer and overhead take.

    Links are collectives within layers, waits for messages, and reductions that are not hidden.
    """
    costs, program = plan.costs, plan.program
    assert costs is not None, "the best plans are predicted in full"
    assert program is not None, "the best plans are predicted in full"
    at = plan.layout.with_values(split=costs.counts)
    alone = each_group(plan.cluster, lambda group: replace(group, node=LinkSpeed(), network=LinkSpeed()))
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


def limits_text(profile: Profile, plan: Prediction, sequence: int) -> str:
    """Return sentences about what takes the time of a step, and about the memory."""
    shares = time_shares(profile, plan, sequence)
    shares["recompute to save memory"] = shares.pop("recompute")
    (first, most), *rest = sorted(shares.items(), key=lambda item: -item[1])
    then = ", ".join(f"{name} {share:.1%}" for name, share in rest if share >= _SHOWN_SHARE)
    full = plan.peak_bytes / plan.capacity
    return (
        f"Limited by {first}: {most:.1%} of the time{f' ({then})' if then else ''}. Memory: {full:.0%} full."
    )


def headline(profile: Profile, found: SearchResult | Prediction, sequence: int) -> list[str]:
    """Return sentences: what to run, how fast it is, and what limits it.

    Before them, it says where weights must leave the devices, or where a pipeline is not worth its waits.

    Args:
        found: result of a search, or the plan of a layout that was asked for.
    """
    if isinstance(found, SearchResult):
        plan = found.best
        sentences = (found.with_store, found.without_devices, found.without_pipeline)
        first = [each for each in sentences if each]
        layout = f"Use {plan.layout}"
        if GROUPS in found.rejections:
            layout += f" on {', then '.join(sized_name(plan.cluster).split('+'))}"
    else:
        plan, first, layout = found, [], str(found.layout)
    return [
        *first,
        layout,
        f"{time_text(plan.step_seconds)} a step, {plan.tokens_per_second:,.0f} {plan.unit}/s. "
        f"{limits_text(profile, plan, sequence)}",
    ]


def left_out_text(result: SearchResult) -> str:
    """Return sentences about what a search did not compare."""
    given = "; ".join(result.not_compared)
    return (
        f"Not compared, unless --fix or --layout asks for it: {given}. No plan has offloading of activations."
    )


def changes(
    profile: Profile, cluster: Cluster, result: SearchResult, sequence: int, batch: int
) -> list[tuple[str, Prediction | None]]:
    """Return the best of a search's plans under other bandwidth, memory and batch.

    Where none of them fits, the same space is searched again, for as long as the search took and at least `_AGAIN`
    seconds; None if that finds nothing.
    """
    cases: tuple[tuple[str, Callable[[Cluster], Cluster], int], ...] = (
        ("half the bandwidth of the links", lambda given: _with_links(given, 0.5), batch),
        ("twice the bandwidth of the links", lambda given: _with_links(given, 2.0), batch),
        ("3/4 of the memory", lambda given: each_group(given, _with_less_memory), batch),
        ("twice the batch", lambda given: given, 2 * batch),
    )
    return [
        (text, _best_under(profile, cluster, change, result, sequence, samples))
        for text, change, samples in cases
    ]


def _with_less_memory(cluster: Cluster) -> Cluster:
    device = cluster.device
    return replace(cluster, device=replace(device, memory=device.memory * 0.75))


def _best_under(
    profile: Profile,
    cluster: Cluster,
    change: Callable[[Cluster], Cluster],
    result: SearchResult,
    sequence: int,
    batch: int,
) -> Prediction | None:
    plans = []
    for plan in result.plans:
        try:
            changed = change(plan.cluster)
            plans.append(predict(profile, changed, plan.layout, sequence=sequence, batch=batch))
        except PenstockError:
            continue  # this layout does not allow the change
    best = min((plan for plan in plans if plan.fits), key=lambda plan: plan.step_seconds, default=None)
    space = result.space
    if best is not None:
        return best
    limit = max(_AGAIN, result.seconds)
    try:
        again = search(
            profile, change(cluster), sequence=sequence, batch=batch, fixed=space.fixed, schedules=space.schedules,
            devices=None if space.devices == space.cluster.devices else space.devices, top=1, limit=limit,
        )  # fmt: skip
    except ConfigError:
        return None  # no layout of the space allows the batch
    return next(iter(again.plans), None)


def change_text(result: SearchResult, best: Prediction | None) -> str:
    """Return in words which plan is best after a change, as `changes` returns it."""
    if best is None:
        return "none found that fits"
    if best.layout == result.best.layout:
        return "the same plan"
    if best.layout in (plan.layout for plan in result.plans):
        return f"best of these is then {best.layout}"
    return f"none of these plans fits; then {best.layout}"


def experts_text(profile: Profile, plan: Prediction, sequence: int, batch: int) -> str:
    """Return why a mixture's layout has its ep: the same layout with every other number; empty without experts."""
    shape, at = profile.shape, plan.layout
    if shape is None or not shape.experts:
        return ""
    texts = [f"ep={at.ep}: a device has {shape.experts // at.ep} of {shape.experts} experts a block"]
    shard = "optimizer" if at.sharding.comes_and_goes else at.shard  # ep divides weights already
    for ep in divisors(gcd(at.replicas * at.tp, shape.experts)):
        if ep == at.ep or (ep == 1 and at.tp > 1):
            continue
        other = predict(
            profile, plan.cluster, at.with_values(ep=ep, shard=shard), sequence=sequence, batch=batch
        )
        change = other.step_seconds / plan.step_seconds - 1
        quicker = f"{abs(change):.1%} {'slower' if change >= 0 else 'quicker'}"
        fits = "" if other.fits else f", more than {size_text(other.capacity)}"
        texts.append(f"ep={ep} is {quicker} and needs {size_text(other.peak_bytes)}{fits}")
    return "; ".join(texts)


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    def faster(link: _Speed) -> _Speed:
        rates = {name: getattr(link, name, None) for name in ("bandwidth", "reduce_bandwidth")}
        return replace(link, **{name: rate * factor for name, rate in rates.items() if rate is not None})

    groups = [
        replace(group, node=faster(group.node), network=faster(group.network), host=faster(group.host))
        for group in cluster.groups
    ]
    return joined(groups, faster(cluster.between))
