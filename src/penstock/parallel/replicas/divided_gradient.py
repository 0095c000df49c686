"""Marks in ``.grad`` of a parameter whose gradient is divided among the replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn

from torch import Tensor

from penstock.base.errors import PenstockError
from penstock.parallel.dtensor import gradient_dtype

Change = Literal["dropped", "replaced"]
"""Change of a mark in ``.grad`` by a program: to None, or to another gradient."""


class DividedGradient(Tensor):
    """A gradient without values, which refuses every operation.

    ``torch.nn.utils.clip_grad_norm_`` and loops over gradients skip parameters whose ``.grad`` is None, and so would do
    nothing to those that the optimizer gets.
    """

    of: str
    """Name of the parameter."""

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> DividedGradient:
        """Return one of a parameter's shape."""
        made: DividedGradient = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=gradient_dtype(parameter),
            device=parameter.device,
        )
        made.of = name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        given = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
        name = next((x.of for x in given if isinstance(x, DividedGradient)), "a parameter")
        raise PenstockError(
            f"the gradient of {name} is divided among the replicas (zero or shard), so {func} has no values to work on. "
            "Clip with pipe.clip_grad_norm_(max_norm) or PipelineOptimizer(pipe, ..., clip=max_norm); to read or change "
            "gradients yourself, use p.grad of pipe.updated(rank), which are this process's parts"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch gives it contents
        return f"DividedGradient({self.of}, shape={tuple(self.shape)})"


def require_not_replaced(changes: Mapping[str, Change]) -> None:
    """Raise if a program has put another gradient in place of a mark, since the shards do not take it."""
    if name := next((name for name, change in changes.items() if change == "replaced"), None):
        raise PenstockError(
            f"the gradient of {name} was replaced, and is divided among the replicas (zero or shard), so the update would "
            "not use the new one. Change p.grad of pipe.updated(rank), which are this process's parts. No weight was "
            "changed; pipe.zero_grad() drops all gradients"
        )


def require_same_changes(rows: Iterable[tuple[int, Mapping[str, Change]]]) -> None:
    """Raise unless all processes of one rank have changed the same; a row is of one process: its rank, changes by name."""
    of_rank: dict[int, Mapping[str, Change]] = {}
    for rank, changes in rows:
        require_not_replaced(changes)
        others = of_rank.setdefault(rank, changes)
        if odd := sorted(set(changes) ^ set(others)):
            raise PenstockError(
                f"the gradient of {odd[0]} was set to None on some of the processes that divide its update, and not on all; "
                "drop it on all or on none. No weight was changed; pipe.zero_grad() drops all gradients"
            )
