"""Tied weights in their stages: one parameter a rank, all of them equal, and who holds which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from penstock.schedule.placement import Placement
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.tied import find_ties, owner_of, set_parameter


class Ties:
    """The tied weights of a model cut into stages.

    Args:
        layers: the whole model's.
        runs: the layers of each stage.
        placement: which rank holds which stage.

    Attributes:
        groups: names that are one parameter; the first is the parameter's name.
        first: every other name of a group → its first.
        stages: for each group the stages it is on.
        holders: for each group the ranks that hold it, first the one whose copy counts.
    """

    def __init__(
        self, layers: Sequence[Layer], runs: Sequence[Sequence[Layer]], placement: Placement
    ) -> None:
        stage_of = {layer.name: s for s, run in enumerate(runs) for layer in run}
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
        """Make each group one parameter on every rank; on further ranks of this process it shares the first's memory.

        Args:
            modules: (rank, stage) → the module there, for the ranks of this process.

        Raises:
            SplitError: weights that are to be tied differ in shape or dtype.
        """
        for names, holders in zip(self.groups, self.holders, strict=True):
            memory: nn.Parameter | None = None
            for rank in holders:
                here = [
                    (modules[rank, self._stage[n]], n) for n in names if (rank, self._stage[n]) in modules
                ]
                if not here:
                    continue
                owner, inner = here[0][0].find(here[0][1])
                own: nn.Parameter = getattr(owner, inner)
                if memory is None:
                    memory = own
                else:
                    own = nn.Parameter(memory.detach(), requires_grad=memory.requires_grad)
                for module, name in here:
                    before = set_parameter(module, name, own)
                    if before is not own:
                        self._replaced.append((module, name, before))

    def undo(self) -> None:
        """Give the modules their own parameters back: what was one parameter is one again."""
        for module, name, before in reversed(self._replaced):
            owner, inner = module.find(name)
            before.data = getattr(owner, inner).data  # where the model was converted meanwhile, this was not
            set_parameter(module, name, before)
        self._replaced.clear()

    @property
    def over_stages(self) -> list[str]:
        """All names of the weights that several stages have."""
        return [
            n
            for names, stages in zip(self.groups, self.stages, strict=True)
            if len(stages) > 1
            for n in names
        ]

    def __bool__(self) -> bool:
        return bool(self.groups)
