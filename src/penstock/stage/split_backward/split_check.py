"""Check that a stage's backward can be split: its first microbatch runs both ways, and the gradients are compared.

The split is correct only if it sees every use of a weight. Models use weights in ways that no list covers: recompute
inside a layer, derivatives inside a forward, hooks that change gradients, weights used both directly and through other
functions. So the first microbatch of a stage is not split. It runs the full backward, whose gradients are the ones that
count, and records the uses that the split would have seen. Only the intercepted functions run twice, so buffers, hooks and
random numbers are not affected.

A layer passes if, for every weight that would be deferred,

- each use gives the same output and the same input gradient with the weight detached as with it attached;
- the sum that W computes from the recorded uses equals the gradient that the full backward gives to the parameter.

All weights of a layer that fails get their gradients in I from then on. On a CPU values must be equal bit for bit; on other
devices, whose kernels need not be deterministic, up to rounding. For weights that are sharded over processes (DTensor) each
process compares its own shard, up to rounding and without communication. As their results could differ, a layer that fails
is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import PenstockError, SplitBackwardError
from penstock.stage.module import StageModule
from penstock.stage.same_values import same_values
from penstock.stage.split_backward.weight_grad import WeightGradQueue, WeightUse


class SplitChecks:
    """Decision for every microbatch of a stage whether its backward is split, with the check where one is needed.

    A change of a parameter's dtype or ``requires_grad``, of a module's training mode, of autocast, or of the dtypes and
    dimensions of the inputs requires another check.
    """

    def __init__(self, stage: int, module: StageModule, strict: bool = False) -> None:
        self.stage = stage
        self.module = module
        self.strict = strict
        self.unsplit_layers: list[str] = []
        self._excluded: set[int] = set()
        self._checked: set[object] = set()
        self._running: object = None
        self._modes: object = None
        self._step: int | None = None

    @cached_property
    def possible(self) -> bool:
        """True if the stage's backward can be split at all; warns once if it cannot."""
        compiled = self.module.compiled
        if compiled is not None:
            warnings.warn(
                f"stage {self.stage} holds compiled modules ({compiled}), into which the split of the backward cannot look: "
                "its I does the full backward and its W nothing",
                stacklevel=2,
            )
        return compiled is None

    def queue(self, step: int, leaves: Sequence[object]) -> WeightGradQueue | None:
        """Return the queue of a microbatch with these inputs; None if it needs the full backward.

        Args:
            step: a number that no other step has, failed ones included.
        """
        if step != self._step:  # within a step, the modules' settings do not change
            self._step = step
            self._modes = _modes_of(self.module)
            self._running = None
        pattern = (self._modes, tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else None for x in leaves))
        if pattern in self._checked:
            return WeightGradQueue(self._excluded, released=self.module.released)
        if self._running is not None:  # the check of an earlier microbatch waits for its backward
            return None
        self._running = pattern
        return WeightGradQueue(self._excluded, SplitCheck(), self.module.released)

    def end(self, queue: WeightGradQueue) -> None:
        """End a check, after the microbatch's full backward."""
        assert isinstance(queue.check, SplitCheck)
        rejected = queue.check.rejected(queue)
        self._checked.add(self._running)
        self._running = None
        if not rejected:
            return
        failed = {
            name: layer
            for name, layer in self.module.named_layers()
            if any(id(p) in rejected for p in layer.parameters())
        }
        self._excluded |= rejected | {id(p) for layer in failed.values() for p in layer.parameters()}
        if new := [name for name in failed if name not in self.unsplit_layers]:
            self.unsplit_layers += new
            self._report(new)

    def _report(self, layers: Sequence[str]) -> None:
        names = ("layer " if len(layers) == 1 else "layers ") + ", ".join(map(repr, layers))
        text = (
            f"stage {self.stage}: the backward of {names} cannot be split: the weight gradients computed apart from the "
            "input gradients differ from the full backward's. The layer recomputes, differentiates or changes "
            "gradients inside its forward, or uses a weight in a way that the split does not see"
        )
        if any(_is_dtensor(p) for p in self.module.parameters()):
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

    def run(self, use: WeightUse) -> Tensor:
        """Call a function as plain PyTorch does, and compare the result with a call with detached weights."""
        parameters = use.parameters()
        self._uses.update((id(p), p) for p in parameters)
        output = use.run(use.x, attached=True)
        if not _same_without_weights(use, output):
            self.reject(parameters[0])
        return output

    def reject(self, weight: Tensor) -> None:
        """Reject a weight, so that the layers that hold it are never deferred."""
        self._rejected.add(id(weight))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Record the gradients that reach the parameters in the full backward, before hooks change them."""
        handles = []
        for weight in self._uses.values():
            # Hooks of a tensor run in the order of this dictionary, and torch has no public way to come first.
            hooks: Any = weight._backward_hooks
            others = dict(hooks or {})
            if others:
                hooks.clear()
            handles.append(weight.register_hook(self._recorder(weight)))
            if others:
                hooks.update(others)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recorder(self, weight: Tensor) -> Callable[[Tensor], None]:
        def record(grad: Tensor) -> None:
            total = self._full.get(id(weight))
            self._full[id(weight)] = grad.clone() if total is None else total + grad

        return record

    def rejected(self, queue: WeightGradQueue) -> set[int]:
        """Return the ids of parameters whose gradients differ, after the full backward; empty the queue."""
        try:
            sums = {id(p): g for p, g in zip(*queue.sums(), strict=True)}
        except PenstockError:  # a tensor was modified in place that the full backward does not need
            queue.clear()
            return set(self._uses)
        for key in self._uses.keys() - queue.excluded:
            recorded, full = sums.get(key), self._full.get(key)
            if recorded is None and full is None:  # no gradient
                continue
            if recorded is None or full is None or not _same(recorded, full):
                self._rejected.add(key)
        return self._rejected


def _same_without_weights(use: WeightUse, output: Tensor) -> bool:
    """Return whether a use gives the same output and input gradient with its weights detached."""
    if _is_dtensor(use.weight):
        return True
    # These hooks hide the calls from outer hooks, which may count bytes or belong to a checkpoint.
    with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
        if not use.x.requires_grad:
            return same_values(use.run(use.x, attached=False), output.detach())
        x_attached, x_detached = use.x.detach().requires_grad_(), use.x.detach().requires_grad_()
        attached = use.run(x_attached, attached=True)
        detached = use.run(x_detached, attached=False)
        any_gradient = attached.detach()
        (grad_attached,) = torch.autograd.grad(attached, x_attached, any_gradient)
        (grad_detached,) = torch.autograd.grad(detached, x_detached, any_gradient)
    return same_values(detached.detach(), output.detach()) and same_values(grad_attached, grad_detached)


def _modes_of(module: StageModule) -> object:
    """Return the settings, other than the inputs, that decide how a stage's layers use their weights."""
    return (
        tuple((id(p), p.dtype, p.requires_grad) for p in module.parameters()),
        tuple(m.training for m in module.modules()),
        tuple((k, torch.get_autocast_dtype(k)) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)),
    )


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _same(recorded: Any, full: Any) -> bool:
    if not _is_dtensor(full):
        return same_values(recorded, full)
    if recorded.placements != full.placements:  # partial sums, say, which the processes have not added up yet
        return True
    with torch.no_grad():
        return same_values(recorded.to_local(), full.to_local(), exact=False)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
