"""Recordings in memory of a model and of its layers, run on the same input, and the first tensor that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _global_forward_hooks_with_kwargs, register_module_forward_hook
from torch.utils._pytree import tree_leaves

from penstock.recordings.compare import compare_recordings
from penstock.recordings.files import Entry, Key, Kind, Recording
from penstock.recordings.fingerprint import fingerprint, forget_vectors


def tensors_returned(args: Any, kwargs: Any, output: Any) -> list[tuple[Tensor, bool]]:
    """Return the tensors of a module's output, and of each whether its gradient is that of the module's output alone.

    The gradient of an input that is passed on is that of all its uses. The list is empty if a tensor has no values, as in
    ``torch.func``, in a trace or in an export.
    """
    given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not all(map(_has_values, leaves)):
        return []
    return [(leaf, leaf.requires_grad and id(leaf) not in given) for leaf in leaves]


def _has_values(value: Tensor) -> bool:
    return not (
        value.is_meta
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or isinstance(value, FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


@contextmanager
def hook_on_all_modules(hook: Any) -> Iterator[None]:
    """Return a context in which a hook, called with a module, args, kwargs and output, sees every forward."""
    handle = register_module_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        # The handle of torch 2.13 leaves this note of a hook, so that `torch.compile` warns of hooks ever after.
        _global_forward_hooks_with_kwargs.pop(handle.id, None)


class Seen:
    """Outputs of modules and their gradients in a run of one microbatch, as a recording in memory.

    Args:
        of: name of the run in messages.
    """

    def __init__(self, of: str) -> None:
        self.recording = Recording(Path(of), {}, [], [])
        self._names: Mapping[nn.Module, str] = {}
        self._paused = False
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watching(self, names: Mapping[nn.Module, str]) -> Iterator[None]:
        """Return a context in which the forward and its backward run, of modules with these names in the whole model."""
        self._names = names
        with hook_on_all_modules(self._output):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose forwards are not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add gradients of parameters, after the backward."""
        for name, gradient in gradients.items():
            if gradient is not None:
                self._write(Key(0, Kind.GRADIENT, -1, name), gradient)

    def _output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._names.get(module)
        if name is None or self._paused:
            return
        call, self._calls[name] = self._calls[name], self._calls[name] + 1
        for slot, (leaf, own) in enumerate(tensors_returned(args, kwargs, output)):
            self._write(Key(0, Kind.OUTPUT, 0, name, call, slot), leaf)
            if own:
                leaf.register_hook(partial(self._write, Key(0, Kind.OUTPUT_GRADIENT, 0, name, call, slot)))

    def _write(self, key: Key, value: Tensor) -> None:
        entries = self.recording.entries
        with torch.no_grad():
            entries.setdefault(key, [Entry(key, len(entries), 0, fingerprint(value))])


def first_difference(model: Seen, layers: Seen) -> str:
    """Say which tensor of the layers is the first that is not the model's; empty if none that both have differs."""
    if not model.recording.entries.keys() & layers.recording.entries.keys():
        return ""
    try:
        for bits in (False, True):  # another order of sums differs in bits, too, and is not the reason
            found = compare_recordings(model.recording, layers.recording, bits=bits)
            if found.first is not None:
                agree = (
                    f"{found.before} tensors before it agree" if found.before else "nothing before it differs"
                )
                return f"{found.first.key.place}, {found.first.what}; {agree}"
        return ""
    finally:
        forget_vectors()
