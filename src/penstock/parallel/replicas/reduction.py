"""Reduction of one rank's gradients over the replicas of a pipeline, which share a global batch.

Gradients live in buckets, whose reduction begins while the backward still runs. There are two ways to know that a gradient
is complete. At the Program's REDUCE of a stage all its gradients are; the first step uses that, while the buckets count
how many contributions each parameter gets. Later a parameter is complete with its last contribution, in the middle of the
stage's last backward. So the second step is the first that shows in which order gradients become complete, and the buckets
are made again, once, in that order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import CallOrderError, PeerError, PenstockError, TransportError
from penstock.parallel.dtensor import is_dtensor, local, redistribute_grad
from penstock.parallel.participant import (
    Losses,
    Outcome,
    Participant,
    Step,
    StepFailure,
    require_same_number,
)
from penstock.parallel.replicas.bucket import BucketEntry
from penstock.parallel.replicas.buckets import GradientBuckets
from penstock.parallel.replicas.layout import FIRST_BUCKET_BYTES
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.replicas.shards import OptimizerShards, Shards
from penstock.stage.module import StageModule
from penstock.stage.split_backward.intercepted import has_local_uses

# More contributions than any step makes: the gradient is complete only when `complete` says so.
_UNKNOWN = 1 << 60

Exchange = Callable[[Any], list[Any]]


class ReplicaReduction(Participant):
    """The replicas of one rank in a step: they agree on its outcome.

    Args:
        exchange: function that takes this process's value and returns the values of the processes with the same rank in
            every replica.
        shared: parameters that other ranks hold, too, by number of their group; their gradients are complete only with
            the other ranks' (see `penstock.runtime.weights.shared`). Groups share no buckets: the order in which a
            communicator adds depends on the position in the buffer, and every holder's sum must have the same bits.

    Attributes:
        shards: shards of the parameters, if the replicas divide the update.
    """

    def __init__(
        self,
        exchange: Exchange,
        modules: Mapping[int, StageModule],
        shared: Mapping[int, Sequence[nn.Parameter]],
    ) -> None:
        self.exchange = exchange
        self.shards: Shards | None = None
        self._modules = modules
        self._groups: dict[Tensor, Hashable] = {
            p: ("shared", number) for number, parameters in shared.items() for p in parameters
        }
        self._index_stages()
        self._dtensors = [p for _, p in self._named() if is_dtensor(p)]
        self._step: Step | None = None
        self._reducing = False  # the others wait for reductions of the step
        self._waited_for = False  # they wait for this one in `agree`

    def _index_stages(self) -> None:
        """Index the parameters by stage, without shared ones, and the stages by parameter."""
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._stages_of: dict[int, set[int]] = {}
        for s, module in self._modules.items():
            self._parameters[s] = [p for p in module.parameters() if p not in self._groups]
            for p in module.parameters():
                self._stages_of.setdefault(id(p), set()).add(s)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs in the order of the stages, each parameter once."""
        modules = (self._modules[s] for s in sorted(self._modules))
        named = {id(p): (name, p) for module in modules for name, p in module.whole_model_parameters()}
        return list(named.values())

    def set_timeout(self, seconds: float) -> None:
        """Set the longest wait for the other replicas in seconds."""

    def detach(self, wait: bool = True) -> None:
        """Remove what was put on the modules.

        Args:
            wait: whether to wait for transfers under way (default True). Give False after a failure, when other processes
                may never send theirs.
        """
        if self.shards is not None:
            self.shards.unmark()
            if wait:
                self.shards.gather_all()
        for module in self._modules.values():
            module.before, module.released = [], None

    def begin(self, step: Step) -> None:
        self._step = step
        if step.trains and self.shards is not None:
            self.shards.unmark()
        # While ops run that reduce gradients, the reduction tells the others of an error.
        self._waited_for = not (step.trains and step.reduces)

    def finish(self) -> None:
        """End the reductions, once all gradients of the rank are complete."""
        assert self._step is not None, "begun"
        if self._step.trains:
            self._finish()
        self._reducing, self._waited_for = False, True

    def _finish(self) -> None:
        for parameter in self._dtensors:
            redistribute_grad(parameter)

    def sharded_grads(self, stage: int) -> list[Tensor]:
        """Return the gradients of a stage's parameters that this replica updates, if replicas divide the update."""
        if self.shards is None:
            return []
        sharded = [self.shards.find(p) for p in self._modules[stage].parameters()]
        shards = [entry.shard for entry in sharded if entry is not None and entry.shard is not None]
        return [local(shard.grad) for shard in shards if shard.grad is not None]

    def agree(self, outcome: Outcome) -> None:
        """Gather from all replicas the losses by microbatch of the global batch, the first refusal, and all flags."""
        assert self._step is not None, "begun"
        losses = outcome.losses
        self._waited_for = False
        rows = self.exchange(
            (
                {n: loss.cpu() for n, loss in losses.total.items()},
                {n: {k: v.cpu() for k, v in part.items()} for n, part in losses.parts.items()},
                losses.weights,
                outcome.refusal,
                outcome.flags,
                self._step.microbatches,
            )
        )
        if told := [row for row in rows if isinstance(row, str)]:
            raise PeerError(f"another replica failed: {told[0]}", told=True)
        require_same_number(row[-1] for row in rows)
        outcome.losses = Losses(rows_in=losses.rows_in, rows_out=losses.rows_out)
        for total, parts, weights, _, flags, _ in rows:
            outcome.losses.update(Losses(total, parts, weights))
            outcome.flags |= flags
        refusals = [refused for *_, refused, _, _ in rows if refused is not None]
        outcome.refusal = min(refusals, default=None)

    def end(self, step: Step, outcome: Outcome) -> None:
        if step.trains and step.reduces and self.shards is not None:
            self.shards.mark()

    def abandon(self, failure: StepFailure) -> None:
        """End the step, and tell the processes with the same rank in the other replicas, which all wait for this one."""
        error = failure.error
        reducing, self._reducing = self._reducing, False
        waited_for, self._waited_for = self._waited_for, False
        # An interrupt does not wait for the others; nor does what is refused because they are in another call.
        if not isinstance(error, Exception) or (failure.told and not failure.ran):
            if reducing:
                self._reset()
            return
        if reducing:
            # Buckets do not pass on transport errors, which all replicas see for themselves. This one comes from the
            # pipeline's own channel, which the other replicas do not see.
            self._abandon(PenstockError(str(error)) if isinstance(error, TransportError) else error)
        if waited_for and not failure.told:
            report = failure.report
            with contextlib.suppress(TransportError, CallOrderError):
                self.exchange(f"{type(report).__name__}: {report}")

    def _abandon(self, error: Exception) -> None:
        """Do what the others still wait for in the step, and tell them of an error."""

    def _reset(self) -> None:
        """End the step on this replica only."""


class BucketReduction(ReplicaReduction):
    """`ReplicaReduction` whose gradients are summed in buckets.

    Args:
        whole: parameters that one replica updates as a whole, with `zero`.
        divided_reducer: communicator of the processes with the same part of parameters that an axis divides; None if each
            process has its own part, whose gradients are then complete.
    """

    def __init__(
        self,
        reducer: GroupReducer,
        exchange: Exchange,
        modules: Mapping[int, StageModule],
        shared: Mapping[int, Sequence[nn.Parameter]],
        bucket_bytes: int,
        zero: bool = False,
        *,
        whole: Collection[nn.Parameter] = (),
        divided_reducer: GroupReducer | None = None,
    ) -> None:
        super().__init__(exchange, modules, shared)
        self._divided_reducer = divided_reducer
        self._reductions = 0
        self.buckets = self._make_buckets(reducer, self._named(), bucket_bytes, zero, whole)
        self.buckets.attach()
        self._accumulating = contextlib.ExitStack()
        self._expected: dict[Tensor, int] = {}
        self._counts: dict[int, dict[Tensor, int]] = {}  # `_expected` by number of microbatches
        self._varying: set[Tensor] = set()
        self._incomplete: dict[int, set[int]] = {}
        self._entries: dict[int, BucketEntry] = {}

    def _make_buckets(
        self,
        reducer: GroupReducer,
        named: Collection[tuple[str, nn.Parameter]],
        size: int,
        zero: bool,
        whole: Collection[nn.Parameter],
    ) -> GradientBuckets:
        options: dict[str, Any] = {
            "bucket_bytes": size,
            "first_bucket_bytes": size if self._groups else min(size, FIRST_BUCKET_BYTES),
            "groups": self._groups,
        }
        divided = [p for _, p in named if has_local_uses(p)]
        if self._divided_reducer is None:
            named = [(name, p) for name, p in named if not has_local_uses(p)]
        else:
            options["reducers"] = dict.fromkeys(divided, self._divided_reducer)
        if zero:
            self.shards = shards = OptimizerShards(named, reducer, whole=whole, **options)
            for module in self._modules.values():
                module.before = [shards.waiter(layer.parameters()) for layer in module.layers]
            return shards.buckets
        return GradientBuckets(named, reducer, **options)

    def set_timeout(self, seconds: float) -> None:
        self.buckets.set_timeout(seconds)

    def detach(self, wait: bool = True) -> None:
        self.buckets.detach()
        super().detach(wait)

    def begin(self, step: Step) -> None:
        super().begin(step)
        self._incomplete = {}
        if not step.trains:
            return
        if not step.reduces:
            self._accumulating.enter_context(self.buckets.accumulating())
            return
        self._expected = self._counts.setdefault(step.microbatches, {})
        counts = {e.parameter: self._expected.get(e.parameter, _UNKNOWN) for e in self.buckets.entries}
        self.buckets.begin(counts, step.number)
        self._reducing = True
        self._entries = {id(e.parameter): e for e in self.buckets.entries}
        self._incomplete = {key: set(self._stages_of[key]) for key in self._entries}

    def complete(self, stage: int) -> None:
        """Mark this rank's gradients of a stage complete."""
        for parameter in self._parameters.get(stage, ()):
            waiting = self._incomplete.get(id(parameter))
            if waiting is not None:
                waiting.discard(stage)
                if not waiting:
                    self._ready(parameter)

    def _ready(self, parameter: Tensor) -> None:
        entry = self._entries.get(id(parameter))
        if entry and not entry.ready and parameter.grad is not None:
            self.buckets.ready(parameter)

    def _finish(self) -> None:
        self._accumulating.close()
        if not self._reducing:
            return
        for shared in self._groups:
            self._ready(shared)
        counted = {e.parameter: e.counted for e in self.buckets.entries if e.parameter.requires_grad}
        (self.shards or self.buckets).finish()
        # If some microbatches do not use a layer, its last contribution cannot be known by counting.
        self._varying |= {p for p, n in counted.items() if self._expected.get(p, n) != n}
        self._expected.update(
            (p, n) for p, n in counted.items() if n and p not in self._groups and p not in self._varying
        )
        for varying in self._varying & self._expected.keys():
            del self._expected[varying]
        self._incomplete = {}
        self._reductions += 1
        if self._reductions == 2 and self.buckets.entries and self.shards is None:  # shards keep their places
            self.buckets.rebuild()

    def abandon(self, failure: StepFailure) -> None:
        self._accumulating.close()
        super().abandon(failure)

    def _abandon(self, error: Exception) -> None:
        self.buckets.abandon(error)

    def _reset(self) -> None:
        self.buckets.reset()
