"""Split of a Hugging Face model into layers: what comes before its blocks, the blocks, what comes after.

The library's model is built on the meta device, where it takes no memory, and is the pattern from which each process
makes its own layers. `penstock.huggingface.own_forward` runs them.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError, DataError, SplitError, describe_error
from penstock.base.model_variants import LARGEST_SIZE, VARIANT_KEYS, refused_architecture, refused_variant
from penstock.huggingface import model_folder
from penstock.huggingface.adapters import base_with_adapters, is_peft_model
from penstock.huggingface.conversion import converted
from penstock.huggingface.device_map import take_off_hooks
from penstock.huggingface.forward_layers import OwnBlock, OwnHead, embedding_of, twin
from penstock.huggingface.heads import (
    CAUSAL,
    HEADS,
    IMAGES,
    SEQUENCE,
    classes_of,
    empty_model,
    head_in,
    head_of,
)
from penstock.huggingface.library import require_library
from penstock.huggingface.loss import ModelLoss, chunked_loss, has_library_loss
from penstock.huggingface.own_forward import OwnForward
from penstock.huggingface.proof import images_refused, require_equal
from penstock.huggingface.quantised import require_known_quantisation
from penstock.stage.compute.causal_lm_loss import causal_lm_loss, valid_tokens
from penstock.stage.layers import BatchNames, Layer, begins_in, joint_name
from penstock.stage.rng.initial import generator_for

_OWN_KERNELS = ("eager", "sdpa")
"""Implementations of attention that are part of transformers and torch."""
# Far above any model; the library makes lists with an entry a layer from a number that may be damaged.
_MOST_LAYERS = 10_000
_WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "n_embd", "n_inner")
_SIZES = (*_WIDTHS, "vocab_size", "num_attention_heads", "num_key_value_heads", "n_head", "n_positions")
"""Keys with the sizes of weights."""

STORED_NAMES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Names in files of weights that have another one in the model, by the config's ``model_type``."""

Make = Callable[[str], nn.Module]
"""Function from a module's name in the whole model to a module with weights."""


def from_transformers(model: object, *, seed: int = 0, check: bool = True) -> list[Layer]:
    """Split a model of Hugging Face transformers into layers that a `Pipeline` takes.

    The first layer takes token ids, int64 (batch, sequence); layers pass on the hidden state, (batch, sequence, width);
    the last returns logits, (batch, sequence, vocabulary); (batch, sequence, labels) for token classification and (batch,
    labels) for sequence and image classification, whose first layer takes ``pixel_values``; (batch, sequence, 2), of starts
    and ends, for question answering, with targets (batch, 2). Masks and positions are named inputs of a step:
    ``pipe.step(ids, labels, attention_mask=mask)``, 1 for a token and 0 for padding, on the left or on the right. Without
    a mask, ``position_ids`` that restart at 0 mark sequences packed into one row, which then do not attend to each other.
    Parameters have the names of the library's model.

    The layers run the model's own forward, with stubs in the place of its blocks. So every family of the library is taken
    whose forward calls its blocks one after the other, and does nothing between them.

    Without a ``loss_fn``, a `Pipeline` takes the model's own loss; of a causal language model with a vocabulary of 32,000 or
    more it computes it by chunks, without the logits, which may differ in rounding (`LinearCrossEntropy`).

    A model of images and text keeps its tower of images, and the merge with the embedded tokens, before the first block.
    ``pixel_values`` and what belongs to it (``image_sizes``, ``pixel_attention_mask``) are named inputs, with the image or
    images of one row in each entry; every row of such a batch has the image's tokens.

    With the config's ``output_router_logits``, layers also pass on sums over their routers, and the last one adds the
    auxiliary loss of the microbatch to its loss, as the model does (`penstock.add_loss`).

    Args:
        model: one of

            - a model, as ``AutoModelForCausalLM``, ``AutoModelForImageTextToText``, ``AutoModelForMaskedLM``,
              ``AutoModelForSequenceClassification``, ``AutoModelForTokenClassification``, ``AutoModelForQuestionAnswering``
              or ``AutoModelForImageClassification`` makes it, or a ``PeftModel`` of one with LoRA: its own modules and
              parameters are used;
            - a config, or the path of a ``config.json``: each process builds only its own layers, with weights by the
              library's rules, drawn from `seed` and the names of the modules alone;
            - a local folder with ``config.json`` and safetensors files, one or several with an index: each process
              reads only the tensors of its own layers. Nothing is downloaded.
        seed: seed of the initial weights if `model` is a config (default 0).
        check: whether a small random model of the same kind proves that logits, loss and every gradient are the model's own,
            bit for bit (default True).

    Returns:
        What the forward does before the blocks, the blocks, and what it does after them. `Layer.tied` of the last names the
        embedding if they share a weight.

    Raises:
        ConfigError: if transformers is not installed, `model` is none of these, or its adapters cannot be split.
        DataError: if the folder's files cannot be read, or tensors are missing, unknown or misshapen; lists all of
            them, and nothing is built.
        SplitError: if the model, or this variant of it, cannot be split, or the layers give other numbers.
    """
    require_library()
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(model, str | os.PathLike):
        path = Path(model).expanduser()
        if not os.path.isfile(path):
            return _of_folder(local_folder(model), check)
        model = read_config(path, HEADS)
    if is_peft_model(model):
        model = base_with_adapters(model)
    if isinstance(model, PreTrainedModel):
        return _of_model(model, check)
    if isinstance(model, PreTrainedConfig):
        require_variant(model)
        pattern = on_meta(model)
        _prove(pattern, head_in(model), check)
        _require_known_ties(pattern)
        return _layers(pattern, head_in(model), partial(_initialised, pattern, seed))
    raise ConfigError(
        f"from_transformers takes a transformers model, a config or a local folder, got a {type(model).__name__}; a model "
        "of your own is trained by penstock.Pipeline, not by a PipelineTrainer"
    )


def layers_on_meta(config: Any, dtype: torch.dtype) -> list[Layer]:
    """Return the layers of a config's model, without weights, for a trace; raises as `from_transformers` does."""
    pattern = on_meta(config, dtype)
    _prove(pattern, CAUSAL, True)
    return _layers(pattern, CAUSAL, pattern.get_submodule)


def layers_of(model: Any) -> list[Layer]:
    """Return the layers of a model, without a proof, and whether or not it has weights."""
    return _layers(model, head_of(model), model.get_submodule)


def local_folder(given: str | os.PathLike[str]) -> Path:
    """Return the path of a local folder.

    Raises:
        ConfigError: if there is no such folder on this machine.
    """
    folder = Path(given).expanduser()
    if not os.path.isdir(folder):
        raise ConfigError(
            f"there is no local folder {os.fspath(given)!r}; Penstock downloads nothing: fetch a model first, as with "
            "hf download NAME --local-dir FOLDER, and give that folder"
        )
    return folder


def read_config(path: Path, heads: Collection[str] = (CAUSAL,)) -> Any:
    """Read a ``config.json`` as the library's config.

    Args:
        heads: heads that its architectures may have (default: the head of causal language models).

    Raises:
        DataError: if it cannot be read, or the library refuses it.
        SplitError: if its family cannot be split.
    """
    require_library()
    return config_from(model_folder.read_json(path), path, heads)


def config_from(table: dict[str, Any], path: str | Path, heads: Collection[str] = (CAUSAL,)) -> Any:
    """Return the library's config for the contents of a ``config.json``; raises the errors of `read_config`."""
    from transformers import CONFIG_MAPPING

    kind = str(table.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise DataError(f"{path} has model_type {kind!r}, which the installed transformers does not know")
    for key in ("num_hidden_layers", "n_layer"):
        layers = table.get(key)
        if isinstance(layers, int) and layers > _MOST_LAYERS:  # the library makes lists of so many entries
            raise DataError(f"{path} has {key} {layers:,}; a model has at most {_MOST_LAYERS:,} blocks")
    for key in _SIZES:
        size = table.get(key)
        if isinstance(size, int) and size > LARGEST_SIZE:
            raise DataError(f"{path} has {key} {size:,}; a size of a model is at most {LARGEST_SIZE:,}")
    try:
        config = CONFIG_MAPPING[kind].from_dict(_with_floats(table))
        # For another kernel, the library would download code from the hub.
        if config._attn_implementation not in _OWN_KERNELS:
            config._attn_implementation = None
        config._experts_implementation = None
    except Exception as error:  # the library's own checks raise many kinds
        raise DataError(f"transformers cannot use {path}: {describe_error(error)}") from error
    if (reason := refused_architecture(table, heads)) is not None:
        raise SplitError(reason)
    require_variant(config)
    return config


def _with_floats(value: Any) -> Any:
    """Return JSON of the library with infinite numbers, which it writes as an object, in the place of these objects."""
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["__float__"]:
        return float(value["__float__"])
    return {key: _with_floats(one) for key, one in value.items()}


def on_meta(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Build the library's model on the meta device, from a copy of the config."""
    config = copy.deepcopy(config)
    if dtype is not None:
        config.dtype = dtype
    try:
        with torch.device("meta"):
            return empty_model(config, head_in(config))
    except Exception as error:  # a value that the library has not checked, such as the name of an activation
        raise DataError(
            f"transformers cannot build the model of this {type(config).__name__}: {describe_error(error)}"
        ) from error


def _of_model(model: Any, check: bool) -> list[Layer]:
    head = head_of(model)
    take_off_hooks(model)
    require_known_quantisation(model)
    require_variant(model.config, head, quantised=True)
    built = [(layer, layer.build()) for layer in _layers(model, head, model.get_submodule)]
    _prove(model, head, check)
    # The modules show which weights are tied, also those that the user has tied.
    return [replace(layer, build=partial(_itself, module), module=module) for layer, module in built]


def require_variant(config: Any, head: str | None = None, *, quantised: bool = False) -> None:
    """Require a config of a model whose layers take a hidden state, a padding mask and positions alone.

    Args:
        head: head of the model; None for the one that the config asks for.
        quantised: whether its weights may be quantised (default False).

    Raises:
        SplitError: if transformers has no such model for it, or the config asks for more; names the key.
    """
    kind = str(getattr(config, "model_type", ""))
    head = head_in(config) if head is None else head
    if not classes_of(config, head):
        images = (
            f"; give the model itself, as AutoModelFor{IMAGES} makes it" if classes_of(config, IMAGES) else ""
        )
        raise SplitError(
            f"transformers has no {HEADS[head][1]} of type {kind!r}, so it cannot be split{images}"
        )
    text = config.get_text_config()
    if head == SEQUENCE and text.pad_token_id is None:
        raise SplitError(
            "the config has no pad_token_id, by which a model for sequence classification finds the last token of each row; "
            "set it, as in model.config.pad_token_id = tokenizer.pad_token_id"
        )
    values = {key: getattr(config, key, None) for key in VARIANT_KEYS}
    if quantised:
        values["quantization_config"] = None
    for key in ("rope_parameters", "rope_scaling"):
        values[key] = values[key] or getattr(text, key, None)
    reason = refused_variant(values)
    if reason is not None:
        raise SplitError(reason)
    for key in ("layerdrop", "decoder_layerdrop"):
        if getattr(config, key, 0) or getattr(text, key, 0):
            raise SplitError(
                f"the config's {key} is set: a model that leaves out random layers cannot be split; set it to 0"
            )


def _prove(model: Any, head: str, check: bool) -> None:
    # A loss of routers is computed by a formula, which only the proof shows to be the model's.
    if check or getattr(model.config, "output_router_logits", False):
        require_equal(model.config, _weights(model), head)


def _weights(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _itself(module: nn.Module) -> nn.Module:
    return module


def _of_folder(folder: Path, check: bool) -> list[Layer]:
    config = read_config(folder / model_folder.CONFIG, HEADS)
    stored = model_folder.stored_tensors(folder)
    if not stored:
        raise DataError(f"the weights in {folder} are empty")
    _require_blocks(folder, config, stored)
    pattern = on_meta(config, config.dtype or model_folder.dtype_of(stored))
    renamed = {other: name for name, other in STORED_NAMES.get(config.model_type, {}).items()}
    stored = converted(folder, pattern, {renamed.get(name, name): one for name, one in stored.items()})
    head = head_in(config)
    _prove(pattern, head, check)
    wanted = {name: tuple(tensor.shape) for name, tensor in pattern.state_dict().items()}
    # Old files have the rotary frequencies, which the library now computes.
    ignored = [*(pattern._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    _require_known_ties(pattern)
    tied = tied_names(pattern)
    matches = model_folder.matched(folder, stored, wanted, tied, ignored, pattern.base_model_prefix)
    for one, other in tied.items():
        if matches[one] != matches[other] and not model_folder.equal(matches[one], matches[other]):
            raise DataError(
                f"{one} and {other} in {folder} differ, but its {model_folder.CONFIG} ties them; set "
                "tie_word_embeddings to false there, or leave one of them out"
            )
    return _layers(pattern, head, partial(_loaded, pattern, matches))


def _require_blocks(folder: Path, config: Any, stored: Iterable[str]) -> None:
    """Raise `DataError` if the weights have fewer blocks than the config says, before so many are made."""
    numbers: dict[str, set[str]] = {}
    for name in stored:
        for match in re.finditer(r"(?:^|\.)(\d+)\.", name):
            numbers.setdefault(name[: match.start()], set()).add(match[1])
    found = max(map(len, numbers.values()), default=0)
    if config.num_hidden_layers > found:
        raise DataError(
            f"{folder / model_folder.CONFIG} says that the model has {config.num_hidden_layers:,} blocks, and the weights "
            f"beside it have {found:,}; they do not belong together"
        )


def tied_names(model: Any) -> dict[str, str]:
    """Return the names of parameters that are others under a second name: name → first name, in the order of layers."""
    embedding = embedding_name(model)
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    every = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in sorted(every, key=lambda one: not one[0].startswith(f"{embedding}.")):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def embedding_name(model: Any) -> str:
    """Return the path of the token table."""
    table = model.get_input_embeddings()
    name: str = next(name for name, module in model.named_modules() if module is table)
    return name


def _layers(model: Any, head: str, make: Make) -> list[Layer]:
    own = OwnForward(model, partial(_around_the_blocks, model))
    own.trains = True
    if own.images and (reason := images_refused(model.config, _weights(model), head)):
        if head == IMAGES:
            raise SplitError(reason)
        own.images = ()
    tied = tied_names(model)

    def around(kind: Callable[..., nn.Module], paths: Sequence[str]) -> nn.Module:
        return kind(own, {path: make(path) for path in paths})

    def block(number: int) -> nn.Module:
        return twin(make(own.paths[number]), OwnBlock, own=own, number=number)

    def of_head(name: str) -> bool:
        return begins_in(name, own.after)

    first, last = joint_name(own.before, 0), joint_name(own.after, own.count + 1)
    loss: tuple[Any, Any] | None = None
    if head in (CAUSAL, IMAGES) and has_library_loss(model):
        loss = chunked_loss(model) or causal_lm_loss, valid_tokens
    elif has_library_loss(model):
        loss = (own_loss := ModelLoss(model, head)), own_loss.count
    batch = BatchNames(own.first, "labels", frozenset(own.named + own.images), loss)
    return [
        Layer(first, partial(around, embedding_of(own), own.before), "embedding", batch=batch),
        *(Layer(path, partial(block, n)) for n, path in enumerate(own.paths)),
        Layer(
            last,
            partial(around, OwnHead, own.after),
            "head",
            tied={name: other for name, other in tied.items() if of_head(name) and not of_head(other)},
        ),
    ]


def _around_the_blocks(model: Any, path: str) -> nn.Module:
    """Return a module without parameters on its device; on the CPU if it is on the meta device."""
    module: nn.Module = model.get_submodule(path)
    if not any(b.is_meta for b in module.buffers()):
        return module
    return _require_buffers(_real(model, module), path)


def _real(pattern: Any, module: nn.Module) -> nn.Module:
    """Copy a module of the pattern to the CPU, with its buffers computed and its parameters uninitialised."""
    # All layers share one config.
    module_copy: nn.Module = copy.deepcopy(module, {id(pattern.config): pattern.config})
    module_copy.to_empty(device="cpu")
    for buffer in module_copy.buffers():
        buffer.fill_(_unset(buffer))
    parameters: list[Any] = list(module_copy.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = True  # so that the library's rules skip it
    with torch.no_grad():
        for part in module_copy.modules():
            if next(part.buffers(recurse=False), None) is not None:
                pattern._init_weights(part)
    for parameter in parameters:
        del parameter._is_hf_initialized
    return module_copy


def _unset(buffer: Tensor) -> Any:
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def _require_buffers(module: nn.Module, name: str) -> nn.Module:
    """Refuse a module with a buffer that neither the library's rules nor a file has set."""
    for inner, buffer in module.named_buffers():
        if (buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)).any():
            raise SplitError(
                f"{name}.{inner} is a buffer that only the constructor of the library's model sets; give the model itself, "
                "as AutoModelForCausalLM makes it"
            )
    return module


def _require_known_ties(pattern: Any) -> None:
    names: dict[int, set[str]] = {}
    for name, parameter in pattern.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    table = f"{embedding_name(pattern)}.weight"
    for same in names.values():
        if len(same) > 1 and (len(same) > 2 or table not in same):
            raise SplitError(
                f"{' and '.join(sorted(same))} are one parameter in transformers; a config or folder gives each layer its "
                "own. Give the model itself, as AutoModelForCausalLM makes it"
            )


def _initialised(pattern: Any, seed: int, name: str) -> nn.Module:
    """Build a module with weights by the library's rules, drawn from the seed and its submodules' names alone."""
    module = _real(pattern, pattern.get_submodule(name))
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            # Children first, as in the library: some rules of a parent overwrite its children's weights.
            for inner, part in _children_first(module):
                torch.set_rng_state(generator_for(seed, f"{name}.{inner}").get_state())
                pattern._init_weights(part)
    finally:
        torch.set_rng_state(before)
    for inner, other in _tied_within(pattern, name).items():
        path, _, last = other.rpartition(".")
        _set(module, inner, getattr(_initialised(pattern, seed, path), last))
    return _require_buffers(module, name)


def _tied_within(pattern: Any, name: str) -> dict[str, str]:
    """Return the parameters of a module that others have, too: name within it → name in the model."""
    tied = {one: other for one, other in tied_names(pattern).items() if begins_in(one, [name])}
    return {one[len(name) + 1 :]: other for one, other in tied.items() if not begins_in(other, [name])}


def _set(module: nn.Module, inner: str, parameter: nn.Parameter) -> None:
    path, _, last = inner.rpartition(".")
    setattr(module.get_submodule(path), last, parameter)


def _children_first(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    modules = []
    for inner, child in module.named_children():
        modules += _children_first(child, f"{name}.{inner}" if name else inner)
    return [*modules, (name, module)]


def _loaded(pattern: Any, stored: dict[str, model_folder.Stored], name: str) -> nn.Module:
    """Build a module with its tensors from the files, in the pattern's dtype."""
    module = _real(pattern, pattern.get_submodule(name))
    module.load_state_dict(
        model_folder.read_tensors({inner: stored[f"{name}.{inner}"] for inner in module.state_dict()})
    )
    return _require_buffers(module, name)
