"""Models with forwards of their own, as people write them.

They are here because pytest rewrites the code of test files, and `penstock.split` wants the code that its source shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, SEQUENCE, WIDTH = 23, 8, 12


def batch(rows: int = 4, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return token ids and targets, int64 (rows, sequence)."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, VOCABULARY, (2, rows, SEQUENCE), generator=generator)
    return x, y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.inner(self.norm(x)))


class MaskedBlock(Block):
    def forward(self, x, mask=None, cos=None):
        h = super().forward(x)
        h = h if mask is None else h * mask
        return h if cos is None else h * cos


class Parts(nn.Module):
    """Embedding, blocks, norm and head, without a forward."""

    def __init__(self, blocks: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Looped(Parts):
    """The forward that most models have."""

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NanoGPT(nn.Module):
    """The shape of nanoGPT: a ModuleDict, positions by arange, a tied head, and the loss inside."""

    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.block_size = SEQUENCE
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(SEQUENCE, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block() for _ in range(blocks)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        device = idx.device
        _, t = idx.size()
        assert t <= self.block_size, f"a sequence of {t}, and there are {self.block_size} positions"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        tok_emb = self.transformer.wte(idx)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss


class Masked(Parts):
    """Masks and tables that every block takes; an optional keyword input; two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__(block=MaskedBlock)
        self.register_buffer("slope", torch.rand(SEQUENCE, 1))
        self.register_buffer("cos", torch.rand(SEQUENCE, WIDTH), persistent=False)

    def forward(self, idx, mask=None):
        x = self.embedding(idx)
        cos = self.cos[: idx.shape[1]]
        slope = self.slope[: idx.shape[1]]
        if mask is not None:
            slope = slope * mask[..., None]
        for block in self.blocks:
            x = block(x, slope, cos=cos)
        return self.head(self.norm(x))


class ByIndex(Parts):
    """Blocks by number, with weights of the model for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.gates = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(4)])

    def forward(self, x):
        x = self.embedding(x)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x) * self.scale[i] * self.gates[i]
        return self.head(self.norm(x))


class ByCount(ByIndex):
    """The number of blocks in a variable."""

    def forward(self, x):
        blocks = len(self.blocks)
        last = blocks - 1
        x = self.embedding(x)
        for i in range(blocks):
            x = self.blocks[i](x) * self.scale[last - i]
        return self.head(self.norm(x))


class UNet(Parts):
    """Two loops; what the first leaves in a list, the second takes out of it."""

    def __init__(self) -> None:
        super().__init__(6)
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.embedding(x)
        skips = []
        for block in self.blocks[:3]:
            x = block(x)
            skips.append(x)
        x = x * 2
        for i, block in enumerate(self.blocks[3:]):
            x = block(x + self.weights[i] * skips.pop())
        return self.head(self.norm(x))


class OneBlockFourTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        x = self.embedding(x)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class OneBlockInThreePlaces(Looped):
    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList([block, block, Block(), block])


class TiedByUse(Parts):
    """A head that is the embedding's weight, used in a product."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight, self.bias)


class Backbone(Parts):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids, positions=None):
        _, t = ids.shape
        if positions is None:
            positions = torch.arange(t)
        x = self.embedding(ids) + positions[None, :, None] * 0.01
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Wrapped(nn.Module):
    """A head around a model that has the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx, labels=None):
        h = self.model(idx)
        logits = self.lm_head(h)
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LossAlone(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out = self.head(self.norm(x))
        return self.criterion(out.view(-1, VOCABULARY), y.view(-1))


class LossInOneStatement(LossAlone):
    """The head, and what else has weights, beside the target."""

    def forward(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.norm(x).mean() + self.criterion(self.head(self.norm(x)).transpose(1, 2), y)


class LossOfEveryBlock(Parts):
    def forward(self, x, y):
        x = self.embedding(x)
        aux = 0.0
        for block in self.blocks:
            x = block(x)
            aux = aux + 0.01 * x.square().mean()
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + aux
        return {"loss": loss, "logits": logits}


class LossInAMethod(Parts):
    """What computes the loss, and what has the blocks, are both one call away."""

    def features(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x

    def _impl(self, x, y):
        h = self.norm(self.features(x))
        logits = self.head(h)
        if y is None:
            return_value = logits
        else:
            y = y.flatten()
            return_value = logits, F.cross_entropy(logits.flatten(0, 1), y)
        return return_value

    def forward(self, x, y=None):
        return self._impl(x, y)


class Methods(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH

    @property
    def scale(self):
        return math.sqrt(self.width)

    def embed(self, idx):
        return self.embedding(idx) * self.scale

    def finish(self, x):
        return self.head(self.norm(x))

    def forward(self, idx):
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.finish(x / self.width)


class WithAdapters(Parts):
    """Two lists side by side, and a block without its adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        x = self.embedding(x)
        for i, (block, adapter) in enumerate(zip(self.blocks, self.adapters, strict=True)):
            if i == 2:
                x = block(x)
                continue
            x = adapter(block(x))
        return self.head(self.norm(x))


class ByValue(Parts):
    """Control flow that depends on the values."""

    def forward(self, idx):
        x = self.embedding(idx)
        while x.abs().max() > 1:
            x = x / 2
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = -x
        rows, _ = idx.shape
        return self.head(self.norm(x)).reshape(rows * SEQUENCE, -1) + idx.view(-1, 1) * 0.1


class AllOutputs(Parts):
    def forward(self, x, keep=True):
        x = self.embedding(x)
        outputs = ()
        for block in self.blocks:
            if keep:
                outputs = (*outputs, x)
            x = block(x)
        return self.head(self.norm(x)), outputs


class Switch(Parts):
    """Two ways through the blocks; an attribute says which."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint = False

    def forward(self, x):
        x = self.embedding(x)
        if self.checkpoint and self.training:
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Dictionaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.net = nn.ModuleDict(
            {"in": nn.Embedding(VOCABULARY, WIDTH), "blocks": blocks, "out": nn.Linear(WIDTH, VOCABULARY)}
        )

    def forward(self, x):
        x = self.net["in"](x)
        for _, block in self.net["blocks"].items():
            x = block(x)
        return self.net.out(x)


class Statistics(nn.Module):
    """Batch norms, whose buffers the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(4)]
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x.float())
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class WithUnused(Looped):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(2))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.rand(WIDTH))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.inverse * self.scale


class SharedRotary(Parts):
    """A module with a weight and a buffer that every block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(self.rotary(x))
        return self.head(self.norm(x))


def with_free_variables() -> nn.Module:
    factor = 3.0

    class Free(Parts):
        def forward(self, x):
            x = self.embedding(x) * factor
            for block in self.blocks:
                x = block(x) / factor
            return self.head(self.norm(x))

    return Free()


class NumbersWithin(Parts):
    """The number of a block, and inner functions and comprehensions that call something else by its name."""

    def forward(self, x):
        x = self.embedding(x)
        for i, block in enumerate(self.blocks):
            double = lambda i: i * 2
            x = block(x) * (1 + i / 10) + double(0.01) + sum(i for i in range(3)) / 100
        return self.head(self.norm(x)) * i


class Random(Parts):
    """Blocks left out at random, and dropout of the forward's own."""

    def forward(self, x):
        x = self.embedding(x)
        if self.training:
            x = F.dropout(x, 0.5)
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.5:
                continue
            x = block(x)
        return self.head(self.norm(x))


class TorchsEncoder(Parts):
    """The blocks in torch's own stack."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, nn.LayerNorm(WIDTH), enable_nested_tensor=nested)

    def forward(self, x):
        padded = x == 0
        return self.head(self.blocks(self.embedding(x), src_key_padding_mask=padded))


class CausalEncoder(TorchsEncoder):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.blocks(self.embedding(x), mask)
        return self.head(x)


WITH_OUTPUT: list[Callable[[], nn.Module]] = [
    Masked, ByIndex, ByCount, UNet, OneBlockFourTimes, OneBlockInThreePlaces, TiedByUse, Wrapped,
    NumbersWithin, Methods, WithAdapters, ByValue, AllOutputs, Switch, Dictionaries, Statistics, WithUnused, SharedRotary,
    with_free_variables, TorchsEncoder, CausalEncoder,
]  # fmt: skip
"""Models whose ``model(x)`` is compared."""

WITH_LOSS: list[Callable[[], nn.Module]] = [
    NanoGPT,
    Wrapped,
    LossAlone,
    LossInOneStatement,
    LossOfEveryBlock,
    LossInAMethod,
]
"""Models whose ``model(x, y)`` gives the loss."""

SUMMED: dict[str, tuple[str, ...]] = {
    "NanoGPT": ("transformer.wte.weight",),
    "OneBlockFourTimes": ("block.",),
    "OneBlockInThreePlaces": ("blocks.0.",),
    "TiedByUse": ("embedding.weight",),
    "SharedRotary": ("rotary.scale",),
    "ByIndex": ("scale",),
    "UNet": ("",),  # a value that goes to two layers gets its gradient in two parts
}
"""Beginnings of the names of weights that several layers use: their gradients are summed layer by layer."""


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()
