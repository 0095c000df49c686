"""Which parameters are frozen, and what becomes of buckets when that changes between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.errors import PenstockError, ReplicaError
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.data.replica_checks import digest


class Frozen:
    """The ``requires_grad`` of parameters, as it was when buckets were made and as it is now.

    Args:
        known: (name, parameter) of all of them.
    """

    def __init__(self, known: Sequence[tuple[str, Tensor]]) -> None:
        self.known = known
        self._seen = 0
        self._flags: list[bool] = []
        self.take()

    def _now(self) -> list[bool]:
        return [p.requires_grad for _, p in self.known]

    def take(self) -> list[tuple[str, Tensor]]:
        """Buckets are made: those that require a gradient from now on."""
        self._flags, self._seen = self._now(), 0
        return [pair for pair, flag in zip(self.known, self._flags, strict=True) if flag]

    def change(self) -> int:
        """0 if nothing has changed since buckets were made; else a number that is the same for the same flags."""
        flags = self._now()
        return 0 if flags == self._flags else digest(bytes(flags)) or 1

    def stays(self, change: int) -> bool:
        """Whether a change, which all replicas have reported, is that of the step before as well."""
        before, self._seen = self._seen, change
        return bool(change) and change == before

    def require_same(self, reducer: Reducer, changes: Sequence[int], sharded: bool) -> None:
        """Check a change; every replica calls it where any has reported one.

        Args:
            reducer: all replicas.
            changes: what each reported.
            sharded: whether the update is divided among the replicas.

        Raises:
            ReplicaError: on every replica, where they differ; names the first parameter.
            PenstockError: the update is divided, and a parameter that was frozen then no longer is.
        """
        if any(change != changes[0] for change in changes):
            table = reducer.exchange([int(flag) for flag in self._now()])()
            n = next(n for n in range(len(self.known)) if len({row[n] for row in table}) > 1)
            frozen = [r for r, row in enumerate(table) if not row[n]]
            name = self.known[n][0]
            raise ReplicaError(
                f"parameter {name!r} is frozen on replica(s) {frozen} of {reducer.size} and not on the others; set "
                "requires_grad to the same on all of them",
                name,
            )
        thawed = (
            name for (name, p), flag in zip(self.known, self._flags, strict=True) if p.requires_grad > flag
        )
        if sharded and (first := next(thawed, None)) is not None:
            raise PenstockError(
                f"parameter {first!r} began to require a gradient after ZeRO had divided the update of the others among "
                "the replicas; make a new PipelineOptimizer after parameters are unfrozen"
            )
