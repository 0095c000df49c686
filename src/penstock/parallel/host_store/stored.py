"""A parameter in a store: its values at home and on the device, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.parallel.dtensor import dense_strides, gradient_dtype
from penstock.parallel.host_store.memory import HostMemory


class StoredParameter:
    """A parameter of one stage, whose home is in a store.

    Args:
        device: device whose ops read it.
        home: where its values are between two steps, if they have a place: that of another rank of this process, which holds
            its stage, too (default None).

    Attributes:
        home: its values between two steps.
        storage: number of the memory of its values on the device, which stays when they go and come again.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        memory: HostMemory,
        device: torch.device,
        home: Tensor | None = None,
    ) -> None:
        self.name, self.parameter = name, parameter
        self._memory = memory
        # Not detach(), which would have writes at home count as writes of the parameter.
        given = parameter.data
        dense = given if dense_strides(given) is not None else given.contiguous()
        self.home = memory.home(dense) if home is None else home
        parameter.data = self.home
        # Whole words, which are summed in a fifth of the time of their copy, and 16 bytes, which any dtype divides.
        self._words = torch.empty(-(-given.nbytes // 16) * 2, dtype=torch.int64, device=device)
        self._values = self._words.view(given.dtype).as_strided(dense.shape, dense.stride())
        self.storage: int = self._words.untyped_storage()._cdata
        self._free()
        marked = given.is_floating_point() or given.is_complex()
        self._absent = torch.full((), float("nan") if marked else 0, dtype=given.dtype, device=device)
        self.resident = False
        self._version = 0
        self._bits: Tensor | None = None  # sum of the values' bits when they came
        self._differences: list[Tensor] = []  # by stay, how the sum has changed
        self._gradient: Tensor | None = None  # the sums at home
        self._room: Tensor | None = None  # memory for them
        self._leaving: Tensor | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient, which is 0 if it is frozen."""
        dtype = gradient_dtype(self.parameter)
        return self.home.numel() * dtype.itemsize if self.parameter.requires_grad else 0

    def allocate(self) -> None:
        """Have room at home for the gradient, in the dtype that it has now.

        Raises:
            ConfigError: if a disk is full.
        """
        dtype = gradient_dtype(self.parameter)
        if not self.parameter.requires_grad or (self._room is not None and self._room.dtype == dtype):
            return
        if self._memory.on_disk or self._values.is_cuda:
            self._room = self._memory.empty(self.home.numel(), dtype).as_strided(
                self.home.shape, self.home.stride()
            )

    def begin(self) -> None:
        """Begin a step: take over what was written into the parameter and its gradient since the last one.

        Raises:
            PenstockError: if the parameter was given other memory that does not fit, as by ``module.to(torch.bfloat16)``.
        """
        parameter, home = self.parameter, self.home
        given = parameter.detach()
        if given.numel() and given.data_ptr() != home.data_ptr():
            if (given.shape, given.dtype) != (home.shape, home.dtype):
                raise PenstockError(
                    f"parameter {self.name} was {home.dtype} of shape {tuple(home.shape)} when the pipeline put it into its "
                    f"store, and was made {given.dtype} of shape {tuple(given.shape)}; do that before the Pipeline is built"
                )
            home.copy_(given)
        self.allocate()
        self._gradient, parameter.grad = parameter.grad, None
        parameter.data = self._absent.expand(home.shape)
        self._differences.clear()

    def expect(self) -> None:
        """Have room on the device for the values, which are to be fetched."""
        self.resident = True
        self._words.untyped_storage().resize_(self._words.nbytes)
        self.parameter.data = self._values
        self._version = self.parameter._version

    def fetch(self) -> None:
        """Copy the values to the device."""
        self._memory.copy(self._values, self.home)
        self._bits = self._words.sum()

    def drop(self) -> None:
        """Drop the values on the device; a write that torch counts goes home first."""
        if not self.resident:
            return
        self.resident = False
        assert self._bits is not None, "it was fetched"
        if self.parameter._version != self._version:
            self.home.copy_(self.parameter.detach())
        else:
            if self._bits.is_cuda:  # so that the memory of the sum is not used again before it is read
                self._bits.record_stream(torch.cuda.current_stream(self._bits.device))
            moved = self.parameter.numel() and self.parameter.data_ptr() != self._values.data_ptr()
            self._differences.append(self._bits * 0 + 1 if moved else self._words.sum() - self._bits)
        self.parameter.data = self._absent.expand(self.home.shape)
        self._free()

    def _free(self) -> None:
        self._words.untyped_storage().resize_(0)

    def resume(self) -> bool:
        """Give the parameter the sums at home back, to which a backward adds; return whether they are to be copied first."""
        parameter = self.parameter
        if parameter.grad is not None or self._gradient is None or not parameter.requires_grad:
            return False
        copied = self._gradient is self._room or self._gradient.device != self._words.device
        here = torch.empty_like(self._gradient, device=self._words.device) if copied else self._gradient
        parameter.grad = here
        return copied

    def bring_gradient(self) -> None:
        """Copy the sums at home to the parameter's gradient."""
        assert self.parameter.grad is not None, "it was resumed"
        assert self._gradient is not None, "it was resumed"
        self._memory.copy(self.parameter.grad, self._gradient)

    def release_gradient(self) -> bool:
        """Take the gradient from the parameter; return whether it is to be copied home."""
        grad = self.parameter.grad
        if grad is None:
            return False
        if grad.layout is not torch.strided:
            raise PenstockError(
                f"parameter {self.name} got a sparse gradient, and a store keeps dense ones only; make its layer with "
                "sparse=False (nn.Embedding), or leave the store out"
            )
        self._leaving, self.parameter.grad = grad, None
        # Without room at home, the device's memory is the host's.
        self._gradient = grad if self._room is None else self._room
        return self._room is not None

    def send_gradient(self) -> None:
        """Copy the gradient home."""
        assert self._gradient is not None, "it was released"
        assert self._leaving is not None, "it was released"
        self._memory.copy(self._gradient, self._leaving)

    def settle(self) -> None:
        """Let the device's memory of a gradient that has gone home go."""
        self._leaving = None

    @property
    def device_bytes(self) -> int:
        """Bytes of values and gradients on the device, within a step."""
        grads = {id(g): g.nbytes for g in (self.parameter.grad, self._leaving) if g is not None}
        return self._words.untyped_storage().nbytes() + sum(grads.values())

    def end(self, keeps: bool) -> None:
        """End a step: the parameter is its home again.

        Args:
            keeps: whether it has the sums at home as its gradient; otherwise it has none.
        """
        self.settle()
        self.parameter.grad = None  # of the device, and it may be another one
        self.resident = False
        self.parameter.data = self.home
        self.parameter.grad = self._gradient if keeps else None
        self._gradient = None
        self._free()

    def require_unwritten(self) -> None:
        """Raise if something wrote into the values on the device in a way that torch does not count."""
        if any(bool(difference) for difference in self._differences):
            raise PenstockError(
                f"parameter {self.name} was written through .data in the middle of a step, which a store does not keep; "
                "write within torch.no_grad() without .data, or between two steps. No weight was changed"
            )
