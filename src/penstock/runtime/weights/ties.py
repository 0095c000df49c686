"""Tied weights of a model split into stages: one parameter on each rank, all of them equal.

`penstock.runtime.weights.shared` sums their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from penstock.schedule.placement import Placement
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.tied import find_ties, owner_of, set_parameter


class Ties:
    """Tied weights of a model split into stages.

    Attributes:
        holders: ranks that hold each group; the copy of the first one counts.
    """

    def __init__(self, layers_of_stages: Sequence[Sequence[Layer]], placement: Placement) -> None:
        layers = [layer for of_stage in layers_of_stages for layer in of_stage]
        stage_of = {layer.name: s for s, of_stage in enumerate(layers_of_stages) for layer in of_stage}
        self.groups = find_ties(layers)
        self.first = {name: names[0] for names in self.groups for name in names[1:]}
        self._stage = {
            name: stage_of[owner_of(name, layers) or ""] for names in self.groups for name in names
        }
        self.stages = [tuple(dict.fromkeys(self._stage[n] for n in names)) for names in self.groups]
        self.holders = [
            tuple(dict.fromkeys(rank for s in stages for rank in placement.holders[s]))
            for stages in self.stages
        ]
        self._replaced: list[tuple[StageModule, str, nn.Parameter]] = []

    def apply(self, modules: Mapping[tuple[int, int], StageModule]) -> None:
        """Make each group one parameter on every rank; the ranks of this process share its memory."""
        for names, holders in zip(self.groups, self.holders, strict=True):
            memory: nn.Parameter | None = None
            for rank in holders:
                here = [
                    (modules[rank, self._stage[n]], n) for n in names if (rank, self._stage[n]) in modules
                ]
                if not here:
                    continue
                owner, inner = here[0][0].find(here[0][1])
                parameter: nn.Parameter = getattr(owner, inner)
                if memory is None:
                    memory = parameter
                else:
                    parameter = nn.Parameter(memory.detach(), requires_grad=memory.requires_grad)
                for module, name in here:
                    before = set_parameter(module, name, parameter)
                    if before is not parameter:
                        self._replaced.append((module, name, before))

    def undo(self) -> None:
        """Give the modules their original parameters back."""
        for module, name, before in reversed(self._replaced):
            owner, inner = module.find(name)
            before.data = getattr(owner, inner).data  # a conversion of the model has not reached the original
            set_parameter(module, name, before)
        self._replaced.clear()

    @property
    def over_stages(self) -> list[str]:
        """All names of the weights that several stages have."""
        groups = zip(self.groups, self.stages, strict=True)
        return [name for names, stages in groups if len(stages) > 1 for name in names]

    def __bool__(self) -> bool:
        return bool(self.groups)
