"""Proof that the layers of a model compute what the model does: logits, loss and every gradient, bit for bit.

It runs on a small random model of the same config's kind and options, which takes a fraction of a second. So it needs no
weights, and models that fit on no machine are proved, too.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError, SplitError, describe_error
from penstock.huggingface.forward_layers import image_token, own_layers
from penstock.huggingface.heads import CAUSAL, IMAGES, MASKED, QUESTIONS, SEQUENCE, TOKEN, empty_model
from penstock.huggingface.loss import ModelLoss
from penstock.huggingface.own_forward import GRIDS, OwnForward, image_shape, logits_of
from penstock.huggingface.quantised import without_quantisation
from penstock.huggingface.router_loss import UNKNOWN
from penstock.huggingface.small_config import small_config
from penstock.recordings.in_memory import Closeness, Run, Seen, first_difference, first_other, watched
from penstock.stage.compute.causal_lm_loss import causal_lm_loss
from penstock.stage.compute.linear_cross_entropy import IGNORED
from penstock.stage.named import Context, names_given, names_taken, within

_MOST_WEIGHTS = 2_000_000
"""Weights up to which a model itself is small enough, and no smaller one is made."""
_SHAPE = (2, 8)
"""Rows and tokens of the sample: more tokens than a small config's windows and chunks have."""
_SEED = 7
_CPU_KERNELS = ("eager", "sdpa")
"""Implementations of attention that run on the CPU, where the proof does."""

_proved: set[str] = set()
_lock = threading.Lock()


def images_refused(config: Any, weights: int, head: str) -> str:
    """Return why models of a config cannot be cut with images in their batches; empty if they can."""
    try:
        require_equal(config, weights, head, images=True)
    except SplitError as error:
        return str(error)
    return ""


def require_equal(config: Any, weights: int, head: str = CAUSAL, images: bool = False) -> None:
    """Prove that models of a config can be cut.

    Args:
        config: config of transformers.
        weights: number of weights of its model.
        head: head of the model, one of `HEADS`.
        images: whether the sample has images (default False).

    Raises:
        SplitError: if the layers give other numbers than the model, or no small model can be made; says which.
    """
    kind = type(config).__name__
    config = without_quantisation(config)
    try:
        small = copy.deepcopy(config) if weights <= _MOST_WEIGHTS else small_config(config)
        kernel = config._attn_implementation
        small._attn_implementation = kernel if kernel in _CPU_KERNELS else None
        small.dtype = torch.float32
        small.architectures = (
            config.architectures
        )  # of several classes with one head, the library chooses by them
        key = json.dumps(
            [kind, head, images, small.to_dict(), str(small._attn_implementation)],
            sort_keys=True,
            default=str,
        )
        with _lock:
            if key in _proved:
                return
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            sample = _Sample(small, head, images)
    except PenstockError:
        raise
    except Exception as error:
        raise SplitError(
            f"no small model of this {kind} can be made and run, on which to prove that its layers give its numbers: "
            f"{describe_error(error)}. With check=False the layers are not proved"
        ) from error
    sample.compare()
    with _lock:
        _proved.add(key)


class _Sample:
    """A small random model, a padded batch, and what the uncut model makes of it.

    Args:
        images: whether each row has an image.
    """

    def __init__(self, config: Any, head: str, images: bool) -> None:
        if images:
            _require_images(config)
        torch.manual_seed(_SEED)
        self.model: Any = empty_model(config, head).float()
        self.loss: Callable[[Tensor, Tensor], Tensor] = (
            causal_lm_loss if head in (CAUSAL, IMAGES) else ModelLoss(self.model, head)
        )
        _without_dropout(self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():  # zeros and ones would hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.model.train()
        self.first: str = self.model.main_input_name
        if self.first == "pixel_values":
            self.ids = torch.randn(_SHAPE[0], *image_shape(config))
        else:
            tokens = self.model.get_input_embeddings().weight.shape[0]
            self.ids = torch.randint(min(3, tokens - 1), tokens, _SHAPE)
        self.images: dict[str, Tensor] = {}
        token = -1 if (found := image_token(config)) is None else found
        self.ids[self.ids == token] = 0
        if images:
            self.images, places = _images(self.model, len(self.ids))
            self.ids = torch.cat([self.ids[:, :1], places, self.ids[:, 1:]], 1)
            self.images["mm_token_type_ids"] = self.ids.eq(token).long()
        self.mask = torch.ones_like(self.ids)
        if self.first == "input_ids":
            self.mask[1, -2:] = 0
        self.labels = _labels(self.ids, self.mask * (self.ids != token), self.model.config, head)
        if head == SEQUENCE and (padding := self.model.config.get_text_config().pad_token_id) is not None:
            self.ids[self.mask == 0] = padding
        self.modules = {module: name for name, module in self.model.named_modules()}
        self.expected = self._whole()

    def _named(self) -> dict[str, Tensor]:
        if self.first != "input_ids":
            return {}
        named = {"attention_mask": self.mask}
        if self.images:
            named["token_type_ids"] = (self.labels == IGNORED).long()
        takes = signature(self.model.forward).parameters
        return {name: value for name, value in (named | self.images).items() if name in takes}

    def _adds_router_loss(self) -> bool:
        # Of other models, the layers are refused with the reason.
        asked = getattr(self.model.config, "output_router_logits", False)
        return bool(asked) and hasattr(self.model, "router_aux_loss_coef")

    def _whole(self, seen: Seen | None = None) -> Run:
        """Return logits, loss and gradients of the model; its own loss is kept apart."""
        torch.manual_seed(_SEED)
        named = self._named()
        pixels = named.get("pixel_values")
        if pixels is not None:
            pixels = named["pixel_values"] = pixels.clone().requires_grad_()
        labels: dict[str, Tensor] = {"labels": self.labels}
        if hasattr(self.loss, "head") and self.loss.head == QUESTIONS:
            labels = dict(zip(("start_positions", "end_positions"), self.labels.unbind(1), strict=True))
        constants = {"use_cache": False} if self.first == "input_ids" else {}
        with watched(seen, self.modules):
            output = self.model(**{self.first: self.ids}, **labels, **constants, **named)
        logits = logits_of(output)
        if not isinstance(logits, Tensor):
            raise SplitError(f"{type(self.model).__name__} cannot be cut: its forward returns no logits")
        loss = self.loss(logits, self.labels)
        if self._adds_router_loss():
            loss = loss + self.model.router_aux_loss_coef * output.aux_loss
        loss.backward()
        if pixels is not None and (pixels.grad is None or not pixels.grad.any()):
            raise SplitError(
                f"{type(self.model).__name__} cannot be cut with images: they do not reach its loss"
            )
        self.own_loss: Tensor = output.loss.detach()
        return Run([logits.detach(), loss.detach()], self._gradients())

    def _gradients(self) -> dict[str, Tensor | None]:
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.model.zero_grad()
        return found

    def compare(self) -> None:
        """Run the layers one after the other, and compare.

        Raises:
            SplitError: if anything differs.
        """
        logits, loss = self.expected.results
        name = type(self.model).__name__
        if not all(bool(x.isfinite().all()) for x in (logits, loss)):
            raise SplitError(f"{name} cannot be proved: a small random model of it gives no finite numbers")
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            other = first_other(self.expected, self._of_layers(), Closeness())
            if other == 1:
                raise SplitError(f"{name} cannot be cut: {UNKNOWN}")
            if other is not None:
                place = first_difference(self._whole, self._of_layers)
                if other == 0:
                    raise SplitError(
                        f"{name} cannot be cut: its layers give other logits than its forward{place}"
                    )
                raise SplitError(
                    f"{name} cannot be cut: its layers give {other} another gradient than its forward{place}"
                )
        if not torch.equal(self.own_loss, loss):
            raise SplitError(
                f"{name} cannot be cut: for labels its forward computes another loss ({self.own_loss.item():.4f}) than "
                f"{'penstock.causal_lm_loss' if self.loss is causal_lm_loss else 'its loss_function'} "
                f"({loss.item():.4f})"
            )

    def _of_layers(self, seen: Seen | None = None) -> Run:
        """Return logits, loss and gradients of the layers."""
        torch.manual_seed(_SEED)
        with watched(seen, self.modules):
            found, added = self._through(own_layers(OwnForward(self.model, self.model.get_submodule)))
        ours = sum(added.values(), self.loss(found, self.labels))
        ours.backward()
        return Run([found.detach(), ours.detach()], self._gradients())

    def _through(self, layers: list[nn.Module]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits, and the losses that layers add to the model's."""
        value: Tensor = self.ids
        gives = frozenset(name for layer in layers for name in names_given(layer))
        with within(Context(dict(self._named()), {}, gives)) as context:
            for layer in layers:
                taken = names_taken(layer)
                value = layer(value, **{name: x for name, x in context.named.items() if name in taken})
        return value, context.losses


def _labels(ids: Tensor, mask: Tensor, config: Any, head: str) -> Tensor:
    """Return labels of a sample, as the loss of the head takes them."""
    if head in (CAUSAL, IMAGES):
        return torch.where(mask == 1, ids, IGNORED)
    count: int = config.num_labels
    if head == TOKEN:
        return torch.where(mask == 1, ids % count, IGNORED)
    if head == MASKED:
        return torch.where((mask == 1) & (torch.arange(ids.shape[1]) % 2 == 0), ids, IGNORED)
    if head == QUESTIONS:
        return torch.tensor([[1, 3]] + [[2, 4]] * (len(ids) - 1))
    if config.problem_type == "single_label_classification" or (config.problem_type is None and count > 1):
        return torch.arange(len(ids)) % count
    return torch.rand(len(ids), count) if count > 1 else torch.rand(len(ids))


def _without_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to zero; its random numbers depend on the order of calls."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _require_images(config: Any) -> None:
    """Raise SplitError if images have no tokens in the rows."""
    if getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None):
        raise SplitError(
            f"{type(config).__name__} cannot be cut with images: it adds their features to the hidden state after its first "
            "blocks, too (deepstack_visual_indexes), which later stages do not have"
        )
    if getattr(config, "vision_config", None) is None or image_token(config) is None:
        raise SplitError(
            f"images cannot be cut: {type(config).__name__} has no vision_config, or no image_token_id"
        )


def _image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of an image.

    Raises:
        SplitError: if images have no fixed size.
    """
    vision, name = config.vision_config, type(config).__name__
    size = getattr(vision, "image_size", None)
    if size is None:
        raise SplitError(
            f"images cannot be cut: the vision_config of {name} has no image_size, and its model takes no {GRIDS} beside "
            "the patches of all images, so no form of a row's image is known"
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return getattr(vision, "num_channels", 3), height, width


def _images(model: Any, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a random image for each row by the names of inputs, and token ids of their places, (rows, tokens).

    A row's image has three dimensions, or four with several parts; the first form is taken that the model can read.
    """
    token = image_token(model.config)
    assert token is not None, "it has been asked for"
    takes = signature(model.forward).parameters
    if GRIDS in takes:
        return _patches(model.config.vision_config, rows, token)
    shape = _image_shape(model.config)
    reasons: list[str] = []
    for parts in ((), (1,), (5,), (10,), (40,)):
        pixels = {"pixel_values": torch.randn(rows, *parts, *shape)}
        sized = pixels | {"image_sizes": torch.tensor([shape[1:]] * rows)}
        for given in (pixels, sized) if "image_sizes" in takes else (pixels,):
            try:
                with torch.no_grad():
                    features = model.get_image_features(**given, return_dict=True).pooler_output
            except Exception as error:  # of the model's own checks and shapes
                reasons.append(describe_error(error))
                continue
            each = features if isinstance(features, list | tuple) else [features]
            tokens = sum(one.shape[:-1].numel() for one in each)
            return given, torch.full((rows, tokens // rows), token)
    raise SplitError(
        f"{type(model).__name__} cannot be cut with images: no form of a row's image is known that it reads: {reasons[0]}"
    )


def _patches(vision: Any, rows: int, token: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return random patches of all images with the grid of each, and token ids of their places, (rows, tokens).

    The first row has one image, and the others two, of other shapes and as many tokens together.
    """
    merged = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    sides = [(2, 6), *[(2, 2), (4, 2)] * (rows - 1)]
    grids = torch.tensor([(1, height * merged, width * merged) for height, width in sides])
    one = [token] * 12 + [0]
    two = [token] * 4 + [0] + [token] * 8
    pixels = torch.randn(int(grids.prod(1).sum()), width)
    return {"pixel_values": pixels, GRIDS: grids}, torch.tensor([one, *[two] * (rows - 1)])
