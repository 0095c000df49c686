"""Mutants of the backward: gradients between stages, weight gradients in a half of their own, tied and copied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.mutants.mutant import Changes, mutant
from penstock.recordings.files import Kind
from penstock.runtime.weights.shared import SharedGradients
from penstock.stage.compute.stage import Stage
from penstock.stage.split_backward.weight_grad import GradAccumulator, WeightGradQueue

MESSAGE = "class: wrong gradient between stages; own"
SPLIT = "class: weight gradients apart from the backward (zero bubble); own"
TIED = "class: embedding and head come untied (TTrace, arXiv 2506.09280)"
ACCUMULATED = "class: gradients accumulated wrongly (Megatron-LM issue 6660)"
CHECKED = 4
"""Calls of W after which each of two stages has had its first."""
DEFERRED = r"^(table|blocks\.\d\.(up|down)|head)\.(weight|bias)$"


def change_gradients(changes: Changes, index: int, change: Any) -> None:
    """Have `change` replace the gradient that a stage sends for a microbatch."""

    def make(backward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, grads: Any) -> Any:
            messages = backward(self, microbatch, grads)
            if self.index != index:
                return messages
            right = messages[0].leaves[0]
            found = changes.made(change(microbatch, right), right)
            return (messages[0]._replace(leaves=(found, *messages[0].leaves[1:])), *messages[1:])

        return wrong

    changes.replace(Stage, "backward_input", make)


@mutant("gradient of a microbatch doubled", MESSAGE, "1f1b", r"^blocks\.1$", Kind.OUTPUT_GRADIENT)
def gradient_doubled(changes: Changes) -> None:
    change_gradients(changes, 1, lambda microbatch, right: right * 2 if microbatch == 1 else right)


@mutant("gradient of a microbatch zero", MESSAGE, "zb-v", r"^blocks\.1$", Kind.OUTPUT_GRADIENT)
def gradient_zero(changes: Changes) -> None:
    change_gradients(changes, 2, lambda microbatch, right: right * 0 if microbatch == 2 else right)


@mutant("gradient rows reversed", MESSAGE, "interleaved", r"^blocks\.2$", Kind.OUTPUT_GRADIENT)
def gradient_reversed(changes: Changes) -> None:
    change_gradients(changes, 3, lambda microbatch, right: right.flip(0))


@mutant("gradient of the microbatch before", MESSAGE, "zb-h1", r"^blocks\.1$", Kind.OUTPUT_GRADIENT)
def gradient_stale(changes: Changes) -> None:
    last: list[Tensor] = []

    def change(microbatch: int, right: Tensor) -> Tensor:
        last.append(right.clone())
        return last[-2] if microbatch == 3 else right

    change_gradients(changes, 1, change)


@mutant(
    "gradient sent in bfloat16",
    "class: wrong precision of what is sent",
    "chimera",
    r"^blocks\.1$",
    Kind.OUTPUT_GRADIENT,
)
def gradient_rounded(changes: Changes) -> None:
    change_gradients(changes, 1, lambda microbatch, right: right.bfloat16().float())


@mutant(
    "gradient divided by the stages",
    "class: wrong scaling of gradients",
    "interleaved",
    r"^blocks\.0$",
    Kind.OUTPUT_GRADIENT,
)
def gradient_divided(changes: Changes) -> None:
    change_gradients(changes, 1, lambda microbatch, right: right / 4)


@mutant(
    "gradient overflows half precision",
    "class: overflow of half precision",
    "1f1b",
    r"^blocks\.1$",
    Kind.OUTPUT_GRADIENT,
    refused="gradient of a weight of stage 0",
)
def gradient_overflows(changes: Changes) -> None:
    change_gradients(
        changes, 1, lambda microbatch, right: (right * 1e9).half().float() if microbatch == 0 else right
    )


def change_contribution(changes: Changes, index: int, microbatch: int, method: str, factor: float) -> None:
    """Have what a microbatch adds to a stage's gradients count `factor` times."""

    def make(backward: Any) -> Any:
        def wrong(self: Stage, number: int, *rest: Any) -> Any:
            if self.index != index or number != microbatch:
                return backward(self, number, *rest)
            before = {p: None if p.grad is None else p.grad.clone() for p in self.module.parameters()}
            found = backward(self, number, *rest)
            with torch.no_grad():
                for p, old in before.items():
                    if p.grad is not None:
                        right = p.grad.clone()
                        start = torch.zeros_like(right) if old is None else old
                        changes.made(p.grad.copy_(start + factor * (right - start)), right)
            return found

        return wrong

    changes.replace(Stage, method, make)


@mutant(
    "backward of a microbatch counted twice on a stage",
    ACCUMULATED,
    "1f1b",
    r"^(blocks\.[23]|head)\.",
    Kind.GRADIENT,
)
def contribution_twice(changes: Changes) -> None:
    change_contribution(changes, 1, 1, "backward", 2.0)


@mutant(
    "first microbatch's gradients lost on a stage", ACCUMULATED, "interleaved", r"^blocks\.1\.", Kind.GRADIENT
)
def contribution_lost(changes: Changes) -> None:
    change_contribution(changes, 1, 0, "backward", 0.0)


@mutant(
    "last microbatch's gradients subtracted", ACCUMULATED, "gpipe", r"^(table|blocks\.[01])\.", Kind.GRADIENT
)
def contribution_negative(changes: Changes) -> None:
    change_contribution(changes, 0, 3, "backward", -1.0)


@mutant(
    "norms' gradients of a microbatch lost in I", SPLIT, "zb-h1", r"\.norm\.(weight|bias)$", Kind.GRADIENT
)
def norms_lost(changes: Changes) -> None:
    def make(backward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, grads: Any) -> Any:
            norms = {name: p for name, p in self.module.whole_model_parameters() if ".norm." in name}
            before = {name: None if p.grad is None else p.grad.clone() for name, p in norms.items()}
            messages = backward(self, microbatch, grads)
            if microbatch == 2:
                for name, parameter in norms.items():
                    parameter.grad = changes.made(before[name], parameter.grad)
            return messages

        return wrong

    changes.replace(Stage, "backward_input", make)


@mutant("W dropped for a microbatch", SPLIT, "zb-v", DEFERRED, Kind.GRADIENT)
def weights_dropped(changes: Changes) -> None:
    def make(backward: Any) -> Any:
        def wrong(self: Stage, microbatch: int) -> None:
            if microbatch == 2 and microbatch in self._waiting:
                changes.made(self._waiting[microbatch].clear())
            backward(self, microbatch)

        return wrong

    changes.replace(Stage, "backward_weight", make)


@mutant("W twice for a microbatch", SPLIT, "zb-h1", DEFERRED, Kind.GRADIENT)
def weights_twice(changes: Changes) -> None:
    def make(backward: Any) -> Any:
        def wrong(self: Stage, microbatch: int) -> None:
            queue = self._waiting.get(microbatch)
            again = list(queue.pending) if queue is not None and microbatch == 1 else []
            backward(self, microbatch)
            if again:
                queue.pending = changes.made(again)
                queue.accumulate(self._accumulators)

        return wrong

    changes.replace(Stage, "backward_weight", make)


def change_queues(changes: Changes, change: Any) -> None:
    """Have `change` replace each use that W of a stage works through, which it gets with that of the W before."""
    kept: dict[int, list[Any]] = {}

    def make(backward: Any) -> Any:
        def wrong(self: Stage, microbatch: int) -> None:
            queue = self._waiting.get(microbatch)
            if queue is not None:
                own = list(queue.pending)
                if self.index in kept:
                    queue.pending = changes.made(
                        [change(*uses) for uses in zip(own, kept[self.index], strict=True)]
                    )
                kept[self.index] = own
            backward(self, microbatch)

        return wrong

    changes.replace(Stage, "backward_weight", make)


@mutant(
    "W with the input of another microbatch",
    SPLIT,
    "zb-v",
    r"^(table|blocks\.\d\.(up|down)|head)\.weight$",
    Kind.GRADIENT,
)
def weights_of_other_inputs(changes: Changes) -> None:
    change_queues(changes, lambda own, other: (own[0], other[1], other[2], own[3], own[4]))


@mutant("W with the gradient of another microbatch", SPLIT, "zb-h1", DEFERRED, Kind.GRADIENT)
def weights_of_other_gradients(changes: Changes) -> None:
    change_queues(changes, lambda own, other: (own[0], own[1], own[2], other[3], other[4]))


@mutant("W without the biases", SPLIT, "zb-v", r"\.(up|down)\.bias$", Kind.GRADIENT)
def weights_without_biases(changes: Changes) -> None:
    def make(accumulate: Any) -> Any:
        calls: list[None] = []

        def wrong(self: WeightGradQueue, accumulators: Any) -> None:
            # The first uses of each stage are compared with a full backward, and would not be deferred any more.
            calls.append(None)
            biases = list({id(p): p for key in accumulators for p in kept.get(key, ())}.values())
            before = [None if p.grad is None else p.grad.clone() for p in biases]
            accumulate(self, accumulators)
            if len(calls) > CHECKED:
                for parameter, grad in zip(biases, before, strict=True):
                    parameter.grad = changes.made(grad)

        return wrong

    kept: dict[tuple[int, ...], list[Tensor]] = {}

    def made(init: Any) -> Any:
        def wrong(self: GradAccumulator, parameters: list[Tensor]) -> None:
            init(self, parameters)
            kept[tuple(map(id, parameters))] = [p for p in parameters if p.dim() == 1]

        return wrong

    changes.replace(GradAccumulator, "__init__", made)
    changes.replace(WeightGradQueue, "accumulate", make)


@mutant(
    "W in bfloat16",
    "class: precision of weight gradients; own",
    "zb-h1",
    DEFERRED,
    Kind.GRADIENT,
)
def weights_rounded(changes: Changes) -> None:
    def make(accumulate: Any) -> Any:
        def wrong(self: GradAccumulator, gradients: list[Tensor]) -> None:
            gradients[:] = changes.made([gradient.bfloat16().float() for gradient in gradients])
            accumulate(self, gradients)

        return wrong

    changes.replace(GradAccumulator, "accumulate", make)


def change_shared(changes: Changes, factor: float) -> None:
    """Have each holder's gradients but the first's count `factor` times."""

    def make(send: Any) -> Any:
        def wrong(self: SharedGradients, group: Any) -> None:
            if self.rank != group.holders[0]:
                for parameter in group.parameters:
                    if parameter.grad is not None:
                        changes.made(parameter.grad.mul_(factor))
            send(self, group)

        return wrong

    changes.replace(SharedGradients, "_send", make)


@mutant("tied weight without the head's gradient", TIED, "tied", r"^table\.weight$", Kind.GRADIENT)
def tied_lost(changes: Changes) -> None:
    change_shared(changes, 0.0)


@mutant("tied weight with the head's gradient twice", TIED, "tied", r"^table\.weight$", Kind.GRADIENT)
def tied_twice(changes: Changes) -> None:
    change_shared(changes, 2.0)


@mutant("tied weight averaged over its holders", TIED, "tied", r"^table\.weight$", Kind.GRADIENT)
def tied_averaged(changes: Changes) -> None:
    def make(finish: Any) -> Any:
        def wrong(self: SharedGradients) -> None:
            finish(self)
            for group in self.shared_groups:
                for parameter in group.parameters:
                    if parameter.grad is not None:
                        parameter.grad = changes.made(parameter.grad / len(group.holders))

        return wrong

    changes.replace(SharedGradients, "finish", make)


@mutant(
    "gradients of a stage's copy lost",
    "class: copies of a stage not added up; own",
    "chimera",
    r".",
    Kind.GRADIENT,
)
def copies_lost(changes: Changes) -> None:
    change_shared(changes, 0.0)
