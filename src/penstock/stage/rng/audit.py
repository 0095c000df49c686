"""Refuse layers whose random numbers would depend on how the model is split."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # public nowhere; documented, and what torch's own tools use

from penstock.errors import ConfigError
from penstock.stage.rng.default_generators import default_states


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, an operator that draws from a default generator is refused.

    It sees operators below torch's Python functions, so also those that C++ code calls. Operators that are not
    torch's own are judged by whether they move a default generator.

    Args:
        layer: the layer's name, for the message.
    """

    supports_higher_order_operators = True

    def __init__(self, layer: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        """Refuse a draw within torch.utils.checkpoint, which would draw anew in the backward, outside of `isolated_rng`.

        Raises:
            ConfigError: it is called from within a function that torch.utils.checkpoint runs.
        """
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                raise ConfigError(
                    f"layer {self._layer!r} draws random numbers within torch.utils.checkpoint, which would draw "
                    "others when it runs that part again; turn its own checkpointing off and let Penstock recompute"
                )


class NoForwardMode(TorchFunctionMode):
    """Within it, forward-mode derivatives are refused: PyTorch keeps their state for the process, not for a thread.

    Args:
        layer: the layer's name, for the message.
    """

    def __init__(self, layer: str) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if forward_ad._current_level >= 0:  # no public reader
            raise ConfigError(
                f"layer {self._layer!r} takes forward-mode derivatives (torch.func.jvp, jacfwd, hessian or "
                "torch.autograd.forward_ad), which do not work in ranks that are threads; run one process a rank (torchrun)"
            )
        return func(*args, **(kwargs or {}))


def refused_draw(layer: str, operator: str) -> str:
    """Return the beginning of the message of a layer that draws from a default generator."""
    return (
        f"layer {layer!r}: {operator} draws from torch's default generator, so its random numbers would depend on "
        "how the model is split"
    )


_NEVER_DRAW = {"_fused_sdp_choice", "_nested_tensor_softmax_with_shape", "_fill_mem_eff_dropout_mask_"}
_SWITCHES = ("dropout_p", "dropout", "train", "training")


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator of torch that may draw does so here, and from a default generator."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    given = {p.name: p.default_value for p in schema.arguments}
    given |= {p.name: value for p, value in zip(schema.arguments, args, strict=False)} | kwargs
    if name in _NEVER_DRAW or given.get("generator") is not None:
        return False
    if any(given.get(switch, True) in (False, 0) for switch in _SWITCHES):
        return False
    if "dropout" in name and given.get("p") == 0:
        return False
    first = next((value for value in given.values() if isinstance(value, Tensor)), None)
    device = given.get("device") if first is None else first.device
    return device is None or torch.device(device).type != "meta"
