"""Devices of the pipeline ranks of a layout: which group of a cluster each rank has, and what follows from that.

Groups have ranks in their order, each on dp x cp x tp devices of one group. So devices that divide a matrix, a sample or a
batch, and wait for each other in every layer or every step, are alike; only messages between stages leave a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, pairwise, permutations
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError
from penstock.plan.cluster import Cluster, LinkSpeed, joined
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile
from penstock.schedule.placement import Placement
from penstock.show.units import size_text, time_text
from penstock.simulate.costs import Communication, Link

Groups = npt.NDArray[np.intp]


@lru_cache(maxsize=1024)
def rank_groups(sizes: Sequence[int], width: int, ranks: int) -> Groups:
    """Return the group of every pipeline rank, shape (ranks,).

    Args:
        sizes: numbers of devices of the groups.
        width: number of devices of a rank.
    """
    ends = np.cumsum([size // width for size in sizes[:-1]])
    return np.searchsorted(ends, np.arange(ranks), side="right")


@lru_cache(maxsize=1024)
def stage_groups(sizes: Sequence[int], width: int, placement: Placement) -> Groups:
    """Return the group of every stage, shape (stages,), as `rank_groups` those of the ranks.

    Raises:
        ConfigError: if copies of a stage may be on unlike devices, so that its ops take the time of two.
    """
    if placement.has_copies and len(sizes) > 1:
        raise ConfigError(
            "a schedule with copies of stages is planned for alike devices alone; take another schedule"
        )
    return rank_groups(sizes, width, placement.ranks)[[ranks[0] for ranks in placement.holders]]


class RankDevices:
    """Devices of the pipeline ranks of a layout.

    Attributes:
        alike: True if all devices of the cluster are.
        places: group of every rank.
    """

    def __init__(self, cluster: Cluster, layout: Layout) -> None:
        self._cluster, self._width = cluster, layout.replicas * layout.tp
        self.alike = len(cluster.groups) == 1
        self.places = rank_groups(cluster.sizes, self._width, layout.pp)

    def each(self, values: Callable[[Cluster], Any], ranks: Sequence[int] | None = None) -> npt.NDArray[Any]:
        """Return a value of every rank, of those that a function returns for its group.

        Args:
            values: function of a group that returns a number, or one for every rank.
            ranks: the ranks, such as those of the stages (default: all of them once).
        """
        places = self.places if ranks is None else self.places[list(ranks)]
        columns = np.array([values(group) for group in self._cluster.groups])
        return columns[places] if columns.ndim == 1 else columns[places, np.arange(len(places))]

    @cached_property
    def usable(self) -> npt.NDArray[np.float64]:
        """Bytes that a layout may use of each rank's device, shape (ranks,)."""
        return self.each(lambda group: group.device.usable)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Name of the device of every rank; empty if all are alike."""
        return () if self.alike else tuple(self._cluster.groups[group].name for group in self.places)

    def mean_peak(self, dtype: str) -> float:
        """Return the rated FLOP/s of a device, in the mean."""
        return float(mean(self.each(lambda group: group.device.peak_rate(dtype)).tolist()))

    def communication(self, messages: Sequence[int], ranks: Sequence[int]) -> Communication:
        """Return the links between ranks, from the bytes over each boundary between stages and the rank of every stage."""
        if self.alike:
            # A rank of the simulator is a pipeline rank, which stands for dp x cp x tp devices of a node. It may have copies
            # of a stage, so that a boundary has no link of its own.
            near, far = (_link(speed) for speed in (self._cluster.node, self._cluster.network))
            return Communication(messages, near, far, self._on_node(self._cluster))
        links = []
        for one, other in pairwise(ranks):
            group, speed = self._cluster.groups[self.places[one]], self._cluster.link_between
            if self.places[one] == self.places[other]:
                each, first = self._on_node(group), int(np.searchsorted(self.places, self.places[one]))
                speed = group.node if (one - first) // each == (other - first) // each else group.network
            links.append(_link(speed))
        return Communication(messages, boundaries=links)

    def sentences(self) -> tuple[str, ...]:
        """Return what a plan says of unlike devices, and of the link between them."""
        if self.alike:
            return ()
        spans = []
        for name, ranks in groupby(range(len(self.names)), self.names.__getitem__):
            mine = list(ranks)
            spans.append(
                f"{name} has {f'rank {mine[0]}' if len(mine) == 1 else f'ranks {mine[0]} to {mine[-1]}'}"
            )
        link = self._cluster.link_between
        return (
            f"Of the pipeline, {', '.join(spans)}; a message between groups takes {time_text(link.latency)} and "
            f"{link.bandwidth / 1e9:.3g} GB/s. Replicas, and devices that divide layers, are of one group.",
        )

    def _on_node(self, group: Cluster) -> int:
        """Return the number of ranks that are on one node of a group."""
        return max(1, group.ranks_per_node // self._width)


def _link(speed: LinkSpeed) -> Link:
    return Link(speed.latency, speed.bandwidth)


def why_not_planned(profile: Profile, cluster: Cluster, store: str) -> str:
    """Return why no plan has a profile, a cluster and a store together; empty if one may."""
    unlike = len(cluster.groups) > 1
    if unlike and profile.source == "measured":
        return (
            f"the profile of {profile.name} has seconds measured on one machine, and {cluster.name} has unlike devices; "
            "profile with measure=False, which gives each device the time that its rates need"
        )
    if unlike and store != "none":
        return (
            f"store={store} is planned for alike devices, which share the memory of their hosts equally, got "
            f"{cluster.name}; leave out the store, or groups"
        )
    if store != "none" and profile.shape is not None and profile.shape.base_bits < 16:
        return (
            f"store={store} keeps plain tensors, and a base of {profile.shape.base_bits} bits has others; leave out the "
            "store, or take 16 bits"
        )
    return ""


def arrangements(cluster: Cluster) -> Iterator[Cluster]:
    """Yield a cluster, its groups in other orders, and fewer of them: what a search compares."""
    yield cluster
    for count in range(len(cluster.groups), 0, -1):
        for groups in permutations(cluster.groups, count):
            if groups != cluster.groups:
                yield joined(groups, cluster.between)


def devices_text(cluster: Cluster) -> str:
    """Return the devices of a cluster, of each group."""
    return "; ".join(
        f"{group.name}, {group.nodes} x {group.ranks_per_node} devices of {size_text(group.device.memory)}"
        for group in cluster.groups
    )


def needs_text(cluster: Cluster, size: float, *, reserve: bool = False) -> str:
    """Return the bytes that a layout needs of those that it may use, or of unlike devices the share.

    Args:
        size: bytes, as if the fullest device were one of the first group.
        reserve: whether bytes that are left free are said, too (default False).
    """
    device = cluster.device
    if len(cluster.groups) > 1:
        return f"{size / device.usable:.0%} of a device's memory"
    text = f"{_bytes_text(size)} of {_bytes_text(device.usable)}"
    if not reserve:
        return text
    left = f" besides the {_bytes_text(device.reserved)} in reserve, which --memory-limit can allow"
    return f"{text} per device{left if device.reserved else ''}"


def _bytes_text(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
