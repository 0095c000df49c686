"""Random numbers of layers at work, the same however the model is split.

A `RandomState` runs layers so that what they draw depends on (seed, step, microbatch, layer) alone. The first run of a
layer is audited: what draws from torch's default generators in spite of `isolated_rng` is refused by name, and a layer that
draws nothing is from then on run without any mode around it. What can change that is looked for at every step: the
settings of the layer's modules, and, around the step, the default generators themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.stage.module import kept_buffers
from penstock.stage.rng.audit import Audit, NoForwardMode, refused_draw
from penstock.stage.rng.default_generators import cuda_generators, cuda_in_use, cuda_states, default_states
from penstock.stage.rng.isolated_rng import isolated_rng
from penstock.stage.values import leaves_of

T = TypeVar("T")


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
        before = default_states() if self._trusts else None
        yield
        if before is not None and default_states() != before:
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
                result, drew = _run_without_modes(key[0], call)
            if not drew:
                if not _has_no_rows(result):
                    self._known[key] = _Known(settings, False, step)
                return result
        audit, before = Audit(name), cuda_states()
        refusing = NoForwardMode(name) if self.in_threads else nullcontext()
        with alone, refusing, isolated_rng(self.seed, step, microbatch, name, audit.no_checkpoint) as mode:
            result = _run_watched(key[0], audit, call) if _autocast_is_on() else _run_within(audit, call)
        if cuda_states() != before:
            raise ConfigError(
                f"{refused_draw(name, 'an extension that torch does not see')}; set its dropout to 0"
            )
        if not mode.drew and _has_no_rows(result):
            return result  # it shows nothing: the next microbatch is audited as well
        known = self._known.get(key)
        if mode.drew and known is not None and not known.draws and known.settings == settings:
            _warn_of_late_draws(name)
        self._known[key] = _Known(settings, mode.drew, step)
        return result

    def _run_compiled(self, name: str, call: Callable[[], T]) -> T:
        """Modes around compiled code would stop its compilation, so it is only watched."""
        before = default_states()
        result = call()
        if default_states() != before:
            raise ConfigError(
                f"{refused_draw(name, 'its compiled code')} (or another thread drew from it meanwhile); set its dropout to "
                "0, or do not compile it"
            )
        return result


def _has_no_rows(result: object) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in leaves_of(result))


def _has_fast_path(layer: object) -> bool:
    """Return whether a layer, all of it in evaluation, takes another path in torch where any mode is on."""
    if not isinstance(layer, nn.Module) or any(part.training for part in layer.modules()):
        return False
    return any(
        isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer) for part in layer.modules()
    )


def _run_without_modes(layer: object, call: Callable[[], T]) -> tuple[T, bool]:
    """Run a layer as it is, and return its result and whether it drew.

    If it drew, its buffers and the default generators are put back, so that it can run again.
    """
    assert isinstance(layer, nn.Module)
    before = torch.get_rng_state(), [(g, g.get_offset()) for g in cuda_generators()]
    put_back = kept_buffers(layer)
    states = default_states()
    result = call()
    drew = default_states() != states
    if drew:
        put_back()
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
    before = default_states()
    result = call()
    if default_states() != before:
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
    """The switches and fractions of a layer's modules (training, p, gradient_checkpointing and so on), in order."""
    if module is None:
        return ()
    values = (value for m in module.modules() for value in vars(m).values())
    return tuple(value for value in values if type(value) is bool or type(value) is float)
