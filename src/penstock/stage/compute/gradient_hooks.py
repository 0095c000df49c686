"""Hooks on tensors whose gradient is a sum over several stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.base.errors import PenstockError
from penstock.stage.input_grads import InputGrads


def graph_nodes(roots: Iterable[Any]) -> set[Any]:
    """Return some nodes of the autograd graph and all nodes behind them; a None among them is ignored."""
    nodes = {root for root in roots if root is not None}
    pending = list(nodes)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                pending.append(node)
    return nodes


def follow_hooks(
    roots: Sequence[GradientEdge], hooked: Sequence[bool], input_grads: InputGrads
) -> Sequence[bool]:
    """Return for each input of a segment whether its layers, or later ones that it is passed on to, have a hook on it.

    PyTorch calls a tensor's hook with the sum of the gradients of all its uses. A stage sees only its own uses of an input.
    If earlier layers use the tensor as well, in an auxiliary loss or as a second output, the hook would get a part of the
    sum. So the gradients that travel back say which inputs have a hook, and the stage that made such a tensor raises if it
    has other uses.
    """
    if True not in hooked:
        return input_grads.hooked
    edges = [(root.node, root.output_nr) for root in roots]
    hooked_edges = {edge for edge, has_hook in zip(edges, hooked, strict=True) if has_hook}
    uses = Counter(edges)
    uses.update(
        (node, number)
        for behind in graph_nodes(node for node, _ in edges)
        for node, number in behind.next_functions
        if node is not None
    )
    if any(uses[edge] > 1 for edge in hooked_edges):
        raise PenstockError(
            "a layer sets a hook on a tensor that it is given (tensor.register_hook), and layers of the stage before use "
            "that tensor, too (in an auxiliary loss, say): the hook would get a part of its gradient. Set the hook in the "
            "layer that makes the tensor, or keep both layers on one stage (split=...)"
        )
    nodes = input_grads.nodes or (None,) * len(input_grads.leaves)
    passed_on = [
        (get_gradient_edge(leaf).node if node is None else node, 0) in hooked_edges
        for leaf, node in zip(input_grads.leaves, nodes, strict=True)
    ]
    own_hooks = input_grads.hooked or (False,) * len(passed_on)
    return [a or b for a, b in zip(own_hooks, passed_on, strict=True)]
