"""Replicas of a pipeline: the same ranks several times over, each with its own microbatches of one global batch.

A rank's gradients live in buckets, whose reduction over its replicas begins while the backward still runs. When a
gradient is complete is known in two ways. At the Program's REDUCE of a stage all its gradients are: that is enough for the
first step, in which the buckets count how many contributions each parameter gets. From then on a parameter is complete
with its last contribution, in the middle of the stage's last backward. So the second step is the first that shows in which
order gradients become complete, and by it the buckets are made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from penstock.errors import PenstockError, TransportError
from penstock.parallel.data.bucket import BucketEntry
from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.data.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.data.replica_checks import first_replicas
from penstock.parallel.data.shards import Shards
from penstock.parallel.dtensor import gradient_dtype, is_dtensor, local, redistribute_grad
from penstock.runtime.consensus import Losses, Refusal
from penstock.runtime.weights.bucket_tuning import choose, measure
from penstock.schedule.program import Program
from penstock.stage.module import StageModule
from penstock.trace.events import Trace

_UNKNOWN = 1 << 60

Exchange = Callable[[Any], list[Any]]
BucketBytes = int | Literal["auto"]


class Replicas:
    """One rank's part.

    Args:
        reducer: to the same rank of the other replicas; None if there is one, whose tensors are cut.
        exchange: gives the values of all processes with this one's place in their pipeline to each of them; None where
            the replicas are threads of one process, which knows all of them.
        modules: of the rank's stages, by number.
        shared: parameters whose gradients are complete only when those of other ranks are added (see `shared`), by what
            those ranks have in common. These share no bucket with others: a communicator adds up in an order that depends on
            the place in the buffer, and every holder's sum has to have the same bits.
        elsewhere: parameters whose gradients are reduced on another rank.
        bucket_bytes: the most bytes in a bucket; "auto" has `tune` choose for each stage.
        zero: the update of the parameters is divided among the replicas, and so are the sums of their gradients.

    Attributes:
        buckets: of the gradients; None if there are none to reduce.
        shards: what of the parameters is updated here, if that is divided.
    """

    def __init__(
        self,
        reducer: Reducer | None,
        exchange: Exchange | None,
        modules: Mapping[int, StageModule],
        shared: Mapping[int, Sequence[nn.Parameter]],
        elsewhere: Sequence[nn.Parameter],
        bucket_bytes: BucketBytes,
        zero: bool = False,
    ) -> None:
        self.exchange = exchange
        left_out = {id(p) for p in elsewhere}
        named = {
            id(p): (name, p)
            for s in sorted(modules)
            for name, p in modules[s].whole_model_parameters()
            if id(p) not in left_out
        }
        # Microbatches were given their share of the whole batch's loss, so the replicas' gradients are only added.
        self.buckets: GradientBuckets | None = None
        self.shards: Shards | None = None
        self._modules = modules
        self._reducer = reducer
        self._chooses = bucket_bytes == "auto"
        most = BUCKET_BYTES if bucket_bytes == "auto" else bucket_bytes
        together = [p for parameters in shared.values() for p in parameters]
        self._groups: dict[Tensor, Hashable] = {
            p: ("shared", number) for number, parameters in shared.items() for p in parameters
        }
        options: dict[str, Any] = {
            "divisor": 1.0,
            "missing": "zeros",
            "bucket_bytes": most,
            "first_bucket_bytes": most if together else min(most, FIRST_BUCKET_BYTES),
            "groups": self._groups,
            "dynamic": True,
        }
        if reducer is not None and named:
            if zero:
                self.shards = Shards(named.values(), reducer, **options)
                self.buckets = self.shards.buckets
                for module in modules.values():
                    module.before = [self.shards.waiter(layer.parameters()) for layer in module.layers]
            else:
                self.buckets = GradientBuckets(named.values(), reducer, rebuild=False, **options)
            self.buckets.attach()
        self._cut = [p for _, p in named.values() if is_dtensor(p)]
        self._late = [p for p in together if id(p) not in left_out]
        late = {id(p) for p in together}
        self._stages: dict[int, list[nn.Parameter]] = {
            s: [p for p in module.parameters() if id(p) not in late] for s, module in modules.items()
        }
        self._of = {
            id(p): {s for s in modules if any(p is q for q in modules[s].parameters())}
            for _, p in named.values()
        }
        self._expected: dict[Tensor, int] = {}
        self._varying: set[Tensor] = set()
        self._incomplete: dict[int, set[int]] = {}
        self._entries: dict[int, BucketEntry] = {}
        self._reduces = False

    @property
    def several(self) -> bool:
        """Whether there are several, whose gradients are added up."""
        return self._reducer is not None

    def set_timeout(self, seconds: float) -> None:
        """How long a wait for the other replicas may last from now on."""
        if self.buckets is not None:
            self.buckets.reducer.set_timeout(seconds)

    def detach(self, wait: bool = True) -> None:
        """Let go of the parameters.

        Args:
            wait: whether to wait for transfers under way (default True). Give False after a failure, when other processes
                may never send theirs.
        """
        if self.buckets is not None:
            self.buckets.detach()
        if self.shards is not None and wait:
            self.shards.wait_all()
        for module in self._modules.values():
            module.before = []

    def tune(self, program: Program, trace: Trace) -> None:
        """After the second step: make the buckets anew, by its order; on every replica of the rank.

        Args:
            program: of the step.
            trace: what this rank did in it.
        """
        if self.buckets is None or not self.buckets.entries:
            return
        if self.shards is not None:  # what is divided stays where it is
            return
        if not self._chooses:
            self.buckets.rebuild()
            return
        assert self._reducer is not None, "there are buckets"
        stage_of: dict[Tensor, int] = {
            p: s
            for s, parameters in self._stages.items()
            for p in parameters
            if p.requires_grad and len(self._of[id(p)]) == 1
        }
        bytes_of = dict.fromkeys(sorted(set(stage_of.values())), 0)
        for parameter, stage in stage_of.items():
            bytes_of[stage] += local(parameter).numel() * gradient_dtype(parameter).itemsize
        device = local(self.buckets.entries[0].parameter).device
        chosen = choose(program, trace, bytes_of, measure(self._reducer, device)) if bytes_of else {}
        agreed = first_replicas(self._reducer, [chosen[s] for s in bytes_of])
        self.buckets.rebuild({**self._groups, **stage_of}, dict(zip(bytes_of, agreed, strict=True)))

    @contextlib.contextmanager
    def step(self, number: int, reduces: bool) -> Iterator[None]:
        """Around a step: `complete` and `finish` come within.

        Args:
            number: of the step.
            reduces: False leaves the gradients as they are, to be reduced with those of a later step.
        """
        if self.buckets is None:
            yield
            return
        self._incomplete = {}
        self._reduces = reduces
        if not reduces:
            with self.buckets.accumulating():
                yield
            return
        every = {e.parameter: self._expected.get(e.parameter, _UNKNOWN) for e in self.buckets.entries}
        self.buckets.begin(every, number)
        self._entries = {id(e.parameter): e for e in self.buckets.entries}
        self._incomplete = {key: set(self._of[key]) for key in self._entries}
        try:
            yield
        except Exception as error:
            # What another rank of this pipeline said, this rank's replicas have not heard; buckets only tell what is no
            # failure of a transport, which theirs would notice.
            told = PenstockError(str(error)) if isinstance(error, TransportError) else error
            self.buckets.abandon(told)
            raise
        except BaseException:  # who interrupts does not wait for the other replicas
            self.buckets.reset()
            raise

    def complete(self, stage: int) -> None:
        """This rank's gradients of a stage are complete."""
        for parameter in self._stages.get(stage, ()):
            waiting = self._incomplete.get(id(parameter))
            if waiting is not None:
                waiting.discard(stage)
                if not waiting:
                    self._ready(parameter)

    def _ready(self, parameter: nn.Parameter) -> None:
        entry = self._entries.get(id(parameter))
        if self.buckets is not None and entry and not entry.ready and parameter.grad is not None:
            self.buckets.ready(parameter)

    def finish(self) -> None:
        """All gradients of the rank are complete: wait until they are the sums over the replicas.

        Raises:
            PeerError: another replica failed.
        """
        if self.buckets is None:
            for parameter in self._cut:
                redistribute_grad(parameter)
        if self.buckets is None or not self._reduces:
            return
        for parameter in self._late:
            self._ready(parameter)
        counted = {e.parameter: e.counted for e in self.buckets.entries if e.parameter.requires_grad}
        late = {id(p) for p in self._late}
        (self.shards or self.buckets).finish()
        # Of a layer that is not used in every microbatch nobody knows which contribution is the last.
        self._varying |= {p for p, n in counted.items() if self._expected.get(p, n) != n}
        self._expected.update(
            (p, n) for p, n in counted.items() if n and id(p) not in late and p not in self._varying
        )
        for varying in self._varying & self._expected.keys():
            del self._expected[varying]
        self._incomplete = {}

    def sharded_grads(self, stage: int) -> list[Tensor]:
        """The gradients of a stage's parameters, where they are divided: those that are here."""
        if self.shards is None:
            return []
        parts = [self.shards.find(p) for p in self._modules[stage].parameters()]
        return [
            part.shard.grad
            for part in parts
            if part is not None and part.shard is not None and part.shard.grad is not None
        ]

    def gather(
        self, losses: Losses, finding: Refusal | None, flags: int
    ) -> tuple[Losses, Refusal | None, int]:
        """End the step on every replica: the losses of all, by microbatch of the global batch, one verdict, all flags."""
        if self.exchange is None:
            return losses, finding, flags
        parts = self.exchange(
            (
                {n: loss.cpu() for n, loss in losses.total.items()},
                {n: {k: v.cpu() for k, v in part.items()} for n, part in losses.parts.items()},
                losses.weights,
                finding,
                flags,
            )
        )
        whole = Losses(rows_in=losses.rows_in, rows_out=losses.rows_out)
        for total, named, weights, _, seen in parts:
            whole.update(Losses(total, named, weights))
            flags |= seen
        return whole, min((found for *_, found, _ in parts if found is not None), default=None), flags
