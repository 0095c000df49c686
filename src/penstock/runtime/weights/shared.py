"""Parameters that several ranks hold (copies of a stage, tied weights): their gradients become one sum, the same on each.

When a rank's gradients are complete (the Program's REDUCE of every stage that adds to them) it sends them to the other
holders; at the end of the step each holder adds up all of them, in one fixed order of the ranks, so the sums are
bit-identical. What a parameter's ``.grad`` held before the step is set aside and added last, so that accumulating over
steps counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import ReplicaError
from penstock.parallel.data.bucket import require_dense
from penstock.parallel.dtensor import from_local_like, local, redistribute_grad
from penstock.runtime.transport.channel import Channel
from penstock.runtime.weights.ties import Ties
from penstock.schedule.placement import Placement
from penstock.stage.module import StageModule
from penstock.stage.values import Message


class SharedGroup(NamedTuple):
    """Parameters that the same ranks hold and whose gradients are complete at the same time.

    Attributes:
        number: the bundle's, the same on every rank.
        holders: the ranks, in the order in which gradients are added.
        stages: those of this rank that add to the gradients.
        parameters: this rank's.
        names: of them in the whole model.
    """

    number: int
    holders: tuple[int, ...]
    stages: frozenset[int]
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]


def groups_of_holders(placement: Placement, ties: Ties) -> list[tuple[int, ...]]:
    """The ranks of every bundle that has several, by the bundle's number: first one a stage, then one a tied weight."""
    return [*placement.holders, *ties.holders]


def shared_groups(
    placement: Placement, ties: Ties, modules: Mapping[int, StageModule], rank: int
) -> list[SharedGroup]:
    """A rank's bundles, in the order of their numbers.

    Args:
        placement: which rank holds which stage.
        ties: the tied weights.
        modules: of the rank's stages, by number.
        rank: which.
    """
    groups = groups_of_holders(placement, ties)
    tied = {name for names in ties.groups for name in names}
    found = []
    for number, holders in enumerate(groups):
        if len(holders) == 1 or rank not in holders:
            continue
        if number < len(placement.holders):
            stages = frozenset([number])
            named = [(n, p) for n, p in modules[number].whole_model_parameters() if n not in tied]
        else:
            at = number - len(placement.holders)
            stages = frozenset(ties.stages[at]) & modules.keys()
            names = [n for n in ties.groups[at] for s in stages if modules[s].has(n)]
            owner, inner = next(modules[s].find(n) for n in names for s in stages if modules[s].has(n))
            named = [(ties.groups[at][0], getattr(owner, inner))]
        parameters = tuple(p for _, p in named)
        found.append(SharedGroup(number, holders, stages, parameters, tuple(name for name, _ in named)))
    return found


class SharedGradients:
    """One rank's part in the sums.

    Args:
        shared_groups: of this rank.
        rank: which rank this is.
        tags: messages are numbered from here.
        channel: its end of the transport.
        one_memory: holders share the parameters' memory (threads), so the optimizer sees the first holder's gradients
            only.
    """

    def __init__(
        self, shared_groups: Sequence[SharedGroup], rank: int, tags: int, channel: Channel, one_memory: bool
    ) -> None:
        self.shared_groups = shared_groups
        self.rank = rank
        self.channel = channel
        self.one_memory = one_memory
        self._tags = tags
        self._incomplete: list[set[int]] = []
        self._before: list[list[Tensor | None]] = []

    def begin(self) -> None:
        """Set aside what the gradients hold from earlier steps."""
        self._incomplete = [set(group.stages) for group in self.shared_groups]
        # Copies, since a gradient may live in a bucket's buffer, which this step's gradients are written to.
        self._before = [
            [None if p.grad is None else p.grad.clone() for p in group.parameters]
            for group in self.shared_groups
        ]
        for group in self.shared_groups:
            for parameter in group.parameters:
                parameter.grad = None

    def complete(self, stage: int) -> None:
        """This rank's gradients of a stage are complete: give what is complete with them to the other holders."""
        for group, waiting in zip(self.shared_groups, self._incomplete, strict=True):
            if stage in waiting:
                waiting.discard(stage)
                if not waiting:
                    self._send(group)

    def _send(self, group: SharedGroup) -> None:
        for name, parameter in zip(group.names, group.parameters, strict=True):
            if parameter.grad is not None:
                require_dense(f"parameter {name!r}", parameter.grad)
            redistribute_grad(parameter)
        gradients = (None if p.grad is None else local(p.grad).clone() for p in group.parameters)
        leaves = (*gradients, _frozen(group))
        for peer in group.holders:
            if peer != self.rank and (not self.one_memory or peer == group.holders[0]):
                self.channel.send(
                    peer, self._tags + group.number, Message(leaves, None, (False,) * len(leaves))
                )

    def finish(self) -> None:
        """Add up every bundle's gradients over its holders.

        Raises:
            ReplicaError: a parameter is frozen on some of the holders only.
        """
        for group, before in zip(self.shared_groups, self._before, strict=True):
            if self.one_memory and self.rank != group.holders[0]:
                for parameter in group.parameters:
                    parameter.grad = None
                continue
            parts: list[tuple[Any, ...]] = [
                (*(None if p.grad is None else local(p.grad) for p in group.parameters), _frozen(group))
                if peer == self.rank
                else self.channel.recv(peer, self._tags + group.number).leaves
                for peer in group.holders
            ]
            self._require_same(group, [part[-1] for part in parts])
            for n, (parameter, old) in enumerate(zip(group.parameters, before, strict=True)):
                found: list[Tensor] = [part[n] for part in parts if part[n] is not None]
                parameter.grad = old
                if found:
                    total = reduce(torch.add, found[1:], found[0])
                    parameter.grad = (
                        from_local_like(total, parameter)
                        if old is None
                        else old.add_(from_local_like(total, parameter))
                    )
        self._before = []

    def _require_same(self, group: SharedGroup, frozen: Sequence[str]) -> None:
        for n, told in enumerate(zip(*frozen, strict=True)):
            if len(set(told)) > 1:
                ranks = [r for r, flag in zip(group.holders, told, strict=True) if flag == _FROZEN]
                raise ReplicaError(
                    f"parameter {group.names[n]!r} is frozen on rank(s) {ranks} of the ranks {group.holders} "
                    "that hold it; set requires_grad to the same on all of them",
                    group.names[n],
                )

    def abandon(self) -> None:
        """After a failed step: the gradients are as before it."""
        for group, before in zip(self.shared_groups, self._before, strict=False):
            for parameter, grad in zip(group.parameters, before, strict=True):
                parameter.grad = grad
        self._before = []


_FROZEN, _TRAINED = "01"


def _frozen(group: SharedGroup) -> str:
    """A character a parameter; text, since what is no tensor travels only when it changes."""
    return "".join(_TRAINED if p.requires_grad else _FROZEN for p in group.parameters)


def equalise(
    shared_groups: Sequence[SharedGroup],
    modules: Mapping[int, StageModule],
    rank: int,
    channel: Channel,
    stages: int,
) -> None:
    """Give every holder the first one's parameters, and of copied stages the buffers; every rank calls it, before step 1.

    Args:
        shared_groups: of this rank.
        modules: of its stages, by number.
        rank: which rank this is.
        channel: its end of the transport.
        stages: how many the model has; bundles below are whole stages.
    """
    channel.open(0)

    def state(group: SharedGroup) -> list[Tensor]:
        buffers = modules[group.number].buffers() if group.number < stages else ()
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
