"""Placement of the stages on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.base.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """Ranks that hold each stage: one, or several that hold copies.

    Attributes:
        ranks: number of ranks.
        holders: ranks that hold each stage; the copy on the first is the one that is saved.
    """

    ranks: int
    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ScheduleError(f"ranks must be at least 1, got {self.ranks}")
        if not self.holders:
            raise ScheduleError("a placement needs at least one stage")
        for stage, ranks in enumerate(self.holders):
            bad = [r for r in ranks if not 0 <= r < self.ranks]
            if not ranks or bad or len(set(ranks)) != len(ranks):
                raise ScheduleError(
                    f"stage {stage} is placed on ranks {list(ranks)}; it needs at least one rank, "
                    f"each once, out of 0..{self.ranks - 1}"
                )
        idle = set(range(self.ranks)) - {r for ranks in self.holders for r in ranks}
        if idle:
            raise ScheduleError(f"rank(s) {sorted(idle)} hold no stage; use fewer ranks or more stages")

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.holders)

    @property
    def has_copies(self) -> bool:
        """True if several ranks hold a stage."""
        return any(len(ranks) > 1 for ranks in self.holders)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Rank → the stages it holds, ascending."""
        held: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, ranks in enumerate(self.holders):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    @staticmethod
    def loop(ranks: int, virtual_stages: int = 1) -> Placement:
        """Place stage s on rank s mod ranks: rank r holds r, r + p, r + 2p, ... (Megatron-LM, 2104.04473).

        A rank holds `virtual_stages` stages.
        """
        _require_counts(ranks, virtual_stages)
        return Placement(ranks, tuple((s % ranks,) for s in range(ranks * virtual_stages)))

    @staticmethod
    def waves(ranks: int, virtual_stages: int = 2) -> Placement:
        """Place stages down and up the ranks again: with virtual_stages=2 the V of ZB-V, with 2W the W waves of Hanayo."""
        _require_counts(ranks, virtual_stages)
        down, up = range(ranks), range(ranks - 1, -1, -1)
        return Placement(ranks, tuple((r,) for v in range(virtual_stages) for r in (up if v % 2 else down)))

    @staticmethod
    def two_way(ranks: int) -> Placement:
        """Place two pipes in opposite directions: stage s on rank s and a copy on rank p-1-s (Chimera)."""
        if ranks < 2 or ranks % 2:
            raise ScheduleError(f"two pipes need an even number of ranks, at least 2, got {ranks}")
        return Placement(ranks, tuple((s, ranks - 1 - s) for s in range(ranks)))

    @staticmethod
    def on_all_ranks(ranks: int, virtual_stages: int = 1) -> Placement:
        """Place all p·v stages on every rank, the first copy of stage s on rank s mod p, as in `loop`."""
        _require_counts(ranks, virtual_stages)
        return Placement(
            ranks, tuple(tuple((s + k) % ranks for k in range(ranks)) for s in range(ranks * virtual_stages))
        )


def _require_counts(ranks: int, virtual_stages: int) -> None:
    if ranks < 1 or virtual_stages < 1:
        raise ScheduleError(f"ranks and virtual_stages must be at least 1, got {ranks} and {virtual_stages}")
