"""The options of an optimizer's groups around a step that may be repeated: an option that the user sets meanwhile stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Options = list[dict[str, Any]]
"""Options by group and name, without the parameters."""
Later = list[tuple[int, str, object]]
"""Options that were set after a step: number of the group, name, and value."""
_ABSENT = object()


class GroupOptions:
    """The options before and after one step of an optimizer.

    Args:
        optimizer: the rank's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: Options = []
        self._after: Options = []

    def take(self) -> None:
        """Copy the options, before the step."""
        self._before = self._copied()

    def step_ended(self) -> bool:
        """Copy the options after the step; return whether the step itself changed any."""
        self._after = self._copied()
        return bool(_changes(self._before, self._after))

    def take_back(self, repeats: bool) -> Later:
        """Set the options back to those around the step, and return what `give_back` needs.

        Args:
            repeats: True to set those before the step, False to set those after it.
        """
        later = _changes(self._after, self._copied())
        self._set(self._before if repeats else self._after)
        return later

    def give_back(self, later: Later) -> None:
        """Set the options again that were set after the step."""
        groups = self._optimizer.param_groups
        for n, name, value in later:
            _set_option(groups[n], name, value)

    def _copied(self) -> Options:
        return [
            {name: copy_value(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def _set(self, options: Options) -> None:
        for group, values in zip(self._optimizer.param_groups, options, strict=False):
            for name in {*group, *values} - {"params"}:
                _set_option(group, name, values.get(name, _ABSENT))


def _changes(before: Options, after: Options) -> Later:
    """Return group, name and new value of the options that differ."""
    return [
        (n, name, new.get(name, _ABSENT))
        for n, (old, new) in enumerate(zip(before, after, strict=False))
        for name in sorted({*old, *new}, key=str)
        if not same_value(old.get(name, _ABSENT), new.get(name, _ABSENT))
    ]


@torch.no_grad()
def _set_option(group: dict[str, Any], name: str, value: object) -> None:
    present = group.get(name)
    if value is _ABSENT:
        group.pop(name, None)
    elif isinstance(present, Tensor) and isinstance(value, Tensor) and _alike(present, value):
        present.copy_(
            value
        )  # schedulers write into a learning rate that is a tensor, and others may have it, too
    else:
        group[name] = copy_value(value)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def is_copied(value: object) -> bool:
    """Return whether `copy_value` copies a value, or need not copy it because nothing can change it."""
    kinds = (dict, list, tuple, set, int, float, complex, str, bytes, bool, type(None))
    return isinstance(value, Tensor) or type(value) in kinds


def copy_value(value: Any) -> Any:
    """Return a copy of a value made of tensors, dicts, lists, tuples and sets; other objects are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copy_value(each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copy_value(each) for each in value)
    return value


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values of `copy_value` are equal, bit for bit; objects that are not copied must be identical."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _alike(one, other) and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, int | float | complex | str | bytes | set):
        return bool(one == other) or bool(one != one and other != other)
    return False
