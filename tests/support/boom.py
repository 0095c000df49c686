"""A layer that raises."""

from __future__ import annotations

import torch
from torch import nn


class Boom(nn.Module):
    """Raises in the forward, or in the backward, of one microbatch; harmless once disarmed."""

    def __init__(self, at: int, backward: bool = False) -> None:
        super().__init__()
        self.at, self.backward, self.seen, self.armed = at, backward, -1, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.armed and self.seen == self.at:
            if not self.backward:
                raise ValueError("boom")
            x.register_hook(self.explode)
        return x * 1.0

    def explode(self, grad: torch.Tensor) -> None:
        raise ValueError("boom")
