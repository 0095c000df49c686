"""Random numbers of running layers that do not depend on how the model is split.

A `RandomState` runs layers so that their draws depend only on (seed, step, microbatch, layer). The first run of a layer is
audited: an operator that draws from torch's default generators in spite of `isolated_rng` raises an error with its name,
and a layer that draws nothing is later called without any mode. Every step checks for changes that void an audit: in the
settings of the layer's modules, and in the states of the default generators.
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

from penstock.base.errors import ConfigError
from penstock.stage.compute.module_buffers import (
    buffer_places,
    get_buffers,
    replaced_buffers,
    snapshot_buffers,
)
from penstock.stage.live import source_of
from penstock.stage.rng.audit import Audit, NoForwardMode, refused_draw
from penstock.stage.rng.default_generators import cuda_generators, cuda_in_use, cuda_states, default_states
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
        if before is not None and default_states() != before:
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
            result = _run_watched(key[0], audit, call) if _autocast_is_on() else _run_within(audit, call)
        if cuda_states() != before:
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
        if default_states() != before:
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
    drew = default_states() != before
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
    """Run a layer under autocast, where the audit's dispatch mode would change its results.

    Within a dispatch mode autocast does not cast the inner calls of an operator, such as the multiplications in
    ``nn.Bilinear``. So only the default generators are watched. If they advance, the layer runs again within the audit,
    which raises with the name of the operator; if it does not, another thread of the program has drawn.
    """
    before = default_states()
    result = call()
    if default_states() != before:
        places = buffer_places([layer] if isinstance(layer, nn.Module) else [])
        # Clones, since the buffers may have been saved for the backward, which forbids writes to them.
        clones = [buffer.clone() for buffer in get_buffers(places)]
        with replaced_buffers(places, clones), torch.no_grad():
            _run_within(audit, call)
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
    """Return the bools and floats of a layer's modules (training, p, gradient_checkpointing and so on), in order."""
    if module is None:
        return ()
    values = (value for m in module.modules() for value in vars(source_of(m)).values())
    return tuple(value for value in values if type(value) is bool or type(value) is float)
