"""Check that a model which was split is still as it was, where its layers would not follow a change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import SplitError
from penstock.forward.forward_steps import Step
from penstock.forward.module_uses import Steps, value_at
from penstock.stage.layers import has_forward_hooks


class UnchangedModel:
    """State of a model that its layers do not follow: its modules, its code, and values by which the split was decided.

    It leaves out modes, and attributes that statements read: layers read these in the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Iterable[str],
        steps: Iterable[Step],
        decided: Mapping[tuple[str, Steps], Any],
    ) -> None:
        above = {""} | {p.rpartition(".")[0] for p in paths}
        above |= {".".join(a.split(".")[:n]) for a in above for n in range(1, a.count(".") + 1)}
        self._above = [(name, model.get_submodule(name)) for name in sorted(above)]
        self.record()
        self._code: dict[tuple[str, str], tuple[nn.Module, list[Any]]] = {}
        for step in steps:
            frame = step.frame
            for path, name in ((frame.path, frame.source.function.__name__), *step.uses.methods):
                self._code[path, name] = frame.module, _definitions(frame.module, name)
        self._decided = [
            (path, way, model.get_submodule(path), value) for (path, way), value in decided.items()
        ]

    def record(self) -> None:
        """Take the modules, parameters and buffers that the model has now as unchanged."""
        self._members = [
            (name, vars(module)[kind], dict(vars(module)[kind]))
            for name, module in self._above
            for kind in ("_modules", "_parameters", "_buffers")
        ]

    def require_unchanged(self) -> None:
        for path, members, before in self._members:
            if members.keys() != before.keys() or not all(
                _same_member(members[n], v) for n, v in before.items()
            ):
                name = next(
                    n for n in {**before, **members} if not _same_member(members.get(n), before.get(n))
                )
                raise _changed(path, name)
        for (path, name), (module, definitions) in self._code.items():
            if name in vars(module) or _definitions(module, name) != definitions:
                raise _changed(path, name)
        for path, way, module, value in self._decided:
            try:
                now = value_at(module, way)
            except (AttributeError, LookupError, TypeError):
                raise _changed(path, _written(way)) from None
            if now is not value and (type(now) is not type(value) or now != value):
                raise _changed(path, _written(way))
        for path, module in self._above:
            if has_forward_hooks(module):
                raise _changed(path, "a hook")


def _definitions(module: nn.Module, name: str) -> list[Any]:
    """Return what each of a module's classes has under a name."""
    return [vars(kind).get(name) for kind in type(module).__mro__]


def _same_member(now: Any, before: Any) -> bool:
    # A process may put what other processes train on the meta device.
    return now is before or (isinstance(now, Tensor) and isinstance(before, Tensor) and now.is_meta)


def _written(way: Steps) -> str:
    """Return the steps to a value as Python writes them."""
    text = ""
    for step in way:
        if step is None:
            text = f"len({text})"
        else:
            text += f".{step}" if isinstance(step, str) else f"[{step[0]!r}]"
    return text.removeprefix(".").replace("(.", "(")


def _changed(path: str, name: str) -> SplitError:
    where = f"{path}.{name}" if path else name
    return SplitError(
        f"{where} of the model was changed, added or removed after the model was split, which its layers do not follow; "
        "close the pipeline and build a new one"
    )
