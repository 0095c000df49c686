"""Random numbers of running layers that do not depend on how the model is split.

A `RandomState` runs layers so that their draws depend only on (seed, step, microbatch, layer). The first run of a layer is
audited: an operator that draws from torch's default generators in spite of `isolated_rng` raises an error with its name,
and a layer that draws nothing is later called without any mode. Every step checks for changes that void an audit: in the
settings of the layer's modules, and in the states of the default generators.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

# Has no public name; torch documents it and its own tools use it.
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base.errors import ConfigError
from penstock.stage.compute.module_buffers import (
    buffer_places,
    get_buffers,
    replaced_buffers,
    snapshot_buffers,
)
from penstock.stage.layers import source_of
from penstock.stage.rng.isolated_rng import isolated_rng
from penstock.stage.values import leaves_of

T = TypeVar("T")


@dataclass
class _AuditResult:
    """Result of the audit of a layer in training, or in evaluation."""

    settings: tuple[bool | float, ...]
    draws: bool
    step: int
    valid: bool = True


class RandomState:
    """The random draws of a Pipeline's layers, which run within `isolated_rng`; stages in threads share one.

    ``run`` calls every layer, and also the loss function, under a reserved name; ``watching`` surrounds every step. A
    recompute calls ``run`` again with the same step and microbatch, and gets the same draws in the same order. The
    microbatch must be numbered over the global batch, not over a replica's part of it.

    Random numbers of Python's ``random`` and of NumPy are not affected. Compiled layers must not draw: neither mode can see
    into them.

    Attributes:
        in_threads: whether several ranks are threads of this process. Layers are then audited one at a time.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.in_threads = False
        self._audit_lock = Lock()
        self._audits: dict[_Key, _AuditResult] = {}
        self._trusts_audits = True

    def run(self, name: str, layer: Any, step: int, microbatch: int, call: Callable[[], T]) -> T:
        """Call a layer so that its draws depend only on (seed, step, microbatch, name)."""
        module = layer if isinstance(layer, nn.Module) else None
        key = _key(layer)
        audit = self._audits.get(key)
        if audit is None or audit.step != step or not audit.valid:
            if module is not None and _compiled(module):
                return self._run_compiled(name, call)
            settings = _settings(module)
            if audit is None or audit.settings != settings or not audit.valid:
                return self._audit(name, key, settings, step, microbatch, call)
            audit.step = step
        if self._trusts_audits and not audit.draws:
            return call()
        with isolated_rng(self.seed, step, microbatch, name) as mode:
            result = call()
        if mode.drew and not audit.draws:
            audit.draws = True
            _warn_of_late_draws(name)
        return result

    def is_rng_free(self, layer: Any, step: int) -> bool:
        """Return whether a layer that has run in this step draws nothing, so that later calls need no isolation."""
        audit = self._audits.get(_key(layer))
        return (
            audit is not None
            and self._trusts_audits
            and audit.valid
            and audit.step == step
            and not audit.draws
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the default generators during a step, in which no audited layer should draw from them.

        If one has advanced, another thread of the program drew from it, or a layer that began to draw without any change in
        its modules' settings. From then on every layer runs within `isolated_rng`, after another audit; a layer that draws
        is named in a warning, since its draws of one step came from a default generator.
        """
        before = default_states() if self._trusts_audits else None
        yield
        if before is not None and advanced(before, default_states()):
            self._trusts_audits = False
            for audit in self._audits.values():
                audit.valid = False

    def _audit(
        self,
        name: str,
        key: _Key,
        settings: tuple[bool | float, ...],
        step: int,
        microbatch: int,
        call: Callable[[], T],
    ) -> T:
        lock = self._audit_lock if self.in_threads else nullcontext()
        if _has_fast_path(key[0]):
            with lock:
                result, drew = _run_without_modes(key[0], call)
            if not drew:
                if not _has_no_rows(result):
                    self._audits[key] = _AuditResult(settings, False, step)
                return result
        audit, before = Audit(name), cuda_states()
        no_forward_mode = NoForwardMode(name) if self.in_threads else nullcontext()
        isolated = isolated_rng(self.seed, step, microbatch, name, audit.no_checkpoint)
        with lock, no_forward_mode, isolated as mode:
            result = _run_watched(key[0], audit, call) if _suffers_from_modes() else _run_within(audit, call)
        if advanced(before, cuda_states()):
            raise ConfigError(
                f"{refused_draw(name, 'an extension that torch does not see')}; set its dropout to 0"
            )
        if not mode.drew and _has_no_rows(result):
            return result  # inconclusive, so the next microbatch is audited as well
        previous = self._audits.get(key)
        if mode.drew and previous is not None and not previous.draws and previous.settings == settings:
            _warn_of_late_draws(name)
        self._audits[key] = _AuditResult(settings, mode.drew, step)
        return result

    def _run_compiled(self, name: str, call: Callable[[], T]) -> T:
        """Run a compiled layer and watch the default generators; a mode would prevent its compilation."""
        before = default_states()
        result = call()
        if advanced(before, default_states()):
            raise ConfigError(
                f"{refused_draw(name, 'its compiled code')} (or another thread drew from it meanwhile); set its dropout to "
                "0, or do not compile it"
            )
        return result


_Key = tuple[object, bool, bool]
"""(layer, whether it trains, whether the step does): a loss function's mode may only show in the latter."""


def _key(layer: object) -> _Key:
    return layer, isinstance(layer, nn.Module) and layer.training, torch.is_grad_enabled()


def _has_no_rows(result: object) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in leaves_of(result))


def _has_fast_path(layer: object) -> bool:
    """Return whether a layer, entirely in evaluation, takes another path in torch when any mode is on."""
    if not isinstance(layer, nn.Module) or any(m.training for m in layer.modules()):
        return False
    return any(isinstance(m, nn.MultiheadAttention | nn.TransformerEncoderLayer) for m in layer.modules())


def _run_without_modes(layer: object, call: Callable[[], T]) -> tuple[T, bool]:
    """Run a layer without any mode; return its result and whether it drew.

    If it drew, its buffers and the default generators are restored, so that it can run again.
    """
    assert isinstance(layer, nn.Module)
    cpu_state, offsets = torch.get_rng_state(), [(g, g.get_offset()) for g in cuda_generators()]
    restore_buffers = snapshot_buffers(layer)
    before = default_states()
    result = call()
    drew = advanced(before, default_states())
    if drew:
        restore_buffers()
        torch.set_rng_state(cpu_state)
        for generator, offset in offsets:
            generator.set_offset(offset)
    return result, drew


def _run_within(audit: Audit, call: Callable[[], T]) -> T:
    with audit:
        return call()


def _run_watched(layer: object, audit: Audit, call: Callable[[], T]) -> T:
    """Run a layer where the audit's dispatch mode would change its results, or stop it.

    Within a dispatch mode autocast does not cast the inner calls of an operator, such as the multiplications in
    ``nn.Bilinear``, and FlexAttention, which torch compiles, does not run. So only the default generators are watched. If
    they advance, the layer runs again within the audit, which raises with the name of the operator; if it does not, another
    thread of the program has drawn.
    """
    before = default_states()
    result = call()
    if advanced(before, default_states()):
        places = buffer_places([layer] if isinstance(layer, nn.Module) else [])
        # Clones, since the buffers may have been saved for the backward, which forbids writes to them.
        clones = [buffer.clone() for buffer in get_buffers(places)]
        with replaced_buffers(places, clones), torch.no_grad():
            _run_within(audit, call)
    return result


def _suffers_from_modes() -> bool:
    if "torch.nn.attention.flex_attention" in sys.modules:
        return True
    return torch.is_autocast_enabled("cpu") or (cuda_in_use() and torch.is_autocast_enabled("cuda"))


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
    """Return the bools and floats of a layer's modules (training, p, gradient_checkpointing and so on), in order."""
    if module is None:
        return ()
    values = (value for m in module.modules() for value in vars(source_of(m)).values())
    return tuple(value for value in values if type(value) is bool or type(value) is float)


def default_states() -> tuple[Any, ...]:
    """Return the states of the CPU's default generator and, if CUDA is in use, of every device's."""
    return torch.get_rng_state().numpy().tobytes(), *cuda_states()


def advanced(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether a generator has drawn between two moments; CUDA's may appear with the first use of CUDA."""
    return now[: len(before)] != before or any(offset for _, offset in now[len(before) :])


def cuda_states() -> tuple[Any, ...]:
    """Return the seeds and offsets of the CUDA devices' default generators, without a copy from a device."""
    return tuple((g.initial_seed(), g.get_offset()) for g in cuda_generators())


def cuda_generators() -> tuple[torch.Generator, ...]:
    """Return the default generators of the CUDA devices; none until CUDA is in use."""
    return torch.cuda.default_generators if cuda_in_use() else ()


def cuda_in_use() -> bool:
    """Return whether this process has initialized CUDA."""
    return bool(torch.cuda.is_initialized())


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
        if advanced(before, default_states()):
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
