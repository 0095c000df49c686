"""Place of this process in the run that it was started for."""

from __future__ import annotations

from typing import NamedTuple

from torch import distributed as dist

from penstock.runtime.start.launch_environment import find_launch


class Place(NamedTuple):
    """Rank and world size of a process, as in ``torch.distributed``."""

    rank: int
    size: int


def current_place() -> Place | None:
    """Return the place of this process in its run; None if there is only this one."""
    if dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    launch = find_launch()
    return None if launch is None else Place(launch.rank, launch.size)
