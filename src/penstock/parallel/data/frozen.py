"""Detection of parameters that are frozen or unfrozen between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.errors import PenstockError, ReplicaError
from penstock.parallel.data.reducer import GroupReducer
from penstock.parallel.data.replica_checks import digest


class Frozen:
    """The ``requires_grad`` of parameters when the buckets were made, compared with now.

    Args:
        known: (name, parameter) pairs of all parameters, frozen ones included.
    """

    def __init__(self, known: Sequence[tuple[str, Tensor]]) -> None:
        self.known = known
        self._last_change = 0
        self._flags: list[bool] = []
        self.record()

    def _current_flags(self) -> list[bool]:
        return [p.requires_grad for _, p in self.known]

    def record(self) -> list[tuple[str, Tensor]]:
        """Record the flags as buckets are made; return the parameters that require a gradient."""
        self._flags, self._last_change = self._current_flags(), 0
        return [pair for pair, flag in zip(self.known, self._flags, strict=True) if flag]

    def change(self) -> int:
        """Return 0 if no flag has changed since the buckets were made; else a digest of the flags."""
        flags = self._current_flags()
        return 0 if flags == self._flags else digest(bytes(flags)) or 1

    def is_repeated(self, change: int) -> bool:
        """Return whether a change, which all replicas have reported, was reported in the step before as well."""
        before, self._last_change = self._last_change, change
        return bool(change) and change == before

    def require_same(self, reducer: GroupReducer, changes: Sequence[int], sharded: bool) -> None:
        """Check that all replicas report the same change; every replica calls it if any has reported one.

        Args:
            reducer: this replica's end of the communicator.
            changes: digests that the replicas reported, by replica.
            sharded: whether the update is divided among the replicas.

        Raises:
            ReplicaError: on every replica, if they differ; names the first parameter.
            PenstockError: if the update is divided, and a parameter was unfrozen since.
        """
        if any(change != changes[0] for change in changes):
            table = reducer.exchange([int(flag) for flag in self._current_flags()])()
            n = next(n for n in range(len(self.known)) if len({row[n] for row in table}) > 1)
            frozen = [r for r, row in enumerate(table) if not row[n]]
            name = self.known[n][0]
            raise ReplicaError(
                f"parameter {name!r} is frozen on replica(s) {frozen} of {reducer.size} and not on the others; set "
                "requires_grad to the same on all of them",
                name,
            )
        unfrozen = (
            name for (name, p), flag in zip(self.known, self._flags, strict=True) if p.requires_grad > flag
        )
        if sharded and (first := next(unfrozen, None)) is not None:
            raise PenstockError(
                f"parameter {first!r} began to require a gradient after ZeRO had divided the update of the others among "
                "the replicas; make a new PipelineOptimizer after parameters are unfrozen"
            )
