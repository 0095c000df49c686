"""The split of ``Pipeline(split={"measured": (x, y)})``: stages of equal time, by layers measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.errors import SplitError
from penstock.profile.cost_split import blocks_by_cost
from penstock.profile.fake_layers import Sample
from penstock.profile.measured import Effort, measure_layers
from penstock.runtime.workers.world import World
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.runner import LossFunction
from penstock.stage.layers import Layer
from penstock.stage.split import Split

_EFFORT = Effort(seconds=10.0, rounds=20)


def resolve_split(
    split: Split,
    layers: Sequence[Layer],
    loss_fn: LossFunction,
    schedule: Schedule,
    world: World | None,
    seed: int,
    autocast: torch.dtype | None = None,
) -> Split:
    """Return a split that needs no measurement: the given one, or the number of blocks of every stage.

    With "measured", every process of a run calls it at the same time, and all get the same numbers.

    Args:
        split: split of a Pipeline; ``{"measured": (x, y)}`` has one microbatch, or ``(x, y, named)`` with keyword inputs.
        layers: layers of the model.
        loss_fn: loss function.
        schedule: schedule of the pipeline, whose ranks measure at the same time.
        world: processes of the run; None if the ranks are threads.
        seed: seed of layers that are built.
        autocast: dtype of mixed precision (default None).

    Raises:
        SplitError: if "measured" comes without a microbatch, or blocks are too few.
        ProfileError: if a layer cannot be profiled.
    """
    measured = isinstance(split, Mapping) and list(split) == ["measured"]
    if not measured and split != "measured":
        return split
    example = split["measured"] if isinstance(split, Mapping) else None
    if not isinstance(example, tuple) or len(example) not in (2, 3):
        raise SplitError(
            "a measured split runs the layers on one microbatch before they are split; give it as "
            "split={'measured': (x, y)}, or {'measured': (x, y, {'name': value})} with keyword inputs"
        )

    def exchange(value: Any) -> list[Any]:
        assert world is not None, "a run of processes"
        return world.exchange_all(value, "measure the layers")

    x, y, named = (*example, {})[:3]
    profile = measure_layers(
        layers, x, target=y, loss_fn=loss_fn, named=named, microbatches=[Sample(x).rows],
        ranks=schedule.ranks if world is None else 1, effort=_EFFORT, exchange=None if world is None else exchange,
        seed=seed, autocast=autocast,
    )  # fmt: skip
    return blocks_by_cost(profile, schedule.stages, Sample(x).rows)
