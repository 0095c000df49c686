"""States of weights and optimizers: those of several processes as one has them, and their equality."""

from __future__ import annotations

import torch

BY_NAME = ("parameters", "state", "main_weights")


def joined(parts: list[tuple[dict, dict]]) -> tuple[dict, dict]:
    weights = {name: value for part, _ in parts for name, value in part.items()}
    state = dict(parts[0][1])
    for key in BY_NAME:
        state[key] = {name: value for _, part in parts for name, value in part[key].items()}
    return weights, state


def assert_equal(ours: object, theirs: object, where: str = "", tolerance: float = 0.0) -> None:
    """Equal through and through, tensors in dtype, and bit for bit or within a tolerance."""
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        if tolerance:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}/{key}", tolerance)
    else:
        assert ours == theirs, where
