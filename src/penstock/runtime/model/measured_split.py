"""The split of ``Pipeline(split={"measured": ...})``: stages of equal time, by a profile or by layers measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.base.errors import SplitError
from penstock.profile.fake_layers import Sample
from penstock.profile.layer_cost import LayerCost
from penstock.profile.measured import Effort, measure_devices, measure_layers
from penstock.profile.model_profile import Profile, read_profile
from penstock.runtime.workers.world import World
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.runner import LossFunction
from penstock.stage.devices import places_of
from penstock.stage.layers import Layer
from penstock.stage.partition import by_weights
from penstock.stage.split import Split, parameter_counts, warn_of_a_large_layer

_EFFORT = Effort(seconds=10.0, rounds=20)

_ALIKE = 1.1
"""Ratio of times below which devices count as alike: a block's time scatters by a few percent."""


def resolve_split(
    split: Split,
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    schedule: Schedule,
    *,
    world: World | None,
    seed: int,
    autocast: torch.dtype | None = None,
    devices: Sequence[torch.device] = (),
) -> Split:
    """Return a split that needs no measurement: the given one, or the number of blocks of every stage.

    With "measured", every process of a run calls it at the same time, and all get the same numbers.

    Args:
        split: split of a Pipeline; ``{"measured": (x, y)}`` has one microbatch, or ``(x, y, named)`` with keyword inputs;
            ``{"measured": profile}`` has a traced or measured profile of these layers, or the path of one.
        devices: device of each rank that is a thread, or the one of this process; none where the layers are (default).
    """
    warns = schedule.stages > 1 and (world is None or (world.rank == 0 and world.is_first))
    if not is_measured(split):
        if warns and (counts := parameter_counts(layers)) is not None:
            warn_of_a_large_layer(layers, counts, "parameters")
        return split
    example = split["measured"] if isinstance(split, Mapping) else None
    if isinstance(example, str | Path):
        example = read_profile(example)
    if isinstance(example, Profile):
        return _split_by(example, layers, schedule.stages)
    places = places_of(p for x in layers if x.module is not None for p in x.module.parameters())
    if len(places) > 1:
        raise SplitError(
            f"layers on several devices ({', '.join(sorted(map(str, places)))}) are not measured; load them onto the CPU "
            "and give device=[...], one for each rank, or leave them where they are with split='even'"
        )
    if not isinstance(example, tuple) or len(example) not in (2, 3):
        raise SplitError(
            "a measured split needs the layers' times before they are split, and so a microbatch to run them on; give it as "
            "split={'measured': (x, y)}, or {'measured': (x, y, {'name': value})} with keyword inputs, or give a profile of "
            "penstock.profile_layers as split={'measured': profile}"
        )

    def exchange(value: Any) -> list[Any]:
        assert world is not None, "a run of processes"
        return world.gather(value, "run", "measure the layers")

    x, y, named = (*example, {})[:3]
    profile = measure_layers(
        layers, x, target=y, loss_fn=loss_fn, named=named, microbatches=[Sample(x).rows],
        ranks=schedule.ranks if world is None else 1, effort=_EFFORT, exchange=None if world is None else exchange,
        seed=seed, autocast=autocast, device=devices[0] if devices else None,
    )  # fmt: skip
    sample = Sample(x, y, loss_fn, named, seed, autocast)
    if warns:
        warn_of_a_large_layer(layers, layer_costs(profile, Sample(x).rows), "measured time")
    return blocks_by_cost(
        profile, schedule.stages, Sample(x).rows, _speeds(layers, sample, schedule, world, devices)
    )


def is_measured(split: Split) -> bool:
    """Return whether a split is by the times of layers, of a profile or measured here."""
    return split == "measured" or (isinstance(split, Mapping) and list(split) == ["measured"])


def _speeds(
    layers: Sequence[Layer],
    sample: Sample,
    schedule: Schedule,
    world: World | None,
    devices: Sequence[torch.device],
) -> list[float]:
    """Return the speed of each stage's device, as measured on one block; empty where they are alike."""
    if world is None:
        if len(set(devices)) < 2:
            return []
        kinds = [*dict.fromkeys(devices)]
        of_device = dict(zip(kinds, measure_devices(layers, sample, kinds, _EFFORT), strict=True))
        seconds = {rank: of_device[device] for rank, device in enumerate(devices)}
    else:
        own = (
            measure_devices(layers, sample, devices, _EFFORT) if devices and devices[0].type != "cpu" else []
        )
        seconds = {}
        for rank, found in world.gather((world.rank, own), "run", "measure the devices"):
            seconds[rank] = max([seconds.get(rank, 0.0), *found])  # the slowest of a rank's replicas
    if min(seconds.values()) == 0 or max(seconds.values()) < _ALIKE * min(seconds.values()):
        return []
    return [1 / max(seconds[rank] for rank in holders) for holders in schedule.placement.holders]


def _split_by(profile: Profile, layers: Sequence[Layer], stages: int) -> tuple[int, ...]:
    """Return the blocks of every stage by a profile, at the smallest microbatch that it has."""
    profiled, names = [name for name, *_ in profile.layers], [layer.name for layer in layers]
    if profiled != names:
        other = next((pair for pair in zip(profiled, names, strict=False) if pair[0] != pair[1]), None)
        where = (
            f"{len(profiled)} layers for {len(names)}" if other is None else f"{other[0]!r} for {other[1]!r}"
        )
        raise SplitError(
            f"the profile of {profile.name} is of other layers than the model's, {where}; profile this model with "
            "penstock.profile_layers"
        )
    return blocks_by_cost(profile, stages, profile.kinds[0].points[0][0])


def blocks_by_cost(
    profile: Profile, stages: int, microbatch: int, speeds: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the number of blocks of every stage, such that the most expensive stage costs least.

    The first stage also gets the embeddings, the last one the heads and the loss, which may be all that it has.

    Args:
        speeds: speed of each stage's device, where they differ (default none).
    """
    roles = [role for _, role, _ in profile.layers]
    if "block" not in roles:
        raise SplitError(f"the profile of {profile.name} has no blocks, so they cannot be split by cost")
    each = layer_costs(profile, microbatch)
    first, last = roles.index("block"), len(roles) - roles[::-1].index("block")
    front, back = ([sum(part)] if part else [] for part in (each[:first], each[last:]))
    counts = [stop - start for start, stop in by_weights([*front, *each[first:last], *back], stages, speeds)]
    counts[0] -= len(front)
    counts[-1] -= len(back)
    return tuple(counts)


def layer_costs(profile: Profile, microbatch: int) -> list[float]:
    """Return seconds of a forward and a backward of every layer, or FLOPs if nothing was measured."""
    return [_seconds(profile.kinds[kind].at(microbatch)) for *_, kind in profile.layers]


def _seconds(cost: LayerCost) -> float:
    """Return seconds of a forward and a backward; FLOPs, and a hundredth of the bytes moved, if nothing was measured."""
    works = (*cost.forward, *(cost.backward or (*cost.input_grad, *cost.weight_grad)))
    return sum(work.amount * (0.01 if work.unit == "memory" else 1) for work in works)
