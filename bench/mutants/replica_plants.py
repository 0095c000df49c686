"""Mutants of replicas: their reductions, their shares of the batch, their norms and updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from bench.mutants.backward_plants import TIED
from bench.mutants.mutant import Changes, mutant
from bench.mutants.update_plants import SKIP, change_apply, change_norms, named
from penstock.parallel.replicas.bucket import Bucket
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.replicas.shards import OptimizerShards
from penstock.recordings.files import Kind
from penstock.runtime.batch.splitter import BatchSplitter
from penstock.runtime.engine import Engine
from penstock.runtime.weights.shared import SharedGradients
from penstock.runtime.workers.world import World
from penstock.stage.compute.runner import LossWeight
from penstock.stage.compute.stage import Stage

REDUCTION = "class: gradients not reduced, or over the wrong group (TTrace, arXiv 2506.09280)"
SHARE = "class: wrong rows for a rank; own"
UPDATE = "class: replicas that part, as norms in the training of BLOOM-176B (TrainCheck, arXiv 2506.14813)"
ZERO = "class: parameters that ZeRO does not update (TTrace, arXiv 2506.09280)"


class Done:
    """A collective that is not made."""

    def wait(self) -> None:
        """Do nothing."""


def change_sums(changes: Changes, change: Any) -> None:
    """Have `change` take the place of a bucket's sum over the replicas, which it gets the sum's function and buffer of."""

    def make(reduce: Any) -> Any:
        def wrong(self: GroupReducer, flat: Tensor) -> Any:
            return change(self, flat, reduce) if flat.is_floating_point() else reduce(self, flat)

        return wrong

    changes.replace(GroupReducer, "all_reduce", make)


@mutant("reduction skipped", REDUCTION, "dp", r".", Kind.GRADIENT)
def reduction_skipped(changes: Changes) -> None:
    change_sums(changes, lambda reducer, flat, reduce: changes.made(Done()))


@mutant("reduction skipped on one stage", REDUCTION, "pp x dp", r"^(blocks\.[23]|head)\.", Kind.GRADIENT)
def reduction_skipped_on_stage(changes: Changes) -> None:
    change_sums(
        changes,
        # The processes of the second stage are the last two of four.
        lambda reducer, flat, reduce: changes.made(Done()) if dist.get_rank() >= 2 else reduce(reducer, flat),
    )


@mutant("reduction over half of the replicas", REDUCTION, "dp 4", r".", Kind.GRADIENT)
def reduction_over_half(changes: Changes) -> None:
    groups: list[Any] = []

    def change(reducer: GroupReducer, flat: Tensor, reduce: Any) -> Any:
        if not groups:
            groups.extend(dist.new_group(ranks) for ranks in ([0, 1], [2, 3]))
        dist.all_reduce(changes.made(flat), group=groups[dist.get_rank() // 2])
        return Done()

    change_sums(changes, change)


@mutant("reduction takes a mean", "class: sum and mean confused", "dp unclipped", r".", Kind.GRADIENT)
def reduction_of_mean(changes: Changes) -> None:
    def change(reducer: GroupReducer, flat: Tensor, reduce: Any) -> Any:
        changes.made(flat.div_(reducer.size))
        return reduce(reducer, flat)

    change_sums(changes, change)


@mutant("reduction twice", REDUCTION, "dp unclipped", r".", Kind.GRADIENT)
def reduction_twice(changes: Changes) -> None:
    def change(reducer: GroupReducer, flat: Tensor, reduce: Any) -> Any:
        reduce(reducer, flat).wait()
        return changes.made(reduce(reducer, flat))

    change_sums(changes, change)


@mutant("reduction in bfloat16", "class: precision of a reduction", "dp", r".", Kind.GRADIENT)
def reduction_rounded(changes: Changes) -> None:
    def change(reducer: GroupReducer, flat: Tensor, reduce: Any) -> Any:
        half = flat.bfloat16()
        reduce(reducer, half).wait()
        flat.copy_(changes.made(half))
        return Done()

    change_sums(changes, change)


def change_bucket(changes: Changes, keep: Any, restore: Any) -> None:
    """Have `keep` run as a bucket's reduction starts, and `restore` when it has ended, with what `keep` returned."""
    kept: dict[int, Any] = {}

    def start(right: Any) -> Any:
        def wrong(self: Bucket) -> None:
            kept[id(self)] = keep(self)
            right(self)

        return wrong

    def wait(right: Any) -> Any:
        def wrong(self: Bucket) -> None:
            right(self)
            if id(self) in kept:
                restore(self, kept.pop(id(self)))

        return wrong

    changes.replace(Bucket, "start", start)
    changes.replace(Bucket, "wait", wait)


@mutant("reduction skipped for a parameter", REDUCTION, "dp", r"^head\.weight$", Kind.GRADIENT)
def reduction_of_parameter(changes: Changes) -> None:
    def restore(bucket: Bucket, kept: Tensor) -> None:
        begin = bucket.plan.starts[0]
        stop = bucket.plan.starts[1] if len(bucket.plan.starts) > 1 else bucket.flat.numel()
        changes.made(bucket.flat[begin:stop].copy_(kept[begin:stop]))

    change_bucket(changes, lambda bucket: bucket.flat.clone(), restore)


@mutant(
    "reduction before the last microbatch",
    "class: reduction that overlaps with the backward (TTrace, arXiv 2506.09280)",
    "dp",
    r".",
    Kind.GRADIENT,
)
def reduction_too_early(changes: Changes) -> None:
    early: dict[int, Tensor] = {}
    buckets: list[Bucket] = []

    def init(right: Any) -> Any:
        def wrong(self: Bucket, *args: Any) -> None:
            right(self, *args)
            buckets.append(self)

        return wrong

    def backward(right: Any) -> Any:
        def wrong(self: Stage, microbatch: int, *rest: Any) -> Any:
            found = right(self, microbatch, *rest)
            if microbatch == 0:
                early.update((id(bucket), bucket.flat.clone()) for bucket in buckets)
            return found

        return wrong

    def keep(bucket: Bucket) -> Tensor:
        late = bucket.flat - early[id(bucket)]
        bucket.flat.copy_(early[id(bucket)])
        return late

    changes.replace(Bucket, "__init__", init)
    changes.replace(Stage, "backward", backward)
    change_bucket(changes, keep, lambda bucket, late: changes.made(bucket.flat.add_(late)))


@mutant(
    "loss divided by a replica's microbatches",
    "class: wrong loss scaling, as in Megatron-LM issues 673 and 906",
    "dp",
    r"^head$",
    Kind.OUTPUT_GRADIENT,
)
def loss_of_replica(changes: Changes) -> None:
    def apply(self: LossWeight, loss: Tensor) -> Tensor:
        return changes.made(loss / (self.divisor // 2))

    changes.replace(LossWeight, "apply", lambda right: apply)


@mutant("replicas get the same rows", SHARE, "dp", r"^table$", Kind.OUTPUT)
def same_rows(changes: Changes) -> None:
    def make(split: Any) -> Any:
        def wrong(self: BatchSplitter, *args: Any) -> Any:
            replica, self.replica = self.replica, 0
            batch = split(self, *args)
            self.replica = replica
            return replace(batch, first=changes.made(replica * len(batch.weights)))

        return wrong

    changes.replace(BatchSplitter, "split", make)


@mutant(
    "replicas begin with other weights",
    UPDATE,
    "dp",
    r"^blocks\.1\.norm$",
    Kind.OUTPUT,
    refused="'blocks.1.norm.weight'",
)
def other_weights(changes: Changes) -> None:
    def make(run_step: Any) -> Any:
        def wrong(self: Engine, *args: Any, **given: Any) -> Any:
            if dist.get_rank() == 1 and not changes.count:
                with torch.no_grad():
                    for name, p in self.stage_modules()[0].whole_model_parameters():
                        if name == "blocks.1.norm.weight":
                            changes.made(p.mul_(1.01))
            return run_step(self, *args, **given)

        return wrong

    changes.replace(Engine, "run_step", make)


@mutant(
    "a replica's weight parts after the update", UPDATE, "dp", r"^blocks\.2\.norm\.weight$", Kind.PARAMETER
)
def weights_part(changes: Changes) -> None:
    def after(optimizer: Any, rank: int, kept: None) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                changes.made(named(optimizer, rank)["blocks.2.norm.weight"].mul_(1.001))

    change_apply(changes, lambda optimizer, rank: None, after)


@mutant("update of a replica skipped", UPDATE, "dp", r".", Kind.PARAMETER)
def update_of_replica(changes: Changes) -> None:
    change_apply(changes, lambda optimizer, rank: changes.made(SKIP) if dist.get_rank() == 1 else None)


@mutant(
    "norm counts replicas",
    "class: norm of gradients over the wrong ranks (Megatron-LM issue 7452)",
    "dp",
    r".",
    Kind.GRADIENT,
)
def norm_counts_replicas(changes: Changes) -> None:
    change_norms(changes, lambda norms: norms * 2**0.5)


@mutant(
    "norm of a rank's own stages",
    "class: norm of gradients over the wrong ranks (Megatron-LM issue 7452)",
    "pp x dp",
    r".",
    Kind.GRADIENT,
    refused="gradients were scaled by another factor on one rank",
)
def norm_of_rank(changes: Changes) -> None:
    def make(reduce: Any) -> Any:
        def wrong(self: World, values: Tensor) -> Any:
            return (
                changes.made(None)
                if values.dtype == torch.float64 and values.dim() == 1
                else reduce(self, values)
            )

        return wrong

    changes.replace(World, "all_reduce", make)


@mutant("a shard of an update not gathered", ZERO, "zero", r".", Kind.PARAMETER)
def shard_not_gathered(changes: Changes) -> None:
    changes.replace(GroupReducer, "all_gather", lambda gather: lambda self, flat: changes.made(Done()))


@mutant("a shard's gradient not reduced", ZERO, "zero", r".", Kind.GRADIENT)
def shard_not_reduced(changes: Changes) -> None:
    changes.replace(GroupReducer, "reduce_scatter", lambda scatter: lambda self, flat: changes.made(Done()))


@mutant("norm of a replica's own shards", ZERO, "zero", r".", Kind.GRADIENT)
def norm_of_shards(changes: Changes) -> None:
    changes.replace(World, "all_reduce_dp", lambda reduce: lambda self, values: changes.made(None))


@mutant("shards gathered before the update", ZERO, "zero", r".", Kind.PARAMETER)
def shards_gathered_early(changes: Changes) -> None:
    def make(collect: Any) -> Any:
        def wrong(self: OptimizerShards) -> None:
            own = [
                (each.shard, each.shard.detach().clone()) for each in self.sharded if each.shard is not None
            ]
            with torch.no_grad():
                for shard, _ in own:
                    shard.sub_(changes.made(1e-3))
            collect(self)
            self.wait_all()
            with torch.no_grad():
                for shard, right in own:
                    shard.copy_(right)

        return wrong

    changes.replace(OptimizerShards, "collect", make)


@mutant(
    "update of a tied weight skipped on a rank", TIED, "tied processes", r"^table\.weight$", Kind.PARAMETER
)
def tied_not_updated(changes: Changes) -> None:
    def before(optimizer: Any, rank: int) -> Any:
        found = [p for name, p in named(optimizer, rank).items() if name in ("table.weight", "head.weight")]
        return [(p, p.detach().clone()) for p in found] if dist.get_rank() == 1 else []

    def after(optimizer: Any, rank: int, kept: Any) -> None:
        with torch.no_grad():
            for parameter, right in kept:
                changes.made(parameter.copy_(right))

    change_apply(changes, before, after)


@mutant("tied weight's gradient of one rank alone", TIED, "tied processes", r"^table\.weight$", Kind.GRADIENT)
def tied_not_added(changes: Changes) -> None:
    def make(finish: Any) -> Any:
        def wrong(self: SharedGradients) -> None:
            own = [p.grad.clone() for group in self.shared_groups for p in group.parameters]
            finish(self)
            parameters = [p for group in self.shared_groups for p in group.parameters]
            for parameter, grad in zip(parameters, own, strict=True):
                parameter.grad = changes.made(grad, parameter.grad)

        return wrong

    changes.replace(SharedGradients, "finish", make)
