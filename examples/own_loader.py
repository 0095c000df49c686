"""Your own data set and DataLoader around a Pipeline: sums of numbers, in rows of many lengths.

python examples/own_loader.py                                 two ranks as threads of this process
torchrun --nproc-per-node 2 examples/own_loader.py            the same with one process per rank

Every process makes the same batches, since the order comes from the seed and the epoch alone. The pipeline takes the rows
of its replica from the batch by itself, so no DistributedSampler is needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import penstock

ALPHABET = "0123456789+=."
WIDTH, BLOCKS, LONGEST = 64, 4, 16
EPOCHS, ROWS, BATCH, MICROBATCHES = 12, 2048, 64, 8


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Texts such as ``12+7=19.``, as tokens and as labels: -100 for the question, which is not trained on."""

    def __init__(self, rows: int, seed: int) -> None:
        drawn = random.Random(seed)
        self.pairs = [(drawn.randrange(30), drawn.randrange(30)) for _ in range(rows)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        a, b = self.pairs[number]
        question, answer = f"{a}+{b}=", f"{a + b}."
        tokens = torch.tensor([ALPHABET.index(letter) for letter in question + answer])
        labels = tokens.clone()
        labels[: len(question)] = -100
        return tokens, labels


def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad rows on the right to one length; the loss skips labels of -100."""
    tokens, labels = zip(*rows, strict=True)
    return pad_sequence(tokens, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)


class Embed(nn.Module):
    """Tokens and their places, as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.places.weight[: x.shape[1]]


class Block(nn.Module):
    """A Transformer block; a token sees those before it, and so never the padding after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.inner(x, src_mask=mask, is_causal=True)


def main() -> None:
    torch.manual_seed(0)
    layers = [Embed(), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, len(ALPHABET))]
    data = Sums(ROWS, seed=0)
    with penstock.Pipeline(
        layers,
        penstock.causal_lm_loss,
        ranks=2,
        microbatches=MICROBATCHES,
        reduction=penstock.valid_tokens,  # the mean over the batch's labels, however microbatches differ
    ) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=2e-3, clip=1.0)
        for epoch in range(EPOCHS):
            # The epoch's number is its seed, so a run can resume at any epoch; `pipe.steps` counts the steps.
            order = torch.Generator().manual_seed(epoch)
            loader = DataLoader(
                data, BATCH, shuffle=True, generator=order, collate_fn=collate, drop_last=True
            )
            for tokens, labels in loader:
                result = pipe.step(tokens, labels)
                optimizer.step()
            if pipe.is_main:
                print(f"epoch {epoch + 1}  loss {result.loss:.4f}")
        tokens, labels = collate([data[n] for n in range(BATCH)])
        result = pipe.evaluate(tokens, labels, outputs=True)
        if pipe.holds_last:  # on other ranks there are no outputs
            guesses, counted = torch.cat(result.outputs)[:, :-1].argmax(2), labels[:, 1:] != -100
            print(f"right letters of answers: {(guesses == labels[:, 1:])[counted].float().mean():.0%}")


if __name__ == "__main__":
    main()
