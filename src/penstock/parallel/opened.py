"""Other values for parameters that begin at a constant, for as long as a check of their layer runs.

A check that compares what a layer returns does not see what a gate of zero hides (a projection that begins with zeros, a
shift of tokens whose share begins at 0), and one of 1e-6 makes it too small to be told from rounding. Training opens the
gate, and what was hidden is then in every step. A layer that may be cut gives equal outputs with any values of its
parameters, so a check takes others where the layer's own could hide something. The parameters themselves are not written.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.parallel.dtensor import from_local_like, is_dtensor, local

_TINY = 0.02
"""Root mean square from which a parameter hides nothing, of that of the values that it gets here."""

_PERIOD = 65_521
"""Random numbers that are drawn, after which they repeat: a prime, so that the rows of a matrix differ."""


def opened(name: str, parameter: Tensor) -> Tensor:
    """Return the values to check a layer with, of the parameter's shape: its own, or others if these may hide something.

    Others are its own plus random numbers that depend on the name alone, so that all copies of a parameter have the same.
    Parameters get them that train, and whose elements are equal or almost 0.
    """
    values = local(parameter.detach())
    kind = type(parameter)
    plain = (kind in (Tensor, nn.Parameter) or is_dtensor(parameter)) and not values.is_meta
    # Expanded tensors may have more elements than memory has.
    dense = 0 < values.nbytes <= values.untyped_storage().nbytes()
    if not (
        parameter.requires_grad and plain and dense and (values.is_floating_point() or values.is_complex())
    ):
        return parameter
    sizes = sorted(values.shape)
    scale = 0.5 * (sizes[-2] if len(sizes) > 1 else 1) ** -0.5
    size = torch.linalg.vector_norm(values) / values.numel() ** 0.5
    if bool(size >= _TINY * scale) and not bool((values == values.flatten()[0]).all()):
        return parameter
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(min(values.numel(), _PERIOD), generator=generator, device="cpu") * scale
    repeats = -(-values.numel() // len(drawn))
    noise = drawn.to(values).repeat(repeats)[: values.numel()].view(values.shape)
    return from_local_like(values + noise, parameter)


def open_parameters(prefix: str, module: nn.Module) -> Callable[[], None]:
    """Put `opened` values in the place of a module's parameters, and return a function that puts the parameters back."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
    for path, inner in module.named_modules(prefix=prefix):
        for name, parameter in inner._parameters.items():
            if parameter is None or (values := opened(f"{path}.{name}", parameter)) is parameter:
                continue
            other = nn.Parameter(values)
            vars(other).update(vars(parameter))
            inner._parameters[name] = other
            replaced.append((inner._parameters, name, parameter, other))

    def restore() -> None:
        for table, name, parameter, other in replaced:
            if table.get(name) is other:  # FSDP puts others there itself
                table[name] = parameter

    return restore
