"""Mutants of what is between the backward and the next step: norms, clipping, updates, and weights that are stale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.mutants.mutant import Changes, mutant
from penstock.recordings.files import Kind
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.weights import grad_norm
from penstock.runtime.weights.grad_norm import GlobalNorm
from penstock.stage.compute.runner import Runner

NORM = "class: norm of gradients over the wrong ranks (Megatron-LM issue 7452)"
UPDATE = "class: parameters that are not updated (TTrace, arXiv 2506.09280)"
OPTIONS = "class: options of another parameter group; own"
ZERO = "class: missing zero_grad; well known"
STALE = "class: stale weights; own"


@mutant(
    "clipping skipped",
    "class: clipping on some ranks, as in the training of BLOOM-176B (TrainCheck, arXiv 2506.14813)",
    "1f1b",
    r".",
    Kind.GRADIENT,
)
def clip_skipped(changes: Changes) -> None:
    changes.replace(
        GlobalNorm, "clip_", lambda clip: lambda self, limit, shards: changes.made(clip(self, 1e9, shards))
    )


@mutant(
    "clipping to twice the norm",
    "class: clipping on some ranks, as in the training of BLOOM-176B (TrainCheck, arXiv 2506.14813)",
    "zb-v",
    r".",
    Kind.GRADIENT,
)
def clip_to_more(changes: Changes) -> None:
    changes.replace(
        GlobalNorm,
        "clip_",
        lambda clip: lambda self, limit, shards: changes.made(clip(self, 2 * limit, shards)),
    )


@mutant(
    "clipping leaves a stage out",
    "class: clipping on some ranks, as in the training of BLOOM-176B (TrainCheck, arXiv 2506.14813)",
    "1f1b",
    r"^(blocks\.[23]|head)\.",
    Kind.GRADIENT,
)
def clip_without_stage(changes: Changes) -> None:
    def make(clip: Any) -> Any:
        def wrong(self: GlobalNorm, limit: float, shards: Any) -> Tensor:
            left = [
                p
                for name, p, _ in self._parameters.counted()
                if name.startswith(("blocks.2", "blocks.3", "head"))
            ]
            before = [p.grad.clone() for p in left]
            total = clip(self, limit, shards)
            for parameter, grad in zip(left, before, strict=True):
                changes.made(parameter.grad.copy_(grad))
            return total

        return wrong

    changes.replace(GlobalNorm, "clip_", make)


def change_norms(changes: Changes, change: Any) -> None:
    """Have `change` replace the norms of parameters from which the norm of all is made."""
    changes.replace(
        grad_norm,
        "_total",
        lambda total: lambda norms, present: total(changes.made(change(norms.clone()), norms), present),
    )


@mutant("norm without a stage", NORM, "1f1b", r".", Kind.GRADIENT)
def norm_without_stage(changes: Changes) -> None:
    def change(norms: Tensor) -> Tensor:
        norms[len(norms) // 2 :] = 0
        return norms

    change_norms(changes, change)


@mutant("norm counts a parameter twice", NORM, "tied", r".", Kind.GRADIENT)
def norm_counts_twice(changes: Changes) -> None:
    def change(norms: Tensor) -> Tensor:
        norms[0] *= 2**0.5
        return norms

    change_norms(changes, change)


@mutant("norms added without squares", "own", "zb-h1", r".", Kind.GRADIENT)
def norm_of_sum(changes: Changes) -> None:
    changes.replace(
        grad_norm, "_total", lambda total: lambda norms, present: changes.made(norms.sum().float())
    )


def change_apply(changes: Changes, before: Any, after: Any = None) -> None:
    """Have `before` and `after` run around each rank's update, with the pipeline's optimizer and the rank."""

    def make(apply: Any) -> Any:
        def wrong(self: PipelineOptimizer, rank: int) -> None:
            kept = before(self, rank)
            if kept is not SKIP:
                apply(self, rank)
            if after is not None:
                after(self, rank, kept)

        return wrong

    changes.replace(PipelineOptimizer, "_apply", make)


SKIP = object()
"""Returned in place of an update that is left out."""


def named(optimizer: PipelineOptimizer, rank: int) -> dict[str, nn.Parameter]:
    return {name: p for group in optimizer.parts(rank) for name, p in group}


@mutant("update of a rank skipped", UPDATE, "1f1b", r"^(blocks\.[23]|head)\.", Kind.GRADIENT, Kind.PARAMETER)
def update_skipped(changes: Changes) -> None:
    change_apply(changes, lambda optimizer, rank: changes.made(SKIP) if rank == 1 else None)


@mutant("update of a parameter lost", UPDATE, "interleaved", r"^blocks\.2\.up\.weight$", Kind.PARAMETER)
def update_lost(changes: Changes) -> None:
    def before(optimizer: PipelineOptimizer, rank: int) -> Tensor | None:
        found = named(optimizer, rank).get("blocks.2.up.weight")
        return None if found is None else found.detach().clone()

    def after(optimizer: PipelineOptimizer, rank: int, kept: Tensor | None) -> None:
        if kept is not None:
            with torch.no_grad():
                weight = named(optimizer, rank)["blocks.2.up.weight"]
                changes.made(weight.copy_(kept))

    change_apply(changes, before, after)


@mutant(
    "parameter missing from the optimizer",
    UPDATE,
    "zb-v",
    r"^blocks\.0\.down\.weight$",
    Kind.GRADIENT,
    Kind.PARAMETER,
)
def parameter_missing(changes: Changes) -> None:
    def before(optimizer: PipelineOptimizer, rank: int) -> None:
        weight = named(optimizer, rank).get("blocks.0.down.weight")
        for group in optimizer._optimizers[rank].param_groups if weight is not None else ():
            group["params"] = changes.made([p for p in group["params"] if p is not weight])

    change_apply(changes, before)


def change_groups(changes: Changes, change: Any) -> None:
    """Have `change` set options of each rank's groups, the small parameters' and the others', for the update alone."""

    def before(optimizer: PipelineOptimizer, rank: int) -> Any:
        groups = optimizer._optimizers[rank].param_groups
        right = [(group["lr"], group["weight_decay"]) for group in groups]
        changes.made(change(*groups))
        return groups, right

    def after(optimizer: PipelineOptimizer, rank: int, kept: Any) -> None:
        for group, (rate, decay) in zip(*kept, strict=True):
            group["lr"], group["weight_decay"] = rate, decay

    change_apply(changes, before, after)


@mutant("learning rate of the other group", OPTIONS, "1f1b", r"bias|norm", Kind.PARAMETER)
def rate_of_other(changes: Changes) -> None:
    change_groups(changes, lambda small, others: small.update(lr=others["lr"]))


@mutant("weight decay on biases and norms", OPTIONS, "gpipe", r"bias|norm", Kind.PARAMETER)
def decay_on_all(changes: Changes) -> None:
    change_groups(changes, lambda small, others: small.update(weight_decay=others["weight_decay"]))


@mutant("no weight decay on matrices", OPTIONS, "zb-v", r"\.weight$", Kind.PARAMETER)
def decay_on_none(changes: Changes) -> None:
    change_groups(changes, lambda small, others: others.update(weight_decay=0.0))


@mutant("learning rate divided by the ranks", OPTIONS, "zb-h1", r".", Kind.PARAMETER)
def rate_divided(changes: Changes) -> None:
    change_groups(changes, lambda small, others: others.update(lr=others["lr"] / 2))


@mutant("Adam with another beta", OPTIONS, "1f1b", r".", Kind.PARAMETER)
def other_beta(changes: Changes) -> None:
    change_groups(
        changes, lambda small, others: [group.update(betas=(0.9, 0.99)) for group in (small, others)]
    )


@mutant("Adam with another epsilon", OPTIONS, "1f1b", r".", Kind.PARAMETER)
def other_epsilon(changes: Changes) -> None:
    change_groups(changes, lambda small, others: [group.update(eps=1e-6) for group in (small, others)])


@mutant("weight decay added to gradients", OPTIONS, "1f1b", r"\.weight$", Kind.PARAMETER)
def decay_in_gradients(changes: Changes) -> None:
    change_groups(changes, lambda small, others: others.update(decoupled_weight_decay=False))


def change_state(changes: Changes, change: Any) -> None:
    """Have `change` write into a rank's optimizer after its update."""

    def after(optimizer: PipelineOptimizer, rank: int, kept: None) -> None:
        states = {name: optimizer._optimizers[rank].state[p] for name, p in named(optimizer, rank).items()}
        change(states)

    change_apply(changes, lambda optimizer, rank: None, after)


@mutant("Adam counts a step twice", "class: wrong state of an optimizer; own", "1f1b", r".", Kind.PARAMETER)
def adam_counts_twice(changes: Changes) -> None:
    change_state(changes, lambda states: [changes.made(state["step"].add_(1)) for state in states.values()])


@mutant(
    "Adam's averages of two weights exchanged",
    "class: wrong state of an optimizer; own",
    "1f1b",
    r"^blocks\.[01]\.up\.weight$",
    Kind.PARAMETER,
)
def adam_exchanged(changes: Changes) -> None:
    def change(states: dict[str, Any]) -> None:
        if "blocks.0.up.weight" in states:
            one, other = states["blocks.0.up.weight"], states["blocks.1.up.weight"]
            one["exp_avg"], other["exp_avg"] = changes.made((other["exp_avg"], one["exp_avg"]))

    change_state(changes, change)


@mutant(
    "Adam's squares lost on a rank",
    "class: wrong state of an optimizer; own",
    "interleaved",
    r"^(blocks\.[13]|head)\.",
    Kind.PARAMETER,
)
def adam_squares_lost(changes: Changes) -> None:
    def change(states: dict[str, Any]) -> None:
        if "head.weight" in states:
            for state in states.values():
                changes.made(state["exp_avg_sq"].zero_())

    change_state(changes, change)


def change_zeroing(changes: Changes, names: tuple[str, ...]) -> None:
    """Have gradients of some parameters stay after an update."""

    def make(zero: Any) -> Any:
        def wrong(self: PipelineOptimizer, set_to_none: bool = True) -> None:
            kept = {p: p.grad for name, p in self.pipe.named_parameters() if name.startswith(names)}
            zero(self, set_to_none)
            for parameter, grad in kept.items():
                parameter.grad = changes.made(grad)

        return wrong

    changes.replace(PipelineOptimizer, "zero_grad", make)


@mutant("gradients of a stage not zeroed", ZERO, "1f1b", r"^(blocks\.[23]|head)\.|step 2", Kind.GRADIENT)
def zeroing_of_stage(changes: Changes) -> None:
    change_zeroing(changes, ("blocks.2", "blocks.3", "head"))


@mutant("gradient of a parameter not zeroed", ZERO, "zb-v", r"^blocks\.1\.norm\.weight$", Kind.GRADIENT)
def zeroing_of_parameter(changes: Changes) -> None:
    change_zeroing(changes, ("blocks.1.norm.weight",))


@mutant("gradients never zeroed", ZERO, "interleaved", r".", Kind.GRADIENT)
def zeroing_of_none(changes: Changes) -> None:
    change_zeroing(changes, ("",))


def put_back(changes: Changes, index: int, name: str) -> None:
    """Have a parameter of a stage be that of the step before."""
    kept: list[Tensor] = []

    def make(begin: Any) -> Any:
        def wrong(self: Runner, step: int, first: int) -> None:
            begin(self, step, first)
            if self.index == index:
                weight = dict(self.module.whole_model_parameters())[name]
                kept.append(weight.detach().clone())
                if step == 1:
                    with torch.no_grad():
                        changes.made(weight.copy_(kept[0]), kept[-1])

        return wrong

    changes.replace(Runner, "begin", make)


@mutant("weight of the step before", STALE, "1f1b", r"^blocks\.2\.up$", Kind.OUTPUT)
def weight_stale(changes: Changes) -> None:
    put_back(changes, 1, "blocks.2.up.weight")


@mutant("norm's bias of the step before", STALE, "interleaved", r"^blocks\.1\.norm$", Kind.OUTPUT)
def bias_stale(changes: Changes) -> None:
    put_back(changes, 1, "blocks.1.norm.bias")


@mutant(
    "one number of a weight wrong",
    "class: silent data corruption",
    "1f1b",
    r"^blocks\.3\.down\.weight$",
    Kind.PARAMETER,
)
def weight_corrupted(changes: Changes) -> None:
    def after(optimizer: PipelineOptimizer, rank: int, kept: None) -> None:
        if rank == 1:
            with torch.no_grad():
                weight = named(optimizer, rank)["blocks.3.down.weight"]
                right = weight.clone()
                weight[3, 7] += 0.01
                changes.made(weight, right)

    change_apply(changes, lambda optimizer, rank: None, after)


@mutant(
    "first of two accumulated steps lost", "class: gradient accumulation", "accumulate", r".", Kind.GRADIENT
)
def accumulation_lost(changes: Changes) -> None:
    def make(step: Any) -> Any:
        def wrong(self: PipelineOptimizer, closure: None = None) -> Any:
            found = step(self)
            if not found.applied:
                changes.made(self.pipe.zero_grad())
            return found

        return wrong

    changes.replace(PipelineOptimizer, "step", make)


@mutant(
    "accumulated gradients not averaged", "class: gradient accumulation", "accumulate", r".", Kind.GRADIENT
)
def accumulation_summed(changes: Changes) -> None:
    changes.replace(PipelineOptimizer, "_average", lambda average: lambda self, rank: changes.made(None))


@mutant(
    "update after each accumulated step",
    "class: gradient accumulation",
    "accumulate",
    r".",
    Kind.GRADIENT,
    Kind.OUTPUT,
)
def accumulation_ignored(changes: Changes) -> None:
    def make(init: Any) -> Any:
        def wrong(self: PipelineOptimizer, pipe: Pipeline, *args: Any, **given: Any) -> None:
            init(self, pipe, *args, **changes.made({**given, "accumulate": 1}))

        return wrong

    changes.replace(PipelineOptimizer, "__init__", make)
