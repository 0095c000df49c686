"""Stages of which two ranks hold a copy (Chimera, DualPipe): their gradients become one sum, the same on each.

When a copy's gradients are complete (the Program's REDUCE) it sends them to the other holders; at the end of the
step each holder adds up all of them, in the order of the placement, so the sums are bit-identical. What a parameter's
``.grad`` held before the step is set aside and added last, so that accumulating over steps counts nothing twice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.transport.base import Channel
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.stage.stage import Stage, StageModule
from penstock.stage.values import Parcel, flatten


class Copies:
    """One rank's copied stages.

    Args:
        program: whose placement says who holds which stage.
        rank: which rank this is.
        stages: the stages it holds.
        channel: its end of the transport.
        one_memory: the copies are `alias`es of the first holder's modules (threads), so the optimizer sees the
            first holder's gradients only.
    """

    def __init__(
        self, program: Program, rank: int, stages: Mapping[int, Stage], channel: Channel, one_memory: bool
    ) -> None:
        self.rank = rank
        self.channel = channel
        self.one_memory = one_memory
        self.holders = {
            s: program.schedule.placement.holders[s]
            for s in stages
            if len(program.schedule.placement.holders[s]) > 1
        }
        self.parameters = {s: [p for _, p in stages[s].module.whole_model_parameters()] for s in self.holders}
        self._tag = len(program.rank) + 1
        self._before: dict[int, list[Tensor | None]] = {}

    def begin(self) -> None:
        """Set aside what the gradients hold from earlier steps."""
        for stage, parameters in self.parameters.items():
            self._before[stage] = [p.grad for p in parameters]
            for parameter in parameters:
                parameter.grad = None

    def send(self, stage: int) -> None:
        """This rank's gradients of a stage are complete: give them to the other holders."""
        first = self.holders[stage][0]
        for peer in self.holders[stage]:
            if peer != self.rank and (not self.one_memory or peer == first):
                leaves, structure = flatten([p.grad for p in self.parameters[stage]])
                self.channel.send(peer, self._tag + stage, Parcel(leaves, structure, (False,) * len(leaves)))

    def finish(self) -> None:
        """Add up every stage's gradients over its holders."""
        for stage, holders in self.holders.items():
            parameters = self.parameters[stage]
            if self.one_memory and self.rank != holders[0]:
                for parameter in parameters:
                    parameter.grad = None
                continue
            parts: list[tuple[Any, ...]] = [
                tuple(p.grad for p in parameters)
                if peer == self.rank
                else self.channel.recv(peer, self._tag + stage).leaves
                for peer in holders
            ]
            for n, (parameter, before) in enumerate(zip(parameters, self._before[stage], strict=True)):
                parameter.grad = before
                found: list[Tensor] = [part[n] for part in parts if part[n] is not None]
                if found:
                    total = reduce(torch.add, found[1:], found[0])
                    parameter.grad = total if before is None else before.add_(total)
        self._before.clear()

    def abandon(self) -> None:
        """After a failed step: the gradients are as before it."""
        for stage, before in self._before.items():
            for parameter, grad in zip(self.parameters[stage], before, strict=True):
                parameter.grad = grad
        self._before.clear()


def equalise(stages: Mapping[int, Stage], placement: Placement, rank: int, channel: Channel) -> None:
    """Give every copy the parameters and buffers of its stage's first holder; every rank calls it, before step 1."""
    channel.open(0)
    copied = {s: stage for s, stage in stages.items() if len(placement.holders[s]) > 1}
    for s, stage in copied.items():
        if placement.holders[s][0] == rank:
            leaves, structure = flatten([t.detach() for t in _state(stage)])
            for peer in placement.holders[s][1:]:
                channel.send(peer, s, Parcel(leaves, structure, (False,) * len(leaves)))
    for s, stage in copied.items():
        if placement.holders[s][0] != rank:
            for tensor, value in zip(
                _state(stage), channel.recv(placement.holders[s][0], s).leaves, strict=True
            ):
                tensor.detach().copy_(value)
    channel.finish()


def _state(stage: Stage) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers()]


def alias(module: StageModule) -> StageModule:
    """A copy of a module that shares its parameters' memory but has gradients and buffers of its own."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()
    }
    return copy.deepcopy(module, memo)
