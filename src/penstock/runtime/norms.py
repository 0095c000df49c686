"""The norm of all gradients, the same number on every rank and whatever the split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.parallel.local import is_cut, local
from penstock.runtime.world import World


def clip_(
    parameters: Sequence[tuple[int, nn.Parameter, bool]],
    max_norm: float,
    count: int,
    world: World | None,
    divided: bool = False,
) -> Tensor:
    """Clip gradients by their global 2-norm.

    Each parameter's norm is put in its own place of one vector; ranks fill in the places they hold. So every rank
    takes the norm of the same vector, and the result does not depend on which rank held what.

    Args:
        parameters: (place in the whole model, parameter, whether this rank's copy is the one that counts).
        max_norm: the largest norm allowed.
        count: how many parameters the whole model has.
        world: the other ranks; None if all parameters are here.
        divided: what is given are pieces of parameters, of which the replicas have the others.

    Returns:
        0-d tensor, the norm before clipping.
    """
    held = [p for _, p, _ in parameters if p.grad is not None]
    places = torch.zeros(count, dtype=torch.float64)
    squares = torch.zeros(count, dtype=torch.float64)  # of parameters that are cut, by this process's part
    present = torch.zeros(count, dtype=torch.float64)
    for place, parameter, counts in parameters:
        if parameter.grad is None or not counts:
            continue
        norm = torch.linalg.vector_norm(local(parameter.grad)).double()
        if divided or is_cut(parameter.grad):
            squares[place] = norm.square()
        else:
            places[place] = norm
        present[place] = 1.0
    if world is not None:
        if divided:
            world.add_up_replicas(squares)
            world.add_up_replicas(present)
        world.add_up_tensor_parallel(squares)
        for column in (places, squares, present):
            world.add_up(column)
    places += squares.sqrt()
    total: Tensor = torch.linalg.vector_norm(places[present > 0].float())
    parts = [_Held(local(p.grad)) for p in held if p.grad is not None]
    nn.utils.clip_grads_with_norm_(parts, max_norm, total)  # type: ignore[arg-type]
    return total


class _Held:
    """The part of a gradient that this process holds, where torch looks for it."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
