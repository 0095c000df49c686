"""Comparison of a trainer's loss of two microbatches as one with the mean of their losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.huggingface.part_collator import EXAMPLES, PARTS, TOGETHER

_NEAR, _NEAR_IN_HALF = 1e-5, 1e-3
"""Relative difference of two losses that other padding and another order of sums explain, in float32 and with fewer bits.

In float32 a mean over rows differs by less than 1e-6 (Llama of width 64, losses of TRL).
"""
_SMALL = 0.1
"""Loss below which differences are relative to it: a small loss may be the difference of larger numbers."""
_OF_A_BATCH = ("kto", "aot", "aot_unpaired", "sft")
"""Losses of TRL's DPOTrainer and KTOTrainer that sort the examples of a batch, or take a mean over them or their tokens."""


class BatchLossCheck:
    """Finds a loss that is not the mean over its microbatches, as with negatives within a batch, and warns of it once.

    TRL's losses of that kind are known by name. Others are compared: of the model as it is, and of one with other logits,
    since a loss of preferences that ranks the examples of a batch, or subtracts their mean, differs only where the model
    differs from its reference.

    Args:
        trainer: the trainer.
        model: the model whose blocks are the stages, without adapters' wrapper.
        of_libraries: whether code of transformers or TRL alone computes the loss.
        autocast: dtype in which the model computes; None for its own.

    Attributes:
        moves_logits: whether evaluations are of the model with other logits now.
    """

    def __init__(self, trainer: Any, model: Any, of_libraries: bool, autocast: torch.dtype | None) -> None:
        self._name, self._of_libraries = type(trainer).__name__, of_libraries
        whole = model.dtype is torch.float32 and not getattr(model, "is_quantized", False)
        exact = whole and autocast is None and torch.get_float32_matmul_precision() == "highest"
        self._near = _NEAR if exact else _NEAR_IN_HALF
        self.moves_logits = False
        self._told = of_libraries and self._tell_of_named_losses(trainer)

    def compares(self, batch: Mapping[str, Any]) -> bool:
        """Return whether a batch is compared: if it has two microbatches as one, and nothing was told."""
        if TOGETHER not in batch or self._told:
            return False
        # Where rows are packed, one of all examples may be too long for a device.
        as_many = _rows(batch[TOGETHER]) == sum(map(_rows, batch[PARTS][:2]))
        return as_many or not self._of_libraries

    def compare(self, batch: Mapping[str, Any], loss: Callable[[Mapping[str, Any], int, int], float]) -> None:
        """Compare the losses of a batch's first two microbatches with that of both as one.

        Args:
            loss: returns the weighted loss of inputs with so many of so many examples; NaN where it is not known.
        """
        (one, other), (n, m) = batch[PARTS][:2], batch[EXAMPLES][:2]
        given = ((one, n), (other, m), (one, n), (batch[TOGETHER], n + m))
        try:
            for moves in (False, True):
                self.moves_logits = moves
                first, second, again, whole = [loss(inputs, count, n + m) for inputs, count in given]
                # Not of a loss that draws, which has another value each time, nor one that reads weights of other processes.
                if again != first or any(math.isnan(each) for each in (first, second, whole)):
                    return
                mean = first + second
                if abs(mean - whole) > self._near * max(abs(mean), abs(whole), _SMALL):
                    self._tell(mean, whole)
                    return
        except ConfigError:
            return  # what evaluations refuse, such as images that do not belong to rows, says nothing of the loss
        finally:
            self.moves_logits = False

    def _tell_of_named_losses(self, trainer: Any) -> bool:
        """Warn of a loss of TRL that is of a whole batch; return whether it is one."""
        types = getattr(trainer, "loss_types", None) or [getattr(trainer, "loss_type", None)]
        named = [name for name in _OF_A_BATCH if name in types]
        if named:
            warnings.warn(
                f"{self._name}'s loss {named[0]!r} compares the examples of a batch, or takes a mean over them, and the "
                f"pipeline computes it of each microbatch, as plain {self._name} does of as many accumulated batches; the "
                "fewer microbatches, the nearer it is to the loss of the batch",
                stacklevel=5,
            )
        return bool(named)

    def _tell(self, mean: float, whole: float) -> None:
        self._told = True
        of_model = ", for other logits than those that the model has now" if self.moves_logits else ""
        warnings.warn(
            f"{self._name}.compute_loss gives {whole:.6g} for two microbatches as one, and {mean:.6g} as their mean"
            f"{of_model}: it is neither a mean over examples nor a sum over targets divided by num_items_in_batch (as with "
            "negatives within a batch, class weights, a sum over the batch, a mean over its tokens, or TRL's KTO and AOT). "
            "The pipeline trains with the mean of the microbatches, as plain Trainer does with as many accumulated batches. "
            "Take fewer microbatches, or write the loss as a mean over examples. This is said once, and compared now and "
            "then",
            stacklevel=4,
        )


def _rows(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of what a collator makes."""
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()), 0)
