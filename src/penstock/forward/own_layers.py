"""`penstock.split`: a model with a forward of its own as layers that a `Pipeline` takes.

The forward is not traced. Its statements are divided: those before the blocks, each block, and those after them. Each layer
runs its statements as they are written, on a copy of the model that has only the modules which they use.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from penstock.base.errors import ConfigError, SplitError
from penstock.forward.candidates import assign
from penstock.forward.forward_steps import Step, require_no_return, steps_of
from penstock.forward.fragments import Flow, flows
from penstock.forward.frames import forward_frame
from penstock.forward.hoisting import Replaced, hoistable
from penstock.forward.iteration import GIVEN
from penstock.forward.liveness import reads, surely_assigned
from penstock.forward.loss_piece import OwnLoss, has_state, loss_in
from penstock.forward.module_uses import Frame, analyse
from penstock.forward.pieces import Piece, as_layer, assign_owners, carried, changed_before, grouped
from penstock.forward.sample_check import check_sample
from penstock.forward.unchanged import UnchangedModel
from penstock.stage.compute.output_loss import OutputLoss
from penstock.stage.converters import converter_of
from penstock.stage.layers import BatchNames, Layer, as_layers, require_initialized, require_values


class ModelLayers(list[Layer]):
    """Layers of a model, as `split` returns them; ``print(layers)`` shows what each is.

    Args:
        layers: the layers.
        model: model that they are of.
        loss_fn: loss that the model's own forward computes; None if the layers end in the output of ``model(x)``.
        rows: description of each layer.
        unchanged: check that the model is as it was when it was split; None if its layers are its own modules.

    Attributes:
        unchecked: whether the layers come from the source of a forward, and were not compared with the model on a sample.
    """

    def __init__(
        self,
        layers: list[Layer],
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        rows: tuple[str, ...] = (),
        unchanged: UnchangedModel | None = None,
    ) -> None:
        super().__init__(layers)
        self.model, self.loss_fn, self.rows = model, loss_fn, rows
        self.unchanged = unchanged
        self.unchecked = unchanged is not None

    def __str__(self) -> str:
        return "\n".join([f"{type(self.model).__name__}: {len(self)} layers", *self.rows])


@dataclass(frozen=True)
class _Inputs:
    """Parameters of a forward: the batch, the target if the forward computes the loss, and keyword inputs."""

    first: str
    target: str | None
    named: dict[str, Any]


def split(model: nn.Module, /, *sample: Any, loss: bool | None = None, **named: Any) -> ModelLayers:
    """Split a model with a forward of its own into layers that a `Pipeline` takes, with the model's names and weights.

    The forward has a loop over blocks, ``for block in self.blocks:``, or calls an ``nn.Sequential`` of them. The first layer
    runs the statements before the loop, then each block is a layer with the loop's statements, and the last layer runs
    those after it. Variables that later statements use travel from layer to layer. ::

        layers = penstock.split(model, x, y)
        print(layers)
        pipe = penstock.Pipeline(layers, microbatches=8)

    With `sample`, the model and its layers run once, each layer on a copy of its own. Output, loss and gradients must be
    equal bit for bit.

    Args:
        model: the model. Its parameters are used, and it is not changed.
        sample: arguments as for ``model(...)``: ``x``, or ``x`` and the target. They are optional.
        loss: whether the forward computes the loss from its second argument: the layers then end where it first uses the
            target, and ``loss_fn`` of the result is the rest. A forward of one argument returns its loss, or one of several
            values called ``loss``. By default True if `sample` has two arguments.
        named: keyword arguments of the sample.

    Raises:
        SplitError: if it is not known from the forward's source which statements belong to which layer, or a sample gives
            other numbers; names the statement and the lines to write instead.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList):
        return ModelLayers(as_layers(model), model)
    if (converter := converter_of(model)) is not None:
        raise SplitError(
            f"split is for your own models; give a model of {converter.library} to the Pipeline as it is, or to "
            f"{converter.name}"
        )
    require_initialized(type(model).__name__, model)
    require_values([("", model)])
    second = _second_input(model)
    if len(sample) == 1 and second in named and loss is not False:
        sample = (*sample, named.pop(second))
    if len(sample) > 2 or (len(sample) == 2 and loss is False):
        raise ConfigError(
            "give a sample as split(model, x), or as split(model, x, target) if the model computes its own loss; give other "
            "by keyword"
        )
    own_loss = len(sample) == 2 if loss is None else loss
    layers = _split(model, own_loss)
    if sample:
        check_sample(model, layers, layers.loss_fn, sample, named)
        layers.unchecked = False
    elif named:
        raise ConfigError("keyword arguments are part of a sample; give split(model, x, ...) the batch, too")
    return layers


def _second_input(model: nn.Module) -> str:
    """Return the name of the forward's second argument; empty if it has none."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    known = len(parameters) > 1 and parameters[1].kind is parameters[1].POSITIONAL_OR_KEYWORD
    return parameters[1].name if known else ""


def _split(model: nn.Module, own_loss: bool) -> ModelLayers:
    frame = forward_frame(model)
    inputs = _inputs(frame, own_loss)
    facts = {} if inputs.target is None else {inputs.target: GIVEN}
    steps = steps_of(frame, facts)
    losses = 0
    if inputs.target is not None:
        steps, losses = _with_loss(model, steps, inputs.target)
    require_no_return(steps[:-1])
    end = steps[-1]
    if surely_assigned(end.statements) is not None:
        raise frame.source.refusal(
            frame.source.tree, "it may end without a return", "return its output at the end"
        )
    available = {inputs.first, *inputs.named, *([inputs.target] if inputs.target else [])}
    every = flows(steps, available)
    every, of_loss = every[: len(every) - losses], every[len(every) - losses :]
    if inputs.target is not None:
        for flow in every:  # the target comes by another way
            flow.live.discard(inputs.target)
    pieces = grouped(every)
    if not of_loss and _only_returns(pieces):
        del pieces[-1]
    assign_owners(model, pieces)
    cuts = range(1, len(pieces))
    ends = [carried(pieces[n].flows[0], changed_before(pieces, n), inputs.named) for n in cuts]
    ends.append(_last(frame, every, pieces, of_loss, inputs))
    takes = [(inputs.first,), *ends[:-1]]
    layers = [as_layer(model, pieces, n, inputs.named, takes[n], ends[n]) for n in range(len(pieces))]
    names = BatchNames(inputs.first, inputs.target, frozenset(inputs.named))
    layers[0] = replace(layers[0], batch=names)
    loss_fn: Callable[[Any, Any], Any] | None = None
    if of_loss and inputs.target is not None:
        loss_fn = OwnLoss(model, of_loss, ends[-1], inputs.target)
    elif own_loss:
        loss_fn = OutputLoss(loss_in)
    rows = tuple(
        _row(layer, piece, ends[n]) for n, (layer, piece) in enumerate(zip(layers, pieces, strict=True))
    )
    if of_loss:
        rows += (f"  loss_fn: {_lines(of_loss)}",)
    used = [flow.step for flow in (*every, *of_loss)]
    paths = {path for piece in pieces for path in piece.paths}
    return ModelLayers(layers, model, loss_fn, rows, UnchangedModel(model, paths, used, frame.decided))


def _inputs(frame: Frame, own_loss: bool) -> _Inputs:
    source = frame.source
    parameters = list(inspect.signature(source.function).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name in reads(
            *source.tree.body
        ):
            raise source.refusal(source.tree, f"it uses {parameter.name}", "name the arguments one by one")
    parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first, others = parameters[0].name, parameters[1:]
    target = None
    if own_loss:
        target = others.pop(0).name if others else None
    return _Inputs(first, target, {p.name: p.default for p in others})


def _with_loss(model: nn.Module, steps: list[Step], target: str) -> tuple[list[Step], int]:
    """Divide the step after the blocks that first uses the target; return the steps, and how many are the loss."""
    for n, step in enumerate(steps):
        number = next((k for k, s in enumerate(step.statements) if _reads(step, s, target)), None)
        if number is None:
            continue
        statement = step.statements[number]
        if any(later.element for later in steps[n:]):
            raise step.frame.source.refusal(
                statement,
                f"it uses {target} before the last block has run",
                f"use {target} after the blocks alone, or give the Pipeline a loss_fn and no {target} to the model",
            )
        before = [*step.statements[:number], *_modules_before(model, step, statement, target)]
        parts = [p for p in (before, step.statements[number:]) if p]
        divided = [Step(step.frame, *analyse(step.frame, copy.deepcopy(p)), keys=step.keys) for p in parts]
        return [*steps[:n], *divided, *steps[n + 1 :]], len(steps) - n
    source = steps[-1].frame.source
    raise SplitError(
        f"{source.owner} does not use {target} to compute a loss; give the Pipeline a loss_fn(output, target)"
    )


def _modules_before(model: nn.Module, step: Step, statement: ast.stmt, target: str) -> list[ast.stmt]:
    """Take what has weights out of a statement with the target, as ``self.head(x)``; return the statements of it.

    All that Python evaluates up to the last such expression goes with it, unless it reads the target.
    """
    parts = hoistable(statement)

    def uses_weights(part: ast.expr) -> bool:
        paths = analyse(step.frame, [copy.deepcopy(ast.copy_location(ast.Expr(part), part))])[1].paths
        return any(has_state(model, path) for path in paths)

    free = [not _reads(step, part, target) for part in parts]
    last = next((n for n in reversed(range(len(parts))) if free[n] and uses_weights(parts[n])), -1)
    if not all(free[: last + 1]):
        return []
    taken = []
    for n, part in enumerate(parts[: last + 1]):
        taken.append(assign(f"_penstock_before_{n}", copy.deepcopy(part), statement))
        Replaced(part, ast.Name(f"_penstock_before_{n}", ast.Load())).visit(statement)
    return taken


def _reads(step: Step, statement: ast.AST, key: str) -> bool:
    return any(step.key(name) == key for name in reads(statement))


def _only_returns(pieces: list[Piece]) -> bool:
    """Return whether the last layer would only return the value of the one before."""
    last = pieces[-1]
    return len(pieces) > 1 and last.role == "head" and _is_return_of(last.flows)


def _is_return_of(of_piece: list[Flow]) -> bool:
    for statement in (s for flow in of_piece for s in flow.step.statements):
        match statement:
            case ast.Return(ast.Name()) | ast.Assign([ast.Name()], ast.Name()):
                pass
            case _:
                return False
    return len(of_piece[0].live) == 1


def _last(
    frame: Frame, every: list[Flow], pieces: list[Piece], of_loss: list[Flow], inputs: _Inputs
) -> tuple[str, ...]:
    """Return the variables that the last layer returns; none if it returns what the forward does."""
    if of_loss:
        return tuple(sorted(of_loss[0].live - {inputs.target}))
    used = sum(len(piece.flows) for piece in pieces)
    return tuple(every[used].live) if used < len(every) else ()


def _row(layer: Layer, piece: Piece, gives: tuple[str, ...]) -> str:
    onward = f" -> {', '.join(gives)}" if gives else ""
    return f"  {layer.role:9} {layer.name}: {_lines(piece.flows)}{onward}"


def _lines(of_piece: list[Flow]) -> str:
    spans = []
    for flow in of_piece:
        numbers = [s.lineno for s in flow.step.statements] + [
            s.end_lineno or s.lineno for s in flow.step.statements
        ]
        if not numbers:  # a round of a loop in which nothing runs
            continue
        span = (
            f"line {min(numbers)}" if min(numbers) == max(numbers) else f"lines {min(numbers)}-{max(numbers)}"
        )
        spans.append(f"{flow.step.frame.source.owner} {span}")
    return ", ".join(dict.fromkeys(spans)) or "nothing"
