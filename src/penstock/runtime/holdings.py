"""The parameters and buffers that one process holds, by their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.runtime.world import World
from penstock.schedule.placement import Placement
from penstock.stage.layers import Layer
from penstock.stage.stage import Stage


class Holdings:
    """What a process holds of the model.

    Args:
        layers: the whole model's.
        stages: those built here, by number.
        placement: which rank holds which stage.
        rank: this process's rank; None if all ranks are threads of this process.
    """

    def __init__(
        self, layers: list[Layer], stages: Mapping[int, Stage], placement: Placement, rank: int | None
    ) -> None:
        self.layers = layers
        self.stages = stages
        self.placement = placement
        self.rank = rank

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), in model order."""
        for index in sorted(self.stages):
            yield from self.stages[index].module.whole_model_parameters()

    def of_rank(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of those that a rank updates: in threads each of the model's on exactly one rank."""
        return [
            pair
            for index in sorted(self.stages)
            if self.rank is not None or self.placement.holders[index][0] == rank
            for pair in self.stages[index].module.whole_model_parameters()
        ]

    def counted(self) -> list[tuple[str, nn.Parameter, bool]]:
        """(name, parameter, whether this process's copy is the one that counts in a sum over ranks)."""
        return [
            (name, parameter, self.rank is None or self.placement.holders[index][0] == self.rank)
            for index in sorted(self.stages)
            for name, parameter in self.stages[index].module.whole_model_parameters()
        ]

    def places(self, world: World | None) -> tuple[dict[str, int], int]:
        """Every parameter's place in the whole model, and how many there are on all ranks; every rank calls it."""
        names = {s: [n for n, _ in stage.module.whole_model_parameters()] for s, stage in self.stages.items()}
        everywhere = world.gather_dict(names) if world is not None else names
        order = [name for s in sorted(everywhere) for name in everywhere[s]]
        return {name: n for n, name in enumerate(order)}, len(order)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers."""
        state: dict[str, Any] = {}
        for index in sorted(self.stages):
            state.update(self.stages[index].module.whole_model_state())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers; entries of stages held elsewhere are left alone.

        Raises:
            ConfigError: an entry of a stage held here is missing or has another shape, or no layer has the name. Nothing
                is loaded then.
        """
        own = self.state_dict()
        prefixes = tuple(f"{layer.name}." for layer in self.layers)
        problems = [f"{name} is missing" for name in own if name not in state]
        problems += [
            f"{name} has shape {tuple(state[name].shape)}, not {tuple(value.shape)}"
            for name, value in own.items()
            if name in state and isinstance(value, Tensor) and value.shape != state[name].shape
        ]
        here = tuple(f"{n}." for stage in self.stages.values() for n in stage.module.names)
        problems += [
            f"{name} is unknown"
            for name in state
            if name not in own and (name.startswith(here) or not name.startswith(prefixes))
        ]
        if problems:
            raise ConfigError("the state does not fit the model: " + "; ".join(problems[:12]))
        for stage in self.stages.values():
            for name, layer in stage.module.named_layers():
                part = {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
                wanted = layer.state_dict().keys()
                layer.load_state_dict(
                    {k: v for k, v in part.items() if k in wanted},
                    assign=any(p.is_meta for p in layer.parameters()),
                )
