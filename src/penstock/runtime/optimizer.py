"""One optimizer for a pipeline: a torch optimizer on every rank, that all step, skip and clip as one.

A rank's optimizer has that rank's parameters alone and runs on that rank's thread, so a step costs what the largest
rank's costs. Nothing of it is exchanged but the gradients' norm and whether an inf was found.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from penstock.errors import ConfigError, NonFiniteError, nearest
from penstock.parallel.local import local
from penstock.parallel.zero import NOT_ELEMENTWISE
from penstock.runtime import optimizer_state
from penstock.runtime.grad_scaler import GradScaler
from penstock.runtime.main_weights import MainWeights, keep_gradients_in_float32
from penstock.runtime.parameter_groups import Named, assign
from penstock.runtime.setup import require_count

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

MakeOptimizer = Callable[..., torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True)
class OptimizerStep:
    """What a call of `PipelineOptimizer.step` did; the same on every rank.

    Attributes:
        applied: whether the weights were updated.
        skipped: whether they would have been, had no gradient on any rank an inf or a NaN (only with a scaler). Neither
            while gradients accumulate.
        grad_norm: 0-d tensor, the gradients' global 2-norm before clipping; None if nothing was applied or `clip` is
            not given.
        lr: the learning rate of each group that this step used, or would have.
    """

    applied: bool
    skipped: bool
    grad_norm: Tensor | None
    lr: tuple[float, ...]


class PipelineOptimizer:
    """Any torch optimizer over all stages of a pipeline; call `step` after every ``pipe.step``.

    In processes every process makes one, with the same arguments.

    Args:
        pipe: whose parameters are trained.
        optimizer: a class of ``torch.optim``, or anything that makes an optimizer of groups of parameters and `defaults`.
        groups: dictionaries with ``match`` (a regular expression searched for in the whole-model name, or a function of
            name and parameter) or ``names``, and options of the optimizer for these parameters. A parameter belongs to
            the first that wants it, or to one more group at the end, which has the `defaults` alone. Every rank has all
            groups in this order, some of them maybe empty.
        accumulate: how many pipeline steps make one update, by the mean of their gradients; replicas add theirs up once.
        clip: the largest global 2-norm of the gradients; ``math.inf`` only measures it.
        lr_factor: from the number of updates done to what every group's learning rate is multiplied by.
        lr_scheduler: makes a scheduler of ``torch.optim.lr_scheduler`` for an optimizer, instead of `lr_factor`.
        scaler: scales the loss; an inf or a NaN in any gradient skips the update on every rank.
        main_weights: update fp32 copies of bf16 and fp16 parameters and round those into the model; gradients are kept
            in fp32 then. See `penstock.runtime.main_weights`.
        **defaults: of the optimizer: ``lr``, ``weight_decay``, ``fused`` and so on.

    Attributes:
        optimizers: the torch optimizers, by rank of this process.
        steps: updates applied.
        skipped: updates skipped.

    Raises:
        ConfigError: something given cannot be used; in processes on every one.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: MakeOptimizer,
        *,
        groups: Sequence[Mapping[str, Any]] | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        lr_factor: Callable[[int], float] | None = None,
        lr_scheduler: MakeScheduler | None = None,
        scaler: GradScaler | None = None,
        main_weights: bool = False,
        **defaults: Any,
    ) -> None:
        require_count("accumulate", accumulate)
        if clip is not None and not (isinstance(clip, int | float) and clip > 0):
            raise ConfigError(f"clip must be a positive number or None, not {clip!r}")
        if lr_factor is not None and lr_scheduler is not None:
            raise ConfigError("give lr_factor or lr_scheduler, not both")
        self.pipe = pipe
        self.accumulate = accumulate
        self.clip = clip
        self.scaler = scaler if scaler is not None and scaler.enabled else None
        self.steps = self.skipped = 0
        self._parts, options = assign(pipe, groups)
        if main_weights:
            keep_gradients_in_float32(p for module in pipe._modules() for p in module.parameters())
            pipe._engine.replicate()
        elif self.scaler is not None:
            _require_no_fp16(pipe)
        self.main_weights = {
            rank: MainWeights([pair for part in parts for pair in part], main_weights)
            for rank, parts in self._parts.items()
        }
        self.optimizers = {
            rank: _build(optimizer, self.main_weights[rank], parts, options, defaults)
            for rank, parts in self._parts.items()
        }
        if lr_factor is not None:
            lr_scheduler = partial(LambdaLR, lr_lambda=lr_factor)
        self.schedulers = [_scheduler(lr_scheduler, o) for o in self.optimizers.values() if lr_scheduler]
        _require_elementwise(pipe, next(iter(self.optimizers.values())))
        pipe.scaler = self.scaler
        self._wait_for_steps(0)

    def step(self) -> OptimizerStep:
        """Take the gradients of the ``pipe.step`` before; on every `accumulate`-th call update, and drop them.

        Every process calls it. The order is: unscale, take the mean, clip, update, move the learning rate on. A skipped
        update leaves weights, optimizer state and learning rate as they are.

        Raises:
            NonFiniteError: `clip` is given and the norm is an inf or a NaN, with no such gradient for a scaler to see; the
                weights are as before, the gradients are dropped.
        """
        rates = tuple(float(group["lr"]) for group in next(iter(self.optimizers.values())).param_groups)
        self._wait_for_steps(self._waiting + 1)
        if self._waiting < self.accumulate:
            return OptimizerStep(applied=False, skipped=False, grad_norm=None, lr=rates)
        finite = self.scaler is None or self.scaler.unscale_(self.pipe)
        norm = self._update() if finite else None
        if self.scaler is not None:
            self.scaler.update(finite)
        self.zero_grad()
        self.steps += finite
        self.skipped += not finite
        return OptimizerStep(applied=finite, skipped=not finite, grad_norm=norm, lr=rates)

    def _update(self) -> Tensor | None:
        if self.accumulate > 1:
            self.pipe.on_ranks(self._average)
        norm = None
        if self.clip is not None:
            norm = self.pipe.clip_grad_norm_(self.clip)
            if not math.isfinite(float(norm)):
                self.zero_grad()
                raise NonFiniteError(
                    f"the norm of the gradients of update {self.steps} is {float(norm)}, so no weight was changed; a lower "
                    "learning rate or a longer warm-up usually helps",
                    what="the norm of all gradients",
                )
        self.pipe.on_ranks(self._apply)
        for scheduler in self.schedulers:
            scheduler.step()
        return norm

    @torch.no_grad()
    def _average(self, rank: int) -> None:
        for _, parameter in self.pipe.rank_parameters(rank):
            if parameter.grad is not None:
                local(parameter.grad).div_(self.accumulate)

    def _apply(self, rank: int) -> None:
        main = self.main_weights[rank]
        main.lend_gradients()
        self.optimizers[rank].step()
        main.round_into_parameters()

    def zero_grad(self) -> None:
        """Drop all gradients, and with them what has accumulated; `step` does it after an update."""
        self._wait_for_steps(0)
        for parameter in self.pipe.parameters():
            parameter.grad = None

    def _wait_for_steps(self, done: int) -> None:
        """So many steps are waiting to be applied; replicas add up their gradients in the last one only."""
        self._waiting = done
        self.pipe.reduce_gradients = done + 1 >= self.accumulate

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on, at any other split; in processes this rank's part.

        ``parameters`` (group and shape), ``state`` (as the torch optimizer keeps it) and ``main_weights`` are by
        whole-model name: the parts of several processes are joined by joining these three. ``optimizer``, ``groups``
        (options), ``lr_scheduler``, ``scaler``, ``steps`` and ``skipped`` are the same in all parts. Tensors are not
        copied.

        Raises:
            ConfigError: gradients are waiting for more of them; they are no part of the state and would be lost.
        """
        if self._waiting:
            raise ConfigError(
                f"{self._waiting} of {self.accumulate} pipeline steps have accumulated, and the state has no gradients; "
                "save after a step that was applied"
            )
        return optimizer_state.collect(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or several processes' joined parts; gradients are dropped.

        Entries of parameters held elsewhere are left alone. Main weights are rounded into the parameters.

        Raises:
            ConfigError: the state does not fit; everything that is wrong is listed, and nothing is loaded.
        """
        optimizer_state.restore(self, state)
        self.zero_grad()

    def parts(self, rank: int) -> list[Named]:
        """A rank's (name, parameter) pairs, group by group."""
        return self._parts[rank]


def _build(
    make: MakeOptimizer,
    main: MainWeights,
    parts: list[Named],
    options: list[dict[str, Any]],
    defaults: dict[str, Any],
) -> torch.optim.Optimizer:
    groups = [
        {"params": [main.of(name, p) for name, p in part], **chosen}
        for part, chosen in zip(parts, options, strict=True)
    ]
    name = getattr(make, "__name__", "the optimizer")
    try:
        made = make(groups, **defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be made with these options and groups: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{make!r} made a {type(made).__name__}, not a torch.optim.Optimizer")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{name} runs the model itself, several times a step, through a closure; a pipeline cannot give it one"
        )
    allowed = sorted(set(made.defaults) | {"lr"})
    problems = [
        f"groups[{n}] has {key!r}, which is no option of {name}{nearest(key, allowed)}; it has {', '.join(allowed)}"
        for n, chosen in enumerate(options)
        for key in chosen
        if key not in allowed
    ]
    if problems:
        raise ConfigError("; ".join(problems))
    return made


def _scheduler(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    made = make(optimizer)
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"lr_scheduler must make a torch.optim.lr_scheduler.LRScheduler; it made a {type(made).__name__}. For a "
            "function of the step, use lr_factor"
        )
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau wants a measurement at every step; change the learning rates in `optimizers` yourself"
        )
    if made.optimizer is not optimizer:
        raise ConfigError("lr_scheduler must make a scheduler of the optimizer it is given")
    return made


def _require_elementwise(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if pipe.tensor_ranks > 1 and kind in NOT_ELEMENTWISE:
        raise ConfigError(
            f"{kind} does not update every element by itself, and tensor parallelism gives it parts of matrices; use an "
            "elementwise optimizer, such as AdamW or SGD, or tp = 1"
        )


def _require_no_fp16(pipe: Pipeline) -> None:
    found = [
        name
        for name, p in pipe.named_parameters()
        if p.requires_grad and p.dtype == torch.float16 and getattr(p, "grad_dtype", p.dtype) == torch.float16
    ]
    if found:
        raise ConfigError(
            f"{', '.join(found[:3])}{' and others' if len(found) > 3 else ''}: unscaling gradients kept in fp16 would "
            "lose what the scale has saved; use main_weights=True, or fp32 parameters under autocast"
        )
