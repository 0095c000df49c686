"""Build and check the torch optimizers and learning-rate schedulers of a PipelineOptimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.base.errors import ConfigError, nearest
from penstock.parallel.data.shard_slice import NOT_ELEMENTWISE
from penstock.runtime.optim.groups import Named
from penstock.runtime.optim.main_weights import MainWeights

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

MakeOptimizer = Callable[..., torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


def build(
    make: MakeOptimizer,
    main: MainWeights,
    groups: list[Named],
    options: list[dict[str, Any]],
    defaults: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return one rank's optimizer."""
    param_groups = [
        {"params": [main.of(name, p) for name, p in group], **chosen}
        for group, chosen in zip(groups, options, strict=True)
    ]
    name = getattr(make, "__name__", "the optimizer")
    try:
        made = make(param_groups, **defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be made with these options and groups: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{make!r} made a {type(made).__name__}, not a torch.optim.Optimizer")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{name} runs the model itself, several times a step, through a closure, which a pipeline cannot give it; use "
            "an optimizer whose step needs none"
        )
    allowed = sorted(set(made.defaults) | {"lr"})
    problems = [
        f"groups[{n}] has {key!r}, which is not an option of {name}{nearest(key, allowed)}; it has {', '.join(allowed)}"
        for n, chosen in enumerate(options)
        for key in chosen
        if key not in allowed
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    return made


def build_scheduler(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the learning-rate scheduler of one rank's optimizer."""
    made = make(optimizer)
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"lr_scheduler must make a torch.optim.lr_scheduler.LRScheduler; it made a {type(made).__name__}. For a "
            "function of the step, use lr_factor"
        )
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a measurement at every step; use it with a torch optimizer over pipe.parameters(), "
            "which Checkpoints saves with it (scheduler=), or change the learning rates in `optimizers` yourself"
        )
    if made.optimizer is not optimizer:
        raise ConfigError("lr_scheduler must make a scheduler of the optimizer it is given")
    return made


def require_elementwise(pipe: Pipeline, optimizer: torch.optim.Optimizer, zero: bool) -> None:
    """Raise if an optimizer needs whole matrices but gets shards of them."""
    kind = type(optimizer).__name__
    if kind in NOT_ELEMENTWISE and (zero or pipe.tensor_ranks > 1):
        cause, instead = ("tensor parallelism", "tp = 1") if pipe.tensor_ranks > 1 else ("ZeRO", "zero=False")
        raise ConfigError(
            f"{kind} does not update every element by itself, and {cause} gives it parts of matrices; use an "
            f"elementwise optimizer, such as AdamW or SGD, or {instead}"
        )


def require_zero(zero: object) -> None:
    """Check the option `zero` of `PipelineOptimizer`."""
    if zero not in (False, True, "overlap"):
        raise ConfigError(f"zero must be False, True or 'overlap', got {zero!r}")


def require_no_fp16(pipe: Pipeline) -> None:
    """Raise if a scaler would unscale gradients in fp16."""
    names = [
        name
        for name, p in pipe.named_parameters()
        if p.requires_grad and p.dtype == torch.float16 and p.grad_dtype == torch.float16
    ]
    if names:
        raise ConfigError(
            f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}: unscaling gradients kept in fp16 would "
            "lose the precision that the scale has saved; use main_weights=True, or fp32 parameters under autocast"
        )
