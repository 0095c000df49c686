"""Weights in 16 bits, trained in 32: gradients and updates in fp32, from which the weights are rounded.

An update is often smaller than the last bit of a bf16 or fp16 weight and would be lost (1710.03740, section 3.1). So an
optimizer is given fp32 copies, the main weights as Megatron calls them, and each step ends by rounding them into the
model. Gradients reach them in fp32, too: ``Tensor.grad_dtype`` tells the autograd engine to add microbatches in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.parallel.dtensor import is_dtensor, local

_NARROW = (torch.bfloat16, torch.float16)


class MainWeights:
    """What the optimizer of one rank updates in place of parameters.

    That is the fp32 copy of a 16-bit parameter; for one that tensor parallelism has cut this process's part of it (or of
    its copy), which shares the parameter's memory; any other parameter is updated itself.

    Args:
        named: (name, parameter) of the rank.
        copies: whether 16-bit parameters have fp32 copies.
        written: name → the parameter that others write to, where `named` has a piece of it.

    Attributes:
        by_name: name → fp32 copy, of those that have one; of a cut parameter this process's part.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        copies: bool,
        written: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.copies = copies
        wide = {name for name, p in named if self.wants_copy(p)}
        self._parameters = {name: p for name, p in named if name in wide}
        self.by_name = {
            name: nn.Parameter(local(p.detach()).to(torch.float32)) for name, p in self._parameters.items()
        }
        self._parts = {
            name: (p, nn.Parameter(local(p.detach()), requires_grad=p.requires_grad))
            for name, p in named
            if is_dtensor(p) and name not in wide
        }
        self._written = {name: (written or {}).get(name, p) for name, p in self._parameters.items()}
        self._versions = {name: self._version(name) for name in self._parameters}

    def wants_copy(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter, or a piece of it, has an fp32 copy."""
        return self.copies and parameter.dtype in _NARROW and parameter.requires_grad

    def _version(self, name: str) -> int | None:
        """By which a write is noticed; None of a cut parameter, whose views have versions of their own."""
        written = self._written[name]
        return None if is_dtensor(written) else written.detach()._version

    def of(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer is to update in place of a parameter."""
        if name in self._parts:
            return self._parts[name][1]
        return self.by_name.get(name, parameter)

    def lend_gradients(self) -> None:
        """Before the optimizer's step: gradients go to the main weights, which follow the parameters first.

        A parameter that someone has written to since (`Pipeline.load_state_dict`, for one) is the truth, unless it is
        still what its main weight rounds to.
        """
        for parameter, part in self._parts.values():
            part.grad = None if parameter.grad is None else local(parameter.grad)
        for name, parameter in self._parameters.items():
            main = self.by_name[name]
            written = local(parameter.detach())
            version = self._version(name)
            changed = version is None or version != self._versions[name]
            if changed and not torch.equal(main.detach().to(written.dtype), written):
                main.detach().copy_(written)
            main.grad = None if parameter.grad is None else local(parameter.grad)

    def round_into_parameters(self) -> None:
        """After the optimizer's step: the parameters are what their main weights round to."""
        for _, part in self._parts.values():
            part.grad = None
        for name, parameter in self._parameters.items():
            main = self.by_name[name]
            main.grad = None
            self._round(name, parameter, main)

    def load(self, name: str, value: Tensor) -> None:
        """Take over a main weight, of the shape of what is in `by_name`, and round it into the parameter."""
        self.by_name[name].detach().copy_(value)
        self._round(name, self._parameters[name], self.by_name[name])

    def _round(self, name: str, parameter: nn.Parameter, main: nn.Parameter) -> None:
        local(parameter.detach()).copy_(main.detach())
        self._versions[name] = self._version(name)


def keep_gradients_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of 16-bit parameters be kept, and added up, in fp32; what there is already is cast.

    Raises:
        ConfigError: this PyTorch has no ``Tensor.grad_dtype``.
    """
    for parameter in parameters:
        if parameter.dtype not in _NARROW or not parameter.requires_grad:
            continue
        if not hasattr(parameter, "grad_dtype"):
            raise ConfigError(
                f"main weights need Tensor.grad_dtype, which torch {torch.__version__} does not have; update torch"
            )
        before, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.float32
        parameter.grad = None if before is None else before.to(torch.float32)
