"""One stage: a run of layers, with a forward and a backward for each microbatch.

Every microbatch has an autograd graph of its own: the stage's inputs are detached leaves, the backward starts from
the gradients that the next stage hands back (or from the loss), and nothing crosses from one microbatch to another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock.errors import PenstockError, SplitError
from penstock.stage.footprint import Footprint
from penstock.stage.layers import Layer
from penstock.stage.values import Parcel, gradients, pack, unpack
from penstock.stage.weight_grad import Delivery, Queue, deferring

LossFunction = Callable[[Any, Any], Tensor]


class StageModule(nn.Module):
    """The layers of one stage, run one after the other, as ``nn.Sequential`` does."""

    def __init__(self, layers: Sequence[Layer], device: torch.device | None = None) -> None:
        super().__init__()
        self.names = tuple(layer.name for layer in layers)
        self.layers = nn.ModuleList()
        for layer in layers:
            module = layer.build()
            if not isinstance(module, nn.Module):
                raise SplitError(
                    f"layer {layer.name!r}: its builder returned a {type(module).__name__}, not an nn.Module"
                )
            self.layers.append(module.to(device) if device is not None else module)

    def forward(self, value: Any) -> Any:
        for layer in self.layers:
            value = layer(value)
        return value

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """(name in the whole model, layer)."""
        yield from zip(self.names, self.layers, strict=True)

    def whole_model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter)."""
        for name, layer in self.named_layers():
            for inner, parameter in layer.named_parameters():
                yield f"{name}.{inner}" if inner else name, parameter

    def whole_model_state(self) -> dict[str, Any]:
        """Parameters and buffers by their names in the whole model."""
        state: dict[str, Any] = {}
        for name, layer in self.named_layers():
            state.update(layer.state_dict(prefix=f"{name}."))
        return state


_NO_TARGET = object()


class _Saved(NamedTuple):
    """What a microbatch's backward needs: leaves that collect, roots to start from, and the weights' queue."""

    collecting: tuple[Tensor, ...]
    roots: tuple[Any, ...]  # gradient edges; on the last stage the scaled loss
    queue: Queue | None


class Stage:
    """A stage at work: what it saved for each microbatch between forward and backward.

    Args:
        index: the stage's number in the whole model.
        module: its layers.
        loss_fn: on the last stage ``loss_fn(output, target)``, a scalar, the mean over its microbatch.
        microbatches: how many microbatches share a step; the backward starts from loss / microbatches.

    Attributes:
        held_bytes: bytes that the held microbatches keep alive for their backwards, each counted as the first one of
            its kind was measured; 0 for stages that hold compiled modules.
    """

    def __init__(
        self, index: int, module: StageModule, loss_fn: LossFunction | None = None, microbatches: int = 1
    ) -> None:
        self.index = index
        self.module = module
        self.loss_fn = loss_fn
        self.microbatches = microbatches
        self._saved: dict[int, _Saved] = {}
        self._waiting: dict[int, Queue] = {}
        self._shared: set[int] = set()
        self._deliveries: dict[tuple[int, ...], Delivery] = {}
        self.held_bytes = 0
        self._saved_bytes: dict[bool, int] = {}
        self._waiting_bytes: int | None = None
        # A stage's input is a leaf, into which autograd lets nobody write; a stage that begins so gets a copy.
        first = next((m for m in module.layers.modules() if next(m.children(), None) is None), None)
        self._writes_input = bool(getattr(first, "inplace", False))

    @property
    def held(self) -> int:
        """How many microbatches' activations the stage holds, those that wait for W included."""
        return len(self._saved) + len(self._waiting)

    def forward(self, microbatch: int, inputs: Parcel, split: bool = False) -> Parcel:
        """Run the layers on a microbatch, keep what its backward needs, and return the output.

        Args:
            microbatch: which.
            inputs: from the stage before, or the batch.
            split: the backward will come in two halves, `backward_input` and `backward_weight`.

        Raises:
            PenstockError: the microbatch is already held: used twice without a backward between.
        """
        value, collecting, queue = self._begin(microbatch, inputs, split)
        output, roots = pack(self._run(value, queue, collecting))
        # The graph's ends are kept, not the outputs: their memory goes when the next stage is done with them.
        self._saved[microbatch] = _Saved(collecting, tuple(map(get_gradient_edge, roots)), queue)
        return output

    def forward_with_loss(
        self, microbatch: int, inputs: Parcel, target: object, keep_output: bool, split: bool = False
    ) -> tuple[Tensor, object]:
        """As `forward`, on the last stage: returns the microbatch's loss and, if kept, the detached output."""
        value, collecting, queue = self._begin(microbatch, inputs, split)
        result, loss = self._run(value, queue, collecting, target)
        scaled = loss / self.microbatches
        self._saved[microbatch] = _Saved(collecting, (scaled,) if scaled.requires_grad else (), queue)
        return loss.detach(), _detached(result) if keep_output else None

    def _begin(
        self, microbatch: int, inputs: Parcel, split: bool
    ) -> tuple[object, tuple[Tensor, ...], Queue | None]:
        if microbatch in self._saved or microbatch in self._waiting:
            raise PenstockError(
                f"stage {self.index} already holds microbatch {microbatch}; its backward has to come first"
            )
        value, collecting = unpack(inputs)
        if self._writes_input and isinstance(value, Tensor) and value.requires_grad:
            value = value.clone()
        return value, collecting, Queue() if split and self.splits else None

    def _run(
        self, value: object, queue: Queue | None, collecting: tuple[Tensor, ...], target: object = _NO_TARGET
    ) -> Any:
        """The layers' output, with the loss if there is a target; the first microbatch is measured on the way."""

        def call() -> Any:
            if queue is None:
                result = self.module(value)
            else:
                with deferring(queue, self._shared):
                    result = self.module(value)
            return result if target is _NO_TARGET else (result, self.loss(result, target))

        split = queue is not None
        if split in self._saved_bytes or self.compiled is not None:
            found = call()
        else:
            footprint = Footprint(self.module)
            if queue is not None:
                queue.note = footprint.add
            found = footprint.run(call)
            if queue is not None:
                queue.note = None
            self._saved_bytes[split] = footprint.of(collecting)
        self.held_bytes += self._saved_bytes.get(split, 0)
        return found

    @cached_property
    def compiled(self) -> str | None:
        """The name of a module that ``torch.compile`` made; None if there is none."""
        return next((name for name, m in self.module.named_modules() if hasattr(m, "_orig_mod")), None)

    @cached_property
    def splits(self) -> bool:
        """Whether the stage's backward can be split; says so once where it cannot."""
        if self.compiled is not None:
            warnings.warn(
                f"stage {self.index} holds compiled modules ({self.compiled}), into which the split of the "
                "backward cannot look: its I does the full backward and its W nothing",
                stacklevel=2,
            )
        return self.compiled is None

    def evaluate(self, microbatch: int, inputs: Parcel) -> Parcel:
        """Run the layers on a microbatch and keep nothing; to be called without gradients enabled."""
        return pack(self.module(unpack(inputs)[0]))[0]

    def evaluate_with_loss(
        self, microbatch: int, inputs: Parcel, target: object, keep_output: bool
    ) -> tuple[Tensor | None, object]:
        """As `evaluate`, on the last stage; the loss is None if there is no target."""
        result = self.module(unpack(inputs)[0])
        loss = None if target is None else self.loss(result, target)
        return loss, result if keep_output else None

    def loss(self, output: object, target: object) -> Tensor:
        """The microbatch's loss, checked to be a scalar tensor."""
        assert self.loss_fn is not None
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise PenstockError(
                f"loss_fn must return a scalar tensor, the mean over its microbatch; it returned {shape}"
            )
        return loss

    def backward(self, microbatch: int, grads: Parcel | None) -> Parcel:
        """Backward of a microbatch: parameter gradients accumulate, the inputs' gradients are returned.

        Args:
            microbatch: which.
            grads: from the next stage, one leaf (a tensor or None) for each output leaf that needed a gradient;
                None on the last stage, where the loss is the start.

        Raises:
            PenstockError: no activation of that microbatch is held.
        """
        inputs = self.backward_input(microbatch, grads)
        self.backward_weight(microbatch)
        return inputs

    def backward_input(self, microbatch: int, grads: Parcel | None) -> Parcel:
        """The half of `backward` that yields the inputs' gradients (and whatever weight gradients cannot wait)."""
        if microbatch not in self._saved:
            raise PenstockError(
                f"stage {self.index} holds no activation of microbatch {microbatch}; its forward has to come "
                "first, and its backward only once"
            )
        collecting, roots, queue = self._saved.pop(microbatch)
        if grads is None:
            if roots:
                torch.autograd.backward(roots)
        else:
            if len(grads.leaves) != len(roots):
                raise PenstockError(
                    f"stage {self.index}, microbatch {microbatch}: {len(grads.leaves)} gradient(s) came back "
                    f"for {len(roots)} output(s) that need one"
                )
            given = [(r, g) for r, g in zip(roots, grads.leaves, strict=True) if g is not None]
            if given:
                torch.autograd.backward([r for r, _ in given], [g for _, g in given])
        self.held_bytes -= self._saved_bytes.get(queue is not None, 0)
        if queue is not None and queue.pending:
            self._waiting[microbatch] = queue
            if self._waiting_bytes is None:
                self._waiting_bytes = Footprint(self.module).of(queue.tensors())
            self.held_bytes += self._waiting_bytes
        return gradients(collecting)

    def backward_weight(self, microbatch: int) -> None:
        """The other half: the weight gradients that `backward_input` put off."""
        queue = self._waiting.pop(microbatch, None)
        if queue is not None:
            self.held_bytes -= self._waiting_bytes or 0
            queue.work_off(self._deliveries)
        elif microbatch in self._saved:
            raise PenstockError(f"stage {self.index}, microbatch {microbatch}: W came before I")

    def drop(self) -> None:
        """Forget every microbatch, as after a failed step."""
        for queue in (*self._waiting.values(), *(saved.queue for saved in self._saved.values())):
            if queue is not None:
                queue.clear()
        self._saved.clear()
        self._waiting.clear()
        self.held_bytes = 0


def _detached(value: object) -> object:
    packed = pack(value)[0]
    return unpack(packed._replace(needs_grad=(False,) * len(packed.leaves)))[0]
