"""One stage: a run of layers, with a forward and a backward for each microbatch.

Every microbatch has an autograd graph of its own: the stage's inputs are detached leaves, the backward starts from
the gradients that the next stage hands back (or from the loss), and nothing crosses from one microbatch to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, SplitError
from penstock.stage.layers import Layer
from penstock.stage.values import Parcel, gradients, pack, unpack

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


class Stage:
    """A stage at work: what it saved for each microbatch between forward and backward.

    Args:
        index: the stage's number in the whole model.
        module: its layers.
        loss_fn: on the last stage ``loss_fn(output, target)``, a scalar, the mean over its microbatch.
        microbatches: how many microbatches share a step; the backward starts from loss / microbatches.
    """

    def __init__(
        self, index: int, module: StageModule, loss_fn: LossFunction | None = None, microbatches: int = 1
    ) -> None:
        self.index = index
        self.module = module
        self.loss_fn = loss_fn
        self.microbatches = microbatches
        self._saved: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    @property
    def held(self) -> int:
        """How many microbatches' activations the stage holds."""
        return len(self._saved)

    def forward(self, microbatch: int, inputs: Parcel) -> Parcel:
        """Run the layers on a microbatch, keep what its backward needs, and return the output.

        Raises:
            PenstockError: the microbatch is already held: used twice without a backward between.
        """
        if microbatch in self._saved:
            raise PenstockError(
                f"stage {self.index} already holds microbatch {microbatch}; its backward has to come first"
            )
        value, collecting = unpack(inputs)
        output, roots = pack(self.module(value))
        self._saved[microbatch] = (collecting, roots)
        return output

    def forward_with_loss(
        self, microbatch: int, inputs: Parcel, target: object, keep_output: bool
    ) -> tuple[Tensor, object]:
        """As `forward`, on the last stage: returns the microbatch's loss and, if kept, the detached output."""
        if microbatch in self._saved:
            raise PenstockError(
                f"stage {self.index} already holds microbatch {microbatch}; its backward has to come first"
            )
        value, collecting = unpack(inputs)
        result = self.module(value)
        loss = self.loss(result, target)
        scaled = loss / self.microbatches
        self._saved[microbatch] = (collecting, (scaled,) if scaled.requires_grad else ())
        return loss.detach(), _detached(result) if keep_output else None

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
        if microbatch not in self._saved:
            raise PenstockError(
                f"stage {self.index} holds no activation of microbatch {microbatch}; its forward has to come "
                "first, and its backward only once"
            )
        collecting, roots = self._saved.pop(microbatch)
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
        return gradients(collecting)

    def drop(self) -> None:
        """Forget every microbatch, as after a failed step."""
        self._saved.clear()


def _detached(value: object) -> object:
    packed = pack(value)[0]
    return unpack(packed._replace(needs_grad=(False,) * len(packed.leaves)))[0]
