"""Mutants of DistributedDataParallel and of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import schedules, stage
from torch.nn.parallel import DistributedDataParallel

from bench.mutants import subjects
from bench.mutants.mutant import Changes, mutant
from penstock.recordings.files import Kind

DDP = "class: DistributedDataParallel used wrongly; well known"
STAGES = "class: schedule of a pipeline; own"


def change_forward(changes: Changes, forward: Any) -> None:
    changes.replace(
        DistributedDataParallel, "forward", lambda right: lambda self, *args: forward(self, right, *args)
    )


@mutant("DDP: module called within the wrapper", DDP, "ddp", r".", Kind.GRADIENT)
def module_called(changes: Changes) -> None:
    change_forward(changes, lambda self, right, *args: changes.made(self.module)(*args))


@mutant("DDP: no_sync around the last microbatch", DDP, "ddp", r".", Kind.GRADIENT)
def never_synchronized(changes: Changes) -> None:
    def forward(self: DistributedDataParallel, right: Any, *args: Any) -> Any:
        self.require_backward_grad_sync = changes.made(False)
        return right(self, *args)

    change_forward(changes, forward)


@mutant("DDP: first microbatch reduced alone", DDP, "ddp", r".", Kind.GRADIENT)
def synchronized_first(changes: Changes) -> None:
    @contextmanager
    def wrong(self: DistributedDataParallel) -> Iterator[None]:
        yield changes.made(None)

    changes.replace(DistributedDataParallel, "no_sync", lambda right: wrong)

    def forward(self: DistributedDataParallel, right: Any, *args: Any) -> Any:
        found = right(self, *args)
        # The second microbatch of each step is not reduced.
        self.require_backward_grad_sync = not self.require_backward_grad_sync
        return found

    change_forward(changes, forward)


def add_hook(changes: Changes, hook: Any) -> None:
    def make(init: Any) -> Any:
        def wrong(self: DistributedDataParallel, *args: Any, **given: Any) -> None:
            init(self, *args, **given)
            self.register_comm_hook(
                None, lambda state, bucket: hook(state, bucket)
            )  # without annotations, which are read

        return wrong

    changes.replace(DistributedDataParallel, "__init__", make)


@mutant("DDP: hook takes a sum", DDP, "ddp unclipped", r".", Kind.GRADIENT)
def hook_of_sum(changes: Changes) -> None:
    def hook(state: None, bucket: Any) -> Any:
        work = dist.all_reduce(changes.made(bucket.buffer()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    add_hook(changes, hook)


@mutant("DDP: hook divides twice", DDP, "ddp unclipped", r".", Kind.GRADIENT)
def hook_divides_twice(changes: Changes) -> None:
    def hook(state: None, bucket: Any) -> Any:
        work = dist.all_reduce(changes.made(bucket.buffer().div_(4)), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    add_hook(changes, hook)


@mutant("DDP: clipping before the reduction", DDP, "ddp", r".", Kind.GRADIENT)
def clipped_before(changes: Changes) -> None:
    def hook(state: None, bucket: Any) -> Any:
        flat = bucket.buffer()
        flat.mul_(changes.made(min(1.0, 0.1 / float(flat.norm()))))
        work = dist.all_reduce(flat.div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    add_hook(changes, hook)


@mutant("DDP: a layer never run", DDP, "ddp", r"^blocks\.1$", Kind.OUTPUT)
def layer_never_run(changes: Changes) -> None:
    def forward(self: DistributedDataParallel, right: Any, *args: Any) -> Any:
        blocks = self.module.blocks
        self.module.blocks = changes.made(nn.ModuleList(block for n, block in enumerate(blocks) if n != 1))
        found = right(self, *args)
        self.module.blocks = blocks
        return found

    def make(init: Any) -> Any:
        def wrong(self: DistributedDataParallel, module: Any) -> None:
            init(self, module, find_unused_parameters=True)

        return wrong

    changes.replace(DistributedDataParallel, "__init__", make)
    change_forward(changes, forward)


@mutant("DDP: replicas begin with other weights", DDP, "ddp", r"^table.weight$", Kind.PARAMETER)
def other_seed(changes: Changes) -> None:
    def make(init: Any) -> Any:
        def wrong(self: DistributedDataParallel, module: Any, **given: Any) -> None:
            init(self, module, **given)
            if dist.get_rank() == 1:
                with torch.no_grad():
                    changes.made(module.table.weight.mul_(1.1))

        return wrong

    changes.replace(DistributedDataParallel, "__init__", make)


@mutant("stages: gradients not divided", STAGES, "stages", r".", Kind.GRADIENT)
def not_divided(changes: Changes) -> None:
    changes.replace(
        stage._PipelineStageBase, "scale_grads", lambda right: lambda self, factor: changes.made(None)
    )


@mutant("stages: target of another microbatch", STAGES, "stages", r"^head$", Kind.OUTPUT_GRADIENT)
def other_target(changes: Changes) -> None:
    def make(right: Any) -> Any:
        def wrong(self: Any, each: Any, output: Any, targets: Any, number: int, *rest: Any) -> Any:
            return right(self, each, output, targets and changes.made(targets[::-1]), number, *rest)

        return wrong

    changes.replace(schedules._PipelineSchedule, "_maybe_compute_loss", make)


@mutant(
    "stages: gradient of a microbatch doubled",
    STAGES,
    "stages",
    r"^blocks\.1(\.drop)?$",
    Kind.OUTPUT_GRADIENT,
)
def gradient_doubled(changes: Changes) -> None:
    def make(right: Any) -> Any:
        def wrong(self: Any, number: int) -> tuple[Tensor, ...]:
            found = right(self, number)
            return tuple(changes.made(g * 2) for g in found) if number == 1 else found

        return wrong

    changes.replace(stage._PipelineStageBase, "_retrieve_recv_grads", make)


@mutant("stages: activation of another microbatch", STAGES, "stages", r"^blocks\.2\b", Kind.OUTPUT)
def other_activation(changes: Changes) -> None:
    kept: list[Any] = []

    def make(right: Any) -> Any:
        def wrong(self: Any, number: int) -> tuple[Tensor, ...]:
            found = right(self, number)
            kept.append(tuple(each.detach().clone() for each in found))
            if number == 2:
                with torch.no_grad():
                    for each, old in zip(found, kept[-2], strict=True):
                        changes.made(each.copy_(old))
            return found

        return wrong

    changes.replace(stage._PipelineStageBase, "_retrieve_recv_activations", make)


@mutant(
    "stages: a stage is not updated",
    STAGES,
    "stages",
    r"^(blocks\.[23]|head)\.",
    Kind.GRADIENT,
    Kind.PARAMETER,
)
def not_updated(changes: Changes) -> None:
    def make(end: Any) -> Any:
        def wrong(model: Any, optimizer: Any, clip: Any) -> None:
            if dist.get_rank() == 1:
                changes.made(optimizer.zero_grad())
            else:
                end(model, optimizer, clip)

        return wrong

    changes.replace(subjects, "end", make)
