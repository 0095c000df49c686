"""Norm of all gradients, the same number on every rank and for any split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.parallel.data.shards import Shards
from penstock.parallel.dtensor import is_sharded, local, real_values
from penstock.runtime.weights.parameters import LocalParameters
from penstock.runtime.workers.world import World


class CountedGradient(NamedTuple):
    """A parameter that may have a gradient on this process.

    Attributes:
        position: position of the parameter in the whole model.
        parameter: the parameter, or the shard of it that this replica updates.
        counts: whether this rank's copy counts.
        tensor_parallel: whether other tensor-parallel ranks hold the parameter's other shards.
    """

    position: int
    parameter: nn.Parameter
    counts: bool
    tensor_parallel: bool


def counted_gradients(
    parameters: LocalParameters, shards: Shards | None, positions: Mapping[str, int]
) -> list[CountedGradient]:
    """Return the parameters that may have gradients on this process.

    Args:
        parameters: parameters of this process.
        shards: shards of them that this process updates with ZeRO; None without.
        positions: positions of all parameters in the whole model, by name.
    """
    gradients = []
    for name, parameter, counts in parameters.counted():
        sharded = None if shards is None else shards.find(parameter)
        updated = parameter if shards is None else None if sharded is None else sharded.shard
        if updated is not None:
            gradients.append(CountedGradient(positions[name], updated, counts, is_sharded(parameter)))
    return gradients


def clip_(
    gradients: Sequence[CountedGradient],
    max_norm: float,
    count: int,
    world: World | None,
    sharded: bool = False,
) -> Tensor:
    """Clip gradients by their global 2-norm.

    Each parameter's norm is put at its position in one vector; ranks fill in the parameters they hold. So every rank
    computes the norm of the same vector, and the result does not depend on which rank held what.

    Args:
        gradients: parameters of this process that may have gradients.
        max_norm: largest norm after clipping.
        count: number of parameters in the whole model.
        world: the pipeline's processes; None if all parameters are here.
        sharded: whether the parameters are shards of ZeRO (default False), so that the other replicas have the rest.

    Returns:
        0-d tensor, the norm before clipping.
    """
    norms = torch.zeros(count, dtype=torch.float64)  # of parameters whose gradient is all here
    tensor_squares = torch.zeros(count, dtype=torch.float64)  # of shards, to add over tensor-parallel ranks
    zero_squares = torch.zeros(count, dtype=torch.float64)  # of shards, to add over replicas
    present = torch.zeros(len(_DTYPES), count, dtype=torch.float64)
    for position, parameter, counts, tensor_parallel in gradients:
        if parameter.grad is None or not counts:
            continue
        if parameter.grad.layout == torch.sparse_coo:  # once coalesced, its values share its memory
            parameter.grad = parameter.grad.coalesce()
        grad = local(parameter.grad)
        norm = torch.linalg.vector_norm(grad if grad.is_complex() else real_values(grad)).double()
        present[_DTYPES.index(grad.dtype), position] = 1.0
        if tensor_parallel:
            tensor_squares[position] = norm.square()
        elif sharded:
            zero_squares[position] = norm.square()
        else:
            norms[position] = norm
    if world is not None:
        for column in (tensor_squares, zero_squares, present) if sharded else ():
            world.add_up_replicas(column)
        world.add_up_tensor_parallel(tensor_squares)
        for column in (norms, tensor_squares, zero_squares, present):
            world.add_up(column)
    norms += (tensor_squares + zero_squares).sqrt()
    total = _total(norms, present)
    clipped = [
        _Gradient(real_values(local(g.parameter.grad))) for g in gradients if g.parameter.grad is not None
    ]
    nn.utils.clip_grads_with_norm_(clipped, max_norm, total)  # type: ignore[arg-type]
    return total


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
