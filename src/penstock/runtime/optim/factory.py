"""Build and check the torch optimizers and learning-rate schedulers of a PipelineOptimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.base.errors import ConfigError, nearest
from penstock.runtime.model.optimizer_trials import MakeOptimizer
from penstock.runtime.model.torch_optimizers import CHECKED
from penstock.runtime.optim.groups import Named
from penstock.runtime.optim.main_weights import MainWeights

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


def build(
    make: MakeOptimizer,
    main: MainWeights,
    groups: list[Named],
    options: list[dict[str, Any]],
    defaults: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return one rank's optimizer; several as one, if groups have one of their own."""
    kinds = [chosen.get("optimizer", make) for chosen in options]
    parts = []
    for kind in dict.fromkeys(kinds):
        numbers = [n for n, other in enumerate(kinds) if other is kind]
        chosen = {n: {k: v for k, v in options[n].items() if k != "optimizer"} for n in numbers}
        params = {n: [main.of(name, p) for name, p in groups[n]] for n in numbers}
        made = build_one(kind, params, chosen, defaults if kind is make else {})
        parts.append((numbers, made))
    if defaults.get("maximize") and not all(
        g.get("maximize") for _, made in parts for g in made.param_groups
    ):
        raise ConfigError(
            "maximize=True holds for the groups without an optimizer of their own alone, so the others would descend; give "
            "them 'maximize' where their optimizer has it, or negate the loss"
        )
    built = parts[0][1] if len(parts) == 1 else SeveralOptimizers(parts)
    CHECKED.update([built, *(made for _, made in parts)])
    return built


def build_one(
    make: MakeOptimizer,
    params: dict[int, list[nn.Parameter]],
    options: dict[int, dict[str, Any]],
    defaults: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return the optimizer of some groups, by their numbers."""
    param_groups = [{"params": params[n], **options[n]} for n in params]
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
        for n, chosen in options.items()
        for key in chosen
        if key not in allowed
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    return made


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers of different groups as one, with the groups and the state of all.

    Args:
        parts: the numbers of the groups that each optimizer has, and the optimizer.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], torch.optim.Optimizer]]) -> None:
        self.parts = tuple(parts)
        numbered = {
            n: group for numbers, made in parts for n, group in zip(numbers, made.param_groups, strict=True)
        }
        groups = [numbered[n] for n in sorted(numbered)]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self._share()

    def _share(self) -> None:
        for numbers, made in self.parts:
            made.param_groups = [self.param_groups[n] for n in numbers]
            made.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has an overload for closures
        """Let each optimizer update its groups."""
        for _, made in self.parts:
            made.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups and the state of all."""
        super().load_state_dict(state_dict)
        self._share()


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, or of several with + between."""
    parts = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (((), optimizer),)
    return "+".join(type(made).__name__ for _, made in parts)


def build_scheduler(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the learning-rate scheduler that a PipelineOptimizer steps itself."""
    made = make(optimizer)
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"lr_scheduler must make a torch.optim.lr_scheduler.LRScheduler; it made a {type(made).__name__}. For a "
            "function of the step, use lr_factor"
        )
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a measurement at every step; make it of the PipelineOptimizer and step it yourself, "
            "with a number that is the same on every rank, and give it to Checkpoints(..., scheduler=...)"
        )
    if made.optimizer is not optimizer:
        raise ConfigError("lr_scheduler must make a scheduler of the optimizer it is given")
    return made


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
