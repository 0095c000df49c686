"""Training and evaluation mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.forward import InARow, Parts, forward
from tests.zoo.kind import WIDTH


@forward()
class TrainingInTheForward(Parts):
    """self.training before, within and after the loop"""

    def forward(self, x):
        x = self.stem(x)
        if self.training:
            x = x * 1.5
        for part in self.parts:
            x = part(x)
            x = x * (0.75 if self.training else 1.0)
        x = self.head(x)
        return torch.sin(x) if self.training else x


@forward()
class TrainingInAMethod(Parts):
    """self.training in a method and in a property"""

    @property
    def rate(self):
        return 0.5 if self.training else 1.0

    def noisy(self, x):
        return self.stem(x) + (0.25 if self.training else 0.0)

    def forward(self, x):
        x = self.noisy(x)
        for part in self.parts:
            x = part(x)
        return self.head(x) * self.rate


class Mode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, train: bool) -> Tensor:
        return self.inner(x) * (1.5 if train else 1.0) + (0.25 if self.training else 0.0)


@forward()
class TrainingAsAnArgument(Parts):
    """self.training, handed to a submodule"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem = Mode()

    def forward(self, x):
        x = self.stem(x, self.training)
        for part in self.parts:
            x = part(x)
        return self.head(x)


@forward(refused=r"training|stem")
class TrainingOfASubmodule(Parts):
    """self.stem.training"""

    def forward(self, x):
        x = self.stem(x)
        if self.stem.training:
            x = torch.sin(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def stem_to_eval(step: int, model: Any) -> None:
    if step == 1:
        model.stem.eval()


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)) if not self.training else self.inner(x)


@forward(change=stem_to_eval)
class PartInEvalMode(Parts):
    """a part that stays in eval mode from the second step on"""

    def __init__(self, parts):
        super().__init__(parts)
        self.stem = Statistics()

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Criterion(nn.Module):
    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(out.float(), y)
        return loss if self.training else loss * 2


@forward(loss="own", refused=r"mode|criterion")
class OwnCriterionByMode(Parts):
    """a criterion of the model, which reads its own mode, called in the forward"""

    def __init__(self, parts):
        super().__init__(parts)
        self.criterion = Criterion()

    def forward(self, x, y):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        out = self.head(x)
        return self.criterion(out, y)


@forward(loss="method", refused=r"mode")
class LossMethodByMode(Parts):
    """a method of the model as loss_fn, which reads self.training"""

    def loss(self, out, y):
        loss = F.mse_loss(out.float(), y)
        return loss if self.training else loss * 2

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def set_weight(step: int, model: Any) -> None:
    if step == 1:
        model.weight = 2.0


@forward(loss="own", change=set_weight, refused=r"weight")
class OwnLossByAnAttribute(Parts):
    """a loss in the forward, by an attribute that changes"""

    def __init__(self, parts):
        super().__init__(parts)
        self.weight = 0.5

    def forward(self, x, y=None):
        x = self.stem(x)
        for part in self.parts:
            x = part(x)
        out = self.head(x)
        if y is None:
            return out
        return out, F.mse_loss(out.float(), y) * self.weight


@forward(loss="method", change=set_weight, refused=r"weight")
class LossMethodByAnAttribute(InARow):
    """a method of the model as loss_fn, which reads an attribute that changes"""

    def __init__(self, parts):
        super().__init__(parts)
        self.weight = 0.5

    def loss(self, out, y):
        return F.mse_loss(out.float(), y) * self.weight
