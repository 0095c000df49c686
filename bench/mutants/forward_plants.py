"""Mutants of the batch, the loss, the forward and the recompute."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.mutants.mutant import Changes, mutant
from bench.mutants.subjects import Block
from penstock.runtime.batch import splitter
from penstock.runtime.batch.loss_weights import loss_weights
from penstock.runtime.batch.splitter import BatchSplitter
from penstock.stage.compute.runner import LossWeight, Runner
from penstock.stage.compute.stage import Stage
from penstock.stage.module import StageModule
from penstock.stage.named import Context
from penstock.stage.rng.random_state import RandomState
from penstock.stage.values import StageState
from penstock.verify.recording import Kind

SCALING = "class: wrong loss scaling, as in Megatron-LM issues 673 and 906"
DATA = "class: wrong rows for a rank or microbatch; own"
RECOMPUTE = "class: wrong recompute (TTrace, arXiv 2506.09280)"
BUFFER = "class: buffer that is used again too early; own"
PRECISION = "class: wrong precision on a part of the model, as with FP8 in TTrace (arXiv 2506.09280)"
RANDOM = "class: random states of ranks; own"
AUXILIARY = "class: auxiliary loss of experts scaled wrongly; own"


def change_batch(changes: Changes, change: Any) -> None:
    """Have `change` replace parts of each pipeline's share of a batch, which it gets with the step's number."""

    def make(split: Any) -> Any:
        def wrong(self: BatchSplitter, x: object, y: object, named: Any, options: Any) -> Any:
            batch = split(self, x, y, named, options)
            return replace(batch, **change(batch, options.number))

        return wrong

    changes.replace(BatchSplitter, "split", make)


def change_inputs(changes: Changes, index: int, change: Any) -> None:
    """Have `change` replace the tensor that stage `index` gets of a microbatch."""

    def make(forward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, inputs: Any, *rest: Any) -> Any:
            if self.index == index:
                right = inputs[0].leaves[0]
                found = changes.made(change(microbatch, right), right)
                inputs = (inputs[0]._replace(leaves=(found, *inputs[0].leaves[1:])), *inputs[1:])
            return forward(self, microbatch, inputs, *rest)

        return wrong

    changes.replace(Stage, "_forward", make)


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
    "class: wrong mask, as of embeddings in TTrace (arXiv 2506.09280)",
    "mask",
    r"^blocks\.0(\.inner)?$",
    Kind.OUTPUT,
)
def masks_exchanged(changes: Changes) -> None:
    change_masks(changes, lambda masks: exchanged(masks, 0, 3))


@mutant(
    "mask shifted by a token",
    "class: wrong mask, as of embeddings in TTrace (arXiv 2506.09280)",
    "mask",
    r"^blocks\.0(\.inner)?$",
    Kind.OUTPUT,
)
def mask_shifted(changes: Changes) -> None:
    change_masks(changes, lambda masks: [mask.roll(1, 1) for mask in masks])


@mutant("mask lost on the second stage", "own", "mask", r"^blocks\.2(\.inner)?$", Kind.OUTPUT)
def mask_lost(changes: Changes) -> None:
    def make(forward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, inputs: Any, *rest: Any) -> Any:
            if self.index == 1:
                leaves = [
                    changes.made(torch.ones_like(leaf), leaf) if leaf.dtype == torch.bool else leaf
                    for leaf in inputs[0].leaves
                ]
                inputs = (inputs[0]._replace(leaves=tuple(leaves)), *inputs[1:])
            return forward(self, microbatch, inputs, *rest)

        return wrong

    changes.replace(Stage, "_forward", make)


@mutant("activation of the microbatch before", BUFFER, "1f1b", r"^blocks\.2\b", Kind.OUTPUT)
def activation_stale(changes: Changes) -> None:
    last: list[Tensor] = []

    def change(microbatch: int, right: Tensor) -> Tensor:
        last.append(right.detach().clone())
        return last[-2] if microbatch == 2 else right

    change_inputs(changes, 1, change)


@mutant("activation of the first microbatch again", BUFFER, "zb-v", r"^blocks\.1\b", Kind.OUTPUT)
def activation_kept(changes: Changes) -> None:
    kept: list[Tensor] = []

    def change(microbatch: int, right: Tensor) -> Tensor:
        kept.append(right.detach().clone())
        return kept[0] if microbatch == 3 else right

    change_inputs(changes, 1, change)


@mutant("activation sent in bfloat16", PRECISION, "1f1b", r"^blocks\.2\b", Kind.OUTPUT)
def activation_rounded(changes: Changes) -> None:
    change_inputs(changes, 1, lambda microbatch, right: right.bfloat16().float())


@mutant(
    "activation rows reversed", "class: wrong layout of what is sent", "chimera", r"^blocks\.2\b", Kind.OUTPUT
)
def activation_reversed(changes: Changes) -> None:
    change_inputs(changes, 1, lambda microbatch, right: right.flip(0) if microbatch == 1 else right)


@mutant(
    "one token of an activation wrong",
    "class: silent data corruption",
    "interleaved",
    r"^blocks\.3\b",
    Kind.OUTPUT,
)
def activation_corrupted(changes: Changes) -> None:
    def change(microbatch: int, right: Tensor) -> Tensor:
        found = right.clone()
        if microbatch == 2:
            found[1, 5, 3] += 0.05
        return found

    change_inputs(changes, 3, change)


@mutant("activation changed after it is sent", "own", "1f1b", r"^blocks\.2\b", Kind.OUTPUT)
def activation_written(changes: Changes) -> None:
    def make(forward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, *rest: Any, **given: Any) -> Any:
            messages = forward(self, microbatch, *rest, **given)
            changes.made(messages[0].leaves[0].mul_(1.01))
            return messages

        return wrong

    changes.replace(Stage, "forward", make)


@mutant(
    "activation is not a number",
    "class: overflow of half precision",
    "1f1b",
    r"^blocks\.2\b",
    Kind.OUTPUT,
    refused="loss of microbatch 1 is NaN",
)
def activation_spoiled(changes: Changes) -> None:
    change_inputs(changes, 1, lambda microbatch, right: right * float("nan") if microbatch == 1 else right)


@mutant(
    "input of a stage without a gradient",
    "class: detached tensor",
    "1f1b",
    r"^blocks\.1$",
    Kind.OUTPUT_GRADIENT,
    refused=r"stage 0, microbatch 0: 0 gradient\(s\) came back",
)
def input_detached(changes: Changes) -> None:
    def make(forward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, inputs: Any, *rest: Any) -> Any:
            if self.index == 1:
                inputs = (changes.made(inputs[0]._replace(needs_grad=(False,))),)
            return forward(self, microbatch, inputs, *rest)

        return wrong

    changes.replace(Stage, "_forward", make)


@mutant(
    "residual path detached",
    "class: detached tensor",
    "1f1b",
    r"^blocks\.2(\.drop)?$|^blocks\.3\.norm$",
    Kind.OUTPUT_GRADIENT,
)
def residual_detached(changes: Changes) -> None:
    def make(forward: Any) -> Any:
        return lambda self, value: changes.made(
            value.detach() + self.drop(self.down(self.act(self.up(self.norm(value)))))
        )

    changes.replace(Block, "forward", make)


def change_run(changes: Changes, stage_of: str, wrong_layers: Any, step: int = 1) -> None:
    """Have the stage that has a layer run others than its own.

    Args:
        step: first step in which it does.
    """
    steps: list[int] = []

    def begin(right: Any) -> Any:
        def wrong(self: Runner, number: int, first: int) -> None:
            steps.append(number)
            right(self, number, first)

        return wrong

    def make(run: Any) -> Any:
        def wrong(self: StageModule, value: Any, context: Context, start: int, stop: int) -> Any:
            if stage_of not in self.names or steps[-1] < step or context.microbatch is None:
                return run(self, value, context, start, stop)
            for layer in changes.made(wrong_layers(dict(zip(self.names, self.layers, strict=True)), context)):
                value = layer(value)
            return value

        return wrong

    changes.replace(Runner, "begin", begin)
    changes.replace(StageModule, "run", make)


LAYERS = "class: wrong division into stages (TTrace, arXiv 2506.09280)"


def without_a_block(own: dict[str, nn.Module], context: Context) -> list[nn.Module]:
    return [module for name, module in own.items() if name != "blocks.1"]


@mutant("a layer skipped", LAYERS, "1f1b", r"^blocks\.1\b", Kind.OUTPUT)
def layer_skipped(changes: Changes) -> None:
    change_run(changes, "blocks.1", without_a_block)


@mutant(
    "a layer never run",
    LAYERS,
    "1f1b",
    r"^blocks\.1\b",
    Kind.OUTPUT,
)
def layer_never_run(changes: Changes) -> None:
    change_run(changes, "blocks.1", without_a_block, step=0)


@mutant("a layer skipped for a microbatch", "own", "gpipe", r"^blocks\.1\b", Kind.OUTPUT)
def layer_skipped_once(changes: Changes) -> None:
    change_run(
        changes,
        "blocks.1",
        lambda own, context: without_a_block(own, context) if context.microbatch == 2 else list(own.values()),
    )


@mutant("a layer run twice", LAYERS, "1f1b", r"^blocks\.1\b", Kind.OUTPUT)
def layer_twice(changes: Changes) -> None:
    change_run(changes, "blocks.1", lambda own, context: [*own.values(), own["blocks.1"]])


@mutant("two layers exchanged", LAYERS, "1f1b", r"^blocks\.2\b", Kind.OUTPUT)
def layers_exchanged(changes: Changes) -> None:
    change_run(
        changes, "blocks.2", lambda own, context: [own["blocks.3"], own["blocks.2"], *list(own.values())[2:]]
    )


@mutant(
    "a stage in evaluation mode",
    "class: model.eval() left on; well known",
    "dropout",
    r"^blocks\.2\.drop$",
    Kind.OUTPUT,
)
def evaluation_mode(changes: Changes) -> None:
    def make(begin: Any) -> Any:
        def wrong(self: Runner, step: int, first: int) -> None:
            if self.index == 1:
                changes.made(self.module.eval())
            begin(self, step, first)

        return wrong

    changes.replace(Runner, "begin", make)


def change_draws(changes: Changes, change: Any) -> None:
    """Have layers draw by another name, step and microbatch."""

    def make(run: Any) -> Any:
        def wrong(self: RandomState, name: str, layer: Any, step: int, microbatch: int, call: Any) -> Any:
            found = change(name, step, microbatch)
            if found != (name, step, microbatch):
                changes.made(found)
            return run(self, found[0], layer, found[1], found[2], call)

        return wrong

    changes.replace(RandomState, "run", make)


@mutant("dropout of the first step in each", RANDOM, "dropout", r"^blocks\.0\.drop$", Kind.OUTPUT)
def dropout_of_step(changes: Changes) -> None:
    change_draws(changes, lambda name, step, microbatch: (name, 0, microbatch))


@mutant("dropout the same for each microbatch", RANDOM, "dropout", r"^blocks\.0\.drop$", Kind.OUTPUT)
def dropout_of_microbatch(changes: Changes) -> None:
    change_draws(changes, lambda name, step, microbatch: (name, step, 0))


@mutant("dropout the same in each layer", RANDOM, "dropout", r"^blocks\.1\.drop$", Kind.OUTPUT)
def dropout_of_layer(changes: Changes) -> None:
    change_draws(changes, lambda name, step, microbatch: ("blocks.0", step, microbatch))


@mutant("replicas draw the same dropout", RANDOM, "dp dropout", r"^blocks\.0\.drop$", Kind.OUTPUT)
def dropout_of_replica(changes: Changes) -> None:
    change_draws(changes, lambda name, step, microbatch: (name, step, microbatch % 2))


def change_recompute(changes: Changes, around: Any) -> None:
    """Have the first stage's recompute of the third microbatch run in `around`, with the record that it returns."""

    def make(again: Any) -> Any:
        before: list[Any] = []

        def wrong(self: Stage, record: Any, microbatch: int, queue: Any) -> Any:
            found = record
            if self.index == 0:
                context, found = (
                    around(self, record, [r for r in before if r.segment == record.segment])
                    if microbatch == 2
                    else (nullcontext(), record)
                )
                before.append(record)
                with context:
                    return again(self, found, microbatch, queue)
            return again(self, record, microbatch, queue)

        return wrong

    changes.replace(Stage, "_forward_again", make)


@mutant(
    "recompute draws other random numbers",
    RECOMPUTE,
    "recompute",
    r"^blocks\.1\.(down|drop)$",
    Kind.OUTPUT_GRADIENT,
)
def recompute_draws(changes: Changes) -> None:
    in_recompute: list[bool] = []

    class Within:
        def __enter__(self) -> None:
            in_recompute.append(True)

        def __exit__(self, *error: object) -> None:
            in_recompute.clear()

    change_draws(
        changes,
        lambda name, step, n: (name, step, n + 9 if in_recompute and name.startswith("blocks.1") else n),
    )
    change_recompute(changes, lambda stage, record, before: (Within(), record))


@mutant(
    "recompute from inputs of another microbatch",
    RECOMPUTE,
    "recompute",
    r"^blocks\.1\b",
    Kind.OUTPUT_GRADIENT,
)
def recompute_inputs(changes: Changes) -> None:
    change_recompute(
        changes,
        lambda stage, record, before: (
            nullcontext(),
            changes.made(record._replace(inputs=before[-1].inputs)),
        ),
    )


@mutant("recompute in bfloat16", RECOMPUTE, "recompute", r"^blocks\.1\b", Kind.OUTPUT_GRADIENT)
def recompute_rounded(changes: Changes) -> None:
    change_recompute(
        changes,
        lambda stage, record, before: (changes.made(torch.autocast("cpu", torch.bfloat16)), record),
    )


@mutant(
    "recompute with dropout off", RECOMPUTE, "recompute", r"^blocks\.1\.(down|drop)$", Kind.OUTPUT_GRADIENT
)
def recompute_evaluates(changes: Changes) -> None:
    class Off:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __enter__(self) -> None:
            changes.made(self.module.eval())

        def __exit__(self, *error: object) -> None:
            self.module.train()

    change_recompute(changes, lambda stage, record, before: (Off(stage.module), record))


@mutant(
    "buffer not kept from a microbatch",
    "class: running statistics; own",
    "buffers",
    r"^blocks\.1(\.inner)?$",
    Kind.OUTPUT,
)
def buffer_lost(changes: Changes) -> None:
    def make(forward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, *rest: Any) -> Any:
            before = {m: m.mean for m in self.module.modules() if hasattr(m, "mean")}
            output = forward(self, microbatch, *rest)
            for module, mean in before.items() if microbatch == 1 else ():
                module.mean = changes.made(mean, module.mean)
            return output

        return wrong

    changes.replace(Stage, "_forward", make)


@mutant("buffer updated twice", "own", "buffers", r"^blocks\.2(\.inner)?$", Kind.OUTPUT)
def buffer_twice(changes: Changes) -> None:
    def make(forward: Any) -> Any:
        def wrong(self: Stage, microbatch: int, *rest: Any) -> Any:
            output = forward(self, microbatch, *rest)
            for module in self.module.modules():
                if hasattr(module, "mean") and self.index == 1:
                    module.mean = changes.made(module.mean * 1.5, module.mean)
            return output

        return wrong

    changes.replace(Stage, "_forward", make)


@mutant("autocast missing on a stage", PRECISION, "bf16", r"^blocks\.2\b", Kind.OUTPUT)
def autocast_missing(changes: Changes) -> None:
    changes.replace(
        Runner,
        "_autocast",
        lambda right: lambda self: changes.made(nullcontext()) if self.index == 1 else right(self),
    )


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


@mutant("dropout without its scale", RANDOM, "dropout", r"^blocks\.0\.drop$", Kind.OUTPUT)
def dropout_scaled(changes: Changes) -> None:
    changes.replace(
        nn.Dropout,
        "forward",
        lambda forward: lambda self, value: changes.made(forward(self, value) * (1 - self.p)),
    )


@mutant(
    "activation off by a ten-thousandth",
    "class: silent data corruption",
    "zb-v",
    r"^blocks\.2\b",
    Kind.OUTPUT,
)
def activation_slightly_off(changes: Changes) -> None:
    change_inputs(changes, 2, lambda microbatch, right: right + 1e-4 * right.roll(1, -1))


@mutant(
    "bfloat16 activation off by 1%", "class: silent data corruption", "bf16", r"^blocks\.2\b", Kind.OUTPUT
)
def activation_off_in_half(changes: Changes) -> None:
    change_inputs(changes, 1, lambda microbatch, right: right + 0.01 * right.roll(1, -1))


@mutant("bfloat16 logits off by 1%", "class: silent data corruption", "dp bf16", r"^head$", Kind.OUTPUT)
def logits_off_in_half(changes: Changes) -> None:
    def make(linear: Any) -> Any:
        def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            found = linear(x, weight, bias)
            return changes.made(found * 1.01) if bias is None else found

        return wrong

    changes.replace(functional, "linear", make)


@mutant("microbatches in reverse", DATA, "gpipe", r"^table$", Kind.OUTPUT)
def microbatches_reversed(changes: Changes) -> None:
    change_batch(
        changes,
        lambda batch, step: {"inputs": changes.made(batch.inputs[::-1]), "targets": batch.targets[::-1]},
    )
