"""Sums of gradients of parameters that several ranks hold (copies of a stage, tied weights).

When a rank's gradients are complete (the Program's REDUCE of every stage that adds to them), it sends them to the other
holders; with a store, once they are all at home. At the end of the step each holder adds all of them in one fixed order of
the ranks, so the sums are bit-identical. The ``.grad`` from before the step is set aside and added last, so that
accumulation over steps counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import ReplicaError
from penstock.parallel.dtensor import from_local_like, local, redistribute_grad
from penstock.parallel.participant import Participant, Step, StepFailure
from penstock.parallel.replicas.bucket import require_dense
from penstock.runtime.transport.channel import Channel
from penstock.runtime.weights.ties import Ties
from penstock.schedule.placement import Placement
from penstock.stage.module import StageModule
from penstock.stage.values import Message


class SharedGroup(NamedTuple):
    """Parameters that the same ranks hold and whose gradients are complete at the same time.

    Attributes:
        holders: ranks that hold the parameters, in the order in which gradients are added.
    """

    number: int
    holders: tuple[int, ...]
    stages: frozenset[int]
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]


def group_holders(placement: Placement, ties: Ties) -> list[tuple[int, ...]]:
    """Return the holders of every group by its number: first one group per stage, then one per tied weight."""
    return [*placement.holders, *ties.holders]


def shared_groups(
    placement: Placement, ties: Ties, modules: Mapping[int, StageModule], rank: int
) -> list[SharedGroup]:
    """Return a rank's groups that other ranks hold, too, in the order of their numbers."""
    tied = {name for names in ties.groups for name in names}
    groups = []
    for number, holders in enumerate(group_holders(placement, ties)):
        if len(holders) == 1 or rank not in holders:
            continue
        if number < len(placement.holders):
            stages = frozenset([number])
            named = [(n, p) for n, p in modules[number].whole_model_parameters() if n not in tied]
        else:
            tie = number - len(placement.holders)
            stages = frozenset(ties.stages[tie]) & modules.keys()
            names = ties.groups[tie]
            owner, inner = next(modules[s].find(n) for n in names for s in stages if modules[s].has(n))
            named = [(names[0], getattr(owner, inner))]
        parameters = tuple(p for _, p in named)
        groups.append(SharedGroup(number, holders, stages, parameters, tuple(name for name, _ in named)))
    return groups


class SharedGradients(Participant):
    """Sums of one rank's shared gradients over their holders.

    Args:
        one_memory: whether holders are threads, which share the parameters' memory, so that the optimizer sees the first
            holder's gradients only.
        stored: whether gradients are in a store, and in ``.grad`` only once the step's ops are done; sums stay in its
            memory.
    """

    def __init__(
        self,
        shared_groups: Sequence[SharedGroup],
        rank: int,
        tags: int,
        channel: Channel,
        one_memory: bool,
        stored: bool,
    ) -> None:
        self.shared_groups = shared_groups
        self.rank = rank
        self.channel = channel
        self.one_memory = one_memory
        self._stored = stored
        self._tags = tags
        self._incomplete: list[set[int]] = []
        self._before: list[list[Tensor | None]] = []

    def begin(self, step: Step) -> None:
        """Set aside the gradients of earlier steps."""
        self._incomplete = [set(group.stages) for group in self.shared_groups]
        # Clone, since a gradient may live in a bucket's buffer, which this step's gradients are written to.
        self._before = [
            [None if p.grad is None else p.grad.clone() for p in group.parameters]
            for group in self.shared_groups
        ]
        for group in self.shared_groups:
            for parameter in group.parameters:
                parameter.grad = None

    def complete(self, stage: int) -> None:
        """Mark this rank's gradients of a stage complete, and send the groups that now are to the other holders."""
        for group, waiting in zip(self.shared_groups, self._incomplete, strict=True):
            if stage in waiting:
                waiting.discard(stage)
                if not waiting and not self._stored:
                    self._send(group)

    def _send(self, group: SharedGroup) -> None:
        for name, parameter in zip(group.names, group.parameters, strict=True):
            if parameter.grad is not None:
                require_dense(f"parameter {name!r}", parameter.grad)
            redistribute_grad(parameter)
        # In a store of one process, they stay as they are until the first holder has added them up.
        stays = self._stored and self.one_memory
        gradients = (
            None if p.grad is None else local(p.grad) if stays else local(p.grad).clone()
            for p in group.parameters
        )
        leaves = (*gradients, _frozen(group))
        for peer in group.holders:
            if peer != self.rank and (not self.one_memory or peer == group.holders[0]):
                self.channel.send(
                    peer, self._tags + group.number, Message(leaves, None, (False,) * len(leaves))
                )

    def finish(self) -> None:
        """Sum each shared parameter's gradient over the ranks that hold it."""
        for group in self.shared_groups if self._stored else ():
            self._send(group)
        for group, before in zip(self.shared_groups, self._before, strict=True):
            if self.one_memory and self.rank != group.holders[0]:
                for parameter in group.parameters:
                    parameter.grad = None
                continue
            rows: list[tuple[Any, ...]] = [
                (*(None if p.grad is None else local(p.grad) for p in group.parameters), _frozen(group))
                if peer == self.rank
                else self.channel.recv(peer, self._tags + group.number).leaves
                for peer in group.holders
            ]
            self._require_same(group, [row[-1] for row in rows])
            for n, (parameter, old) in enumerate(zip(group.parameters, before, strict=True)):
                grads: list[Tensor] = [row[n] for row in rows if row[n] is not None]
                own, parameter.grad = parameter.grad, old
                # In the holders' order, the same on every rank, so that all of them have the same bits.
                if grads:
                    total = from_local_like(reduce(torch.add, grads[1:], grads[0]), parameter)
                    total = total if old is None else old.add_(total)
                    parameter.grad = own.copy_(total) if self._stored and own is not None else total
        self._before = []

    def _require_same(self, group: SharedGroup, frozen: Sequence[str]) -> None:
        for n, flags in enumerate(zip(*frozen, strict=True)):
            if len(set(flags)) > 1:
                ranks = [r for r, flag in zip(group.holders, flags, strict=True) if flag == _FROZEN]
                raise ReplicaError(
                    f"parameter {group.names[n]!r} is frozen on rank(s) {ranks} of the ranks {group.holders} "
                    "that hold it; set requires_grad to the same on all of them",
                    group.names[n],
                )

    def abandon(self, failure: StepFailure) -> None:
        """Restore the gradients from before a failed step."""
        for group, before in zip(self.shared_groups, self._before, strict=False):
            for parameter, grad in zip(group.parameters, before, strict=True):
                # A parameter that was given another dtype after its gradient, which the error is about, takes none.
                fits = grad is None or parameter.grad_dtype in (None, grad.dtype)
                parameter.grad = grad if fits else None
        self._before = []


_FROZEN, _TRAINED = "01"


def _frozen(group: SharedGroup) -> str:
    # One character per parameter: the transport sends a text only when it changes.
    return "".join(_TRAINED if p.requires_grad else _FROZEN for p in group.parameters)


def broadcast_shared(
    shared_groups: Sequence[SharedGroup],
    modules: Mapping[int, StageModule],
    rank: int,
    channel: Channel,
) -> None:
    """Give every holder the first one's parameters and, of copied stages, buffers; every rank calls it before step 1."""
    channel.open(0)

    def state(group: SharedGroup) -> list[Tensor]:
        buffers = modules[group.number].buffers() if group.number in modules else ()  # a tied weight has none
        return [*group.parameters, *buffers]

    for group in shared_groups:
        if group.holders[0] == rank:
            leaves = tuple(local(t.detach()) for t in state(group))
            for peer in group.holders[1:]:
                channel.send(peer, group.number, Message(leaves, None, (False,) * len(leaves)))
    for group in shared_groups:
        if group.holders[0] != rank:
            values = channel.recv(group.holders[0], group.number).leaves
            for tensor, value in zip(state(group), values, strict=True):
                local(tensor.detach()).copy_(value)
    channel.finish()
