"""Other uses of a weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import WIDTH, kind


class Uses(nn.Module):
    """A matrix, a second one and a vector, used as a function says."""

    def __init__(self, use: Callable[[Uses, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.3)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.use(self, x))


@kind()
def cat_and_linear():
    """a weight in torch.cat and in F.linear of its own"""
    return Uses(
        lambda m, x: F.linear(F.linear(x, m.weight, m.bias), torch.cat([m.weight[:4], m.other[4:]]), m.bias)
    )


@kind()
def stack_of_weights():
    """torch.stack of weights, and bmm"""
    return Uses(lambda m, x: torch.bmm(x.expand(2, -1, -1), torch.stack([m.weight, m.other])).sum(0) + m.bias)


@kind()
def weights_by_keyword():
    """weights as keyword arguments"""
    return Uses(lambda m, x: F.linear(input=F.linear(x, weight=m.weight, bias=m.bias), weight=m.other))


@kind()
def linear_and_keyword():
    """a weight as a positional and as a keyword argument"""
    return Uses(
        lambda m, x: (
            F.linear(F.linear(x, m.weight), weight=m.weight) + torch.add(x, other=m.bias) + m.other.sum()
        )
    )


@kind()
def einsum():
    """torch.einsum"""
    return Uses(lambda m, x: torch.einsum("bi,oi,op->bp", x, m.weight, m.other) + m.bias)


@kind()
def matmul():
    """torch.matmul, torch.mm, `@`"""
    return Uses(lambda m, x: torch.mm(torch.matmul(x, m.weight) @ m.other, m.weight) + m.bias)


@kind()
def addmm():
    """torch.addmm with alpha and beta, baddbmm"""
    return Uses(
        lambda m, x: torch.addmm(m.bias, torch.addmm(m.bias, x, m.weight), m.other, beta=0.5, alpha=2.0)
    )


@kind()
def transposed_weight():
    """F.linear with a transposed weight"""
    return Uses(lambda m, x: F.linear(x, m.weight.t(), m.bias) + F.linear(x, m.other.T))


@kind()
def sliced_weight():
    """F.linear with slices of a weight"""
    return Uses(
        lambda m, x: (
            torch.cat([F.linear(x, m.weight[:4]), F.linear(x, m.weight[4:])], 1) + m.bias * m.other.sum()
        )
    )


@kind()
def three_dimensions():
    """F.linear of values with three and four dimensions, contiguous and not"""
    return Uses(
        lambda m, x: (
            F.linear(x[:, None] * m.bias[None, :, None], m.weight).mean(1)
            + F.linear((x[:, None, None] * m.bias[:, None]).transpose(0, 2), m.other)
            .transpose(0, 2)
            .mean((1, 2))
        )
    )


@kind()
def expanded_input():
    """F.linear of an expanded input"""
    return Uses(
        lambda m, x: F.linear(x[:, None].expand(-1, 3, -1), m.weight, m.bias).mean(1) + F.linear(x, m.other)
    )


@kind(mixes=True)
def one_row():
    """F.linear of a vector"""
    return Uses(lambda m, x: x + F.linear(x.mean(0), m.weight, m.bias) + F.linear(x, m.other).mean())


@kind()
def input_without_gradient():
    """F.linear of a constant and of a detached input"""
    return Uses(
        lambda m, x: x + F.linear(torch.ones_like(x), m.weight, m.bias) + F.linear(x.detach(), m.other)
    )


@kind(
    writes=True,
    refused="modified by an inplace operation|modifying its input in place|the forward writes into parameter",
)
def weight_written_in_the_forward():
    """a weight that the forward clamps in place under no_grad"""

    def use(m: Uses, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.weight.clamp_(-0.5, 0.5)
        return F.linear(x, m.weight, m.bias) + F.linear(x, m.other)

    return Uses(use)


@kind()
def merged_weights():
    """a weight and a product of two others as one, as in merged LoRA"""
    return Uses(lambda m, x: F.linear(x, m.weight + m.other[:2].t() @ m.other[2:4], m.bias))


@kind()
def merged_by_rows():
    """a product of a transposed weight and another as the weight"""
    return Uses(lambda m, x: F.linear(x, m.weight.t() @ m.other, m.bias))


@kind()
def parts_of_an_activation():
    """chunks of what a linear returns, each in a product of its own, one of them unused"""

    def use(m: Uses, x: Tensor) -> Tensor:
        first, second, _, last = F.linear(x, m.weight, m.bias).chunk(4, -1)
        return first @ m.other[:2] + second @ m.other[2:4] + last @ m.other[6:]

    return Uses(use)


@kind()
def weights_as_inputs():
    """a weight as the input of linear layers, as learned queries are"""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(3, WIDTH) * 0.3)
            self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.softmax(x @ self.keys(self.queries).t(), -1) @ self.values(self.queries)

    return Queries()


@kind()
def table_through_a_linear():
    """all rows of an embedding table through a linear layer"""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(self.table.weight)
            return x + made[(x.detach()[:, 0].float() * 2).long().remainder(5)]

    return Table()


@kind()
def kernels_in_a_stack():
    """a convolution with a kernel of a stack"""

    class Kernels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernels = nn.Parameter(torch.randn(2, 1, 1, 3) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.conv1d(x[:, None], self.kernels[1], padding=1)[:, 0]

    return Kernels()


@kind(writes=True)
def weight_in_bounds():
    """a weight that its forward keeps in bounds, by .data"""

    class Bounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.2, 0.2)
            return super().forward(x)

    return Bounded(WIDTH, WIDTH)
