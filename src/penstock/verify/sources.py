"""Modules, parameters and buffers that a recording watches: of any loop of PyTorch, of layers, or of a pipeline."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from penstock.base.errors import ConfigError
from penstock.parallel.replicas.shards import ShardedParameter
from penstock.recordings.files import CALLS
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import named_modules_of, whole_name
from penstock.stage.module import is_compiled
from penstock.stage.named import Context, current_context

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of names that ``torch.compile`` and torch's wrappers of modules add."""


@dataclass(frozen=True)
class Place:
    """Place of a call of a module in the run.

    Attributes:
        name: name of the module in the whole model.
        microbatch: number of the microbatch.
        run: name of the present run of the modules; calls of a module are counted in each.
        first_call: number of the module's first call in this run.
        again: whether it runs because a backward needs its output again.
    """

    name: str
    microbatch: int
    run: str
    first_call: int = 0
    again: bool = False


class Source:
    """Modules and parameters that run, by their names in the whole model, and the place of a call in the run.

    Attributes:
        parameters: (name, parameter) pairs, each parameter once.
        shares: whether the gradients of each microbatch are recorded, too.
        aliases: further names of modules that the whole model has in several places → the first name.
        backward_of: microbatch whose backward runs; None where that is not known.
    """

    parameters: list[tuple[str, nn.Parameter]]
    _names: Mapping[Any, str]
    shares = False
    aliases: Mapping[str, str] = MappingProxyType({})
    backward_of: int | None = None

    def install(self, begin_forward: Callable[[], None], stack: ExitStack) -> None:
        """Watch the run as long as a stack is open, and tell of each forward before it is numbered."""

    def next_step(self) -> None:
        """Number microbatches from the first again."""

    def sharded(self) -> Sequence[ShardedParameter]:
        """Return the parameters whose gradients replicas divide, each with this process's range of elements."""
        return ()

    def values(self) -> Mapping[str, Tensor] | None:
        """Return whole parameters between steps by name; None if the parameters themselves have their values."""
        return None

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, buffer) pairs as they are between steps; a buffer with several names has each of them."""
        raise NotImplementedError

    def has_module(self, name: str) -> bool:
        """Return whether a module has this name."""
        return name in self._names.values()

    @property
    def names(self) -> set[str]:
        """Names of all modules, parameters and buffers."""
        own = (name for name, _ in (*self.parameters, *self.buffers()))
        return {*self._names.values(), *own}

    @property
    def in_forward(self) -> bool:
        """True while a forward runs on this thread; gradients that it computes itself are not those of the loss."""
        return current_context() is not None

    def place(self, module: nn.Module) -> Place | None:
        """Return the place of the call of a module that has just ended; None (default) if it is not recorded."""
        return None


class PlainSource(Source):
    """Modules that a loop calls."""

    shares = True

    def __init__(self, roots: dict[str, nn.Module], first: int) -> None:
        wrappers = (DistributedDataParallel, nn.DataParallel)
        roots = {p: m.module if isinstance(m, wrappers) else m for p, m in roots.items()}
        named = (
            (f"{p}{name}" or "the model", m) for p, root in roots.items() for name, m in root.named_modules()
        )
        if compiled := next((name for name, m in named if is_compiled(m)), ""):
            raise ConfigError(
                f"{compiled} is compiled, so the modules within it are not called; record without torch.compile"
            )
        self._first, self._modules = first, roots
        self._roots = {id(m) for m in roots.values()}
        self._counts: Counter[int] = Counter()
        self._inside: list[int] = []
        self._microbatch: int | None = None
        self._names: dict[int, str] = {}
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, root in roots.items():
            # A wrapper has the name of the module within it, which comes later.
            modules = {_own_name(prefix, name): module for name, module in root.named_modules()}
            for name, module in modules.items():
                self._names.setdefault(id(module), name)
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), (_own_name(prefix, name), parameter))
        self.parameters = list(found.values())

    def install(self, begin_forward: Callable[[], None], stack: ExitStack) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in self._roots and not self._inside:
                self._inside.append(id(module))
                begin_forward()
                if torch.is_grad_enabled():
                    self._microbatch = self._first + self._counts[id(module)]
                    self._counts[id(module)] += 1
                else:
                    self._microbatch = None

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._inside == [id(module)]:
                self._inside.clear()

        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)

    def next_step(self) -> None:
        self._counts.clear()

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, root in self._modules.items():
            for name, buffer in root.named_buffers():
                yield _own_name(prefix, name), buffer

    @property
    def in_forward(self) -> bool:
        return bool(self._inside)

    def place(self, module: nn.Module) -> Place | None:
        name = self._names.get(id(module))
        if name is None:
            return None
        if not self._inside:  # a backward needs its output again
            number = self.backward_of
            return None if number is None else Place(name, number, "again", again=True)
        context = current_context()
        known = None if context is None else context.microbatch
        number = self._microbatch if known is None or self._microbatch is None else known
        return None if number is None else Place(name, number, "forward")


class StagesSource(Source):
    """Layers of stages, whose context tells the microbatch and the layer that runs."""

    def __init__(
        self, layers: Iterable[tuple[str, nn.Module]], parameters: list[tuple[str, nn.Parameter]]
    ) -> None:
        self.parameters = parameters
        self._given = list(layers)
        self._find_names(self._given)

    def _find_names(self, layers: Iterable[tuple[str, nn.Module]]) -> None:
        """Find the names of all modules of layers, and the places of the layers in the model."""
        self._names: dict[tuple[str, int], str] = {}
        self._layers: dict[int, str] = {}
        self._places: dict[str, int] = {}
        for name, layer in layers:
            self._places.setdefault(name, len(self._places))
            for whole, module in named_modules_of(name, layer):
                self._names.setdefault((name, id(module)), whole)
                self._layers.setdefault(id(module), name)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._layers_in_order():
            # Other buffers are scratch, and copies of a stage have scratch of their own.
            saved = layer.state_dict(keep_vars=True).keys()
            for inner, buffer in layer.named_buffers():
                if inner in saved:
                    yield whole_name(name, inner, parameter=False), buffer

    def _layers_in_order(self) -> list[tuple[str, nn.Module]]:
        return self._given

    def place(self, module: nn.Module) -> Place | None:
        context = current_context()
        if context is None or context.microbatch is None:
            return None
        layer = context.layer or self._layers.get(id(module), "")
        if (layer, id(module)) not in self._names:
            return None
        name, first = self._names[layer, id(module)], self._places[layer] * CALLS
        return Place(name, context.microbatch, layer, first)


class PipelineSource(StagesSource):
    """The stages of a pipeline on this process."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._order = {layer.name: place for place, layer in enumerate(pipe.layers)}
        super().__init__(self._layers_in_order(), list(pipe.named_parameters()))
        first: dict[int, str] = {}
        aliases = {}
        for layer in pipe.layers:
            # Each rank may have a copy of its own; the layers that were given show that they are one.
            for whole, module in () if layer.module is None else named_modules_of(layer.name, layer.module):
                if (known := first.setdefault(id(module), whole)) != whole:
                    aliases[whole] = known
        self.aliases = aliases
        self._thread = threading.local()
        self._steps, self._base = -1, 0
        self._lock = threading.Lock()
        self._runs = count()

    def _layers_in_order(self) -> list[tuple[str, nn.Module]]:
        layers = (pair for stage in self._pipe.stage_modules() for pair in stage.named_layers())
        return sorted(layers, key=lambda pair: self._order[pair[0]])

    def install(self, begin_forward: Callable[[], None], stack: ExitStack) -> None:
        def wrap(rank: int, run: Callable[[], None]) -> Callable[[], None]:
            def recorded() -> None:
                with self._lock:
                    self._note_step()
                    begin_forward()
                self._thread.active = True
                try:
                    run()
                finally:
                    self._thread.active, self._thread.context = False, None

            return recorded

        stack.callback(self._pipe.wrap_ops(wrap))

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        # Two copies of a stage change statistics copy after copy, and not in the order of the microbatches.
        copied = any(len(holders) > 1 for holders in self._pipe.schedule.placement.holders)
        return iter(()) if copied else super().buffers()

    def _note_step(self) -> None:
        if self._pipe.steps != self._steps:
            self._base += self._pipe.microbatches * self._pipe.replicas if self._steps >= 0 else 0
            self._steps = self._pipe.steps
            # During a step, a rank may have a copy in the place of a module that others have, too.
            self._find_names(self._layers_in_order())

    def sharded(self) -> Sequence[ShardedParameter]:
        return () if self._pipe.shards is None else self._pipe.shards.sharded

    def next_step(self) -> None:
        self._base = 0

    def values(self) -> Mapping[str, Tensor] | None:
        shards = self._pipe.shards
        if shards is None or not shards.sharded_weights:
            self._pipe.wait()  # with zero="overlap" values may still be arriving
            return None
        return self._pipe.state_dict()  # between steps a process has a part of each weight

    def place(self, module: nn.Module) -> Place | None:
        found = super().place(module) if getattr(self._thread, "active", False) else None
        if found is None:
            return None
        # Within a backward, a checkpoint of the user's own runs it again.
        again = torch._C._current_graph_task_id() != -1
        run = f"{self._run_of(current_context())} {found.run}{' again' if again else ''}"
        return replace(found, microbatch=self._base + found.microbatch, run=run, again=again)

    def _run_of(self, context: Context | None) -> int:
        """Return a number for the present run of layers: an op runs them again where its first try was given up."""
        if context is not getattr(self._thread, "context", None):
            self._thread.context, self._thread.run = context, next(self._runs)
        number: int = self._thread.run
        return number


def _own_name(prefix: str, name: str) -> str:
    """Return a name in the whole model, without the parts that wrappers of torch add."""
    return ".".join(part for part in (prefix, *name.split(".")) if part and part not in _WRAPPERS)
