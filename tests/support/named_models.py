"""Models whose arguments have names that a pipeline's own functions use, too."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.own_models import VOCABULARY, WIDTH, Block, Parts

ROWS, TOKENS, LABELS = 8, 6, 5


class Diffusion(nn.Module):
    """The shape of a diffusion transformer: a noisy input, times, and labels called y; blocks take the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.labels = nn.Linear(1, WIDTH), nn.Embedding(LABELS, WIDTH)
        self.blocks = nn.ModuleList([Modulated() for _ in range(4)])
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, t, y):
        c = self.times(t[:, None]) + self.labels(y)
        for block in self.blocks:
            x = block(x, c)
        return self.last(self.norm(x) * c[:, None])


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, c):
        shift, scale = self.modulation(F.silu(c)).chunk(2, dim=-1)
        return x + torch.tanh(self.inner(self.norm(x) * (1 + scale[:, None]) + shift[:, None]))


def diffusion_batch(seed: int = 3) -> dict[str, torch.Tensor]:
    """Return x, the target noise, t and y."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, ROWS, TOKENS, WIDTH, generator=generator)
    y = torch.randint(0, LABELS, (ROWS,), generator=generator)
    return {"x": x, "target": noise, "t": torch.rand(ROWS, generator=generator), "y": y}


class Colliding(Parts):
    """Arguments named like those of a pipeline's own functions."""

    def forward(  # noqa: PLR0917 - a model's own forward
        self, ids, value=None, named=None, module=None, message=None, inputs=None, layer=None, call=None
    ):
        x = self.embedding(ids)
        for block in self.blocks:
            for extra in (value, named, module, message):
                x = x + extra[:, None, None]
            x = block(x)
        for extra in (inputs, layer, call):
            x = x * extra[:, None, None]
        return self.head(self.norm(x))


class Options(Parts):
    """Arguments named like the options of a step, and like its arguments."""

    def forward(self, ids, outputs=None, input_grads=None, x=None):
        h = self.embedding(ids)
        for block in self.blocks:
            for extra in (outputs, input_grads, x):
                if extra is not None:
                    h = h + extra[:, None, None]
            h = block(h)
        return self.head(self.norm(h))


class Labelled(Parts):
    """A loss of its own, with labels as the second argument, and a mask."""

    def forward(self, input_ids, labels, attention_mask=None):
        x = self.embedding(input_ids)
        for block in self.blocks:
            if attention_mask is not None:
                x = x * attention_mask[..., None]
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


class TakesAMapping(nn.Module):
    """A forward whose first argument is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, features):
        x = features["a"] + features["b"]
        for block in self.blocks:
            x = block(x)
        return x
