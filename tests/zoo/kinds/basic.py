"""Basic layers of torch.nn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import WIDTH, kind


@kind()
def linear():
    """nn.Linear"""
    return nn.Linear(WIDTH, WIDTH)


@kind()
def linear_without_bias():
    """nn.Linear without a bias"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())


@kind()
def mlp():
    """two linears with an activation between them"""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


@kind()
def layer_norm():
    """nn.LayerNorm"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


@kind()
def rms_norm():
    """nn.RMSNorm"""
    return nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


@kind()
def group_norm():
    """nn.GroupNorm"""
    return nn.GroupNorm(2, WIDTH)


@kind()
def normalisation_without_weights():
    """nn.LayerNorm without weights"""
    return nn.LayerNorm(WIDTH, elementwise_affine=False)


@kind()
class BilinearLayer(nn.Module):
    """nn.Bilinear of a value with itself"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x, torch.sigmoid(x)))


@kind()
def prelu():
    """nn.PReLU, one weight a channel"""
    return nn.PReLU(WIDTH)


@kind()
def no_parameters():
    """activations only"""
    return nn.Sequential(nn.Softplus(), nn.Hardtanh())


@kind()
def identity():
    """nn.Identity"""
    return nn.Identity()


@kind()
class ListOfModules(nn.Module):
    """nn.ModuleList and nn.ModuleDict inside a layer"""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ModuleDict({"gate": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.many:
            x = x + torch.tanh(inner(x))
        return x * torch.sigmoid(self.named["gate"](x))


@kind()
class ListOfParameters(nn.Module):
    """nn.ParameterList and nn.ParameterDict"""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(2)])
        self.named = nn.ParameterDict({"shift": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.many:
            x = torch.tanh(F.linear(x, weight))
        return x + self.named["shift"]


@kind(refused=r"(?i)lazy", optimizers=("sgd", "momentum", "adam", "adamw"))
def lazy_linear():
    """nn.LazyLinear, which has no shape yet"""
    return nn.LazyLinear(WIDTH)


@kind()
def dropout():
    """nn.Dropout"""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))


@kind()
def alpha_dropout():
    """nn.AlphaDropout and nn.Dropout1d"""
    return nn.Sequential(
        nn.SELU(), nn.AlphaDropout(0.2), nn.Unflatten(1, (2, 4)), nn.Dropout1d(0.2), nn.Flatten()
    )


@kind()
class Noise(nn.Module):
    """torch.randn_like and torch.bernoulli in the forward"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * torch.randn_like(x)
        return x * torch.bernoulli(torch.full_like(x, 0.8))


@kind()
class GumbelChoice(nn.Module):
    """F.gumbel_softmax, hard"""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gumbel_softmax(self.choose(x), hard=True)


@kind()
class Gated(nn.Module):
    """a gated feed-forward layer whose one matrix is chunked"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x).chunk(2, -1)
        return x + self.outer(F.silu(a) * b)
