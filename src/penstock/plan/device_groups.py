"""Pipeline ranks on groups of unlike devices: which rank has which device, and what follows from that.

Groups have ranks in their order, each on dp x cp x tp devices of one group. So devices that divide a matrix, a sample or a
batch, and wait for each other in every layer or every step, are alike; only messages between stages leave a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, GroupedCluster, groups_of, joined
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile
from penstock.schedule.placement import Placement
from penstock.show.units import size_text
from penstock.simulate.costs import Link


def rank_groups(sizes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the group of every pipeline rank, from the numbers of devices of the groups.

    Raises:
        ConfigError: if the groups have fewer devices than the layout's ranks need.
    """
    width = layout.replicas * layout.tp
    places = [group for group, size in enumerate(sizes) for _ in range(size // width)]
    if len(places) < layout.pp:
        raise ConfigError(
            f"the layout needs pp={layout.pp} ranks of {plural(width, 'device')} (dp x cp x tp) that are of one group, and "
            f"groups of {' + '.join(map(str, sizes))} devices have {len(places)}; take smaller degrees"
        )
    return tuple(places[: layout.pp])


def cluster_ranks(cluster: Cluster, layout: Layout) -> tuple[int, ...]:
    """Return the group of every pipeline rank of a layout on a cluster."""
    if not isinstance(cluster, GroupedCluster):
        return (0,) * layout.pp
    return rank_groups([group.devices for group in cluster.groups], layout)


def on_groups(cluster: Cluster, groups: Sequence[int], values: Callable[[Cluster], Any]) -> Any:
    """Return values of ranks or stages, each of those that a function returns for its own group.

    Args:
        groups: group of every rank or stage.
        values: function of a group that returns a number, or one for every rank or stage.
    """
    if not isinstance(cluster, GroupedCluster):
        return values(cluster)
    columns = [np.broadcast_to(values(group), (len(groups),)) for group in cluster.groups]
    return np.stack(columns)[list(groups), np.arange(len(groups))]


def usable_bytes(cluster: Cluster, layout: Layout) -> npt.NDArray[np.float64] | None:
    """Return the bytes that a layout may use of each pipeline rank's device, shape (ranks,); None if all are alike."""
    if not isinstance(cluster, GroupedCluster):
        return None
    usable = [group.device.usable for group in cluster.groups]
    return np.array([usable[group] for group in cluster_ranks(cluster, layout)])


def boundary_links(cluster: GroupedCluster, layout: Layout, ranks: Sequence[int]) -> list[Link]:
    """Return the link over each boundary between stages, from the pipeline rank of every stage."""
    places = cluster_ranks(cluster, layout)
    width = layout.replicas * layout.tp
    links = []
    for one, other in pairwise(ranks):
        group = cluster.groups[places[one]]
        speed = cluster.link_between
        if places[one] == places[other]:
            each, first = max(1, group.ranks_per_node // width), places.index(places[one])
            speed = group.node if (one - first) // each == (other - first) // each else group.network
        links.append(Link(speed.latency, speed.bandwidth))
    return links


def stage_ranks(placement: Placement) -> tuple[int, ...]:
    """Return the pipeline rank of every stage.

    Raises:
        ConfigError: if ranks have copies of a stage, whose ops would take as long as those of two devices.
    """
    if placement.has_copies:
        raise ConfigError(
            "a schedule with copies of stages is planned for alike devices alone; take another schedule"
        )
    return tuple(ranks[0] for ranks in placement.holders)


def require_supported(profile: Profile, cluster: Cluster, store: str) -> None:
    """Raise `ConfigError` if groups of unlike devices cannot run a profile or a store."""
    if not isinstance(cluster, GroupedCluster):
        return
    if profile.source == "measured":
        raise ConfigError(
            f"the profile of {profile.name} has seconds measured on one machine, and {cluster.name} has unlike devices; "
            "profile with measure=False, which gives each device the time that its rates need"
        )
    if store != "none":
        raise ConfigError(
            f"store={store} is planned for alike devices, which share the memory of their hosts equally, got "
            f"{cluster.name}; leave out the store, or groups"
        )


def arrangements(cluster: Cluster) -> Iterator[Cluster]:
    """Yield a cluster, its groups in other orders, and fewer of them: what a search compares."""
    yield cluster
    if isinstance(cluster, GroupedCluster):
        for count in range(len(cluster.groups), 0, -1):
            for groups in permutations(cluster.groups, count):
                if groups != cluster.groups:
                    yield joined(groups, cluster.between)


def device_names(cluster: Cluster, layout: Layout) -> tuple[str, ...]:
    """Return the name of the device of every pipeline rank; empty if all are alike."""
    if not isinstance(cluster, GroupedCluster):
        return ()
    return tuple(cluster.groups[group].name for group in cluster_ranks(cluster, layout))


def devices_text(cluster: Cluster) -> str:
    """Return the devices of a cluster, of each group."""
    return "; ".join(
        f"{group.name}, {group.nodes} x {group.ranks_per_node} devices of {size_text(group.device.memory)}"
        for group in groups_of(cluster)
    )


def mean_peak(cluster: Cluster, layout: Layout, dtype: str) -> float:
    """Return the rated FLOP/s of a layout's devices, in the mean."""
    rates = on_groups(cluster, cluster_ranks(cluster, layout), lambda group: group.device.peak_rate(dtype))
    return float(np.mean(rates))
