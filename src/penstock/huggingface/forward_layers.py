"""Layers of a pipeline that run a model's own forward: what is before the blocks, each block, and what is after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import BatchError, ConfigError
from penstock.huggingface.divided_attention import attention_of_parts
from penstock.huggingface.own_forward import IMAGE_INPUTS, NAMED, OwnForward, Reached
from penstock.parallel.context.attention import current_part
from penstock.stage.layers import INTERNAL, Layer, Live, follow, live_copy
from penstock.stage.named import give

POSITIONS = "multimodal_positions"
"""Name that the first layer gives the others: positions that follow from the token ids and the grids of images."""


class _OwnLayer(Live, nn.Module):
    """Modules around the blocks, under their paths in the model; the mode follows the module with the blocks."""

    own: OwnForward

    def __init__(self, own: OwnForward, modules: Mapping[str, nn.Module]) -> None:
        follow(self, own.parent)
        super().__init__()
        self.own = own
        for path, module in modules.items():
            *parents, last = path.split(".")
            parent: nn.Module = self
            for name in parents:
                if name not in parent._modules:
                    parent.add_module(name, _Folder(own))
                parent = parent.get_submodule(name)
            parent.add_module(last, module)
        for path in own.parameters if modules.keys() == {*own.before} else ():
            parent = self.get_submodule(path.rpartition(".")[0])
            parent.register_parameter(path.rpartition(".")[2], own.model.get_parameter(path))


class _Folder(Live, nn.Module):
    """A place of modules in a path, with the mode of the module with the blocks."""

    def __init__(self, own: OwnForward) -> None:
        follow(self, own.parent)
        super().__init__()


class OwnEmbedding(_OwnLayer):
    """Part of a model's forward before its blocks: int64 (batch, sequence) → (batch, sequence, width)."""

    def __init__(self, own: OwnForward, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(own, modules)
        self.gives = ("input_ids",) if own.pools else (POSITIONS,) if own.has_grids else ()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Any:
        return self._hidden(input_ids, _by_name(attention_mask, position_ids, token_type_ids))

    def _hidden(self, input_ids: Tensor, named: Mapping[str, Tensor | None]) -> Any:
        hidden, positions = self.own.embed(self, input_ids, named)
        if self.own.pools:
            give("input_ids", input_ids)
        if self.own.has_grids:
            give(POSITIONS, positions)
        router_loss = self.own.router_loss
        return hidden if router_loss is None else (hidden, *router_loss.zeros(hidden.device))


class OwnImageEmbedding(OwnEmbedding):
    """Part of a model's forward before its blocks, with its tower of images: one image for each row."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
    ) -> Any:
        values = pixel_values, image_sizes, pixel_attention_mask, image_grid_thw, mm_token_type_ids
        images = dict(zip(IMAGE_INPUTS, values, strict=True))
        given = [name for name, value in images.items() if value is not None]
        if strange := [name for name in given if name not in self.own.images]:
            raise BatchError(
                f"{type(self.own.model).__name__} takes no {strange[0]}; its images are {', '.join(self.own.images)}"
            )
        if given and current_part() is not None:
            raise ConfigError(
                f"{given[0]} is given, and images are not divided over the tokens of a sample (cp); leave cp at 1"
            )
        if given and self.own.divides_images and not self.own.has_grids:
            _require_image_in_every_row(input_ids, image_token(self.own.model.config))
        named = _by_name(attention_mask, position_ids, token_type_ids)
        return self._hidden(input_ids, named | images)


def forward_of(layers: Sequence[Layer]) -> OwnForward:
    """Return the forward that layers of `penstock.from_transformers` run."""
    own: OwnForward = layers[0].build().own  # type: ignore[assignment]  # an OwnEmbedding's
    return own


def embedding_of(own: OwnForward) -> type[OwnEmbedding]:
    """Return the class of the first layer."""
    return OwnImageEmbedding if own.images else OwnEmbedding


class OwnHead(_OwnLayer):
    """Part of a model's forward after its blocks: (batch, sequence, width) → logits."""

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        multimodal_positions: Tensor | None = None,
    ) -> Tensor:
        if self.own.router_loss is not None:
            hidden_states, count, probability = hidden_states
            tokens = hidden_states.shape[:2].numel()
            self.own.router_loss.add_to_loss(count, probability, tokens, attention_mask)
        if multimodal_positions is not None:
            position_ids = multimodal_positions
        named = _by_name(attention_mask, position_ids, token_type_ids)
        ids = input_ids if self.own.pools else None
        if self.own.keeps_hidden:
            self.own.ends(Reached(self, hidden_states, named, ids))
            kept: Tensor = hidden_states
            return kept
        return self.own.logits(self, hidden_states, named, ids)


class OwnBlock(nn.Module):
    """A block: (batch, sequence, width) → the same shape, with the arguments that the model's forward gives it."""

    own: OwnForward
    number: int

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        multimodal_positions: Tensor | None = None,
    ) -> Any:
        if multimodal_positions is not None:
            position_ids = multimodal_positions
        named = _by_name(attention_mask, position_ids, token_type_ids)
        router_loss = self.own.router_loss
        if router_loss is None:
            return self._hidden(hidden_states, named)
        hidden, count, probability = hidden_states
        with router_loss.logits_of(self) as logits:
            hidden = self._hidden(hidden, named)
        return hidden, *router_loss.added(count, probability, logits, attention_mask)

    def _hidden(self, hidden_states: Tensor, named: Mapping[str, Tensor | None]) -> Tensor:
        call = self.own.call(self.number, hidden_states, named)
        with attention_of_parts(self):
            if call.keyword:
                output = super().forward(*call.args, **{call.keyword: hidden_states}, **call.kwargs)
            else:
                output = super().forward(hidden_states, *call.args, **call.kwargs)
        return self.own.hidden_of(output)


def _by_name(*values: Tensor | None) -> dict[str, Tensor | None]:
    return dict(zip(NAMED, values, strict=True))


def image_token(config: Any) -> int | None:
    """Return the token whose places in a row are for the features of its image; None if a config has none."""
    found: int | None = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not annotate it
def _require_image_in_every_row(input_ids: Tensor, token: int | None) -> None:
    """Refuse rows without an image: with as many images as rows, another row then has several, and rows are cut wrongly."""
    without = input_ids.ne(-1 if token is None else token).all(1)
    if bool(without.any()):
        raise BatchError(
            f"row {int(without.nonzero()[0])} of a microbatch has no image (token {token}), and images are divided into "
            "microbatches by rows; give every row one image, or a batch without images"
        )


def twin(module: nn.Module, kind: type[nn.Module], **extra: Any) -> nn.Module:
    """Return a module with the parameters, buffers, children, mode and attributes of another, and another forward.

    Args:
        kind: class whose forward calls the module's.
        extra: attributes of the twin.
    """
    plain = [name for name in vars(module) if name not in INTERNAL]
    copied: nn.Module = live_copy(module, plain, (kind,))
    copied.__dict__.update({n: v for n, v in vars(module).items() if n in INTERNAL and n != "training"})
    copied._modules = dict(module._modules)
    for name, value in extra.items():
        setattr(copied, name, value)
    return copied


def own_layers(own: OwnForward) -> list[nn.Module]:
    """Return the layers of a model whose modules have their weights."""
    modules = own.model.get_submodule
    blocks = [twin(modules(path), OwnBlock, own=own, number=n) for n, path in enumerate(own.paths)]
    return [
        embedding_of(own)(own, {path: modules(path) for path in own.before}),
        *blocks,
        OwnHead(own, {path: modules(path) for path in own.after}),
    ]
