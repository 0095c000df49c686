"""The split of ``Pipeline(split={"measured": ...})``: stages of equal time that fit into their GPUs' free memory.

Times are those of a profile, or of layers measured here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from penstock.base.errors import SplitError
from penstock.profile.fake_layers import Sample
from penstock.profile.layer_cost import LayerCost
from penstock.profile.measured import Effort, measure_devices, measure_layers
from penstock.profile.model_profile import Profile, read_profile
from penstock.runtime.model.stage_memory import StageMemory, free_memory, make_stage_memory
from penstock.runtime.workers.world import World
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.recompute import Policy
from penstock.stage.compute.runner import LossFunction
from penstock.stage.devices import places_of
from penstock.stage.layers import Layer
from penstock.stage.partition import by_weights, by_weights_within
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
    recompute: Policy | None = None,
) -> Split:
    """Return a split that needs no measurement: the given one, or the number of blocks of every stage.

    With "measured", every process of a run calls it at the same time, and all get the same numbers.

    Args:
        split: split of a Pipeline; ``{"measured": (x, y)}`` has one microbatch, or ``(x, y, named)`` with keyword inputs;
            ``{"measured": profile}`` has a traced or measured profile of these layers, or the path of one.
        devices: device of each rank that is a thread, or the one of this process; none where the layers are (default).
        recompute: policy of the stages, by which the memory is known that they take of their GPUs; None (default) if it is
            not known, and stages are of equal time alone.
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
        _require_layers(example, layers)
        memory = _memory(example, layers, schedule, recompute, world, devices)
        return _fitting(example, schedule, example.kinds[0].points[0][0], [], memory, warns)
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
    speeds = _speeds(layers, sample, schedule, world, devices)
    memory = _memory(profile, layers, schedule, recompute, world, devices)
    return _fitting(profile, schedule, Sample(x).rows, speeds, memory, warns)


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


def _memory(
    profile: Profile,
    layers: Sequence[Layer],
    schedule: Schedule,
    recompute: Policy | None,
    world: World | None,
    devices: Sequence[torch.device],
) -> StageMemory | None:
    """Return the memory of every stage; None if all are on one device, none is on a GPU, or it is not known."""
    if recompute is None or (world is None and len(set(devices)) < 2):
        return None
    free = free_memory(devices, [layer.module for layer in layers if layer.module is not None])
    if world is not None:
        of_ranks: dict[int, float] = {}
        for rank, found in world.gather((world.rank, free), "run", "look at the devices' memory"):
            for each in found.values():
                of_ranks[rank] = min(of_ranks.get(rank, each), each)
        free = of_ranks  # the least of a rank's replicas
    return make_stage_memory(profile, schedule, recompute, free) if free else None


def _fitting(
    profile: Profile,
    schedule: Schedule,
    microbatch: int,
    speeds: Sequence[float],
    memory: StageMemory | None,
    warns: bool,
) -> tuple[int, ...]:
    """Return the blocks of every stage, within the memory if any split is; otherwise of equal time, with a warning."""
    counts = blocks_by_cost(profile, schedule.stages, microbatch, speeds)
    if memory is None:
        return counts
    within = blocks_by_cost(profile, schedule.stages, microbatch, speeds, memory)
    if within is None and warns:
        warnings.warn(
            "by the profile of its layers no split of the model fits into the free memory of the GPUs, with gradients, "
            f"Adam's state and activations; the stages, of {list(counts)} blocks, are of equal time. If memory runs out, "
            "give recompute='full', smaller microbatches or more ranks",
            UserWarning,
            stacklevel=5,
        )
    return within or counts


def _require_layers(profile: Profile, layers: Sequence[Layer]) -> None:
    """Raise SplitError if a profile is of other layers."""
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


@overload
def blocks_by_cost(
    profile: Profile, stages: int, microbatch: int, speeds: Sequence[float] = ()
) -> tuple[int, ...]: ...


@overload
def blocks_by_cost(
    profile: Profile, stages: int, microbatch: int, speeds: Sequence[float], memory: StageMemory
) -> tuple[int, ...] | None: ...


def blocks_by_cost(
    profile: Profile,
    stages: int,
    microbatch: int,
    speeds: Sequence[float] = (),
    memory: StageMemory | None = None,
) -> tuple[int, ...] | None:
    """Return the number of blocks of every stage, such that the most expensive stage costs least.

    The first stage also gets the embeddings, the last one the heads and the loss, which may be all that it has.

    Args:
        speeds: speed of each stage's device, where they differ (default none).
        memory: memory that limits the stages (default none); if no split keeps it, the answer is None.
    """
    roles = [role for _, role, _ in profile.layers]
    if "block" not in roles:
        raise SplitError(f"the profile of {profile.name} has no blocks, so they cannot be split by cost")
    each = [profile.kinds[kind].at(microbatch) for *_, kind in profile.layers]
    first, last = roles.index("block"), len(roles) - roles[::-1].index("block")
    # Embeddings stay together, and heads do.
    parts = [part for part in (each[:first], *([cost] for cost in each[first:last]), each[last:]) if part]
    weights = [sum(map(_seconds, part)) for part in parts]
    if memory is None:
        ranges = by_weights(weights, stages, speeds)
    elif (within := by_weights_within(weights, stages, speeds, memory.stops(parts))) is None:
        return None
    else:
        ranges = within
    counts = [stop - start for start, stop in ranges]
    counts[0] -= first > 0
    counts[-1] -= last < len(each)
    return tuple(counts)


def layer_costs(profile: Profile, microbatch: int) -> list[float]:
    """Return seconds of a forward and a backward of every layer, or FLOPs if nothing was measured."""
    return [_seconds(profile.kinds[kind].at(microbatch)) for *_, kind in profile.layers]


def _seconds(cost: LayerCost) -> float:
    """Return seconds of a forward and a backward; FLOPs, and a hundredth of the bytes moved, if nothing was measured."""
    works = (*cost.forward, *(cost.backward or (*cost.input_grad, *cost.weight_grad)))
    return sum(work.amount * (0.01 if work.unit == "memory" else 1) for work in works)
