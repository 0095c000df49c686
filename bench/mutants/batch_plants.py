"""Mutants of the batch and the loss: microbatches, targets, masks, and what losses are divided by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.mutants.mutant import Changes, mutant
from penstock.recordings.files import Kind
from penstock.runtime.batch import splitter
from penstock.runtime.batch.loss_weights import loss_weights
from penstock.runtime.batch.splitter import BatchSplitter
from penstock.stage.compute.runner import LossWeight, Runner
from penstock.stage.named import Context
from penstock.stage.values import StageState

SCALING = "class: wrong loss scaling, as in Megatron-LM issues 673 and 906"
DATA = "class: wrong rows for a rank or microbatch; own"
AUXILIARY = "class: auxiliary loss of experts scaled wrongly; own"
MASK = "class: wrong mask, as of embeddings in TTrace (arXiv 2506.09280)"
PRECISION = "class: wrong precision on a part of the model, as with FP8 in TTrace (arXiv 2506.09280)"


def change_batch(changes: Changes, change: Any) -> None:
    """Have `change` replace parts of each pipeline's share of a batch, which it gets with the step's number."""

    def make(split: Any) -> Any:
        def wrong(self: BatchSplitter, x: object, y: object, named: Any, options: Any) -> Any:
            batch = split(self, x, y, named, options)
            return replace(batch, **change(batch, options.number))

        return wrong

    changes.replace(BatchSplitter, "split", make)


def exchanged(values: Any, one: int, other: int) -> list[Any]:
    """Return a list with two entries exchanged."""
    found = list(values)
    found[one], found[other] = found[other], found[one]
    return found


@mutant("loss not divided", SCALING, "1f1b", r"^head$", Kind.OUTPUT_GRADIENT)
def loss_not_divided(changes: Changes) -> None:
    changes.replace(LossWeight, "apply", lambda apply: lambda self, loss: changes.made(loss))


@mutant("loss divided twice", SCALING, "zb-v", r"^head$", Kind.OUTPUT_GRADIENT)
def loss_divided_twice(changes: Changes) -> None:
    changes.replace(
        LossWeight, "apply", lambda apply: lambda self, loss: changes.made(apply(self, apply(self, loss)))
    )


@mutant("loss summed over tokens", SCALING, "interleaved", r"^head$", Kind.OUTPUT_GRADIENT)
def loss_summed(changes: Changes) -> None:
    def make(losses: Any) -> Any:
        def wrong(self: Runner, output: Tensor, target: Tensor) -> dict[str, Tensor]:
            return {"loss": changes.made(losses(self, output, target)["loss"] * target.numel())}

        return wrong

    changes.replace(Runner, "_losses", make)


@mutant(
    "ignored tokens counted",
    "class: mean over padding, as in Hugging Face's gradient accumulation",
    "1f1b",
    r"^head$",
    Kind.OUTPUT_GRADIENT,
)
def ignored_counted(changes: Changes) -> None:
    def make(losses: Any) -> Any:
        def wrong(self: Runner, output: Tensor, target: Tensor) -> dict[str, Tensor]:
            total = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
            return {"loss": changes.made(total / target.numel())}

        return wrong

    changes.replace(Runner, "_losses", make)


@mutant(
    "mean of means over tokens",
    "class: mean of means, as in Hugging Face's gradient accumulation",
    "ragged",
    r"^head$",
    Kind.OUTPUT_GRADIENT,
)
def mean_of_means(changes: Changes) -> None:
    changes.replace(
        splitter,
        "loss_weights",
        lambda right: (
            lambda targets, rows, reduction, scale=1.0: changes.made(
                loss_weights(targets, rows, "mean", scale)
            )
        ),
    )


@mutant("weights of microbatches exchanged", "own", "ragged", r"^head$", Kind.OUTPUT_GRADIENT)
def weights_exchanged(changes: Changes) -> None:
    change_batch(changes, lambda batch, step: {"weights": changes.made(exchanged(batch.weights, 1, 2))})


@mutant(
    "loss of a microbatch dropped", "class: last microbatch left out", "1f1b", r"^head$", Kind.OUTPUT_GRADIENT
)
def loss_dropped(changes: Changes) -> None:
    change_batch(
        changes,
        lambda batch, step: {
            "weights": changes.made([*batch.weights[:3], batch.weights[3]._replace(factor=0.0)])
        },
    )


@mutant("targets exchanged", DATA, "gpipe", r"^head$", Kind.OUTPUT_GRADIENT)
def targets_exchanged(changes: Changes) -> None:
    change_batch(changes, lambda batch, step: {"targets": changes.made(exchanged(batch.targets, 1, 2))})


@mutant("labels shifted once more", DATA, "1f1b", r"^head$", Kind.OUTPUT_GRADIENT)
def labels_shifted(changes: Changes) -> None:
    change_batch(
        changes, lambda batch, step: {"targets": changes.made([t.roll(-1, 1) for t in batch.targets])}
    )


@mutant("inputs exchanged", DATA, "zb-h1", r"^table$", Kind.OUTPUT)
def inputs_exchanged(changes: Changes) -> None:
    change_batch(changes, lambda batch, step: {"inputs": changes.made(exchanged(batch.inputs, 1, 2))})


@mutant("a microbatch in the place of the next", DATA, "1f1b", r"^table$", Kind.OUTPUT)
def microbatch_repeated(changes: Changes) -> None:
    def change(batch: Any, step: int) -> dict[str, Any]:
        return {
            "inputs": changes.made([*batch.inputs[:3], batch.inputs[2]]),
            "targets": [*batch.targets[:3], batch.targets[2]],
        }

    change_batch(changes, change)


@mutant("rows dealt out in turn", DATA, "interleaved", r"^table$", Kind.OUTPUT)
def rows_in_turn(changes: Changes) -> None:
    def dealt(parts: Any) -> list[Tensor]:
        whole = torch.cat(list(parts))
        return [whole[n :: len(parts)] for n in range(len(parts))]

    change_batch(
        changes,
        lambda batch, step: {"inputs": changes.made(dealt(batch.inputs)), "targets": dealt(batch.targets)},
    )


@mutant(
    "batch of the step before",
    DATA,
    "1f1b",
    r"^table$",
    Kind.OUTPUT,
)
def batch_again(changes: Changes) -> None:
    kept: dict[str, Any] = {}

    def change(batch: Any, step: int) -> dict[str, Any]:
        if step == 0:
            kept.update(inputs=batch.inputs, targets=batch.targets)
            return {}
        return changes.made(kept)

    change_batch(changes, change)


def change_masks(changes: Changes, change: Any) -> None:
    def of_batch(batch: Any, step: int) -> dict[str, Any]:
        masks = changes.made(change([state.named["mask"] for state in batch.inputs]))
        states = [
            StageState(s.value, {"mask": m}, s.losses) for s, m in zip(batch.inputs, masks, strict=True)
        ]
        return {"inputs": states}

    change_batch(changes, of_batch)


@mutant(
    "masks exchanged",
    MASK,
    "mask",
    r"^blocks\.0(\.inner)?$",
    Kind.OUTPUT,
)
def masks_exchanged(changes: Changes) -> None:
    change_masks(changes, lambda masks: exchanged(masks, 0, 3))


@mutant(
    "mask shifted by a token",
    MASK,
    "mask",
    r"^blocks\.0(\.inner)?$",
    Kind.OUTPUT,
)
def mask_shifted(changes: Changes) -> None:
    change_masks(changes, lambda masks: [mask.roll(1, 1) for mask in masks])


@mutant("loss rounded to bfloat16", PRECISION, "1f1b", r"^head$", Kind.OUTPUT_GRADIENT)
def loss_rounded(changes: Changes) -> None:
    changes.replace(
        Runner,
        "_losses",
        lambda losses: (
            lambda self, output, target: losses(self, changes.made(output.bfloat16(), output).float(), target)
        ),
    )


def change_added_losses(changes: Changes, change: Any) -> None:
    changes.replace(
        Context,
        "add",
        lambda add: (
            lambda self, name, value: change(
                lambda factor: add(self, name, changes.made(value * factor)), self
            )
        ),
    )


@mutant("auxiliary loss twice", AUXILIARY, "auxiliary", r"^blocks\.1\.down$", Kind.OUTPUT_GRADIENT)
def auxiliary_twice(changes: Changes) -> None:
    change_added_losses(changes, lambda add, context: add(2.0))


@mutant("auxiliary loss dropped", AUXILIARY, "auxiliary", r"^blocks\.1\.down$", Kind.OUTPUT_GRADIENT)
def auxiliary_dropped(changes: Changes) -> None:
    change_added_losses(changes, lambda add, context: changes.made(None))


@mutant(
    "auxiliary loss of one microbatch alone",
    AUXILIARY,
    "auxiliary",
    r"^blocks\.1\.down$",
    Kind.OUTPUT_GRADIENT,
)
def auxiliary_once(changes: Changes) -> None:
    change_added_losses(changes, lambda add, context: add(4.0 if context.microbatch == 0 else 0.0))


@mutant("microbatches in reverse", DATA, "gpipe", r"^table$", Kind.OUTPUT)
def microbatches_reversed(changes: Changes) -> None:
    change_batch(
        changes,
        lambda batch, step: {"inputs": changes.made(batch.inputs[::-1]), "targets": batch.targets[::-1]},
    )
