"""Norm of all gradients, the same number on every rank and for any split."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.parallel.dtensor import full_tensor, is_sharded, local, real_values
from penstock.parallel.replicas.shards import Shards
from penstock.runtime.weights.parameters import LocalParameters
from penstock.runtime.workers.world import World
from penstock.stage.split_backward.intercepted import has_local_uses


class CountedGradient(NamedTuple):
    """A parameter that may have a gradient on this process."""

    position: int
    parameter: nn.Parameter
    counts: bool
    tensor_parallel: bool
    expert: bool


class GlobalNorm:
    """Norm of the gradients of all parameters of a pipeline.

    Each parameter's norm is put at its position in one vector; ranks fill in the parameters they hold. So every rank
    computes the norm of the same vector, and the result does not depend on which rank held what.
    """

    def __init__(self, parameters: LocalParameters, world: World | None) -> None:
        self._parameters = parameters
        self._world = world

    @cached_property
    def _positions(self) -> tuple[dict[str, int], int]:
        return self._parameters.positions(self._world)

    def gradients(self, shards: Shards | None) -> list[CountedGradient]:
        """Return the parameters that may have gradients on this process."""
        gradients = []
        for name, parameter, counts in self._parameters.counted():
            sharded = None if shards is None else shards.find(parameter)
            updated = parameter if sharded is None else sharded.shard
            if updated is not None:
                position = self._positions[0][name]
                ours = is_sharded(parameter) and self._world is not None and self._world.shards_matrices
                expert = ours and has_local_uses(parameter)
                gradients.append(CountedGradient(position, updated, counts, ours and not expert, expert))
        return gradients

    def clip_(self, max_norm: float, shards: Shards | None) -> Tensor:
        """Clip gradients by their global 2-norm, and return the norm before clipping, 0-d; every process calls it."""
        gradients, world = self.gradients(shards), self._world
        count = self._positions[1]
        # Norms of parameters whose gradient is all here; squares of shards, to add over tensor-parallel ranks, of shards to
        # add over replicas, and of experts, to add over all that divide them.
        norms, tensor_squares, zero_squares, expert_squares = torch.zeros(4, count, dtype=torch.float64)
        present = torch.zeros(len(_DTYPES), count, dtype=torch.float64)
        found: list[tuple[Tensor, int, Tensor]] = []
        for position, parameter, counts, tensor_parallel, expert in gradients:
            if parameter.grad is None or not counts:
                continue
            norm, dtype = _norm_of(parameter, parameter.grad, is_shard=tensor_parallel or expert)
            present[dtype, position] = 1.0
            if expert:
                found.append((expert_squares, position, norm.square()))
            elif tensor_parallel:
                found.append((tensor_squares, position, norm.square()))
            elif shards is not None:
                found.append((zero_squares, position, norm.square()))
            else:
                found.append((norms, position, norm))
        device = found[0][2].device if found else torch.device("cpu")
        if found:  # one copy from a GPU, for which the host waits once
            values = torch.stack([norm.to(device) for _, _, norm in found]).cpu()
            for (column, position, _), value in zip(found, values, strict=True):
                column[position] = value
        if world is not None:
            for column in (tensor_squares, zero_squares, present) if shards is not None else ():
                world.all_reduce_dp(column)
            for axis in world.axes:
                axis.sum_norms({"tp": tensor_squares, "ep": expert_squares}, present, shards is not None)
            for column in (norms, tensor_squares, zero_squares, expert_squares, present):
                world.all_reduce(column)
        norms += (tensor_squares + zero_squares + expert_squares).sqrt()
        total = _total(norms.to(device), present.to(device))
        clipped = [_Gradient(real_values(local(p.grad))) for _, p, *_ in gradients if p.grad is not None]
        nn.utils.clip_grads_with_norm_(clipped, max_norm, total)  # type: ignore[arg-type]  # which needs .grad alone
        return total


def _norm_of(parameter: nn.Parameter, grad: Tensor, is_shard: bool) -> tuple[Tensor, int]:
    """Return the norm of a gradient in float64, and its dtype's index.

    Args:
        is_shard: whether this process's shard alone counts. Otherwise the norm is over all shards of a gradient that the
            caller's own code sharded (FSDP2, ``parallelize_module``), and all their processes call this.
    """
    if grad.layout == torch.sparse_coo:  # once coalesced, its values share its memory
        parameter.grad = grad = grad.coalesce()
    if is_sharded(grad) and not is_shard:
        with torch.no_grad():
            return full_tensor(torch.linalg.vector_norm(grad)).double(), _DTYPES.index(grad.dtype)
    grad = local(grad)
    values = grad if grad.is_complex() else real_values(grad)
    # As torch's own norm of all gradients does on a GPU; it adds in another order than the function for one tensor.
    norm = torch._foreach_norm([values])[0] if values.is_cuda else torch.linalg.vector_norm(values)
    return norm.double(), _DTYPES.index(grad.dtype)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def _total(norms: Tensor, present: Tensor) -> Tensor:
    """Return the norm of the norms as torch computes it, which groups gradients by dtype.

    Args:
        norms: norm of each parameter's gradient, float64, shape (parameters,).
        present: shape (dtypes, parameters), not 0 where there is a gradient of that dtype.
    """
    dtypes = [dtype for dtype, row in zip(_DTYPES, present, strict=True) if row.any()]
    if len(dtypes) == 1 and not dtypes[0].is_complex:
        total: Tensor = torch.linalg.vector_norm(norms[present.any(0)].to(dtypes[0]))
        return total
    # The norm of one number is the number, so these replace the gradients.
    each = [
        norms[n].to(_DTYPES[int(present[:, n].argmax())]).reshape(1)
        for n in present.any(0).nonzero().flatten()
    ]
    return nn.utils.get_total_norm(each)


class _Gradient:
    """This process's shard of a gradient, in the attribute that torch reads."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
