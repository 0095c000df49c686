"""The norm of all gradients, the same number on every rank and whatever the split."""

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
    """What has a gradient here.

    Attributes:
        place: of the parameter in the whole model.
        parameter: itself, or the piece of it that this replica updates.
        counts: whether this rank's copy is the one that counts.
        cut: whether other processes hold the parameter's other parts.
    """

    place: int
    parameter: nn.Parameter
    counts: bool
    cut: bool


def held(
    parameters: LocalParameters, shards: Shards | None, places: Mapping[str, int]
) -> list[CountedGradient]:
    """What this process may have gradients of.

    Args:
        parameters: its parameters.
        shards: the pieces of them that it updates, if that is divided among replicas.
        places: of all parameters in the whole model, by name.
    """
    found = []
    for name, whole, counts in parameters.counted():
        part = None if shards is None else shards.find(whole)
        updated = whole if shards is None else None if part is None else part.shard
        if updated is not None:
            found.append(CountedGradient(places[name], updated, counts, is_sharded(whole)))
    return found


def clip_(
    parameters: Sequence[CountedGradient],
    max_norm: float,
    count: int,
    world: World | None,
    divided: bool = False,
) -> Tensor:
    """Clip gradients by their global 2-norm.

    Each parameter's norm is put in its own place of one vector; ranks fill in the places they hold. So every rank
    takes the norm of the same vector, and the result does not depend on which rank held what.

    Args:
        parameters: what this process has gradients of.
        max_norm: the largest norm allowed.
        count: how many parameters the whole model has.
        world: the other ranks; None if all parameters are here.
        divided: what is given are pieces of parameters, of which the replicas have the others.

    Returns:
        0-d tensor, the norm before clipping.
    """
    places = torch.zeros(count, dtype=torch.float64)
    cut = torch.zeros(count, dtype=torch.float64)  # squares, of this process's part
    pieces = torch.zeros(
        count, dtype=torch.float64
    )  # squares, of what the replicas have divided and is not cut as well
    present = torch.zeros(len(_DTYPES), count, dtype=torch.float64)
    for one in parameters:
        if one.parameter.grad is None or not one.counts:
            continue
        if one.parameter.grad.layout == torch.sparse_coo:  # whose values then share its memory
            one.parameter.grad = one.parameter.grad.coalesce()
        grad = local(one.parameter.grad)
        norm = torch.linalg.vector_norm(grad if grad.is_complex() else real_values(grad))
        present[_DTYPES.index(grad.dtype), one.place] = 1.0
        norm = norm.double()
        if one.cut:
            cut[one.place] = norm.square()
        elif divided:
            pieces[one.place] = norm.square()
        else:
            places[one.place] = norm
    if world is not None:
        for column in (cut, pieces, present) if divided else ():
            world.add_up_replicas(column)
        world.add_up_tensor_parallel(cut)
        for column in (places, cut, pieces, present):
            world.add_up(column)
    places += (cut + pieces).sqrt()
    total = _total(places, present)
    parts = [
        _Gradient(real_values(local(h.parameter.grad))) for h in parameters if h.parameter.grad is not None
    ]
    nn.utils.clip_grads_with_norm_(parts, max_norm, total)  # type: ignore[arg-type]
    return total


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def _total(norms: Tensor, present: Tensor) -> Tensor:
    """The norm of the norms as torch computes it, which takes gradients of one dtype together.

    Args:
        norms: float64, by parameter.
        present: (dtype, parameter), not 0 where there is a gradient of that dtype.
    """
    dtypes = [dtype for dtype, row in zip(_DTYPES, present, strict=True) if row.any()]
    if len(dtypes) == 1 and not dtypes[0].is_complex:
        total: Tensor = torch.linalg.vector_norm(norms[present.any(0)].to(dtypes[0]))
        return total
    # One number has itself as its norm, so these stand for the gradients.
    each = [
        norms[n].to(_DTYPES[int(present[:, n].argmax())]).reshape(1)
        for n in present.any(0).nonzero().flatten()
    ]
    return nn.utils.get_total_norm(each)


class _Gradient:
    """The part of a gradient that this process holds, where torch looks for it."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
