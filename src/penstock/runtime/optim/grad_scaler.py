"""A loss scale for fp16 that every rank agrees on (1710.03740, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.parallel.dtensor import local, real_values

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "scale": ("a positive float32 number", lambda v: 0 < _float32(v) < math.inf),
    "growth_factor": ("a number above 1", lambda v: 1 < v < math.inf),
    "backoff_factor": ("a number between 0 and 1", lambda v: 0 < v < 1),
    "growth_interval": ("a whole number of at least 1", lambda v: int(v) == v >= 1),
    "_growth_tracker": ("a whole number of at least 0", lambda v: int(v) == v >= 0),
}
"""Allowed values of the entries of the state, in words and as a function."""


class GradScaler:
    """Loss scaler with the rules of ``torch.amp.GradScaler``; an inf on any rank skips the step on all ranks.

    A `PipelineOptimizer` uses it as a whole. In your own loop set ``pipe.scaler = scaler`` once; after each step call
    ``finite = scaler.unscale_(pipe)``, the optimizer's step if `finite` is True, then ``scaler.update(finite)``.

    Args:
        init_scale: first scale (default 65536).
        growth_factor: factor of the scale after `growth_interval` finite steps in a row (default 2).
        backoff_factor: factor of the scale after a step with an inf or a NaN (default 0.5).
        growth_interval: finite steps in a row after which the scale grows (default 2000).
        enabled: False keeps the scale at 1 and lets every step pass (default True).

    The arguments are those of torch without ``device``, since the scale is a Python number.

    Attributes:
        scale: factor of the loss; always a float32 number.

    Raises:
        ConfigError: if a factor is on the wrong side of 1, or a scale or an interval is not positive.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.scale = 1.0
        if enabled:
            values = (init_scale, growth_factor, backoff_factor, growth_interval, 0)
            self._set(dict(zip(_RULES, values, strict=True)))

    def unscale_(self, pipe: Pipeline) -> bool:
        """Divide every gradient of the pipeline by the scale; every process calls it, once a step.

        Returns:
            True if every gradient on every rank is finite. If not, no rank may use its gradients.
        """
        if not self.enabled:
            return True
        # Like torch: the float32 number nearest to 1 / scale.
        factor = _float32(1.0 / self.scale)

        def unscale(rank: int) -> float:
            return _unscale([local(p.grad) for p in pipe.updated(rank) if p.grad is not None], factor)

        nonfinite = sum(pipe.on_ranks(unscale))
        return not float(pipe.sum_over_ranks(torch.tensor(nonfinite, dtype=torch.float64), replicas=True))

    def update(self, finite: bool) -> None:
        """Choose the next step's scale; every process calls it with the result of `unscale_`."""
        if not self.enabled:
            return
        if not finite:
            self.scale = _float32(self.scale * self._backoff_factor)
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            grown = _float32(self.scale * self._growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self._growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of torch's: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker."""
        if not self.enabled:
            return {}
        values = (
            self.scale,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._growth_tracker,
        )
        return dict(zip(_RULES, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, or of a ``torch.amp.GradScaler``.

        Raises:
            ConfigError: if an entry is missing or has an invalid value; nothing is loaded then.
        """
        if problems := self.problems(state):
            raise ConfigError("the state does not fit a GradScaler: " + "; ".join(problems))
        if self.enabled:
            self._set(state)

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Return the reasons why a state cannot be loaded; empty if it can."""
        if not self.enabled:
            return []
        missing = [f"{key} is missing" for key in _RULES if key not in state]
        return missing or _invalid(state)

    def _set(self, state: Mapping[str, Any]) -> None:
        if problems := _invalid(state):
            raise ConfigError("; ".join(problems).replace("scale must", "init_scale must", 1))
        self.scale = _float32(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])


def _invalid(state: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} must be {allowed}, got {state[key]!r}"
        for key, (allowed, is_valid) in _RULES.items()
        if isinstance(state[key], bool)
        or not isinstance(state[key], int | float)
        or not math.isfinite(state[key])
        or not is_valid(state[key])
    ]


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _unscale(gradients: list[Tensor], factor: float) -> float:
    """Multiply gradients in place; return the number of gradients with an inf or a NaN."""
    if not gradients:
        return 0.0
    for gradient in gradients:
        gradient.mul_(factor)
    device = gradients[0].device
    return float(
        torch.stack([real_values(g).isfinite().all().logical_not().to(device) for g in gradients]).sum()
    )
