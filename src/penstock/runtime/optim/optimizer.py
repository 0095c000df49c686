"""One optimizer for a pipeline: a torch optimizer on every rank, that all step, skip and clip as one.

A rank's optimizer has that rank's parameters alone and runs on that rank's thread, so a step costs what the largest
rank's costs. Nothing of it is exchanged but the gradients' norm and whether an inf was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from penstock.errors import ConfigError, NonFiniteError, PenstockError
from penstock.parallel.dtensor import local
from penstock.runtime.optim import state as optimizer_state
from penstock.runtime.optim.factory import (
    MakeOptimizer,
    MakeScheduler,
    build,
    build_scheduler,
    require_elementwise,
    require_no_fp16,
    require_zero,
)
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.groups import Named, assign
from penstock.runtime.optim.main_weights import MainWeights, keep_gradients_in_float32
from penstock.runtime.validation import require_count

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


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
            in fp32 then. See `penstock.runtime.optim.main_weights`.
        zero: divide the optimizer's state and work among the replicas of the pipeline (ZeRO stage 1, 1910.02054, section
            5.1): each updates its part of the parameters and gets the others'. True: `step` returns when all are there.
            "overlap": they are collected while the next step's first forwards run, each layer waiting for its own;
            until then read parameters through the pipeline only (``pipe.parameters()``, ``pipe.state_dict()``), which
            waits. Replicas that are threads of one process have one state and do the work once in any case.
        **defaults: of the optimizer: ``lr``, ``weight_decay``, ``fused`` and so on.

    Attributes:
        optimizers: the torch optimizers, by rank of this process.
        steps: updates applied.
        skipped: updates skipped.
        shards: the pieces of parameters that this process updates, with `zero` and several replicas; else None.

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
        zero: bool | Literal["overlap"] = False,
        **defaults: Any,
    ) -> None:
        require_count("accumulate", accumulate)
        require_zero(pipe, zero)
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
            keep_gradients_in_float32(p for module in pipe.stage_modules() for p in module.parameters())
        elif self.scaler is not None:
            require_no_fp16(pipe)
        if main_weights or zero or pipe.shards is not None:
            pipe.make_buckets(bool(zero))
        self.shards = pipe.shards
        self._overlaps = zero == "overlap"
        held = {rank: [self._held(part) for part in parts] for rank, parts in self._parts.items()}
        self.main_weights = {
            rank: MainWeights(
                [pair for part in held[rank] for pair in part],
                main_weights,
                {name: p for part in parts for name, p in part},
            )
            for rank, parts in self._parts.items()
        }
        self.optimizers = {
            rank: build(optimizer, self.main_weights[rank], parts, options, defaults)
            for rank, parts in held.items()
        }
        if lr_factor is not None:
            lr_scheduler = partial(LambdaLR, lr_lambda=lr_factor)
        self.schedulers = [build_scheduler(lr_scheduler, o) for o in self.optimizers.values() if lr_scheduler]
        require_elementwise(pipe, next(iter(self.optimizers.values())), self.shards is not None)
        pipe.scaler = self.scaler
        self._wait_for_steps(0)

    def _held(self, part: Named) -> Named:
        """The pieces of a group's parameters that are updated here; without ZeRO they are the parameters."""
        if self.shards is None:
            return part
        pairs = [(name, p, self.shards.find(p)) for name, p in part]
        owned = [(name, p if piece is None else piece.shard) for name, p, piece in pairs]
        return [(name, own) for name, own in owned if own is not None]

    def step(self) -> OptimizerStep:
        """Take the gradients of the ``pipe.step`` before; on every `accumulate`-th call update, and drop them.

        Every process calls it. The order is: unscale, take the mean, clip, update, move the learning rate on. A skipped
        update leaves weights, optimizer state and learning rate as they are.

        Raises:
            NonFiniteError: `clip` is given and the norm is an inf or a NaN, with no such gradient for a scaler to see; the
                weights are as before, the gradients are dropped.
        """
        if self.pipe.shards is not self.shards:
            raise PenstockError(
                "another PipelineOptimizer was made for this pipeline since; its gradients go to that one"
            )
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
        for parameter in self.pipe.updated(rank):
            if parameter.grad is not None:
                local(parameter.grad).div_(self.accumulate)

    def _apply(self, rank: int) -> None:
        main = self.main_weights[rank]
        main.lend_gradients()
        self.optimizers[rank].step()
        main.round_into_parameters()
        if self.shards is not None:
            self.shards.collect()
            if not self._overlaps:
                self.shards.wait_all()

    def zero_grad(self) -> None:
        """Drop all gradients, and with them what has accumulated; `step` does it after an update."""
        self._wait_for_steps(0)
        self.pipe.zero_grad()
        if self.shards is not None:
            self.shards.drop()

    def _wait_for_steps(self, done: int) -> None:
        """So many steps are waiting to be applied; replicas add up their gradients in the last one only."""
        self._waiting = done
        self.pipe.reduce_gradients = done + 1 >= self.accumulate

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on, at any other split; in processes this rank's part.

        ``parameters`` (group and shape), ``state`` (as the torch optimizer keeps it) and ``main_weights`` are by
        whole-model name: the parts of several processes are joined by joining these three. ``optimizer``, ``groups``
        (options), ``lr_scheduler``, ``scaler``, ``steps`` and ``skipped`` are the same in all parts. Tensors are not
        copied. With `zero` the replicas put their parts together, on the CPU: all of them call it, or `give_state`.

        Raises:
            ConfigError: gradients are waiting for more of them; they are no part of the state and would be lost.
        """
        self._require_applied()
        return optimizer_state.collect(self)

    def give_state(self) -> None:
        """With `zero`, give this replica's part of the state to those that call `state_dict`, and keep nothing."""
        self._require_applied()
        if self.shards is not None:
            optimizer_state.collect(self, keep=False)

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this process holds, main weights included."""
        mains = [main for weights in self.main_weights.values() for main in weights.by_name.values()]
        states = [entries for made in self.optimizers.values() for entries in made.state.values()]
        tensors = [t for entries in states for t in entries.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.itemsize for t in (*mains, *tensors))

    def _require_applied(self) -> None:
        if self._waiting:
            raise ConfigError(
                f"{self._waiting} of {self.accumulate} pipeline steps have accumulated, and the state has no gradients; "
                "save after a step that was applied"
            )

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
