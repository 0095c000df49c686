"""Parameters and buffers of one process by their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError
from penstock.parallel.dtensor import distribute_like, full_tensor
from penstock.runtime.weights.ties import Ties
from penstock.runtime.workers.world import World
from penstock.schedule.placement import Placement
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer, begins_in, is_joint, is_second_name, prefixes, whole_name
from penstock.stage.module import layer_state


class LocalParameters:
    """Parameters and buffers of one process.

    Args:
        own_names: names of the model's parameters in its own order; empty if it was a list of layers, in whose order they
            are then.
    """

    def __init__(
        self,
        layers: list[Layer],
        stages: Mapping[int, Stage],
        placement: Placement,
        ties: Ties,
        rank: int | None,
        own_names: Sequence[str],
    ) -> None:
        self.layers = layers
        self.stages = stages
        self.placement = placement
        self.ties = ties
        self.rank = rank
        self._order = {name: n for n, name in enumerate(own_names)}
        self._places = self._find_places()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, int]]:
        """Yield (name, parameter, first rank that holds it), each parameter once, in model order."""
        first_holder = {names[0]: h[0] for names, h in zip(self.ties.groups, self.ties.holders, strict=True)}
        found: dict[str, tuple[nn.Parameter, int]] = {}
        for index in sorted(self.stages):
            for any_name, parameter in self.stages[index].module.whole_model_parameters():
                name = self.ties.first.get(any_name, any_name)
                found.setdefault(name, (parameter, first_holder.get(name, self.placement.holders[index][0])))
        for name in sorted(found, key=self._place):
            yield name, *found[name]

    def _place(self, name: str) -> int:
        """Return a parameter's place in the model's own order."""
        return self._order.get(name, len(self._order))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs in model order."""
        for name, parameter, _ in self._parameters():
            yield name, parameter

    def of_rank(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs that a rank updates; in threads exactly one rank updates each parameter."""
        return [(n, p) for n, p, holder in self._parameters() if self.rank is not None or holder == rank]

    def counted(self) -> list[tuple[str, nn.Parameter, bool]]:
        """Return (name, parameter, whether this process's copy counts in a sum over ranks)."""
        return [(n, p, self.rank is None or holder == self.rank) for n, p, holder in self._parameters()]

    def positions(self, world: World | None) -> tuple[dict[str, int], int]:
        """Return every parameter's position in the whole model, and the number of parameters; every rank calls this."""
        names = {
            s: [self.ties.first.get(n, n) for n, _ in stage.module.whole_model_parameters()]
            for s, stage in self.stages.items()
        }
        everywhere = world.gather_dict(names) if world is not None else names
        order = sorted(
            dict.fromkeys(name for s in sorted(everywhere) for name in everywhere[s]), key=self._place
        )
        return {name: n for n, name in enumerate(order)}, len(order)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers, sharded ones in full (with tensor parallelism all its ranks call this).

        A tied weight has the first of its names, even if only another rank has the layer of that name.
        """
        return {name: full_tensor(value) for name, value in self.sharded_state().items()}

    def sharded_state(self) -> dict[str, Any]:
        """Return `state_dict` with sharded tensors as they are."""
        state: dict[str, Any] = {}
        for index in sorted(self.stages):
            state.update(self.stages[index].module.whole_model_state())
        named = {name: self.ties.first.get(name, name) for name in state}
        return {first: state[name] for name, first in named.items() if name == first or first not in state}

    def own_state(self) -> dict[str, Any]:
        """Return `state_dict` without what other ranks have, too, and give; sharded tensors are not made whole."""
        holders = self.placement.holders
        held = {
            start
            for s, stage in self.stages.items()
            for name in stage.module.names
            for start in prefixes(name)
            if self.rank is None or holders[s][0] == self.rank
        }
        return {name: value for name, value in self.sharded_state().items() if begins_in(name, held)}

    def non_persistent_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are in no state, by their names in the whole model."""
        return {
            whole_name(name, inner, parameter=False): buffer
            for stage in self.stages.values()
            for name, layer in stage.module.named_layers()
            for inner, buffer in layer.named_buffers(remove_duplicate=False)
            if inner not in layer.state_dict(keep_vars=True)
        }

    def _find_places(self) -> list[tuple[str, dict[str, nn.Parameter | None], str, nn.Parameter]]:
        """Return (name in the whole model, parameters of the module that has it, name in the module, parameter)."""
        return [
            (whole_name(name, f"{path}.{inner}" if path else inner), module._parameters, inner, parameter)
            for _, stage in sorted(self.stages.items())
            for name, layer in stage.module.named_layers()
            for path, module in layer.named_modules()
            for inner, parameter in module._parameters.items()
            if parameter is not None
        ]

    def require_same(self) -> None:
        """Check that no parameter was replaced by another, which the optimizer would not have.

        A frozen one may be replaced by one in the same memory, as peft does on the CPU with weights of 4 bits for DoRA.
        """
        for n, (name, members, inner, parameter) in enumerate(self._places):
            found = members.get(inner, parameter)
            if found is not None and found is not parameter and _is_same_frozen(found, parameter):
                self._places[n] = (name, members, inner, found)
            elif found is not parameter:
                raise ConfigError(
                    f"the parameter {name} was replaced after the pipeline was built, as load_state_dict(assign=True) does, "
                    "and the optimizer has the one from before; load a state with pipe.load_state_dict, or close the "
                    "pipeline before the model gets its weights back"
                )

    @property
    def tied_names(self) -> dict[str, str]:
        """Names of tied weights in the model, with the first name of each."""
        return {name: first for name, first in self.ties.first.items() if not is_second_name(name)}

    def with_all_names(self, state: Mapping[str, Any], model: nn.Module | None) -> dict[str, Any]:
        """Return the state of the whole model with all names of tied weights, in the model's order.

        A weight with several names is an ``nn.Parameter``: ``load_state_dict(assign=True)`` then makes it one again.
        """
        names = self.tied_names
        tied = {first: nn.Parameter(state[first], requires_grad=False) for first in names.values()}
        everything = {**state, **tied, **{name: tied[first] for name, first in names.items()}}
        order = (
            [] if model is None else [name for name in model.state_dict(keep_vars=True) if name in everything]
        )
        return {name: everything[name] for name in dict.fromkeys([*order, *everything])}

    def give_buffers_to(self, model: nn.Module) -> None:
        """Put buffers that a conversion has replaced in layers into the module that the layers are of."""
        for stage in self.stages.values():
            for name, layer in stage.module.named_layers():
                for inner, buffer in layer.named_buffers() if is_joint(name) else ():
                    path, _, last = inner.rpartition(".")
                    model.get_submodule(path)._buffers[last] = buffer

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers, or none if an entry does not fit; entries of stages held elsewhere are left alone."""
        state = dict(state)
        for names in self.ties.groups:
            saved = [name for name in names if name in state]
            if saved:
                state.setdefault(names[0], state[saved[0]])
        if problems := self._problems(state):
            raise ConfigError("the state does not fit the model: " + "; ".join(problems[:12]))
        state |= {name: state[first] for name, first in self.ties.first.items() if first in state}
        for stage in self.stages.values():
            for name, layer in stage.module.named_layers():
                layer.load_state_dict(
                    {
                        inner: distribute_like(state[whole], value)
                        for inner, whole, value in layer_state(name, layer)
                    },
                    # A layer on the meta device has no memory to copy into.
                    assign=any(p.is_meta for p in layer.parameters()),
                )
        self._places = self._find_places()  # layers built on the meta device have new ones

    def _problems(self, state: Mapping[str, Any]) -> list[str]:
        expected = self.sharded_state()
        problems = [f"{name} is missing" for name in expected if name not in state]
        problems += [
            f"{name} has shape {tuple(state[name].shape)}, not {tuple(value.shape)}"
            for name, value in expected.items()
            if name in state and isinstance(value, Tensor) and value.shape != state[name].shape
        ]
        here = {p for stage in self.stages.values() for n in stage.module.names for p in prefixes(n)}
        anywhere = {p for layer in self.layers for p in prefixes(layer.name)}
        problems += [
            f"{name} is unknown"
            for name in state
            if name not in expected
            and name not in self.ties.first
            and (begins_in(name, here) or not begins_in(name, anywhere))
        ]
        problems += [
            f"{name} differs from {first}, to which it is tied"
            for name, first in self.ties.first.items()
            if name in state and first in state and not _equal(state[name], state[first])
        ]
        return problems


def _equal(one: object, other: object) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def _is_same_frozen(one: nn.Parameter, other: nn.Parameter) -> bool:
    same = (type(one), one.data_ptr(), one.shape, one.dtype) == (
        type(other), other.data_ptr(), other.shape, other.dtype
    )  # fmt: skip
    return same and not (one.requires_grad or other.requires_grad)
