"""Process groups that only their own processes make, for a mesh that has some of the run's processes.

``torch.distributed.new_group`` is called by all processes of the run, or else names a group by the number of groups that
this process has: after one was destroyed, the next would read its addresses from the store. Here the processes of a mesh
agree on a name that was never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Private, since there is no public way to name a group, or to make one without the other processes.
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from penstock.runtime.start.restarts import name_of_this_start


class LocalGroups:
    """Groups within some processes of the run; all of these make one with the same arguments.

    Raises:
        RuntimeError: if not all of the processes come in time.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        world: Any = dist.group.WORLD
        store = dist.PrefixStore(f"penstock/{'-'.join(map(str, ranks))}", world.get_group_store())  # type: ignore[attr-defined]
        position = list(ranks).index(dist.get_rank())
        self._name = name_of_this_start(store, position, len(ranks), timeout)
        self._made = 0

    def make(self, lines: Sequence[Sequence[int]], backend: str | None, timeout: timedelta) -> Any:
        """Make the group of the line that has this process; every process calls it, each in the same order.

        Args:
            lines: lines of ranks in ``torch.distributed``, ascending; no two have a common one.

        Returns:
            The group; None if no line has this process.
        """
        self._made += 1
        rank = dist.get_rank()
        line = next((line for line in lines if rank in line), None)
        if line is None:
            return None
        world: Any = dist.group.WORLD
        group, _ = _new_process_group_helper(
            len(line),
            list(line).index(rank),
            list(line),
            dist.Backend(backend or _world.pg_map[world][0]),
            world.get_group_store(),
            f"{self._name}/{self._made}/{line[0]}",  # type: ignore[arg-type]
            timeout=timeout,
        )
        _world.pg_group_ranks[group] = {other: n for n, other in enumerate(line)}
        return group
