"""Results of a step that may not be complete on all ranks yet: reading them waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from penstock.runtime.batch.result import StepResult


class FlowingResult(StepResult):
    """Result of a step with ``flow=True``; see `StepResult`. Reading an attribute waits until all ranks have done the step.

    Raises:
        NonFiniteError: when an attribute is read, if a loss or a gradient of the step was NaN or infinite.
        PenstockError: when an attribute is read, if the step failed.
    """

    def __init__(self, wait: Callable[[], StepResult]) -> None:
        object.__setattr__(self, "_wait", wait)
        object.__setattr__(self, "_result", None)

    def _read(self) -> StepResult:
        result: StepResult | None = self.__dict__["_result"]
        if result is None:
            result = self.__dict__["_wait"]()
            object.__setattr__(self, "_result", result)
            object.__setattr__(self, "_wait", None)
        return result

    @property
    def loss(self) -> Tensor | None:
        """0-d tensor, the loss of the step."""
        return self._read().loss

    @property
    def losses(self) -> Tensor | None:
        """Losses by microbatch id, shape (microbatches,)."""
        return self._read().losses

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """Terms of the loss by name."""
        return self._read().parts

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Outputs of the last stage by microbatch id; see `StepResult.outputs`."""
        return self._read().outputs

    @property
    def input_grads(self) -> tuple[Any, ...]:
        """Gradients of the inputs by microbatch id; see `StepResult.input_grads`."""
        return self._read().input_grads
