"""Optimizer of a pipeline: a torch optimizer on every rank; all of them step, skip and clip together.

A rank's optimizer has only that rank's parameters and runs on that rank's thread, so a step takes as long as that of the
largest rank. Ranks exchange only the norm of the gradients and whether there is an inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.base.counts import require_count
from penstock.base.errors import ConfigError, NonFiniteError, PenstockError
from penstock.parallel.dtensor import is_sharded, local
from penstock.parallel.replicas.divided_gradient import require_same_changes
from penstock.parallel.replicas.exchange import run_each
from penstock.runtime.model.optimizer_trials import MakeOptimizer, looks_across, needs_whole
from penstock.runtime.model.torch_optimizers import CHECKED, looking_across
from penstock.runtime.optim import state as optimizer_state
from penstock.runtime.optim.expert_balance import ExpertBalance
from penstock.runtime.optim.factory import (
    MakeScheduler,
    build,
    build_scheduler,
    require_no_fp16,
)
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.groups import Named, assign
from penstock.runtime.optim.main_weights import MainWeights, keep_gradients_in_float32
from penstock.runtime.optim.shared_groups import SharedOptions
from penstock.runtime.workers.agreement import require_same_arguments
from penstock.stage.split_backward.intercepted import has_local_uses

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class OptimizerStep:
    """Result of `PipelineOptimizer.step`, the same on every rank.

    Attributes:
        applied: whether the weights were updated. False while gradients accumulate.
        skipped: whether the update was skipped because a gradient on some rank has an inf or a NaN (only with a scaler).
        grad_norm: 0-d tensor, the gradients' global 2-norm before clipping; None if nothing was applied or `clip` is None.
        lr: learning rate of each group in this step.
    """

    applied: bool
    skipped: bool
    grad_norm: Tensor | None
    lr: tuple[float, ...]


class PipelineOptimizer(torch.optim.Optimizer):
    """A torch optimizer over all stages of a pipeline; call `step` after every ``pipe.step``.

    In processes every process makes one, with the same arguments. A scheduler of ``torch.optim.lr_scheduler`` or of
    transformers takes it like any optimizer, and a program may write options into its ``param_groups``, on every process
    alike: the next update compares what was changed.

    Args:
        pipe: pipeline whose parameters are trained.
        optimizer: class of ``torch.optim``, or a function that makes an optimizer from parameter groups and `defaults`.
        groups: dictionaries with ``match`` (a regular expression searched for in the whole-model name, or a function of
            name and parameter) or ``names``, and optimizer options for these parameters. A parameter belongs to the first
            group that takes it, or to one more group at the end with only the `defaults`. Every rank has all groups in
            this order, some possibly empty. A group with an ``optimizer`` of its own, such as ``torch.optim.Muon`` for the
            matrices of blocks, has that one's defaults in place of these.
        accumulate: pipeline steps that make one update, by the mean of their gradients (default 1), also with
            ``reduction="sum"``. Gradients are reduced over replicas in the last of them only.
        clip: largest global 2-norm of the gradients; ``math.inf`` only measures it (default None, neither).
        lr_factor: function from the number of updates done to a factor of every group's learning rate.
        lr_scheduler: function that makes a scheduler of ``torch.optim.lr_scheduler`` for an optimizer; excludes
            `lr_factor`.
        scaler: scaler of the loss; an inf or a NaN in any gradient skips the update on every rank.
        main_weights: update fp32 copies of bf16 and fp16 parameters and round them into the model (default False);
            gradients are then kept in fp32. See `penstock.runtime.optim.main_weights`.
        zero: divide the optimizer's state and work among the replicas of the pipeline (ZeRO stage 1, 1910.02054, section
            5.1; default False): each updates its shards of the parameters and gets the others'. True: `step` returns when
            all have arrived. "overlap": they arrive while the next step's first forwards run, and each layer waits for its
            parameters; until then read parameters through the pipeline only (``pipe.parameters()``,
            ``pipe.state_dict()``), which waits. Muon and Adafactor need whole matrices, and get each on one replica, so
            that the work is equal; so does any other that looks at more than each element, as a trial on a small matrix
            shows. With tensor parallelism all processes of a matrix update it. One that looks across tensors, as Prodigy,
            is refused where replicas or ranks each have some of them.
        **defaults: optimizer options of all groups: ``lr``, ``weight_decay``, ``fused`` and so on.

    Attributes:
        param_groups: the groups in the order of `groups`, each with this process's parameters and the options of all ranks.
        state: state of every tensor that this process updates: a parameter, its main weight, or its shard.
        optimizers: torch optimizers by rank of this process.
        steps: number of updates applied.
        skipped: number of updates skipped.
        shards: shards of the parameters that this process updates, with `zero` and several replicas; otherwise None.

    Raises:
        ConfigError: if an argument cannot be used; on every process.
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
        given = {
            "accumulate": accumulate, "clip": clip, "lr_factor": lr_factor, "lr_scheduler": lr_scheduler,
            "scaler": scaler is not None, "main_weights": main_weights, "zero": zero, "optimizer": optimizer, **defaults,
        }  # fmt: skip
        _compare(pipe, given, groups)
        _require_options(accumulate, clip, zero, lr_factor, lr_scheduler)
        self.pipe = pipe
        self.accumulate = accumulate
        self.clip = clip
        self.scaler = scaler if scaler is not None and scaler.enabled else None
        self.steps = self.skipped = 0
        self._groups, options = assign(pipe, groups)
        if main_weights:
            keep_gradients_in_float32(p for module in pipe.stage_modules() for p in module.parameters())
        elif self.scaler is not None:
            require_no_fp16(pipe)
        zero = zero or pipe.parallel.shard != "none"
        gather = None if pipe.world is None else partial(pipe.world.gather, over="run")
        whole: dict[str, nn.Parameter] = {}
        across: set[int] = set()

        def find_whole() -> None:
            looking, found = _looking_further(
                pipe, optimizer, options, defaults, self._groups.values(), bool(zero)
            )
            across.update(looking)
            whole.update(found)

        run_each(find_whole, gather)
        # After the choice of the gradients' dtype, which buckets have; and to drop an earlier optimizer's shards.
        if main_weights or zero or pipe.shards is not None:
            pipe.make_buckets(bool(zero), whole.values())
        self.shards = pipe.shards
        self._overlaps = zero == "overlap"
        updated = {
            rank: [self._updated(group) for group in of_rank] for rank, of_rank in self._groups.items()
        }
        self.main_weights = {
            rank: MainWeights(
                [pair for group in updated[rank] for pair in group],
                main_weights,
                {name: p for group in of_rank for name, p in group},
                whole,
            )
            for rank, of_rank in self._groups.items()
        }
        self._optimizers: dict[int, torch.optim.Optimizer] = {}

        def build_all() -> None:
            for rank, of_rank in updated.items():
                self._optimizers[rank] = build(optimizer, self.main_weights[rank], of_rank, options, defaults)
                if pipe.store is not None:
                    pipe.store.prepare_update(self._optimizers[rank])

        run_each(build_all, gather)
        self._require_together(across, [chosen.get("optimizer", optimizer) for chosen in options])
        order = {p: place for place, p in enumerate(pipe.parameters())}
        members = [{p for of in self._groups.values() for _, p in of[n]} for n in range(len(options))]
        super().__init__([{"params": sorted(group, key=order.__getitem__)} for group in members], {})
        CHECKED.add(self)
        self._options = SharedOptions(self, list(self._optimizers.values()))
        if lr_factor is not None:
            lr_scheduler = partial(LambdaLR, lr_lambda=lr_factor)
        self._own_scheduler = None if lr_scheduler is None else build_scheduler(lr_scheduler, self)
        self.schedulers = [] if self._own_scheduler is None else [self._own_scheduler]
        pipe.scaler = self.scaler
        self._balance = ExpertBalance(pipe)
        self._set_accumulated(0)

    @property
    def optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """Torch optimizers by rank of this process, with what was written into `param_groups`."""
        self._options.give()
        return self._optimizers

    def _require_together(self, across: Collection[int], kinds: Sequence[MakeOptimizer]) -> None:
        """Raise if an optimizer that looks across tensors has parameters on several ranks.

        Args:
            across: numbers of the groups whose optimizers do.
            kinds: optimizers of the groups.
        """
        for kind in dict.fromkeys(kinds[n] for n in sorted(across)):
            if self.shards is not None:
                raise ConfigError(
                    looking_across(kind, "with ZeRO each replica has some only", "leave zero off")
                )
            counts = torch.zeros(self.pipe.ranks, dtype=torch.float64)
            for rank, of_rank in self._groups.items():
                own = [group for other, group in zip(kinds, of_rank, strict=True) if other is kind]
                counts[rank] = sum(p.requires_grad for group in own for _, p in group)
            if (ranks := int(self.pipe.sum_over_ranks(counts).count_nonzero())) > 1:
                instead = (
                    "use ranks=1" if self.pipe.in_processes else "make one of pipe.parameters() yourself"
                )
                raise ConfigError(looking_across(kind, f"each of {ranks} ranks has only its own", instead))

    def _updated(self, group: Named) -> Named:
        """Return the parameters of a group that are updated here, or with ZeRO their shards."""
        if self.shards is None:
            return group
        sharded = [(name, p, self.shards.find(p)) for name, p in group]
        updated = [(name, p if entry is None else entry.shard) for name, p, entry in sharded]
        return [(name, p) for name, p in updated if p is not None]

    def step(self, closure: None = None) -> OptimizerStep:  # type: ignore[override]  # torch returns the closure's loss
        """Count the gradients of the last ``pipe.step``; on every `accumulate`-th call, update the weights.

        Every process calls it. The order is: unscale, take the mean, clip, update, step the learning rate. A skipped
        update leaves weights, optimizer state and learning rate unchanged. Gradients are dropped after an update.

        Raises:
            ConfigError: if `param_groups` were not changed alike on every process, or have other parameters; on every
                process, and the weights are unchanged. Also for a `closure`.
            NonFiniteError: if `clip` is given and the norm is infinite or NaN, and no scaler has skipped the update; the
                weights are unchanged, and the gradients are dropped.
            PenstockError: if another PipelineOptimizer was made for the pipeline since; or on every process, if a gradient
                that replicas divide was replaced, or dropped on some of them only.
        """
        if closure is not None:
            raise ConfigError("a PipelineOptimizer takes no closure; call pipe.step(x, y), then step()")
        if self.pipe.shards is not self.shards:
            raise PenstockError(
                "a later PipelineOptimizer was made for this pipeline and gets its gradients; use that one"
            )
        with self.pipe.calling("PipelineOptimizer.step()"):
            return self._step()

    def _step(self) -> OptimizerStep:
        rates = tuple(float(group["lr"]) for group in next(iter(self.optimizers.values())).param_groups)
        self._set_accumulated(self._accumulated + 1)
        if self._accumulated < self.accumulate:
            return OptimizerStep(applied=False, skipped=False, grad_norm=None, lr=rates)
        self._require_same_changes()
        finite = self.scaler is None or self.scaler.unscale_(self.pipe)
        norm = self._update() if finite else None
        if self.scaler is not None:
            self.scaler.update(finite)
        self.zero_grad()
        self.steps += finite
        self.skipped += not finite
        return OptimizerStep(applied=finite, skipped=not finite, grad_norm=norm, lr=rates)

    def _require_same_changes(self) -> None:
        """Compare what programs may have changed since the last update: options, and gradients that are divided."""
        changes = {} if self.shards is None else self.shards.changes()
        world = self.pipe.world
        if self._options.require_same(world, note=bool(changes)) and world is not None:
            require_same_changes(world.gather((world.rank, changes), "run", "compare changed gradients"))

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
        self._balance.update()
        self._options.take()
        if self._own_scheduler is not None:
            self._own_scheduler.step()
        return norm

    @torch.no_grad()
    def _average(self, rank: int) -> None:
        for parameter in self.pipe.updated(rank):
            if parameter.grad is not None:
                local(parameter.grad).div_(self.accumulate)

    def _apply(self, rank: int) -> None:
        main = self.main_weights[rank]
        if self.shards is not None:
            self.shards.written()
        main.lend_gradients()
        optimizer, store = self._optimizers[rank], self.pipe.store
        optimizer.step() if store is None else store.update(optimizer)
        main.round_into_parameters()
        if self.shards is not None:
            self.shards.collect()
            if not self._overlaps:
                self.shards.wait_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, accumulated ones included; `step` does it after an update."""
        if not set_to_none:
            raise ConfigError("gradients are dropped; leave set_to_none=False out")
        self._set_accumulated(0)
        self._balance.clear()
        self.pipe.zero_grad()

    def _set_accumulated(self, steps: int) -> None:
        self._accumulated = steps
        self.pipe.reduce_gradients = steps + 1 >= self.accumulate  # in the last step before an update only

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to continue, with any split; in processes, for this rank's parameters.

        ``parameters`` (group and shape), ``state`` (as the torch optimizer keeps it) and ``main_weights`` are by
        whole-model name; to join the states of several processes, join these three. ``optimizer``, ``groups`` (options),
        ``lr_scheduler``, ``scaler``, ``steps`` and ``skipped`` are the same on all processes. Tensors are not copied. With
        `zero` the replicas join their shards, on the CPU: all of them call this, or `give_state`.

        Raises:
            ConfigError: if gradients are accumulating; they are no part of the state and would be lost.
        """
        self._require_applied()
        self.pipe.wait()
        return optimizer_state.collect(self)

    def sharded_state(self) -> dict[str, Any]:
        """Return `state_dict` with this process's shards of tensors."""
        self._require_applied()
        self.pipe.wait()
        return optimizer_state.collect(self, whole=False)

    def give_state(self) -> None:
        """Give this replica's shards of the state to the replicas that call `state_dict`, with `zero`."""
        self._require_applied()
        if self.shards is not None:
            optimizer_state.collect(self, keep=False)

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state that this process holds, main weights included."""
        mains = [main for weights in self.main_weights.values() for main in weights.by_name.values()]
        tensors = [t for entries in self.state.values() for t in entries.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.itemsize for t in (*mains, *tensors))

    def _require_applied(self) -> None:
        if self._accumulated:
            raise ConfigError(
                f"{self._accumulated} of {self.accumulate} pipeline steps have accumulated, and the state has no "
                "gradients; save after a step that was applied"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, or joined states of several processes; gradients are dropped.

        Entries of parameters held elsewhere are left alone. Main weights are rounded into the parameters.

        Raises:
            ConfigError: if the state does not fit; lists all problems, and nothing is loaded.
        """
        self.pipe.wait()
        optimizer_state.restore(self, state)
        self._options.take()
        self.zero_grad()

    def parts(self, rank: int) -> list[Named]:
        """Return a rank's (name, parameter) pairs by group."""
        return self._groups[rank]


def _require_options(
    accumulate: int, clip: object, zero: object, lr_factor: object, lr_scheduler: object
) -> None:
    require_count("accumulate", accumulate)
    if zero not in (False, True, "overlap"):
        raise ConfigError(f"zero must be False, True or 'overlap', got {zero!r}")
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ConfigError(f"clip must be a positive number or None, got {clip!r}")
    if lr_factor is not None and lr_scheduler is not None:
        raise ConfigError("give lr_factor or lr_scheduler, not both")


def _compare(pipe: Pipeline, given: dict[str, Any], groups: object) -> None:
    """Compare the arguments of an optimizer on all processes."""
    if pipe.world is None:
        return
    for number, group in enumerate(groups if isinstance(groups, list | tuple) else ()):
        named = group if isinstance(group, Mapping) else {"": group}
        given |= {f"groups[{number}].{name}": value for name, value in named.items()}
    with pipe.calling("PipelineOptimizer()"):
        require_same_arguments(pipe.world.collectives, given)


def _looking_further(
    pipe: Pipeline,
    make: MakeOptimizer,
    options: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    groups: Collection[Sequence[Named]],
    zero: bool,
) -> tuple[list[int], dict[str, nn.Parameter]]:
    """Return what optimizers look at besides each element, if processes or ranks divide it.

    Args:
        options: of each group.
        groups: of each rank.

    Returns:
        numbers of the groups whose optimizers look across tensors, and the parameters by name that others need whole, too.
    """
    parameters = [p for of_rank in groups for group in of_rank for _, p in group]
    parts = zero or any(map(is_sharded, parameters))
    if not parts and pipe.ranks == 1:
        return [], {}
    device = next((p.device for p in parameters), torch.device("cpu"))
    across, needing = [], []
    for number, chosen in enumerate(options):
        kind = chosen.get("optimizer", make)
        given = {**(defaults if kind is make else {}), **chosen}
        given.pop("optimizer", None)
        if looks_across(kind, given, device):
            across.append(number)
        needing.append(parts and (number in across or needs_whole(kind, given, device)))
    whole = {
        name: p
        for of_rank in groups
        for needs, group in zip(needing, of_rank, strict=True)
        for name, p in group
        if needs
    }
    if zero and (stacks := [name for name, p in whole.items() if has_local_uses(p)]):
        raise ConfigError(
            f"{stacks[0]} is a stack of divided experts, whose optimizer needs whole matrices, which zero divides no "
            "further; give it another optimizer in a group of its own, such as AdamW, or leave zero off"
        )
    return across, whole
