"""Marks in ``.grad`` of a parameter whose gradient is divided among the replicas."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from penstock.base.errors import PenstockError
from penstock.parallel.dtensor import gradient_dtype


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
