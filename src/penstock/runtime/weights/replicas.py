"""Reduction of one rank's gradients over the replicas of a pipeline, which share a global batch.

Gradients live in buckets, whose reduction begins while the backward still runs. There are two ways to know that a gradient
is complete. At the Program's REDUCE of a stage all its gradients are; the first step uses that, while the buckets count
how many contributions each parameter gets. Later a parameter is complete with its last contribution, in the middle of the
stage's last backward. So the second step is the first that shows in which order gradients become complete, and the buckets
are made again, once, in that order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import CallOrderError, PeerError, PenstockError, TransportError
from penstock.parallel.data.bucket import BucketEntry
from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.data.layout import FIRST_BUCKET_BYTES
from penstock.parallel.data.reducer import GroupReducer
from penstock.parallel.data.resident_shards import Collective
from penstock.parallel.data.shards import OptimizerShards, Shards
from penstock.parallel.dtensor import is_dtensor, local, redistribute_grad
from penstock.runtime.consensus import Losses, Refusal, require_same_number
from penstock.stage.module import StageModule
from penstock.stage.split_backward.intercepted import has_local_uses

# More contributions than any step makes: the gradient is complete only when `complete` says so.
_UNKNOWN = 1 << 60

Exchange = Callable[[Any], list[Any]]


class ReplicaReduction:
    """One rank's end of the reduction over replicas.

    Args:
        exchange: function that takes this process's value and returns the values of the processes with the same rank in
            every replica.
        shared: parameters that other ranks hold, too, by number of their group; their gradients are complete only with
            the other ranks' (see `penstock.runtime.weights.shared`). Groups share no buckets: the order in which a
            communicator adds depends on the position in the buffer, and every holder's sum must have the same bits.
        whole: parameters that one replica updates as a whole, with `zero`.
        expert_reducer: communicator of the processes with the same experts, if they are divided; None if there is one
            process for each, whose gradients are then complete.
    """

    def __init__(
        self,
        reducer: GroupReducer | None,
        exchange: Exchange,
        modules: Mapping[int, StageModule],
        shared: Mapping[int, Sequence[nn.Parameter]],
        bucket_bytes: int,
        zero: bool = False,
        *,
        whole: Collection[nn.Parameter] = (),
        expert_reducer: GroupReducer | None = None,
    ) -> None:
        self.exchange = exchange
        self._expert_reducer = expert_reducer
        self.buckets: GradientBuckets | None = None
        self.shards: Shards | None = None
        self._modules = modules
        self._reductions = 0
        self._groups: dict[Tensor, Hashable] = {
            p: ("shared", number) for number, parameters in shared.items() for p in parameters
        }
        self._index_stages()
        named = {id(p): (name, p) for s in sorted(modules) for name, p in modules[s].whole_model_parameters()}
        self._dtensors = [p for _, p in named.values() if is_dtensor(p)]
        if reducer is not None and named:
            self._make_buckets(reducer, named.values(), bucket_bytes, zero, whole)
        self._expected: dict[Tensor, int] = {}
        self._counts: dict[int, dict[Tensor, int]] = {}  # `_expected` by number of microbatches
        self._varying: set[Tensor] = set()
        self._incomplete: dict[int, set[int]] = {}
        self._entries: dict[int, BucketEntry] = {}
        self._reduces = False

    def _index_stages(self) -> None:
        """Index the parameters by stage, without shared ones, and the stages by parameter."""
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._stages_of: dict[int, set[int]] = {}
        for s, module in self._modules.items():
            self._parameters[s] = [p for p in module.parameters() if p not in self._groups]
            for p in module.parameters():
                self._stages_of.setdefault(id(p), set()).add(s)

    def _make_buckets(
        self,
        reducer: GroupReducer,
        named: Collection[tuple[str, nn.Parameter]],
        size: int,
        zero: bool,
        whole: Collection[nn.Parameter],
    ) -> None:
        options: dict[str, Any] = {
            "bucket_bytes": size,
            "first_bucket_bytes": size if self._groups else min(size, FIRST_BUCKET_BYTES),
            "groups": self._groups,
        }
        experts = [p for _, p in named if has_local_uses(p)]
        if self._expert_reducer is None:
            named = [(name, p) for name, p in named if not has_local_uses(p)]
        else:
            options["reducers"] = dict.fromkeys(experts, self._expert_reducer)
        if zero:
            self.shards = shards = OptimizerShards(named, reducer, whole=whole, **options)
            self.buckets = shards.buckets
            for module in self._modules.values():
                module.before = [shards.waiter(layer.parameters()) for layer in module.layers]
        else:
            self.buckets = GradientBuckets(named, reducer, **options)
        self.buckets.attach()

    def set_timeout(self, seconds: float) -> None:
        """Set the longest wait for the other replicas in seconds."""
        if self.buckets is not None:
            self.buckets.set_timeout(seconds)

    def detach(self, wait: bool = True) -> None:
        """Remove the hooks from the parameters.

        Args:
            wait: whether to wait for transfers under way (default True). Give False after a failure, when other processes
                may never send theirs.
        """
        if self.buckets is not None:
            self.buckets.detach()
        if self.shards is not None and wait:
            self.shards.gather_all()
        for module in self._modules.values():
            module.before, module.released = [], None

    @contextlib.contextmanager
    def step(
        self, number: int, reduces: bool, microbatches: int, collectives: Sequence[Collective] = ()
    ) -> Iterator[None]:
        """Return a context for one step, in which `complete` and `finish` are called.

        Args:
            reduces: False leaves the gradients to be reduced together with a later step's.
            collectives: gathers and reductions of the step, if the Program says where they come.
        """
        if self.buckets is None:
            yield
            return
        self._incomplete = {}
        self._reduces = reduces
        self._expected = self._counts.setdefault(microbatches, {})
        if not reduces:
            with self.buckets.accumulating():
                yield
            return
        counts = {e.parameter: self._expected.get(e.parameter, _UNKNOWN) for e in self.buckets.entries}
        self.buckets.begin(counts, number)
        self._entries = {id(e.parameter): e for e in self.buckets.entries}
        self._incomplete = {key: set(self._stages_of[key]) for key in self._entries}
        try:
            yield
        except Exception as error:
            # Buckets do not pass on transport errors, which all replicas see for themselves. This one comes from the
            # pipeline's own channel, which the other replicas do not see.
            reported = PenstockError(str(error)) if isinstance(error, TransportError) else error
            self.buckets.abandon(reported)
            raise
        except BaseException:  # an interrupt does not wait for the other replicas
            self.buckets.reset()
            raise

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
        if self.buckets is not None and entry and not entry.ready and parameter.grad is not None:
            self.buckets.ready(parameter)

    def finish(self) -> None:
        """Wait until the gradients are sums over the replicas; called once all gradients of the rank are complete."""
        if self.buckets is None:
            for parameter in self._dtensors:
                redistribute_grad(parameter)
        if self.buckets is None or not self._reduces:
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

    def sharded_grads(self, stage: int) -> list[Tensor]:
        """Return the gradients of a stage's parameters that this replica updates with `zero`."""
        if self.shards is None:
            return []
        sharded = [self.shards.find(p) for p in self._modules[stage].parameters()]
        shards = [entry.shard for entry in sharded if entry is not None and entry.shard is not None]
        return [local(shard.grad) for shard in shards if shard.grad is not None]

    def tell(self, why: str) -> None:
        """Tell the processes with the same rank in the other replicas, in place of `gather`, that this one has failed."""
        with contextlib.suppress(TransportError, CallOrderError):
            self.exchange(why)

    def gather(
        self, losses: Losses, refusal: Refusal | None, flags: int, microbatches: int
    ) -> tuple[Losses, Refusal | None, int]:
        """Gather from all replicas the losses by microbatch of the global batch, the first refusal, and all flags."""
        rows = self.exchange(
            (
                {n: loss.cpu() for n, loss in losses.total.items()},
                {n: {k: v.cpu() for k, v in part.items()} for n, part in losses.parts.items()},
                losses.weights,
                refusal,
                flags,
                microbatches,
            )
        )
        if told := [row for row in rows if isinstance(row, str)]:
            raise PeerError(f"another replica failed: {told[0]}")
        require_same_number(row[-1] for row in rows)
        gathered = Losses(rows_in=losses.rows_in, rows_out=losses.rows_out)
        for total, parts, weights, _, replica_flags, _ in rows:
            gathered.update(Losses(total, parts, weights))
            flags |= replica_flags
        refusals = [refused for *_, refused, _, _ in rows if refused is not None]
        return gathered, min(refusals, default=None), flags
