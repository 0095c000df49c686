"""The order in which a backward completes its parameters' gradients, from the loss's graph before it runs.

Among the ready nodes the autograd engine runs the one that was created last. So a loss's leaves complete in about the
reverse of the order in which the forward used them, and a leaf used several times completes at its first use.
"""

from __future__ import annotations

import heapq
from typing import Any

from torch import Tensor

from penstock.errors import PenstockError


def parameter_order(*losses: Tensor) -> list[Tensor]:
    """Return the leaves that a backward from these losses gives gradients, in the order in which they become complete.

    It walks the graph as the engine of one device does (torch/csrc/autograd/engine.cpp, ``CompareNodeTaskTime``): a node
    runs when all nodes that feed it have run; among the ready ones the latest created runs first, and leaves before others.

    Args:
        losses: losses, or other tensors with a graph.

    Returns:
        Leaf tensors that require a gradient, each once.

    Raises:
        PenstockError: if a loss has no graph.
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
            "a leaf has no graph to take the order from; give the loss that was computed from it"
        )
    waits_for: dict[Any, int] = {}
    pending = list(dict.fromkeys(roots))
    visited = set(pending)
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is not None:
                waits_for[following] = waits_for.get(following, 0) + 1
                if following not in visited:
                    visited.add(following)
                    pending.append(following)
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
