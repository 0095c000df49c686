"""A loss scale for fp16 that every rank agrees on (1710.03740, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.parallel.dtensor import local, real_values

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class GradScaler:
    """The rules of ``torch.amp.GradScaler``, with one decision for all ranks: an inf anywhere skips the step everywhere.

    A `PipelineOptimizer` that is given one does everything. In a loop of your own: ``pipe.scaler = scaler`` once, and
    after each step ``finite = scaler.unscale_(pipe)``, the optimizer's step if it is, then ``scaler.update(finite)``.

    Args:
        init_scale: the first scale.
        growth_factor: the scale is multiplied by it after `growth_interval` sound steps in a row.
        backoff_factor: the scale is multiplied by it after a step with an inf or a NaN.
        growth_interval: how many sound steps in a row.
        enabled: False keeps the scale at 1 and lets every step pass.

    The arguments are torch's but for ``device``: this scale is a number and lives on none.

    Attributes:
        scale: what the loss is multiplied by; always a float32 number.

    Raises:
        ConfigError: a factor on the wrong side of 1, or a scale or an interval that is not positive.
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
        self._growth_tracker = 0
        if enabled:
            self._take(
                {
                    "scale": init_scale,
                    "growth_factor": growth_factor,
                    "backoff_factor": backoff_factor,
                    "growth_interval": growth_interval,
                    "_growth_tracker": 0,
                }
            )

    def unscale_(self, pipe: Pipeline) -> bool:
        """Divide every gradient of the pipeline by the scale; every process calls it, once a step.

        Returns:
            Whether every gradient on every rank is finite. If not, no rank may use its own.
        """
        if not self.enabled:
            return True
        # As torch has it: times the float32 number nearest to 1 / scale.
        factor = _float32(1.0 / self.scale)

        def unscale(rank: int) -> float:
            return _unscale([local(p.grad) for p in pipe.updated(rank) if p.grad is not None], factor)

        bad = sum(pipe.on_ranks(unscale))
        return not float(pipe.sum_over_ranks(torch.tensor(bad, dtype=torch.float64), replicas=True))

    def update(self, finite: bool) -> None:
        """Choose the next step's scale; every process calls it with what `unscale_` returned."""
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
        """The entries of torch's: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker."""
        if not self.enabled:
            return {}
        return {
            "scale": self.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or that of a ``torch.amp.GradScaler``.

        Raises:
            ConfigError: an entry is missing, or is something no scaler can have; nothing is loaded then.
        """
        if problems := self.problems(state):
            raise ConfigError("the state does not fit a GradScaler: " + "; ".join(problems))
        if self.enabled:
            self._take(state)

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """What keeps a state from being loaded; empty if nothing does."""
        if not self.enabled:
            return []
        missing = [f"{key} is missing" for key in _KEYS if key not in state]
        return missing or _unsound(state)

    def _take(self, state: Mapping[str, Any]) -> None:
        if problems := _unsound(state):
            raise ConfigError("; ".join(problems).replace("scale must", "init_scale must", 1))
        self.scale = _float32(state["scale"])
        self._growth_factor = float(state["growth_factor"])
        self._backoff_factor = float(state["backoff_factor"])
        self._growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])


def _unsound(state: Mapping[str, Any]) -> list[str]:
    rules: dict[str, tuple[str, Callable[[float], bool]]] = {
        "scale": ("a positive float32 number", lambda v: 0 < _float32(v) < math.inf),
        "growth_factor": ("a number above 1", lambda v: 1 < v < math.inf),
        "backoff_factor": ("a number between 0 and 1", lambda v: 0 < v < 1),
        "growth_interval": ("a whole number of at least 1", lambda v: int(v) == v >= 1),
        "_growth_tracker": ("a whole number of at least 0", lambda v: int(v) == v >= 0),
    }
    return [
        f"{key} must be {what}, not {state[key]!r}"
        for key, (what, holds) in rules.items()
        if isinstance(state[key], bool)
        or not isinstance(state[key], int | float)
        or not math.isfinite(state[key])
        or not holds(state[key])
    ]


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _unscale(gradients: list[Tensor], factor: float) -> float:
    """Multiply in place; returns how many gradients have an inf or a NaN."""
    if not gradients:
        return 0.0
    for gradient in gradients:
        gradient.mul_(factor)
    device = gradients[0].device
    return float(
        torch.stack([real_values(g).isfinite().all().logical_not().to(device) for g in gradients]).sum()
    )
