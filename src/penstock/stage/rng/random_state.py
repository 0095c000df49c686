"""The random numbers of layers, in their building and at work, the same however the model is cut.

A `RandomState` runs layers so that what they draw depends on (seed, step, microbatch, layer) alone. The first run of a
layer is audited: what draws from torch's default generators in spite of `isolated_rng` is refused by name, and a layer that
draws nothing is from then on run without any mode around it. What can change that is looked for at every step: the
settings of the layer's modules, and, around the step, the default generators themselves.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # public nowhere; documented, and what torch's own tools use

from penstock.errors import ConfigError
from penstock.stage.rng.isolated_rng import isolated_rng
from penstock.stage.rng.seeds import seed_of
from penstock.stage.values import leaves_of

T = TypeVar("T")


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
                    f"{_wrong(self._layer, str(func))}; call it through torch's Python functions (torch.rand, "
                    "torch.nn.functional.dropout and so on), or pass it a generator of your own"
                )
            return func(*args, **kwargs)
        before = _default_states()
        result = func(*args, **kwargs)
        if _default_states() != before:
            raise ConfigError(
                f"{_wrong(self._layer, str(func))}; draw its random numbers outside, by torch.rand, and pass them "
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


def _wrong(layer: str, operator: str) -> str:
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


def _default_states() -> tuple[Any, ...]:
    """What tells whether a default generator has been drawn from: of the CPU and, if in use, of CUDA devices."""
    return torch.get_rng_state().numpy().tobytes(), *_cuda_states()


def _cuda_states() -> tuple[Any, ...]:
    return tuple((g.initial_seed(), g.get_offset()) for g in _cuda_generators())


def _cuda_generators() -> tuple[torch.Generator, ...]:
    """The default generators of the CUDA devices, once CUDA is in use."""
    return torch.cuda.default_generators if _cuda_in_use() else ()


@dataclass
class _Known:
    """What is known of a layer in training, or in evaluation.

    Attributes:
        settings: of its modules, when it was audited.
        draws: whether it drew then, or later.
        step: when the settings were last compared.
        audited: whether the audit still holds.
    """

    settings: tuple[bool | float, ...]
    draws: bool
    step: int
    audited: bool = True


class RandomState:
    """Runs layers with random numbers of their own. One for a Pipeline; stages in threads share it.

    ``run`` goes around every call of a layer (and of the loss function, under a name of its own), ``watching`` around
    every step. To recompute a forward is to call ``run`` again with the same step and microbatch: the same numbers come
    in the same order. Which microbatch it is must be counted over the whole batch, not over a copy's share.

    Random numbers of Python's ``random`` and of NumPy are not touched. Compiled layers may not draw: neither mode can
    look into them.

    Args:
        seed: of the model.

    Attributes:
        in_threads: whether several ranks are threads of this process. Layers are then audited one at a time.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.in_threads = False
        self._auditing = Lock()
        self._known: dict[tuple[object, bool], _Known] = {}
        self._trusts = True

    def run(self, name: str, layer: Any, step: int, microbatch: int, call: Callable[[], T]) -> T:
        """Call a layer so that what it draws depends on (seed, step, microbatch, name) alone.

        Args:
            name: the layer's name in the whole model.
            layer: the module, whose settings are looked at; or a function, which has none.
            step, microbatch: which.
            call: calls the layer.

        Returns:
            What `call` returns.

        Raises:
            ConfigError: the layer draws in a way that cannot be made to hold.
        """
        module = layer if isinstance(layer, nn.Module) else None
        key = (layer, module is not None and module.training)
        known = self._known.get(key)
        if known is None or known.step != step or not known.audited:
            if module is not None and _compiled(module):
                return self._run_compiled(name, call)
            settings = _settings(module)
            if known is None or known.settings != settings or not known.audited:
                return self._audit(name, key, settings, step, microbatch, call)
            known.step = step
        if self._trusts and not known.draws:
            return call()
        with isolated_rng(self.seed, step, microbatch, name) as mode:
            result = call()
        if mode.drew and not known.draws:
            known.draws = True
            _warn_of_late_draws(name)
        return result

    def quiet(self, layer: Any, step: int) -> bool:
        """Whether a layer that has run in this step is known to draw nothing, so that the step may call it as it is."""
        known = self._known.get((layer, isinstance(layer, nn.Module) and layer.training))
        return known is not None and self._trusts and known.audited and known.step == step and not known.draws

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step: notices if a default generator was drawn from although no layer is known to draw so.

        Another thread of the program may have done it, or a layer that has begun to draw without any change in its
        modules' settings. From then on every layer is run within `isolated_rng`, after another audit; the layer that is
        found to draw is named in a warning, for one step's draws of it were not its own.
        """
        before = _default_states() if self._trusts else None
        yield
        if before is not None and _default_states() != before:
            self._trusts = False
            for known in self._known.values():
                known.audited = False

    def _audit(
        self,
        name: str,
        key: tuple[object, bool],
        settings: tuple[bool | float, ...],
        step: int,
        microbatch: int,
        call: Callable[[], T],
    ) -> T:
        alone = self._auditing if self.in_threads else nullcontext()
        if _has_fast_path(key[0]):
            with alone:
                result, drew = _run_without_modes(call)
            if not drew:
                self._known[key] = _Known(settings, False, step)
                return result
        audit, before = Audit(name), _cuda_states()
        refusing = NoForwardMode(name) if self.in_threads else nullcontext()
        with alone, refusing, isolated_rng(self.seed, step, microbatch, name, audit.no_checkpoint) as mode:
            result = _run_watched(key[0], audit, call) if _autocast_is_on() else _run_within(audit, call)
        if _cuda_states() != before:
            raise ConfigError(f"{_wrong(name, 'an extension that torch does not see')}; set its dropout to 0")
        if not mode.drew and any(isinstance(x, Tensor) and x.numel() == 0 for x in leaves_of(result)):
            return result  # a microbatch without rows shows nothing: the next one is audited as well
        known = self._known.get(key)
        if mode.drew and known is not None and not known.draws and known.settings == settings:
            _warn_of_late_draws(name)
        self._known[key] = _Known(settings, mode.drew, step)
        return result

    def _run_compiled(self, name: str, call: Callable[[], T]) -> T:
        """Modes around compiled code would stop its compilation, so it is only watched."""
        before = _default_states()
        result = call()
        if _default_states() != before:
            raise ConfigError(
                f"{_wrong(name, 'its compiled code')} (or another thread drew from it meanwhile); set its dropout to "
                "0, or do not compile it"
            )
        return result


def _has_fast_path(layer: object) -> bool:
    """Tell whether modules of a layer take another path, with other roundings, where any mode is on."""
    return isinstance(layer, nn.Module) and any(
        isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer) and not part.training
        for part in layer.modules()
    )


def _run_without_modes(call: Callable[[], T]) -> tuple[T, bool]:
    """Run a layer as it is; return its result, and whether it drew. If so, the default generators are set back."""
    before = torch.get_rng_state(), [(g, g.get_offset()) for g in _cuda_generators()]
    states = _default_states()
    result = call()
    drew = _default_states() != states
    if drew:
        torch.set_rng_state(before[0])
        for generator, offset in before[1]:
            generator.set_offset(offset)
    return result, drew


def _run_within(audit: Audit, call: Callable[[], T]) -> T:
    with audit:
        return call()


def _run_watched(layer: object, audit: Audit, call: Callable[[], T]) -> T:
    """Run a layer under autocast, where the mode would change what it computes.

    What an operator calls within a dispatch mode is not cast any more, such as the multiplications in ``nn.Bilinear``. So it
    is the default generators that are watched. If they move, the layer runs again within the audit, whose refusal names
    the operator; where there is none, another thread of the program has drawn.
    """
    before = _default_states()
    result = call()
    if _default_states() != before:
        parts = list(layer.modules()) if isinstance(layer, nn.Module) else []
        kept = [dict(part._buffers) for part in parts]
        try:
            # The buffers themselves may have been saved for the backward, which forbids to write to them.
            for part in parts:
                part._buffers.update({n: None if b is None else b.clone() for n, b in part._buffers.items()})
            with torch.no_grad():
                _run_within(audit, call)
        finally:
            for part, buffers in zip(parts, kept, strict=True):
                part._buffers.clear()
                part._buffers.update(buffers)
    return result


def _autocast_is_on() -> bool:
    return torch.is_autocast_enabled("cpu") or (_cuda_in_use() and torch.is_autocast_enabled("cuda"))


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _warn_of_late_draws(name: str) -> None:
    warnings.warn(
        f"layer {name!r} began to draw random numbers without a change in its modules' settings; in the step before, "
        "it may have drawn from torch's default generator, so that step's numbers may depend on how the model is "
        "split; from now on they do not",
        stacklevel=3,
    )


def _compiled(module: nn.Module) -> bool:
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in module.modules())


def _settings(module: nn.Module | None) -> tuple[bool | float, ...]:
    """The switches and fractions of a layer's modules (training, p, gradient_checkpointing and so on), in order."""
    if module is None:
        return ()
    values = (value for m in module.modules() for value in vars(m).values())
    return tuple(value for value in values if type(value) is bool or type(value) is float)


_BUILDING = RLock()  # the default generators are the process's, and so is the right to set them


def build_seeded(build: Callable[[], T], seed: int, name: str) -> T:
    """Build a layer whose initial weights depend on the seed and its name alone.

    torch's default generators (of the CPU and, where CUDA is in use, of every device) are seeded for the call, and set
    back after it. One thread at a time; nothing else should draw from them meanwhile.

    Args:
        build: makes the layer.
        seed: of the model.
        name: the layer's name in the whole model.
    """
    own = seed_of(seed, name)
    generators = _cuda_generators()
    with _BUILDING, torch.random.fork_rng(range(len(generators))):
        # Not torch.manual_seed, which would also seed devices that are not in use yet, for good.
        for generator in (torch.default_generator, *generators):
            generator.manual_seed(own)
        return build()
