"""Layers whose rows depend on each other: the first step refuses them, since a batch is cut between rows."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Inner, Layer, kind

DEPEND = {"refused": r"its rows depend on each other", "rows": 2}


@kind(**DEPEND)
def attention_over_rows():
    """nn.MultiheadAttention that takes rows for time"""
    inner = nn.MultiheadAttention(WIDTH, 2)
    return Layer(lambda self, x: x + self.inner(x, x, x)[0], inner=inner)


@kind(**DEPEND)
def lstm_over_rows():
    """nn.LSTM that takes rows for time"""
    return Layer(lambda self, x: self.inner(x)[0], inner=nn.LSTM(WIDTH, WIDTH))


@kind(**DEPEND)
class Centred(Inner):
    """A layer that subtracts the mean over the rows"""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x - x.mean(0, keepdim=True)
