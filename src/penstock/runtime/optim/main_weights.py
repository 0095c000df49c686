"""Main weights: fp32 copies of 16-bit parameters that the optimizer updates.

An update is often smaller than the last bit of a bf16 or fp16 weight and would be lost (1710.03740, section 3.1). So the
optimizer gets fp32 copies, the main weights as Megatron calls them, and each step ends by rounding them into the model.
Gradients are fp32, too: ``Tensor.grad_dtype`` tells the autograd engine to add microbatches in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.parallel.dtensor import distribute_like, full_tensor, is_dtensor, is_sharded, local

_NARROW = (torch.bfloat16, torch.float16)


class MainWeights:
    """Tensors that the optimizer of one rank updates in place of parameters.

    For a 16-bit parameter that is its fp32 copy. For a DTensor it is this process's shard (or the shard's copy), which
    shares the parameter's memory. Any other parameter is updated itself.

    Args:
        whole: names of parameters whose optimizer needs whole matrices: all processes of a DTensor update a full copy.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        copies: bool,
        written: Mapping[str, nn.Parameter] | None = None,
        whole: Collection[str] = (),
    ) -> None:
        self.copies = copies
        self.whole = {name for name, p in named if is_sharded(p) and name in whole}
        wide = {name for name, p in named if self.wants_copy(p)}
        self._parameters = {name: p for name, p in named if name in wide}
        self.by_name = {
            name: nn.Parameter(self.part(name, p.detach()).to(torch.float32))
            for name, p in self._parameters.items()
        }
        self._shards: dict[str, tuple[nn.Parameter, nn.Parameter]] = {
            name: (p, nn.Parameter(self.part(name, p.detach()), requires_grad=p.requires_grad))
            for name, p in named
            if is_dtensor(p) and name not in wide
        }
        self._written = {name: (written or {}).get(name, p) for name, p in self._parameters.items()}
        self._versions = {name: self._version(name) for name in self._parameters}

    def wants_copy(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter, or its shard, has an fp32 copy."""
        return self.copies and parameter.dtype in _NARROW and parameter.requires_grad

    def _version(self, name: str) -> tuple[int, int] | None:
        """Return a parameter's memory and the count of its writes; None for a DTensor, whose views have separate counts."""
        written = self._written[name]
        return None if is_dtensor(written) else (written.data_ptr(), written.detach()._version)

    def of(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates in place of a parameter."""
        if name in self._shards:
            return self._shards[name][1]
        return self.by_name.get(name, parameter)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return what this process updates of a tensor like a parameter: its shard, or all of it."""
        return full_tensor(tensor) if name in self.whole else local(tensor)

    def lend_gradients(self) -> None:
        """Give the gradients to the main weights, before the optimizer's step.

        A parameter written to since the last step, as by `Pipeline.load_state_dict`, is first copied into its main weight,
        but for the elements that still equal the rounded main weight.
        """
        for name, (parameter, shard) in self._shards.items():
            if name in self.whole:
                shard.detach().copy_(self.part(name, parameter.detach()))
            shard.grad = None if parameter.grad is None else self.part(name, parameter.grad)
        for name, parameter in self._parameters.items():
            main = self.by_name[name]
            written = self.part(name, parameter.detach())
            version = self._version(name)
            if version is None or version != self._versions[name]:
                same = main.detach().to(written.dtype) == written
                main.detach().copy_(torch.where(same, main.detach(), written))
            main.grad = None if parameter.grad is None else self.part(name, parameter.grad)

    def round_into_parameters(self) -> None:
        """Round the main weights into their parameters, after the optimizer's step."""
        for name, (parameter, shard) in self._shards.items():
            shard.grad = None
            if name in self.whole:
                self._write(name, parameter, shard.detach())
        for name, parameter in self._parameters.items():
            main = self.by_name[name]
            main.grad = None
            self._round(name, parameter, main)

    def load(self, name: str, value: Tensor) -> None:
        """Load a main weight, of the shape of its tensor in `by_name`, and round it into the parameter."""
        self.by_name[name].detach().copy_(value)
        self._round(name, self._parameters[name], self.by_name[name])

    def _round(self, name: str, parameter: nn.Parameter, main: nn.Parameter) -> None:
        self._write(name, parameter, main.detach())
        self._versions[name] = self._version(name)

    def _write(self, name: str, parameter: nn.Parameter, value: Tensor) -> None:
        part = local(distribute_like(value, parameter)) if name in self.whole else value
        local(parameter.detach()).copy_(part)


def keep_gradients_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Keep and accumulate the gradients of 16-bit parameters in fp32; gradients already there are cast."""
    for parameter in parameters:
        if parameter.dtype not in _NARROW or not parameter.requires_grad:
            continue
        before, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.float32
        parameter.grad = None if before is None else before.to(torch.float32)
