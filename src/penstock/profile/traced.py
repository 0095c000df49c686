"""Profile of any model that a Pipeline takes, traced on tensors without memory: no weights, no device, no measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from penstock.base.errors import ProfileError
from penstock.profile.fake_layers import LayerRun, Sample, run_layers
from penstock.profile.model_profile import Profile, ProfiledLayer
from penstock.stage.compute.runner import LossFunction
from penstock.stage.layers import Layer, as_layers

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def trace_layers(
    model: object,
    example: object,
    *,
    target: object = None,
    loss_fn: LossFunction | None = None,
    named: Mapping[str, object] | None = None,
    microbatches: Sequence[int] | None = None,
    name: str | None = None,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> Profile:
    """Profile a model's layers without running them on a device.

    Only shapes and dtypes of the example count. `microbatches` are sizes to trace (default: the example's, and twice
    as many samples); costs at other sizes are on the line through the two nearest. The loss is part of the last
    layer. A layer's profile has FLOPs, bytes moved, bytes kept for the backward (each storage once, without
    parameters and buffers), bytes handed on, and parameters.
    """
    layers = as_layers(model)
    sample = Sample(example, target, loss_fn, named or {}, seed, require_autocast(autocast))
    return profile_of_runs(
        name or type(model).__name__, layers, sample, trace_sizes(layers, sample, microbatches)
    )


def trace_sizes(
    layers: Sequence[Layer], sample: Sample, microbatches: Sequence[int] | None
) -> dict[int, list[LayerRun]]:
    """Return samples of a microbatch → runs of all layers, for at least one size."""
    sizes = sorted(set(microbatches or (sample.rows, 2 * sample.rows)))
    if not sizes or sizes[0] < 1:
        raise ProfileError(f"microbatches must be sizes of at least 1 sample, got {microbatches!r}")
    return {size: run_layers(layers, sample, size) for size in sizes}


def kinds_of(runs: Mapping[int, Sequence[LayerRun]]) -> tuple[list[int], list[int]]:
    """Return the kind of every layer, and the last layer of every kind; layers of a kind are alike at every size.

    The last layer stands for its kind because the first one of a step may fill caches that later ones read.
    """
    kinds: dict[object, int] = {}
    of_layers = [
        kinds.setdefault(tuple(run.key for run in at_sizes), len(kinds))
        for at_sizes in zip(*runs.values(), strict=True)
    ]
    last = {kind: n for n, kind in enumerate(of_layers)}
    return of_layers, [last[kind] for kind in range(len(kinds))]


def profile_of_runs(
    name: str, layers: Sequence[Layer], sample: Sample, runs: Mapping[int, Sequence[LayerRun]]
) -> Profile:
    """Return the profile of traced runs."""
    of_layers, chosen = kinds_of(runs)
    kinds = tuple(ProfiledLayer(tuple((size, runs[size][n].cost) for size in runs)) for n in chosen)
    entries = tuple((layer.name, layer.role, kind) for layer, kind in zip(layers, of_layers, strict=True))
    dtype = dtype_of_runs(runs, sample)
    return Profile(
        name=name,
        source="traced",
        shape=None,
        sequence=sample.tokens,
        dtype=dtype,
        kinds=kinds,
        layers=entries,
        tied=sum(run.tied for run in next(iter(runs.values()))),
        autocast=sample.autocast is not None,
    )


def require_autocast(dtype: object) -> torch.dtype | None:
    """Return a dtype of mixed precision; raise ProfileError unless it is of 16 bits, or None."""
    if dtype is not None and dtype not in _DTYPES:
        raise ProfileError(f"autocast must be torch.bfloat16, torch.float16 or None, got {dtype!r}")
    assert dtype is None or isinstance(dtype, torch.dtype)
    return dtype


def dtype_of_runs(runs: Mapping[int, Sequence[LayerRun]], sample: Sample) -> str:
    """Return the dtype of mixed precision, or else of the values between the layers."""
    if sample.autocast is not None:
        return _DTYPES[sample.autocast]
    for run in next(iter(runs.values())):
        for leaf in _pytree.tree_leaves(run.inputs):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                return _DTYPES.get(leaf.dtype, "fp32")
    return "fp32"


def input_values(run: LayerRun, sample: Sample) -> tuple[Any, dict[str, Any]]:
    """Return real values in the shapes of a layer's inputs: random if floating-point, else from the example or 0."""
    known = {
        (tuple(x.shape), x.dtype): x
        for x in _pytree.tree_leaves((sample.example, dict(sample.named)))
        if isinstance(x, Tensor)
    }
    draws = torch.Generator().manual_seed(0)

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = tuple(leaf.shape)
        if leaf.is_floating_point():
            return torch.randn(shape, generator=draws).to(leaf.dtype).requires_grad_(leaf.requires_grad)
        for (other, dtype), value in known.items():
            if dtype == leaf.dtype and other[1:] == shape[1:]:
                return value[torch.arange(shape[0]) % other[0]] if shape else value
        return torch.zeros(shape, dtype=leaf.dtype)

    return _pytree.tree_map(real, run.inputs), _pytree.tree_map(real, dict(run.named))
