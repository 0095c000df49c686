"""Parameters of one process that share memory: copies of a stage, replicas and tied weights of ranks that are threads.

For autograd each is a parameter of its own, for the user they are one. What the user says of one holds for all.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Aliases:
    """The parameters of a process, those that share memory together.

    Args:
        parameters: of all modules of the process.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        found: dict[object, dict[int, nn.Parameter]] = {}
        for p in parameters:
            if p.numel() and not p.is_meta:
                found.setdefault((p.data_ptr(), p.shape, p.dtype), {})[id(p)] = p
        self.groups = [tuple(group.values()) for group in found.values() if len(group) > 1]
        self._flags = [group[0].requires_grad for group in self.groups]

    def follow(self) -> None:
        """Let all of a group require a gradient, or none, where that was changed for some of them since the last call."""
        for n, group in enumerate(self.groups):
            before = self._flags[n]
            if any(p.requires_grad != before for p in group):
                self._flags[n] = not before
                for p in group:
                    p.requires_grad_(not before)
