"""Recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, kind


class Read(nn.Module):
    """Reads a row as a sequence of 4 by 2."""

    def __init__(self, inner: nn.RNNBase) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.unflatten(1, (4, 2)))[0].flatten(1)[:, :WIDTH]


@kind()
def lstm():
    """nn.LSTM, two layers, both directions"""
    return Read(nn.LSTM(2, 1, num_layers=2, bidirectional=True, batch_first=True))


@kind()
def gru():
    """nn.GRU with dropout between its layers"""
    return Read(nn.GRU(2, 2, num_layers=2, dropout=0.2, batch_first=True))


@kind()
class Cells(nn.Module):
    """nn.LSTMCell and nn.GRUCell in a loop"""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x)
        for _ in range(2):
            h, c = self.lstm(x, (h, c))
            x = self.gru(h, x)
        return x
