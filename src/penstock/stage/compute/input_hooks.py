"""Hooks that layers set on what they are given, where plain PyTorch would call them with more than one stage knows.

A hook on a tensor is called with the sum of the gradients of all its uses. Of a stage's input, that stage has only its own
uses; if the layers before use the tensor as well, in an auxiliary loss or as a second output, the hook would see a part of
the sum. So the gradients that travel back say on which inputs there is a hook, and the stage that made them refuses if it
has other uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.errors import PenstockError
from penstock.stage.values import Collecting

_Edge = tuple[Node, int]


def follow_hooks(
    roots: Sequence[GradientEdge], hooked: Sequence[bool], collecting: Collecting
) -> Sequence[bool]:
    """Which inputs of a segment have a hook, set by its own layers or, where it only passes them on, by later ones.

    Args:
        roots: what the segment handed on, and needs a gradient.
        hooked: for each of them, whether a later layer has set a hook on it.
        collecting: the segment's inputs.

    Raises:
        PenstockError: there is a hook on a tensor that the segment uses itself, or hands on twice.
    """
    if True not in hooked:
        return collecting.hooked
    edges: list[_Edge] = [(root.node, root.output_nr) for root in roots]
    wanted = {edge for edge, there in zip(edges, hooked, strict=True) if there}
    uses = Counter(edges) + Counter(_edges_behind(edges))
    if any(uses[edge] > 1 for edge in wanted):
        raise PenstockError(
            "a layer sets a hook on a tensor that it is given (tensor.register_hook), and layers of the stage before use "
            "that tensor, too (in an auxiliary loss, or as a second output): the hook would be called with a part of its "
            "gradient. Set the hook in the layer that makes the tensor, or keep both layers on one stage (split=...)"
        )
    nodes = collecting.nodes or (None,) * len(collecting.leaves)
    passed = [
        (get_gradient_edge(leaf).node if node is None else node, 0) in wanted
        for leaf, node in zip(collecting.leaves, nodes, strict=True)
    ]
    own = collecting.hooked or (False,) * len(passed)
    return [a or b for a, b in zip(own, passed, strict=True)]


def _edges_behind(roots: Sequence[_Edge]) -> list[_Edge]:
    """All edges of the graph behind some roots, as often as they are there."""
    waiting = list({node for node, _ in roots})
    seen, found = set(waiting), []
    while waiting:
        for node, number in waiting.pop().next_functions:
            if node is None:
                continue
            found.append((node, number))
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return found
