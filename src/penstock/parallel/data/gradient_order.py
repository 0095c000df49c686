"""In which order a backward completes its parameters' gradients, read off the loss's graph before it runs.

The autograd engine runs, of all nodes that are ready, the one that was made last; so a loss's leaves come up in about
the reverse of the order in which the forward used them, and a leaf used several times comes up with its first use.
"""

from __future__ import annotations

import heapq
from typing import Any

from torch import Tensor

from penstock.errors import PenstockError


def parameter_order(*losses: Tensor) -> list[Tensor]:
    """The leaves a backward from these losses gives gradients to, in the order in which they become complete.

    The graph is walked as the engine of one device walks it (torch/csrc/autograd/engine.cpp, ``CompareNodeTaskTime``):
    a node runs when all nodes that feed it have run, among those the latest made first, leaves before all others.

    Args:
        losses: the roots, or anything else with a graph.

    Returns:
        Leaf tensors that require a gradient, each once.

    Raises:
        PenstockError: a loss has no graph.
    """
    roots: list[Any] = []
    for loss in losses:
        if not loss.requires_grad:
            raise PenstockError(
                "the loss has no graph to take the order from: it was made without gradients, or of nothing that needs one"
            )
        roots.append(loss.grad_fn)
    if any(root is None for root in roots):
        raise PenstockError(
            "a leaf has no graph to take the order from; give the loss that was computed of it"
        )
    waits_for: dict[Any, int] = {}
    todo = list(dict.fromkeys(roots))
    seen = set(todo)
    while todo:
        for following, _ in todo.pop().next_functions:
            if following is not None:
                waits_for[following] = waits_for.get(following, 0) + 1
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    heap: list[tuple[int, int, Any]] = []

    def push(node: Any) -> None:
        leaf = hasattr(node, "variable")
        heapq.heappush(heap, (-(1 << 62) if leaf else -node._sequence_nr(), len(heap), node))

    for root in dict.fromkeys(roots):
        if not waits_for.get(root):
            push(root)
    order: list[Tensor] = []
    while heap:
        _, _, node = heapq.heappop(heap)
        if hasattr(node, "variable"):
            order.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None:
                waits_for[following] -= 1
                if not waits_for[following]:
                    push(following)
    return order
