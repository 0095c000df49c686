"""Reduction over replicas that hold gradients, and weights, in full only while ops need them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from penstock.base.errors import ConfigError
from penstock.parallel.clocks import clock
from penstock.parallel.participant import Step, StepFailure
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.replicas.reduction import Exchange, ReplicaReduction
from penstock.parallel.replicas.resident_shards import ResidentShards
from penstock.parallel.replicas.stage_bucket import StageBucket
from penstock.schedule.residency import Sharding
from penstock.stage.module import StageModule
from penstock.stage.split_backward.intercepted import has_local_uses


def require_divisible(
    modules: Iterable[StageModule], whole: Collection[nn.Parameter], sharding: Sharding
) -> None:
    """Check that all parameters can be divided by elements.

    Args:
        whole: parameters whose optimizer needs them whole.
    """
    needs_whole = set(whole)
    for name, parameter in (pair for module in modules for pair in module.whole_model_parameters()):
        reason = None
        if has_local_uses(parameter):
            reason = "is a stack of divided experts (ep)"
        elif parameter in needs_whole:
            reason = "has an optimizer that needs whole matrices"
        if reason is not None:
            raise ConfigError(
                f"{name} {reason}, which shard={sharding.shard!r} does not divide; use shard='optimizer'"
            )


class ResidentReduction(ReplicaReduction):
    """`ReplicaReduction` whose gradients are sharded, and whose weights may be; see `penstock.schedule.residency`.

    Its reductions are those of the Program, so all replicas begin them in the same order.
    """

    def __init__(
        self,
        reducer: GroupReducer,
        exchange: Exchange,
        modules: Mapping[int, StageModule],
        shared: Mapping[int, Sequence[nn.Parameter]],
        bucket_bytes: int,
        sharding: Sharding,
        *,
        device: torch.device | None,
    ) -> None:
        super().__init__(exchange, modules, shared)
        self.sharding = sharding
        alone = {
            id(p): (p, min(self._stages_of[id(p)]))
            for _, p in self._named()
            if len(self._stages_of[id(p)]) == 1
        }
        self.resident = ResidentShards(
            self._named(),
            reducer,
            stage_of={p: stage for p, stage in alone.values() if p not in self._groups},
            weights=sharding.shard == "weights",
            groups=self._groups,
            bucket_bytes=bucket_bytes,
        )
        self.shards = self.resident
        self._device = device
        self._moments, self._clock = 0, clock(None, 0)
        for module in modules.values():
            module.before = [self.resident.waiter(layer.parameters()) for layer in module.layers]
            module.released = self.resident.come_and_go if self.resident.sharded_weights else None

    def set_timeout(self, seconds: float) -> None:
        self.resident.set_timeout(seconds)

    @property
    def recorded(self) -> Sequence[StageBucket]:
        return self.resident.buckets

    def begin(self, step: Step) -> None:
        super().begin(step)
        if not (step.trains or step.collectives):
            return
        # A start and an end for each bucket of each collective, and of the one that ends the step.
        if (needed := 2 * (len(step.collectives) + 1) * len(self.resident.buckets)) > self._moments:
            self._moments, self._clock = needed, clock(self._device, needed)
        self.resident.begin(step.number, step.collectives, self._clock)
        self._reducing = True

    def unshard(self, stage: int) -> None:
        self.resident.unshard(stage)

    def before(self, stage: int) -> None:
        self.resident.wait(stage)

    def reshard(self, stage: int) -> None:
        self.resident.reshard(stage)

    def reduce(self, stage: int) -> None:
        self.resident.complete(stage)

    def settle(self) -> None:
        self.resident.settle()

    def finish(self) -> None:
        super().finish()
        self.resident.stop_clock()

    def _finish(self) -> None:
        self.resident.finish()

    def abandon(self, failure: StepFailure) -> None:
        super().abandon(failure)
        self.resident.stop_clock()
        if self._step is not None and self._step.trains:
            # What some stages have summed is in no ``.grad``, where a program could see it and drop it.
            (self.resident.drop if failure.ran else self.resident.mark)()

    def _abandon(self, error: Exception) -> None:
        assert self._step is not None, "begun"
        # An evaluation has no reduction that tells the others.
        self.resident.abandon(error if self._step.trains else None)

    def _reset(self) -> None:
        self.resident.reset()

    @contextlib.contextmanager
    def records_kept(self) -> Iterator[None]:
        """Return a context with other steps, after which the spans of collectives are those of the step before it."""
        buckets = self.resident.buckets
        moments, present = self._moments, self._clock
        kept = [(bucket, bucket.spans) for bucket in buckets]
        self._moments = 0  # the next step makes a clock of its own, whose moments are others
        for bucket in buckets:
            bucket.spans = {kind: [] for kind in bucket.spans}
        try:
            yield
        finally:
            self._moments, self._clock = moments, present
            for bucket, spans in kept:
                bucket.spans = spans
