"""Routes of named values: from the batch, or from the layer that produces a value to the layers that take it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.base.encoding import sendable
from penstock.base.errors import BatchError, SplitError, nearest
from penstock.stage.compute.runner import StageRoutes
from penstock.stage.module import StageModule


@sendable
class LayerNames(NamedTuple):
    """Names of the values that a layer takes and produces."""

    layer: str
    takes: dict[str, bool]
    gives: tuple[str, ...]


def names_of(module: StageModule) -> list[LayerNames]:
    """Return the names that each layer of a stage takes and produces."""
    return [
        LayerNames(name, takes, gives)
        for name, takes, gives in zip(module.names, module.takes, module.gives_by_layer, strict=True)
    ]


class ValueRoutes:
    """The routes of a model's named values.

    Attributes:
        required: layers that cannot run without a value of the batch, by its name.
        skips: (source stage, target stage) of the values that skip the stages between.
    """

    def __init__(self, stages: Sequence[Sequence[LayerNames]]) -> None:
        layers = [(s, names) for s, stage_layers in enumerate(stages) for names in stage_layers]
        producers = _producers([names for _, names in layers])
        onward: list[set[str]] = [set() for _ in stages]
        skips: dict[tuple[int, int], set[str]] = {}
        self._inputs: dict[str, list[str]] = {}  # layers that take a value from the batch, by its name
        self.required: dict[str, list[str]] = {}
        for index, (stage, names) in enumerate(layers):
            for name, required in names.takes.items():
                if name not in producers:
                    self._inputs.setdefault(name, []).append(names.layer)
                    if required:
                        self.required.setdefault(name, []).append(names.layer)
                    # A value of the batch passes every stage before the one that takes it.
                    for before in range(stage):
                        onward[before].add(name)
                    continue
                source, producer = layers[producers[name]]
                if producers[name] >= index:
                    raise SplitError(
                        f"layer {names.layer!r} takes {name!r}, which only the later layer {producer.layer!r} gives; move "
                        "it behind that layer, since a value travels forwards"
                    )
                if source + 1 == stage:
                    onward[source].add(name)
                elif source < stage:
                    skips.setdefault((source, stage), set()).add(name)
        self.skips = tuple(sorted(skips))
        self.stages = [
            StageRoutes(
                frozenset(onward[s]), tuple(tuple(sorted(skips[skip])) for skip in self.skips if skip[0] == s)
            )
            for s in range(len(stages))
        ]

    @property
    def inputs(self) -> Collection[str]:
        """Names of the keyword inputs of all layers."""
        return self._inputs.keys()

    def check_given(self, names: Iterable[str]) -> None:
        """Check the names of the keyword inputs of a step."""
        names = set(names)
        for name in names - self._inputs.keys():
            raise BatchError(
                f"no layer takes {name!r}{nearest(name, list(self._inputs))}; a layer takes a keyword input by listing it "
                "in its forward, after the first parameter"
            )
        for name, layers in self.required.items():
            if name not in names:
                raise BatchError(f"layer {layers[0]!r} needs {name!r}; pass it to the step as {name}=...")


def _producers(layers: Sequence[LayerNames]) -> dict[str, int]:
    """Return the index of the layer that produces each value."""
    producers: dict[str, int] = {}
    for index, names in enumerate(layers):
        for name in names.gives:
            if name in producers:
                raise SplitError(
                    f"both {layers[producers[name]].layer!r} and {names.layer!r} give {name!r}; only one layer may give a "
                    "name: rename one of the two values"
                )
            producers[name] = index
    return producers


def gathered(parts: Mapping[int, list[LayerNames]]) -> list[list[LayerNames]]:
    """Return the layers' names by stage; `parts` has the stages of this process, or of all (`World.gather_dict`)."""
    return [[LayerNames(*names) for names in parts[s]] for s in sorted(parts)]
