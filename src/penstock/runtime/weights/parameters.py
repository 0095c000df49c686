"""The parameters and buffers that one process holds, by their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.parallel.dtensor import distribute_like, full_tensor
from penstock.runtime.weights.ties import Ties
from penstock.runtime.workers.world import World
from penstock.schedule.placement import Placement
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer


class LocalParameters:
    """What a process holds of the model.

    Args:
        layers: the whole model's.
        stages: those built here, by number.
        placement: which rank holds which stage.
        ties: the tied weights; each has the first of its names.
        rank: this process's rank; None if all ranks are threads of this process.
    """

    def __init__(
        self,
        layers: list[Layer],
        stages: Mapping[int, Stage],
        placement: Placement,
        ties: Ties,
        rank: int | None,
    ) -> None:
        self.layers = layers
        self.stages = stages
        self.placement = placement
        self.ties = ties
        self.rank = rank

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, int]]:
        """(name, parameter, the rank whose copy counts), each once, in model order."""
        home = {names[0]: h[0] for names, h in zip(self.ties.groups, self.ties.holders, strict=True)}
        seen = set()
        for index in sorted(self.stages):
            for own, parameter in self.stages[index].module.whole_model_parameters():
                name = self.ties.first.get(own, own)
                if name not in seen:
                    seen.add(name)
                    yield name, parameter, home.get(name, self.placement.holders[index][0])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), in model order."""
        for name, parameter, _ in self._parameters():
            yield name, parameter

    def of_rank(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of those that a rank updates: in threads each of the model's on exactly one rank."""
        return [(n, p) for n, p, home in self._parameters() if self.rank is not None or home == rank]

    def counted(self) -> list[tuple[str, nn.Parameter, bool]]:
        """(name, parameter, whether this process's copy is the one that counts in a sum over ranks)."""
        return [(n, p, self.rank is None or home == self.rank) for n, p, home in self._parameters()]

    def places(self, world: World | None) -> tuple[dict[str, int], int]:
        """Every parameter's place in the whole model, and how many there are on all ranks; every rank calls it."""
        names = {
            s: [self.ties.first.get(n, n) for n, _ in stage.module.whole_model_parameters()]
            for s, stage in self.stages.items()
        }
        everywhere = world.gather_dict(names) if world is not None else names
        order = dict.fromkeys(name for s in sorted(everywhere) for name in everywhere[s])
        return {name: n for n, name in enumerate(order)}, len(order)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers, those that tensor parallelism has cut put together (its ranks all call it then).

        A tied weight has the first of its names, also where only another rank has the layer of that name.
        """
        state: dict[str, Any] = {}
        for index in sorted(self.stages):
            state.update(self.stages[index].module.whole_model_state())
        named = {name: self.ties.first.get(name, name) for name in state}
        return {
            first: full_tensor(state[name])
            for name, first in named.items()
            if name == first or first not in state
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers; entries of stages held elsewhere are left alone.

        Raises:
            ConfigError: an entry of a stage held here is missing or has another shape, or no layer has the name. Nothing
                is loaded then.
        """
        own, state = self.state_dict(), dict(state)
        for names in self.ties.groups:
            given_as = [name for name in names if name in state]
            if given_as:
                state.setdefault(names[0], state[given_as[0]])
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
            if name not in own
            and name not in self.ties.first
            and (name.startswith(here) or not name.startswith(prefixes))
        ]
        problems += [
            f"{name} differs from {first}, with which it is tied"
            for name, first in self.ties.first.items()
            if name in state and first in state and not _equal(state[name], state[first])
        ]
        if problems:
            raise ConfigError("the state does not fit the model: " + "; ".join(problems[:12]))
        given = state | {name: state[first] for name, first in self.ties.first.items() if first in state}
        for stage in self.stages.values():
            for name, layer in stage.module.named_layers():
                wanted = layer.state_dict()
                layer.load_state_dict(
                    {inner: distribute_like(given[f"{name}.{inner}"], own) for inner, own in wanted.items()},
                    assign=any(p.is_meta for p in layer.parameters()),
                )


def _equal(one: object, other: object) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
