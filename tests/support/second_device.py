"""A second device beside the CPU where there is no GPU: its tensors are computed on the CPU, and never beside the CPU's.

As on a GPU, an operation on tensors of two devices is an error, autograd runs the device's backward in a thread of its own,
and values go over by ``to`` alone. PyTorch has this for backends written in Python. It cannot be undone, so only processes
that end with their tests may call `add_device`. There are no random generators for it, so dropout cannot be tested on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree, backend_registration

NAME = "second"


class OnDevice(Tensor):
    """A tensor of the device, around one of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: Any, requires_grad: bool = False) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.inner!r} on {self.device}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = OnDevice(self.inner.clone(), self.device, self.requires_grad)
        if isinstance(self, nn.Parameter):
            made._is_param = True
        return made

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: OnDevice) -> None:
        Tensor.data.__set__(self, value)
        self.inner = value.inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A number of the CPU may be beside any tensor.
        devices = {leaf.device for leaf in leaves if leaf.dim() or isinstance(leaf, cls)}
        name = func.overloadpacket._qualified_op_name
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            kwargs["device"] = torch.device("cpu")
        elif name == "aten::copy_":
            target = args[0].device
        elif len(devices) == 1:
            (target,) = devices
        else:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, got {devices}")
        known = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, cls)}

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor) or target.type == "cpu":
                return value
            return known[id(value)] if id(value) in known else cls(value, target)

        plain = _pytree.tree_map(lambda leaf: leaf.inner if isinstance(leaf, cls) else leaf, (args, kwargs))
        return _pytree.tree_map(wrapped, func(*plain[0], **plain[1]))


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def alone(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the device's name in a worker process, as if it were the only process."""
    if dist.is_initialized():  # where it is, each process is a rank
        dist.destroy_process_group()
    return function(add_device(), *args)


_KERNELS: list[Any] = []
"""Keeps what was registered."""


@cache
def add_device() -> str:
    """Add the device to this process, and return its name."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> Tensor:
        return OnDevice(torch.empty(size, dtype=dtype), device)

    def empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype), device)

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    _KERNELS.append(library)
    # ``nn.Module.to`` then keeps the parameters' identity, as it does where only their memory changes.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return f"{NAME}:0"
