"""Weights in 16 bits, trained in 32: gradients and updates in fp32, from which the weights are rounded.

An update is often smaller than the last bit of a bf16 or fp16 weight and would be lost (1710.03740, section 3.1). So an
optimizer is given fp32 copies, the main weights as Megatron calls them, and each step ends by rounding them into the
model. Gradients reach them in fp32, too: ``Tensor.grad_dtype`` tells the autograd engine to add microbatches in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError

_NARROW = (torch.bfloat16, torch.float16)


class MainWeights:
    """The fp32 copies of one rank's 16-bit parameters; other parameters are their own main weights.

    Args:
        named: (name, parameter) of the rank.

    Attributes:
        by_name: name → fp32 copy, of those that have one.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters = {name: p for name, p in named if p.dtype in _NARROW and p.requires_grad}
        self.by_name = {
            name: nn.Parameter(p.detach().to(torch.float32)) for name, p in self._parameters.items()
        }
        self._versions = {name: p._version for name, p in self._parameters.items()}

    def of(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer is to update in place of a parameter."""
        return self.by_name.get(name, parameter)

    def lend_gradients(self) -> None:
        """Before the optimizer's step: gradients go to the main weights, which follow the parameters first.

        A parameter that someone has written to since (`Pipeline.load_state_dict`, for one) is the truth, unless it is
        still what its main weight rounds to.
        """
        for name, parameter in self._parameters.items():
            main = self.by_name[name]
            if parameter._version != self._versions[name]:
                written = parameter.detach()
                if not torch.equal(main.detach().to(written.dtype), written):
                    main.detach().copy_(written)
            main.grad = parameter.grad

    def round_into_parameters(self) -> None:
        """After the optimizer's step: the parameters are what their main weights round to."""
        for name, parameter in self._parameters.items():
            main = self.by_name[name]
            main.grad = None
            parameter.detach().copy_(main.detach())
            self._versions[name] = parameter._version

    def load(self, name: str, value: Tensor) -> None:
        """Take over a main weight, of the parameter's shape, and round it into the parameter."""
        self.by_name[name].detach().copy_(value)
        parameter = self._parameters[name]
        parameter.detach().copy_(self.by_name[name].detach())
        self._versions[name] = parameter._version


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
