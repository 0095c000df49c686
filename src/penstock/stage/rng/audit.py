"""Detection of layers whose random numbers would depend on how the model is split."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

# Has no public name; torch documents it and its own tools use it.
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base.errors import ConfigError
from penstock.stage.rng.default_generators import default_states


class Audit(TorchDispatchMode):
    """Mode that raises for an operator that draws from a default generator.

    It sees operators below torch's Python functions, so also those that C++ code calls. For operators that are not
    torch's own, it checks whether they advance a default generator.
    """

    supports_higher_order_operators = True

    def __init__(self, layer: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._layer = layer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
                raise ConfigError(
                    f"{refused_draw(self._layer, str(func))}; call it through torch's Python functions (torch.rand, "
                    "torch.nn.functional.dropout and so on), or pass it a generator of your own"
                )
            return func(*args, **kwargs)
        before = default_states()
        result = func(*args, **kwargs)
        if default_states() != before:
            raise ConfigError(
                f"{refused_draw(self._layer, str(func))}; draw its random numbers outside, by torch.rand, and pass them "
                "in, or set its dropout to 0"
            )
        return result

    def no_checkpoint(self) -> None:
        """Check that torch.utils.checkpoint does not run the caller: it would draw again in the backward, not isolated."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                raise ConfigError(
                    f"layer {self._layer!r} draws random numbers within torch.utils.checkpoint, which would draw "
                    "others when it runs that part again; turn its own checkpointing off and let Penstock recompute"
                )


class NoForwardMode(TorchFunctionMode):
    """Mode that raises for forward-mode derivatives, whose state PyTorch keeps for the process, not for a thread."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if forward_ad._current_level >= 0:  # no public reader
            raise ConfigError(
                f"layer {self._layer!r} takes forward-mode derivatives (torch.func.jvp, jacfwd, hessian or "
                "torch.autograd.forward_ad), which do not work in ranks that are threads; run one process per rank "
                "(torchrun)"
            )
        return func(*args, **(kwargs or {}))


def refused_draw(layer: str, operator: str) -> str:
    """Return the beginning of the error message for a layer that draws from a default generator."""
    return (
        f"layer {layer!r}: {operator} draws from torch's default generator, so its random numbers would depend on "
        "how the model is split"
    )


_NEVER_DRAW = {"_fused_sdp_choice", "_nested_tensor_softmax_with_shape", "_fill_mem_eff_dropout_mask_"}
_SWITCHES = ("dropout_p", "dropout", "train", "training")


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an operator that may draw does so, and from a default generator."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    arguments = {p.name: p.default_value for p in schema.arguments}
    arguments |= {p.name: value for p, value in zip(schema.arguments, args, strict=False)} | kwargs
    if name in _NEVER_DRAW or arguments.get("generator") is not None:
        return False
    if any(arguments.get(switch, True) in (False, 0) for switch in _SWITCHES):
        return False
    if "dropout" in name and arguments.get("p") == 0:
        return False
    first = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    device = arguments.get("device") if first is None else first.device
    return device is None or torch.device(device).type != "meta"
