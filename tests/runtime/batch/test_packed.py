"""Sequences packed into rows: FlexAttention in the layers, and offsets that are no rows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import mse_loss

import penstock

ROWS, TOKENS, WIDTH = 4, 128, 16


class Attention(nn.Module):
    """Attention within the documents of a row, whose mask is made from their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def within(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[row, query] == documents[row, key])

        mask = create_block_mask(within, len(x), None, TOKENS, TOKENS, device="cpu")
        q, k, v = self.qkv(x).view(len(x), TOKENS, 3, 1, WIDTH).permute(2, 0, 3, 1, 4)
        attended: Tensor = flex_attention(q, k, v, block_mask=mask)
        return x + attended.squeeze(1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention())


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, TOKENS, WIDTH), torch.randint(0, 2, (ROWS, TOKENS)).cumsum(-1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, on FlexAttention without a compiler and on what it compiles
def test_flex_attention_gives_the_numbers_of_the_whole_model():
    """An evaluation, since FlexAttention has no backward on a CPU."""
    net, (x, documents) = model().requires_grad_(False), batch()
    with penstock.Pipeline(net, mse_loss, ranks=2, microbatches=2) as pipe:
        outputs = pipe.evaluate(x, x, documents=documents, outputs=True).outputs
    value = x
    for layer in net:
        value = layer(value, documents)
    assert outputs is not None
    torch.testing.assert_close(torch.cat(list(outputs)), value)


def test_a_block_mask_is_refused():
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device="cpu")
    x, _ = batch()
    with (
        penstock.Pipeline(model(), mse_loss, ranks=2, microbatches=2) as pipe,
        pytest.raises(
            penstock.BatchError, match=r"documents is a BlockMask .* call create_block_mask in the"
        ),
    ):
        pipe.step(x, x, documents=mask)


class Packed(NamedTuple):
    """Offsets of the sequences in a row, with the longest."""

    cu_seqlens: Tensor
    longest: int


class Counting(nn.Module):
    """A layer that takes offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        added: Tensor = self.linear(x) + len(packed.cu_seqlens) + packed.longest
        return added


def test_offsets_are_not_split_as_rows():
    net = nn.Sequential(Counting(), Counting())
    x = torch.randn(4, 4)
    with penstock.Pipeline(net, mse_loss, ranks=2, microbatches=2) as pipe:
        with pytest.raises(
            penstock.BatchError,
            match=r"the keyword input packed\.cu_seqlens has the offsets of packed sequences, \[0, 2, 5, 9\] .*"
            r"penstock\.Microbatches",
        ):
            pipe.step(x, x, packed=Packed(torch.tensor([0, 2, 5, 9]), 4))
        parts = [Packed(torch.tensor([0, 2]), 2), Packed(torch.tensor([0, 2, 5]), 3)]
        loss = pipe.step(x, x, packed=penstock.Microbatches(parts)).loss
    halves = [net[1](net[0](half, part), part) for half, part in zip(x.split(2), parts, strict=True)]
    torch.testing.assert_close(loss, mse_loss(torch.cat(halves), x).detach())


@pytest.mark.parametrize("numbers", [[3, 2, 5, 9], [0, 0, 0, 0]])
def test_numbers_of_rows_are_split(numbers: list[int]):
    """Their name may be one of offsets, and they are not."""
    net = nn.Sequential(Counting(), Counting())
    x = torch.randn(4, 4)
    # The layers add how many numbers there are, which is twice as many for two microbatches as one.
    execution = penstock.ExecutionOptions(check_split=False)
    with penstock.Pipeline(net, mse_loss, ranks=2, microbatches=2, execution=execution) as pipe:
        pipe.step(x, x, packed=Packed(torch.tensor(numbers), 4))
