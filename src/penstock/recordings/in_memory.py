"""Recordings in memory of a model and of its layers, run on the same input, and the first tensor that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
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


def watched(seen: Seen | None, names: Mapping[nn.Module, str]) -> AbstractContextManager[None]:
    """Return the context of `Seen.watching`; an empty one without a recording."""
    return nullcontext() if seen is None else seen.watching(names)


@dataclass(frozen=True)
class Run:
    """Results of a model or of its layers, and gradients of their backward.

    Attributes:
        gradients: by name of the parameter in the model; one without a gradient may be left out.
        terms: numbers of gradients that were added up to a parameter's, in an order of their own (default 1 each).
    """

    results: Sequence[Any]
    gradients: Mapping[str, Tensor | None]
    terms: Mapping[str, int] = field(default_factory=dict)


def first_other(model: Run, layers: Run, close: Closeness) -> int | str | None:
    """Return the number of the first result that is not the model's, or the name of the first gradient; None without one."""
    if len(model.results) != len(layers.results):
        return 0
    for number, pair in enumerate(zip(model.results, layers.results, strict=True)):
        if not close(*pair):
            return number
    for name, gradient in model.gradients.items():
        if not close(gradient, layers.gradients.get(name), layers.terms.get(name, 1)):
            return name
    return None


def first_difference(run_model: Callable[[Seen], Run], run_layers: Callable[[Seen], Run]) -> str:
    """Run both again, watched, and return a sentence that names the first tensor that differs; empty if it is not found."""
    model, layers = Seen("model"), Seen("layers")
    try:
        model.add_gradients(run_model(model).gradients)
        layers.add_gradients(run_layers(layers).gradients)
    except Exception:  # a forward that fails when it runs again; the refusal holds without the place
        return ""
    if not model.recording.entries.keys() & layers.recording.entries.keys():
        return ""
    try:
        for bits in (False, True):  # another order of sums differs in bits, too, and is not the reason
            found = compare_recordings(model.recording, layers.recording, bits=bits)
            if found.first is not None:
                agree = (
                    f"{found.before} tensors before it agree" if found.before else "nothing before it differs"
                )
                what = f"{found.first.key.place}, {found.first.what}"
                return f". The first tensor that differs from the model's: {what}; {agree}"
        return ""
    finally:
        forget_vectors()


class Closeness:
    """Test of whether a result of layers is the model's.

    Args:
        exact: whether one order of sums gives the same bits (default True); on a GPU kernels may sum in any.
        autocast: lower precision that both computed in (default None).
    """

    def __init__(self, exact: bool = True, autocast: torch.dtype | None = None) -> None:
        self._exact = exact
        self._autocast = autocast is not None
        # The rounding of float32 through a whole model, or a few units in the last place of the lower precision.
        self._tolerance = 1e-4 if autocast is None else 4 * torch.finfo(autocast).eps

    def __call__(self, one: Any, other: Any, terms: int = 1) -> bool:
        """Return whether two values are equal; they are sums of so many terms, which may have another order."""
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return type(one) is type(other) and bool(one == other)
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if torch.equal(one, other):
            return True
        if one.is_complex():
            one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
        one, other = one.nan_to_num(), other.nan_to_num()
        if torch.equal(one, other):
            return True
        # Autocast casts a weight once for all its uses, and adds up their gradients before it casts them back.
        # A sum of two has one order, and equal bits; only from three terms on does the rounding depend on the order.
        if self._exact and terms < (2 if self._autocast else 3):
            return False
        size = torch.linalg.vector_norm(one.double())
        distance = torch.linalg.vector_norm(one.double() - other.double())
        return bool(distance <= self._tolerance * size + 1e-6)
