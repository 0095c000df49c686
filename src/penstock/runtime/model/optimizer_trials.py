"""Trials of optimizers: whether an update of an element depends on others of its tensor, or on other tensors.

One that updates each element by itself may have parts of tensors; one that updates each tensor by itself, some of a model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.parallel.dtensor import distribute_like, full_tensor, is_dtensor
from penstock.parallel.replicas.shard_slice import NOT_ELEMENTWISE

MakeOptimizer = Callable[..., torch.optim.Optimizer]

_FACTORS = (1.0, 30.0, 0.01, 1.0, 5.0, 0.2, 1.0, 100.0, 1.0, 1.0, 0.1, 1.0)
"""Factors of the gradients by step, so that thresholds are passed in both directions."""

_LR = 0.1
"""Learning rate of a trial, since a schedule may begin at 0."""

_NEAR_IN_BITS = 1e4
"""Largest difference of updates that count as equal, in last bits of the largest, since other kernels may compute them."""

_NEAR = 0.05
"""Largest difference of updates from partial sums, over the largest update: bf16 products, as Muon's, differ by 0.01."""


class _Given(NamedTuple):
    """A tensor's value and gradient in a trial."""

    value: Tensor
    grad: Tensor


def needs_whole(make: MakeOptimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether an optimizer needs whole tensors: torch's by their names, any other by a trial."""
    known = _known(make)
    return _differs(make, options, device) if known is None else known in NOT_ELEMENTWISE


def looks_across(make: MakeOptimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether an optimizer's update of one tensor depends on other tensors, as with the norm of all gradients.

    Of torch's, only that of LBFGS does. False if it cannot be tried.
    """
    if _known(make) not in (None, "LBFGS"):
        return False
    for dtype in (torch.float64, torch.float32):  # the second for kernels that have no other
        # Small, so that no update is lost beside its value.
        one, other = (
            _Given(1e-3 * each.value, each.grad * (1 + 6 * n)) for n, each in enumerate(_draw((6, 4), 2))
        )
        given = [_Given(*(x.to(device, dtype) for x in each)) for each in (one, other)]
        try:
            alone, together = (_updated(make, options, some)[0] for some in (given[:1], given))
        except Exception:  # of the optimizer's own code
            continue
        return not _near(alone, together, given[0].value, _NEAR_IN_BITS * torch.finfo(dtype).eps)
    return False


def differs_in_parts(
    make: MakeOptimizer, options: Mapping[str, Any], parameters: Sequence[Tensor], across: bool
) -> bool:
    """Return whether an optimizer makes other values of parameters that are DTensors than of whole ones.

    All processes of their meshes call it. False if it cannot be tried.

    Args:
        parameters: those that it updates; the trial has one for each way in which they are divided.
        across: whether it looks across tensors, so that a small difference is none of rounding.
    """
    kinds = {
        (p.device_mesh, p.placements, p.dim()) if is_dtensor(p) else (None, None, p.dim()): p
        for p in parameters
    }
    whole = [
        _Given(*(x.to(p.device, torch.float64) for x in _draw(_shape_like(p), 1)[0])) for p in kinds.values()
    ]
    try:
        expected = _updated(make, options, whole)
        parts = [
            _Given(*(distribute_like(x, p) for x in each))
            for p, each in zip(kinds.values(), whole, strict=True)
        ]
        got = [full_tensor(x) for x in _updated(make, options, parts)]
    except Exception:  # of the optimizer's own code, which will say so in its first step, too
        return False
    near = 1e-9 if across else _NEAR
    return not all(_near(a, b, each.value, near) for a, b, each in zip(expected, got, whole, strict=True))


def _known(make: MakeOptimizer) -> str | None:
    """Return the name of a class of torch; None for any other."""
    named = getattr(make, "func", make)  # of a functools.partial
    is_torch = isinstance(named, type) and named.__module__.startswith("torch.optim")
    return named.__name__ if is_torch else None


def _differs(make: MakeOptimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether the update of parts of a matrix differs from that of the whole, or cannot be tried."""
    pair = torch.stack(_draw((6, 4), 1)[0]).to(device)
    flat = pair.reshape(2, 24)
    cuts = ([pair[:, :3], pair[:, 3:]], [pair[:, :, :2], pair[:, :, 2:]], [flat[:, :10], flat[:, 10:]])
    try:
        whole = _updated(make, options, [_Given(*pair)])[0]
        joined = [
            torch.cat([_updated(make, options, [_Given(*part)])[0] for part in parts], dim).view_as(whole)
            for dim, parts in zip((0, 1, 0), cuts, strict=True)
        ]
    except Exception:  # of the optimizer's own code, which may take matrices alone, or need more than one
        return True
    return not all(torch.allclose(one, whole, rtol=1e-3, atol=1e-4) for one in joined)


def _draw(shape: Sequence[int], count: int) -> list[_Given]:
    """Return random values and gradients, the same on all processes."""
    generator = torch.Generator("cpu").manual_seed(0)
    # Rows and columns of different size, so that parts have other norms than the whole.
    scale = torch.ones((), device="cpu")
    for size in shape:
        scale = scale[..., None] * torch.arange(1.0, size + 1, device="cpu")
    drawn = [scale * torch.randn(*shape, generator=generator, device="cpu") for _ in range(2 * count)]
    return [_Given(*drawn[n : n + 2]) for n in range(0, 2 * count, 2)]


def _shape_like(parameter: Tensor) -> list[int]:
    """Return a small shape that divides as a parameter does."""
    shape = [4 + n for n in range(parameter.dim())]
    if is_dtensor(parameter):
        placement: Any  # a shard, strided or not
        for n, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                # A strided one divides each of several matrices.
                shape[placement.dim] *= getattr(placement, "split_factor", 1) * parameter.device_mesh.size(n)
    return shape


def _near(a: Tensor, b: Tensor, before: Tensor, most: float) -> bool:
    """Return whether the updates that led to two values differ by at most a share of the largest; NaN is as NaN."""
    allowed = most * float((a - before).abs().nan_to_num().max())
    return torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True)


def _updated(make: MakeOptimizer, options: Mapping[str, Any], given: Sequence[_Given]) -> list[Tensor]:
    """Return what an optimizer makes of some tensors in some updates, which draw the same random numbers for the first."""
    parameters = [nn.Parameter(each.value.clone()) for each in given]
    devices = [p.device for p in parameters if p.is_cuda][:1]
    with torch.random.fork_rng(devices):
        made = make([{"params": parameters}], **options)
    for group in made.param_groups:
        if "lr" in group:
            group["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], Tensor) else _LR
    closure = inspect.signature(made.step).parameters.get("closure")
    for factor in _FACTORS:
        again = partial(_give_gradients, parameters, given, factor)
        again()
        with torch.random.fork_rng(devices):
            # One that needs a closure calls it for gradients at other values, which are the same here.
            made.step(*[again] if closure is not None and closure.default is closure.empty else [])
    return [p.detach() for p in parameters]


def _give_gradients(parameters: Sequence[Tensor], given: Sequence[_Given], factor: float) -> float:
    for parameter, each in zip(parameters, given, strict=True):
        parameter.grad = factor * each.grad
    return 1.0
