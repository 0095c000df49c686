"""The proof that a stage's backward can be split: its first microbatch runs both ways, and the gradients are compared.

The split trusts that it sees every use of a weight. Models break that trust in ways that no list covers: recomputation
inside a layer, derivatives inside a forward, hooks that change gradients, weights used both directly and through
other functions. So the first microbatch of a stage does not use the split. It runs the full backward, whose gradients
are the ones that count, and records what the split would have seen. Nothing runs twice except the intercepted
functions themselves, so buffers, hooks and random numbers are left alone.

A layer passes if, for every weight that would be deferred,

- each use gives the same output and the same input gradient with the weight detached as with it attached;
- the sum that W computes from the recorded uses equals the gradient that the full backward hands to the parameter.

All weights of a layer that fails get their gradients in I for good. On a CPU values must be equal bit for bit, on other
devices, whose kernels need not be deterministic, up to rounding. Of weights that are cut over processes (DTensor) each
process compares its own part, up to rounding and without talking to the others; as they could come to different verdicts,
a layer that fails is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError, SplitBackwardError
from penstock.stage.module import StageModule
from penstock.stage.split_backward.weight_grad import Queue, Use
from penstock.stage.values import same_numbers


class SplitChecks:
    """Decides for every microbatch of a stage whether its backward is split, and checks it where that is not known yet.

    A change of a parameter's dtype, of what requires a gradient, of a module's training mode, of autocast, or of the
    dtypes and dimensions of the inputs calls for another check.

    Args:
        stage: its number, for messages.
        module: its layers.
        strict: refuse layers that fail, instead of giving them the full backward.

    Attributes:
        whole: names of the layers that failed.
    """

    def __init__(self, stage: int, module: StageModule, strict: bool = False) -> None:
        self.stage = stage
        self.module = module
        self.strict = strict
        self.whole: list[str] = []
        self._excluded: set[int] = set()
        self._passed: set[object] = set()
        self._running: object = None
        self._modes: object = None

    @cached_property
    def possible(self) -> bool:
        """Whether the stage's backward can be split at all; warns once where it cannot."""
        compiled = self.module.compiled
        if compiled is not None:
            warnings.warn(
                f"stage {self.stage} holds compiled modules ({compiled}), into which the split of the backward cannot look: "
                "its I does the full backward and its W nothing",
                stacklevel=2,
            )
        return compiled is None

    def begin(self) -> None:
        """Start a step, in which the modules' settings stay as they are."""
        self._modes = None
        self._running = None

    def queue(self, leaves: Sequence[object]) -> Queue | None:
        """The queue of a microbatch with these inputs; None if it needs the full backward."""
        if self._modes is None:
            self._modes = _modes_of(self.module)
        pattern = (self._modes, tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else None for x in leaves))
        if pattern in self._passed:
            return Queue(self._excluded)
        if self._running is not None:  # the check of an earlier microbatch waits for its backward
            return None
        self._running = pattern
        return Queue(self._excluded, SplitCheck())

    def end(self, queue: Queue) -> None:
        """End a check, after the microbatch's full backward.

        Raises:
            SplitBackwardError: a layer failed, and `strict` is set.
        """
        assert isinstance(queue.check, SplitCheck)
        rejected = queue.check.rejected(queue)
        self._passed.add(self._running)
        self._running = None
        if not rejected:
            return
        failed = {name: layer for name, layer in self.module.named_layers() if _holds(layer, rejected)}
        self._excluded |= rejected | {id(p) for layer in failed.values() for p in layer.parameters()}
        if news := [name for name in failed if name not in self.whole]:
            self.whole += news
            self._report(news)

    def _report(self, layers: Sequence[str]) -> None:
        named = ("layer " if len(layers) == 1 else "layers ") + ", ".join(map(repr, layers))
        text = (
            f"stage {self.stage}: the backward of {named} cannot be split: the weight gradients computed apart from the "
            "input gradients differ from those of the full backward. The layer recomputes, differentiates or changes "
            "gradients inside its forward, or uses a weight in a way that the split does not see"
        )
        if any(_is_cut(p) for p in self.module.parameters()):
            raise SplitBackwardError(f"{text}. With tensor parallelism, use a schedule without W ops")
        if self.strict:
            raise SplitBackwardError(
                f"{text}. Use a schedule without W ops, or strict=False to give the layer its full backward in I"
            )
        warnings.warn(f"{text}. From now on I runs its full backward and W nothing", stacklevel=2)


class SplitCheck:
    """The check of one microbatch."""

    def __init__(self) -> None:
        self._uses: dict[int, Tensor] = {}
        self._rejected: set[int] = set()
        self._full: dict[int, Tensor] = {}

    def run(self, use: Use) -> Tensor:
        """Call a function as plain PyTorch does, and compare it with what the split would call."""
        for weight in (use.weight, use.bias):
            if weight is not None:
                self._uses[id(weight)] = weight
        output = use.call(use.x, use.weight, use.bias)
        if not _same_without_weights(use, output):
            self.reject(use.weight)
        return output

    def reject(self, weight: Tensor) -> None:
        """Never defer the layers that hold this weight."""
        self._rejected.add(id(weight))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around the full backward: keep the gradients that reach the parameters, as they are before hooks."""
        handles = []
        for weight in self._uses.values():
            # Hooks of a tensor run in the order of this dictionary, and torch has no public way to come first.
            own: Any = weight._backward_hooks
            others = dict(own or {})
            if others:
                own.clear()
            handles.append(weight.register_hook(self._keep(weight)))  # type: ignore[no-untyped-call]  # not annotated in torch
            if others:
                own.update(others)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, weight: Tensor) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            before = self._full.get(id(weight))
            self._full[id(weight)] = grad.clone() if before is None else before + grad

        return keep

    def rejected(self, queue: Queue) -> set[int]:
        """The ids of parameters whose gradients differ, after the full backward; empties the queue."""
        try:
            sums = {id(p): g for p, g in zip(*queue.sums(), strict=True)}
        except PenstockError:  # something was modified in place that the full backward does not need
            queue.clear()
            return set(self._uses)
        for key in self._uses.keys() - queue.excluded:
            recorded, full = sums.get(key), self._full.get(key)
            if recorded is None and full is None:  # it got no gradient
                continue
            if recorded is None or full is None or not _same(recorded, full):
                self._rejected.add(key)
        return self._rejected


def _same_without_weights(use: Use, output: Tensor) -> bool:
    """Whether a use gives the same output and input gradient with its weights detached."""
    if _is_cut(use.weight):
        return True
    bias = None if use.bias is None else use.bias.detach()
    # These hooks keep those of the caller, who may count bytes or run a checkpoint, from seeing these calls.
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        if not use.x.requires_grad:
            return same_numbers(use.call(use.x, use.weight.detach(), bias), output.detach())
        one, other = use.x.detach().requires_grad_(), use.x.detach().requires_grad_()
        attached = use.call(one, use.weight, use.bias)
        detached = use.call(other, use.weight.detach(), bias)
        any_gradient = attached.detach()
        (grad,) = torch.autograd.grad(attached, one, any_gradient)
        (same,) = torch.autograd.grad(detached, other, any_gradient)
    return same_numbers(detached.detach(), output.detach()) and same_numbers(grad, same)


def _modes_of(module: StageModule) -> object:
    """What decides how a stage's layers use their weights, apart from their inputs."""
    return (
        tuple((id(p), p.dtype, p.requires_grad) for p in module.parameters()),
        tuple(m.training for m in module.modules()),
        tuple((k, torch.get_autocast_dtype(k)) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)),
    )


def _is_cut(tensor: Tensor) -> bool:
    """Whether a tensor is cut over processes."""
    return hasattr(tensor, "to_local")


def _same(recorded: Any, full: Any) -> bool:
    if not _is_cut(full):
        return same_numbers(recorded, full)
    if recorded.placements != full.placements:  # sums that are still to be added up over the processes, say
        return True
    with torch.no_grad():
        return same_numbers(recorded.to_local(), full.to_local(), exact=False)


def _holds(layer: torch.nn.Module, parameters: set[int]) -> bool:
    return any(id(p) in parameters for p in layer.parameters())


def _itself(tensor: Tensor) -> Tensor:
    return tensor
