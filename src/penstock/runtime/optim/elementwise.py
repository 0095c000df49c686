"""Trials of optimizers: whether one updates each element by itself, so that processes may each update a part of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.parallel.replicas.shard_slice import NOT_ELEMENTWISE

MakeOptimizer = Callable[..., torch.optim.Optimizer]

_FACTORS = (1.0, 30.0, 0.01, 1.0, 5.0, 0.2, 1.0, 100.0, 1.0, 1.0, 0.1, 1.0)
"""Factors of the gradients by step, so that thresholds are passed in both directions."""

_LR = 0.1
"""Learning rate of a trial, since a schedule may begin at 0."""


def needs_whole(make: MakeOptimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether an optimizer needs whole tensors: torch's by their names, any other by a trial."""
    named = getattr(make, "func", make)  # of a functools.partial
    if isinstance(named, type) and named.__module__.startswith("torch.optim"):
        return named.__name__ in NOT_ELEMENTWISE
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return _differs(make, options, device)


def _differs(make: MakeOptimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether the update of parts of a matrix differs from that of the whole, or cannot be tried."""
    generator = torch.Generator().manual_seed(0)
    # Rows and columns of different size, so that parts have other norms than the whole.
    scale = torch.arange(1.0, 7.0)[:, None] * torch.arange(1.0, 5.0)
    value, grad = (scale * torch.randn(6, 4, generator=generator) for _ in range(2))
    pair = torch.stack([value, grad]).to(device)
    flat = pair.reshape(2, 24)
    cuts = ([pair[:, :3], pair[:, 3:]], [pair[:, :, :2], pair[:, :, 2:]], [flat[:, :10], flat[:, 10:]])
    try:
        whole = _updated(make, options, pair)
        joined = [
            torch.cat([_updated(make, options, part) for part in parts], dim).view_as(whole)
            for dim, parts in zip((0, 1, 0), cuts, strict=True)
        ]
    except Exception:  # of the optimizer's own code, which may take matrices alone, or need more than one
        return True
    return not all(torch.allclose(one, whole, rtol=1e-3, atol=1e-4) for one in joined)


def _updated(make: MakeOptimizer, options: Mapping[str, Any], pair: Tensor) -> Tensor:
    """Return what an optimizer makes of (value, gradient) in some updates."""
    parameter = nn.Parameter(pair[0].clone())
    made = make([{"params": [parameter]}], **options)
    for group in made.param_groups:
        if "lr" in group:
            group["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], Tensor) else _LR
    for factor in _FACTORS:
        parameter.grad = factor * pair[1]
        made.step()
    return parameter.detach()
