"""Which named values go where: from the batch, or from the layer that gives one to the layers that take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.encoding import sendable
from penstock.errors import BatchError, SplitError, nearest
from penstock.stage.compute.runner import StageRoutes
from penstock.stage.module import StageModule


@sendable
class LayerNames(NamedTuple):
    """What a layer takes and gives.

    Attributes:
        layer: its name.
        takes: named value → whether it must have it.
        gives: named values.
    """

    layer: str
    takes: dict[str, bool]
    gives: tuple[str, ...]


def names_of(module: StageModule) -> list[LayerNames]:
    """What each layer of a stage takes and gives."""
    return [
        LayerNames(name, takes, gives)
        for name, takes, gives in zip(module.names, module.takes, module.gives_by_layer, strict=True)
    ]


class ValueRoutes:
    """The named values of a whole model.

    Args:
        stages: for every stage what its layers take and give.

    Attributes:
        stages: for every stage what it hands on.
        skips: (source stage, target stage) of the values that travel past the stages between.

    Raises:
        SplitError: a value that two layers give, or that a layer takes before it is given.
    """

    def __init__(self, stages: Sequence[Sequence[LayerNames]]) -> None:
        flat = [(s, names) for s, run in enumerate(stages) for names in run]
        givers: dict[str, int] = {}
        for at, (_, names) in enumerate(flat):
            for name in names.gives:
                if name in givers:
                    raise SplitError(
                        f"both {flat[givers[name]][1].layer!r} and {names.layer!r} give {name!r}; one layer gives a name"
                    )
                givers[name] = at
        onward: list[set[str]] = [set() for _ in stages]
        straight: dict[tuple[int, int], set[str]] = {}
        self._needed: dict[str, list[str]] = {}
        self._taken: dict[str, list[str]] = {}
        for at, (stage, names) in enumerate(flat):
            for name, must in names.takes.items():
                if name not in givers:
                    self._taken.setdefault(name, []).append(names.layer)
                    if must:
                        self._needed.setdefault(name, []).append(names.layer)
                    for before in range(stage):
                        onward[before].add(name)
                    continue
                source = flat[givers[name]][0]
                if givers[name] >= at:
                    raise SplitError(
                        f"layer {names.layer!r} takes {name!r}, which only the later layer "
                        f"{flat[givers[name]][1].layer!r} gives; a value travels forwards"
                    )
                if source + 1 == stage:
                    onward[source].add(name)
                elif source < stage:
                    straight.setdefault((source, stage), set()).add(name)
        self.skips = tuple(sorted(straight))
        self.stages = [
            StageRoutes(
                frozenset(onward[s]),
                tuple(tuple(sorted(straight[skip])) for skip in self.skips if skip[0] == s),
            )
            for s in range(len(stages))
        ]

    def check_given(self, names: Iterable[str]) -> None:
        """Refuse keyword inputs that no layer takes, and a step without one that a layer must have.

        Raises:
            BatchError: names the layer and the value.
        """
        given = set(names)
        for name in given - self._taken.keys():
            raise BatchError(
                f"no layer takes {name!r}{nearest(name, list(self._taken))}; a layer takes a keyword input by listing it "
                "in its forward, after the first parameter"
            )
        for name, layers in self._needed.items():
            if name not in given:
                raise BatchError(f"layer {layers[0]!r} needs {name!r}; pass it to the step as {name}=...")


def gathered(parts: Mapping[int, list[LayerNames]]) -> list[list[LayerNames]]:
    """By stage, what `World.gather_dict` or this process alone has found."""
    return [[LayerNames(*names) for names in parts[s]] for s in sorted(parts)]
