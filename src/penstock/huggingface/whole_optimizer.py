"""State of an optimizer whose parameters are on several processes, as the optimizer of the whole model has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import ConfigError
from penstock.runtime.model.pipeline_model import gather_state
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup


class WholeOptimizer:
    """Places of one process's parameters among those of all; every process of the run makes one.

    Loading a state of the whole model into the optimizer takes this process's part of it.

    Args:
        pipe: pipeline in processes.
        model: the whole model; parameters of other processes are on the meta device.
        optimizer: optimizer of the parameters of this process; all processes have as many groups.

    Raises:
        ConfigError: if the optimizer has parameters that the model has not, or other groups than another process.
    """

    def __init__(self, pipe: Pipeline, model: nn.Module, optimizer: Any) -> None:
        self._pipe, self._optimizer = pipe, optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = [
            [names.get(id(parameter), "") for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        told = RunGroup.of(pipe).each(lambda: own)
        if any(not name for groups in told for names_of in groups for name in names_of):
            raise ConfigError(
                "the optimizer has parameters that are not the model's, so its state cannot be saved from several "
                "processes; run the ranks as threads of one process"
            )
        if len({len(groups) for groups in told}) > 1:
            raise ConfigError(
                f"the optimizer has {' and '.join(sorted({str(len(groups)) for groups in told}))} parameter groups on the "
                "processes; make as many on each, possibly without parameters"
            )
        places = {name: n for n, name in enumerate(names.values())}
        self._groups = [
            sorted({name for groups in told for name in groups[n]}, key=places.__getitem__)
            for n in range(len(own))
        ]
        order = {name: n for n, name in enumerate(name for group in self._groups for name in group)}
        self._own = [[order[name] for name in group] for group in own]
        optimizer.register_load_state_dict_pre_hook(self._part)

    def state(self, keep: bool) -> dict[str, Any]:
        """Return the state of all ranks, on the CPU; every process calls it.

        Args:
            keep: whether this process needs it; otherwise, the result is without state.
        """
        local = self._optimizer.state_dict()
        here = [number for group in self._own for number in group]
        entries = {
            f"{here[index]}/{key}": value.detach().cpu() if isinstance(value, Tensor) else value
            for index, values in local["state"].items()
            for key, value in values.items()
        }
        world = self._pipe.world
        assert world is not None, "the ranks are processes"
        state: dict[int, dict[str, Any]] = {}
        for name, value in gather_state(entries, world, keep).items():
            number, _, key = name.partition("/")
            state.setdefault(int(number), {})[key] = value
        return {
            **local,
            "state": dict(sorted(state.items())),
            "param_groups": self._with_params(local["param_groups"], self._whole()),
        }

    def _whole(self) -> list[list[int]]:
        """Return the numbers of all parameters by group."""
        groups, start = [], 0
        for group in self._groups:
            groups.append([*range(start, start + len(group))])
            start += len(group)
        return groups

    def _with_params(self, groups: list[dict[str, Any]], params: list[list[int]]) -> list[dict[str, Any]]:
        return [{**group, "params": numbers} for group, numbers in zip(groups, params, strict=True)]

    def _part(self, optimizer: object, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return this process's part of a state of the whole model; None for another state, which is taken as it is."""
        if [len(group["params"]) for group in state["param_groups"]] != [
            len(group) for group in self._groups
        ]:
            return None
        here = [number for group in self._own for number in group]
        numbers = iter(range(len(here)))
        local = [[next(numbers) for _ in group] for group in self._own]
        return {
            **state,
            "state": {
                index: state["state"][number] for index, number in enumerate(here) if number in state["state"]
            },
            "param_groups": self._with_params(state["param_groups"], local),
        }
