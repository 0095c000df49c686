"""State of the whole model, gathered from the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.runtime.workers.world import World

ROUND_BYTES = 1 << 26
"""Bytes that a rank sends in one round, from which on the next begins; a larger tensor is alone in its round."""


def gather_state(own: Mapping[str, Any], world: World, keeps: bool) -> dict[str, Any]:
    """Return the states of all ranks; every rank calls it.

    Args:
        own: this rank's part, on the CPU.
        keeps: whether this process needs the result; otherwise it is empty.
    """
    rounds: list[dict[str, Any]] = [{}]
    size = 0
    for name, value in own.items():
        nbytes = value.nbytes if isinstance(value, Tensor) else 0
        if rounds[-1] and size + nbytes > ROUND_BYTES:
            rounds.append({})
            size = 0
        rounds[-1][name] = value
        size += nbytes
    count = max(world.all_gather(len(rounds)))
    state: dict[str, Any] = {}
    for number in range(count):
        for part in world.all_gather(rounds[number] if number < len(rounds) else {}):
            if keeps:
                state.update(part)
    return state
