"""A run of a model's forward with stubs in the place of its blocks, which record the arguments of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import SplitError

FORMS: tuple[int, ...] = (0, 1, 2, 3)
"""Forms of a block's result: 0 for the hidden state alone, n for a tuple of n elements whose first is the hidden state."""


@dataclass(frozen=True)
class Call:
    """Arguments of a block besides the hidden state.

    Attributes:
        keyword: name of the hidden state if it is given by keyword; empty if it is the first argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str


class Stopped(Exception):  # noqa: N818 - it ends a run and is no error
    """End of a run at a stub, with the hidden state that reached it."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Rest:
    """Element of a block's result besides the hidden state, in a run with stubs."""


class Run:
    """One run of the forward: what stubs do, and what they have recorded.

    Args:
        count: number of stubs.
        form: what blocks return, one of `FORMS`.
        stop: index of the stub that ends the run; None if it runs to its end.
        last: hidden state that the last stub returns; None for its input.

    Attributes:
        positions: positions that the module with the blocks was given, if it is observed.
        probe: what modules with parameters before the first block return in a run without them; None for NaN of a shape that
            follows from their input.
    """

    def __init__(self, count: int, form: int, stop: int | None, last: Tensor | None = None) -> None:
        self.count, self.form, self.stop, self.last = count, form, stop, last
        self.calls: list[Call] = []
        self.rests: list[Rest] = []
        self.modules: list[tuple[str, int]] = []
        self.device: torch.device | None = None
        self.positions: Tensor | None = None
        self.probe: Tensor | None = None
        self._hidden: Any = None

    def observe(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the module with the blocks, and keep the positions that it is given."""
        self.positions = kwargs.get("position_ids")
        return forward(*args, **kwargs)

    def reach(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number != len(self.calls):
            raise SplitError(f"its forward calls block {number} where block {len(self.calls)} is due")
        keyword = "" if args else next(iter(kwargs), "")
        hidden = args[0] if args else kwargs.get(keyword)
        if number and hidden is not self._hidden:
            raise SplitError(
                f"its forward changes the hidden state between block {number - 1} and block {number}"
            )
        if not isinstance(hidden, Tensor):
            raise SplitError(
                f"its forward gives block {number} a {type(hidden).__name__} in the place of the hidden state"
            )
        self._hidden = hidden
        rest = {name: value for name, value in kwargs.items() if name != keyword}
        self.calls.append(Call(args[1:], rest, keyword))
        if number == self.stop:
            raise Stopped(hidden)
        if number == self.count - 1 and self.last is not None:
            hidden = self.last
        if not self.form:
            return hidden
        self.rests += (rests := [Rest() for _ in range(self.form - 1)])
        return (hidden, *rests)


class Stub(nn.Module):
    """A block's place in the forward, with the block's attributes."""

    def __init__(self, block: nn.Module, number: int, run: Run) -> None:
        super().__init__()
        self.__dict__.update(block=block, number=number, run=run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.reach(self.number, args, kwargs)


class Absent(nn.Module):
    """A module with parameters that a run does without: NaN in the place of what it would return."""

    def __init__(self, module: nn.Module, path: str, run: Run) -> None:
        super().__init__()
        self.__dict__.update(module=module, path=path, run=run)
        dtype = next(module.parameters()).dtype
        # A model finds its dtype and device by its parameters, and other stages' may be on the meta device.
        self._parameters["_"] = nn.Parameter(nan((), dtype, run.device), requires_grad=False)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["module"], name)
        if isinstance(value, Tensor) and value.is_floating_point():
            # Those of other processes are on the meta device.
            return nan(value.shape, value.dtype, self.run.device if value.is_meta else value.device)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.run.modules.append((self.path, len(self.run.calls)))
        if self.run.probe is not None and not self.run.calls:
            return self.run.probe
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        dtype = next(self.module.parameters()).dtype
        if not tensors:
            return nan((), dtype, None)
        hidden = next((one for one in tensors if one.dim() > 2 and one.is_floating_point()), None)
        if hidden is not None:
            width = getattr(self.module, "out_features", hidden.shape[-1])
            return nan((*hidden.shape[:-1], width), hidden.dtype, hidden.device)
        tables = [part.embedding_dim for part in self.module.modules() if isinstance(part, nn.Embedding)]
        if tables:
            return nan((*tensors[0].shape[:2], tables[0]), dtype, tensors[0].device)
        return nan(tensors[0].shape, dtype, tensors[0].device)


def nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
