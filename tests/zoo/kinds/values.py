"""Values between layers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.kind import WIDTH, Inner, Layer, kind


def handed(pack: Any, unpack: Any) -> list[nn.Module]:
    """Two layers: the first returns ``pack(h)``, the second takes it by ``unpack(value)``."""

    class First(Inner):
        def forward(self, x: Tensor) -> Any:
            return pack(torch.tanh(self.inner(x)))

    class Second(Inner):
        def forward(self, value: Any) -> Tensor:
            return self.inner(unpack(value))

    return [First(), Second()]


@kind()
def tuples():
    """a tuple of tensors"""
    return handed(lambda h: (h, h * 2, h.detach()), lambda v: v[0] + v[1] * v[2])


@kind(mixes=True)
def dictionaries():
    """a dictionary with tensors of several dtypes"""
    return handed(
        lambda h: {"h": h, "ids": torch.arange(len(h)), "mask": h.detach() > 0, "wide": h.double()},
        lambda v: v["h"] * v["mask"] + v["ids"][:, None] + v["wide"].to(v["h"].dtype),
    )


@kind()
def ordered_dictionaries():
    """an OrderedDict"""
    return handed(lambda h: OrderedDict(b=h, a=h * 2), lambda v: v["a"] - v["b"])


@kind()
def none_and_numbers():
    """None, numbers and text beside tensors"""
    return handed(lambda h: (h, None, 3, 0.5, True, "text"), lambda v: v[0] * v[2] * v[3] if v[4] else v[0])


@kind()
def deep_nesting():
    """tuples in dictionaries in lists"""
    return handed(lambda h: [{"a": (h, [h * 2, None])}, ()], lambda v: v[0]["a"][0] + v[0]["a"][1][0])


@kind(mixes=True)
def scalars():
    """0-d tensors and empty ones"""
    return handed(lambda h: (h, h.mean(), h[:0], torch.tensor(2)), lambda v: v[0] * v[1] + v[2].sum() + v[3])


@kind(mixes=True)
def expanded():
    """an expanded output"""
    return handed(lambda h: h.mean(0, keepdim=True).expand(len(h), -1), lambda v: v * 1.5)


@kind()
def strided():
    """an output with gaps, and one with three dimensions that is transposed"""
    return handed(
        lambda h: (torch.cat([h, h], 1)[:, ::2], h.unflatten(1, (2, 4)).transpose(1, 2)),
        lambda v: v[0] + v[1].flatten(1),
    )


@kind()
def unused_output():
    """an output that needs a gradient and that nobody uses"""
    return handed(lambda h: (h, h * 3), lambda v: v[0])


@kind()
def output_without_gradient():
    """an output without a gradient beside one with"""
    return handed(lambda h: {"x": h, "constant": torch.ones(len(h), 1)}, lambda v: v["x"] + v["constant"])


class Pair(NamedTuple):
    hidden: Tensor
    scale: Tensor
    note: str


@kind()
def named_tuples():
    """a NamedTuple of one's own"""
    return handed(lambda h: Pair(h, h.sigmoid(), "note"), lambda v: v.hidden * v.scale)


@dataclass
class Record:
    hidden: Tensor
    scale: Tensor


OTHER = r"a stage returned a \w+ among its outputs|NamedTuple|dataclass"


@kind(refused=OTHER, when="split")
def dataclasses():
    """a dataclass that is not registered with torch's pytrees"""
    return handed(lambda h: Record(h, h.sigmoid()), lambda v: v.hidden * v.scale)


@kind(refused=r"a stage returned a set among its outputs", when="split")
def sets():
    """a set of words beside a tensor"""
    return handed(lambda h: (h, {"a", "b"}), lambda v: v[0] * len(v[1]))


@kind(mixes=True)
def shapes_that_change():
    """a layer whose inside has another shape in every microbatch"""
    return Layer(lambda m, x: x + m.inner(x[x.detach()[:, 0] > 0]).sum(0), inner=nn.Linear(WIDTH, WIDTH))


@kind(mixes=True)
def shapes_that_change_between():
    """a value handed over whose shape is another in every microbatch"""
    return handed(lambda h: (h, h[h.detach()[:, 0] > 0]), lambda v: v[0] + v[1].sum(0))


def written(v: tuple[Tensor, Tensor]) -> Tensor:
    """Write into the first of two tensors, and use both."""
    one, other = v
    one.mul_(2.0).add_(1.0)
    return one.mean(-1, keepdim=True) + other.mean(-1, keepdim=True) * 3


@kind()
def parts_of_one_tensor():
    """parts of one tensor, as of a chunk, of which the next layer writes into one"""
    return handed(lambda h: ((x := h * 2.0)[:, :4], x[:, 4:]), lambda v: written(v).expand(-1, WIDTH))


@kind()
def views_that_are_read():
    """views with common elements that the next layer reads"""
    return handed(lambda h: (h, h[:, :4]), lambda v: v[0] + v[1].mean(-1, keepdim=True))
