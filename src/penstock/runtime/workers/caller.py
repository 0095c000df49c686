"""Give the settings of the thread that calls `Pipeline.step` to the rank threads, or refuse those that cannot be given."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from penstock.errors import ConfigError

Job = Callable[[], Any]


def with_settings(jobs: Sequence[Job]) -> list[Job]:
    """Give each job what belongs to the caller's thread: its context variables, and autocast, which torch keeps itself.

    Raises:
        ConfigError: the caller has set modes or hooks on saved tensors, which other threads would not see.
    """
    _require_no_modes()
    states = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]

    def run(job: Job) -> None:
        with ExitStack() as stack:
            for kind, dtype in states:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            job()

    # A context for each job, since two threads cannot be in one at a time.
    return [partial(contextvars.copy_context().run, run, job) for job in jobs]


def _require_no_modes() -> None:
    """Refuse modes and hooks on saved tensors, which torch keeps for one thread."""
    functions: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # not annotated in torch
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    # A default device is for layers that make tensors; those that mind the device say it.
    found = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # no public reader
        found.append("torch.autograd.graph.saved_tensors_hooks")
    if found:
        raise ConfigError(
            f"{', '.join(found)} is set around a step whose ranks are threads of their own, which it would not reach; set "
            "it within the layers, or run one process a rank (torchrun)"
        )
