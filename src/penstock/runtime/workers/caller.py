"""Settings of the thread that calls `Pipeline.step`, passed on to the rank threads."""

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
    """Run each job with the caller's context variables, and its autocast, which torch keeps per thread.

    Raises:
        ConfigError: if the caller has set modes or hooks on saved tensors, which other threads would not see.
    """
    _require_no_modes()
    autocasts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]

    def run(job: Job) -> None:
        with ExitStack() as stack:
            for kind, dtype in autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            job()

    # One context a job, since two threads cannot be in the same context at once.
    return [partial(contextvars.copy_context().run, run, job) for job in jobs]


def _require_no_modes() -> None:
    functions: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # not annotated in torch
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    # A default device matters only to layers that make tensors; those that need it raise their own error.
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # no public reader
        names.append("torch.autograd.graph.saved_tensors_hooks")
    if names:
        raise ConfigError(
            f"{', '.join(names)} is set around a step whose ranks are separate threads, which it would not reach; set it "
            "within the layers, or run one process per rank (torchrun)"
        )
