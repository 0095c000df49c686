"""The exchange of keys and values between the processes that divide the tokens of samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.parallel.axis import Processes
from penstock.parallel.context.attention import Masks
from penstock.parallel.layer_exchange import LayerExchange
from penstock.parallel.mesh import Mesh
from penstock.parallel.participant import Step


class TokenExchange(LayerExchange):
    """This process among those with the other tokens of its samples.

    Attributes:
        masks: of attention, which layers of a step share.
    """

    def __init__(self, processes: Processes, mesh: Mesh) -> None:
        shape = mesh.shape
        lines = processes.lines(lambda rank: shape.line(rank, "cp"))
        super().__init__(processes, "cp", lines, "which has the other tokens of the same samples")
        self.masks: Masks = {}

    @property
    def microbatches(self) -> int:
        """Number of a replica's microbatches in the step."""
        return 1 if self.step is None else self.step.microbatches

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.masks.clear()

    def start_gather(self, part: Tensor) -> Callable[[], Tensor]:
        """Gather the tensors of all processes that divide the tokens of a sample, along a new dimension 0."""
        out = part.new_empty(self.size, *part.shape)
        start = partial(_ALL_GATHER, out.flatten(0, 1), part.contiguous(), group=self.group, async_op=True)
        return self.start(start, out, self.group, "gather keys and values")

    def start_sum(self, whole: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Sum this process's row in dimension 0 over those that divide the tokens; return its tensor at once, too."""
        out = whole.new_empty(whole.shape[1:])
        whole, action = whole.contiguous(), "add up gradients of keys and values"
        if whole.is_cuda:
            start = partial(_REDUCE_SCATTER, out, whole.flatten(0, 1), group=self.group, async_op=True)
            return out, self.start(start, out, self.group, action)
        # Gloo's reduce-scatter is an all-reduce, which sends twice as much.
        parts = torch.empty_like(whole)
        finish = self.start(
            partial(dist.all_to_all_single, parts, whole, group=self.group, async_op=True),
            parts,
            self.group,
            action,
        )
        return out, lambda: torch.sum(finish(), 0, out=out)


# The first names exist from torch 2.12 on, where the second ones warn.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
