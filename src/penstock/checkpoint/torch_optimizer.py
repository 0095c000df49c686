"""State of a plain torch optimizer over a pipeline's parameters, by their names in the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.checkpoint.manifest import encode_value
from penstock.runtime.optim import state as optimizer_state
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.groups import Named
from penstock.runtime.optim.main_weights import MainWeights
from penstock.runtime.pipeline import Pipeline

_GLOBAL_STATE = {
    "LBFGS": "keeps one state for all parameters together",
    "ZeroRedundancyOptimizer": "keeps each replica's share of the state out of reach",
}
_MAX_LISTED = 4


class TorchOptimizer:
    """An optimizer of ``torch.optim`` that the user steps, with the state of a `PipelineOptimizer`."""

    shards = None
    skipped = 0

    def __init__(
        self, pipe: Pipeline, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> None:
        self.pipe = pipe
        self.optimizers = {pipe.rank: optimizer}
        self.schedulers = [] if scheduler is None else [scheduler]
        self.main_weights = {pipe.rank: MainWeights([], copies=False)}
        self.steps = 0
        self._optimizer = optimizer
        _require_state_by_parameter(optimizer)
        if pipe.shards is not None:
            raise ConfigError(
                "this pipeline is updated by a PipelineOptimizer (zero=True); give that one to Checkpoints"
            )
        if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigError(
                "the scheduler must be one of the optimizer that is saved; it is of another one"
            )
        # What a save could not keep is refused now, not at the first save.
        self.parts(pipe.rank)
        for key in ("groups", "lr_scheduler"):
            encode_value(optimizer_state.common(self)[key], f"optimizer/{key}", lambda name, tensor: None)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler of the pipeline."""
        scaler = self.pipe.scaler
        return scaler if isinstance(scaler, GradScaler) else None

    def parts(self, rank: int) -> list[Named]:
        """Return the (name, parameter) pairs of each group, which may have none."""
        names = {id(p): name for name, p in self.pipe.named_parameters()}
        groups = [group["params"] for group in self._optimizer.param_groups]
        strangers = [(n, p) for n, group in enumerate(groups) for p in group if id(p) not in names]
        kind = type(self._optimizer).__name__
        if strangers:
            number, first = strangers[0]
            raise ConfigError(
                f"{kind} has {plural(len(strangers), 'tensor')} that the pipeline does not train on rank {rank} (the first, "
                f"of shape {tuple(first.shape)}, is in group {number}); build it from pipe.parameters() or "
                "pipe.named_parameters(), after the pipeline"
            )
        given = {id(p) for group in groups for p in group}
        missing = [n for n, p in self.pipe.named_parameters() if p.requires_grad and id(p) not in given]
        if missing:
            more = f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
            raise ConfigError(
                f"{kind} does not have {', '.join(missing[:_MAX_LISTED])}{more}, which the pipeline trains; give it all of "
                "pipe.parameters(), in several groups if their options differ, or freeze the rest (requires_grad_(False))"
            )
        return [[(names[id(p)], p) for p in group] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process's parameters, as `PipelineOptimizer.state_dict` does."""
        parameters = {p for group in self._optimizer.param_groups for p in group["params"]}
        others = [key for key in self._optimizer.state if key not in parameters]
        if others:
            raise ConfigError(
                f"{type(self._optimizer).__name__} keeps state under {str(others[0])[:80]!r}, not under a parameter; "
                "keep it in optimizer.state[parameter], or in a group's options"
            )
        self.steps = self.pipe.steps
        return optimizer_state.collect(self)

    def give_state(self) -> None:
        """Do nothing: every replica has the whole state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, also a `PipelineOptimizer`'s, or nothing of it if it does not fit; gradients are dropped."""
        self.pipe.wait()
        optimizer_state.restore(self, state)
        self.pipe.zero_grad()


def _require_state_by_parameter(optimizer: object) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer or a penstock.PipelineOptimizer, got a {kind.__name__}"
        )
    why = next((_GLOBAL_STATE[base.__name__] for base in kind.__mro__ if base.__name__ in _GLOBAL_STATE), "")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if not why and closure is not None and closure.default is inspect.Parameter.empty:
        why = "runs the model itself, through a closure that a pipeline cannot give it"
    if why:
        raise ConfigError(
            f"{kind.__name__} {why}, so it cannot be saved by parameter name and continued at another layout; use an "
            "optimizer with a state for each parameter, such as AdamW or SGD"
        )
