"""Loss functions, and what people do to a model between its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Loss:
    """A loss function.

    Attributes:
        call: of the output and the target.
        weight: how often it is drawn.
        refused: a regular expression for the refusal, where it is refused.
    """

    call: Callable[[Any, Tensor], Any]
    weight: int = 1
    refused: str = ""


def named(out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"fit": F.mse_loss(out, y), "size": 0.01 * out.float().square().mean()}


class ByMode(nn.Module):
    """A criterion that reads its own mode."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * (1.0 if self.training else 0.5)


def classes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y.argmax(1))


def right(out: Tensor, y: Tensor) -> Tensor:
    return (out.argmax(1) == y.argmax(1)).sum()


def cut_off(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y).detach()


LOSSES = {
    "mse": Loss(F.mse_loss, 30),
    "module": Loss(nn.SmoothL1Loss(), 3),
    "by_mode": Loss(ByMode(), 2),
    "classes": Loss(classes, 3),
    "named": Loss(named, 3),
    "by_row": Loss(lambda out, y: F.mse_loss(out, y, reduction="none").mean(1), 1, r"scalar"),
    "integer": Loss(right, 1, r"(?i)loss"),
    "detached": Loss(cut_off, 1, r"(?i)loss"),
}


class Trainee(Protocol):
    """What is trained, by a pipeline or by plain PyTorch.

    Attributes:
        layers: the zoo's layers.
        given: the modules that the user has: the model that has them, or the layers themselves.
    """

    layers: list[nn.Module]
    given: list[nn.Module]

    def evaluate(self, step: int) -> None: ...

    def train(self, mode: bool) -> None: ...

    def reload(self) -> None: ...


def nothing(step: int, trainee: Trainee) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Habit:
    """What is done before every step, and to its batch.

    Attributes:
        what: in words.
        before: does it: the step's number, and what is trained.
        batch: changes the input and the target of a step.
        weight: how often it is drawn.
        refused: a regular expression for the refusal, where it is refused; empty where it must work.
        zero: how gradients are dropped after an update: "none", "zeros" or "never".
        optimizers: those plain PyTorch can go on with; None for any.
    """

    what: str
    before: Callable[[int, Trainee], None] = nothing
    batch: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda step, x, y: (x, y)
    weight: int = 2
    refused: str = ""
    zero: str = "none"
    optimizers: tuple[str, ...] | None = None


def evaluates(step: int, trainee: Trainee) -> None:
    trainee.evaluate(step)


def every_other(trainee: Trainee, wanted: bool) -> None:
    for layer in trainee.layers[::2]:
        for parameter in layer.parameters():
            parameter.requires_grad_(wanted)


def freezes(step: int, trainee: Trainee) -> None:
    if step == 1:
        every_other(trainee, False)


def thaws(step: int, trainee: Trainee) -> None:
    if step < 2:
        every_other(trainee, step == 1)


def widens(step: int, trainee: Trainee) -> None:
    if step == 1:
        for module in trainee.given:
            module.double()


def wide_batch(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x.double(), y.double()) if step >= 1 else (x, y)


def writes(step: int, trainee: Trainee) -> None:
    with torch.no_grad():
        for module in trainee.given if step == 1 else ():
            for parameter in module.parameters():
                parameter.mul_(0.75)


def loads(step: int, trainee: Trainee) -> None:
    if step == 1:
        trainee.reload()


def turns_to_eval(step: int, trainee: Trainee) -> None:
    if step in (1, 2):
        trainee.train(step == 2)


def turns_the_module_to_eval(step: int, trainee: Trainee) -> None:
    if step in (1, 2):
        for module in trainee.given:
            module.train(step == 2)
    trainee.evaluate(step)


def spoiled(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if step == 1:
        x[-1, 0] = float("nan")
    return x, y


HABITS = {
    "none": Habit(what="nothing", weight=12),
    "evaluate": Habit(what="evaluates between steps", before=evaluates),
    "freeze": Habit(what="freezes every other layer after the first step", before=freezes),
    "thaw": Habit(
        what="begins with every other layer frozen and thaws it after the first step", before=thaws
    ),
    "double": Habit(
        what="turns the model to float64 after the first step",
        before=widens,
        batch=wide_batch,
        weight=1,
        refused=r"(?i)dtype|float64|double",
        optimizers=("sgd",),
    ),
    "write": Habit(what="writes to the weights between steps, under no_grad", before=writes),
    "reload": Habit(what="loads the state it has", before=loads),
    "eval_mode": Habit(what="takes a step in eval mode", before=turns_to_eval),
    "module_mode": Habit(
        what="turns the model itself to eval mode for a step, and evaluates between steps",
        before=turns_the_module_to_eval,
    ),
    "zeros": Habit(what="zeroes gradients instead of dropping them", zero="zeros"),
    "never": Habit(what="never drops gradients", weight=1, zero="never"),
    "nan": Habit(what="has a NaN in a batch", batch=spoiled, weight=1),
}
