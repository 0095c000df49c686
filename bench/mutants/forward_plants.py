"""Mutants of the forward: activations, layers, random numbers, recompute, buffers and precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.mutants.mutant import Changes, mutant
from bench.mutants.subjects import Block
from penstock.recordings.files import Kind
from penstock.stage.compute.runner import Runner
from penstock.stage.compute.stage import Stage
from penstock.stage.module import StageModule
from penstock.stage.named import Context
from penstock.stage.rng.random_state import RandomState

RECOMPUTE = "class: wrong recompute (TTrace, arXiv 2506.09280)"
BUFFER = "class: buffer that is used again too early; own"
PRECISION = "class: wrong precision on a part of the model, as with FP8 in TTrace (arXiv 2506.09280)"
RANDOM = "class: random states of ranks; own"
LAYERS = "class: wrong division into stages (TTrace, arXiv 2506.09280)"


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
