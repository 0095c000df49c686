"""Forwards of models' own, by what they have in common; importing this fills `tests.zoo.forward.FORWARDS`."""

from __future__ import annotations

from tests.zoo.forwards import attributes, calls, inputs, loops, modes

__all__ = ["attributes", "calls", "inputs", "loops", "modes"]
