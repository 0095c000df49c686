"""Check that a model which was split is still as it was: layers would not follow changes of its modules and attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from penstock.errors import SplitError
from penstock.stage.layers import has_forward_hooks


class UnchangedModel:
    """Modules, parameters, buffers and attributes of a model at the time of its split.

    Args:
        model: the model.
        paths: names of modules, parameters and buffers that layers have.
        attributes: (name of the module, name of the attribute) of plain attributes that layers have, or by which the
            split was decided.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str], attributes: Iterable[tuple[str, str]]) -> None:
        above = {""} | {p.rpartition(".")[0] for p in paths}
        above |= {".".join(a.split(".")[:n]) for a in above for n in range(1, a.count(".") + 1)}
        self._above = [(name, model.get_submodule(name)) for name in sorted(above)]
        self.record()
        self._attributes = [
            (path, name, vars(model.get_submodule(path)), vars(model.get_submodule(path)).get(name))
            for path, name in sorted(set(attributes))
        ]

    def record(self) -> None:
        """Take the modules, parameters and buffers that the model has now for those of the split."""
        self._members = [
            (name, vars(module)[kind], dict(vars(module)[kind]))
            for name, module in self._above
            for kind in ("_modules", "_parameters", "_buffers")
        ]

    def require_unchanged(self) -> None:
        """Check the model.

        Raises:
            SplitError: if a module, parameter, buffer, attribute or hook was added, removed or replaced; names it.
        """
        for path, members, before in self._members:
            if members.keys() != before.keys() or any(members[n] is not value for n, value in before.items()):
                name = next(n for n in {**before, **members} if members.get(n) is not before.get(n))
                raise _changed(path, name)
        for path, name, attributes, value in self._attributes:
            if not _same(attributes.get(name), value):
                raise _changed(path, name)
        for path, module in self._above:
            if has_forward_hooks(module):
                raise _changed(path, "a hook")


def _same(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is type(other) and isinstance(one, bool | int | float | str) and one == other
    )


def _changed(path: str, name: str) -> SplitError:
    where = f"{path}.{name}" if path else name
    return SplitError(
        f"{where} of the model was added, replaced or removed after the model was split, which its layers do not follow; "
        "close the pipeline and build a new one"
    )
