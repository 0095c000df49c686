"""Split of a Hugging Face causal language model into layers: embedding, blocks, final norm, head.

The library's model is built on the meta device, where it takes no memory, and is the pattern from which each process
makes its own layers. The model is not traced, and its forward is never called.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError, DataError, SplitError, describe_error
from penstock.base.model_variants import LARGEST_SIZE, refused_architecture
from penstock.huggingface import model_folder
from penstock.huggingface.adapters import fill
from penstock.huggingface.adapters.adapted_model import Adapters, adapters_in, add_adapters, with_adapters
from penstock.huggingface.adapters.supported import is_peft_model, read_adapter_folder
from penstock.huggingface.block_layers import BlockLayer, CappedHead, Positions, Tables, Tokens, twin
from penstock.huggingface.families import HEAD, Attention, ModelFamily, require_library
from penstock.huggingface.family_of import family_of
from penstock.stage.layers import BatchNames, Layer
from penstock.stage.rng.initial import generator_for

_OWN_KERNELS = ("eager", "sdpa")
"""Implementations of attention that are part of transformers and torch."""
# Far above any model; the library makes lists with an entry a layer from a number that may be damaged.
_MOST_LAYERS = 10_000
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads",
    "n_embd", "n_inner", "n_head", "n_positions",
)  # fmt: skip
"""Keys with the sizes of weights."""

Make = Callable[[str], nn.Module]
"""Function from a module's name in the whole model to a module with weights."""


def from_transformers(model: object, *, seed: int = 0, adapters: object = None) -> list[Layer]:
    """Split a causal language model of Hugging Face transformers into layers that a `Pipeline` takes.

    The first layer takes token ids, int64 (batch, sequence); layers pass on the hidden state, (batch, sequence, width);
    the last returns logits, (batch, sequence, vocabulary). Masks and positions are named inputs of a step:
    ``pipe.step(ids, labels, attention_mask=mask)``, 1 for a token and 0 for padding, on the left or on the right. Without
    a mask, ``position_ids`` that restart at 0 mark sequences packed into one row, which then do not attend to each other.
    Parameters have the names of the library's model.

    Families in `penstock.huggingface.families` are supported, and those with a ``base_model_pp_plan`` in the library whose
    forward is that of one of them.

    Args:
        model: one of

            - a model, as ``AutoModelForCausalLM`` makes it, or a ``PeftModel`` of one with LoRA: its own modules and
              parameters are used;
            - a config, or the path of a ``config.json``: each process builds only its own layers, with weights by the
              library's rules, drawn from `seed` and the names of the modules alone;
            - a local folder with ``config.json`` and safetensors files, one or several with an index: each process
              reads only the tensors of its own layers. Nothing is downloaded.
        seed: seed of the initial weights if `model` is a config, and of new adapters (default 0).
        adapters: with a folder, LoRA adapters to train in place of the model's own weights, which are frozen: peft's
            ``LoraConfig`` for new ones, whose weights depend on `seed` and names alone, or a folder that
            ``save_pretrained`` of peft or `penstock.save_adapters` has written (default None, no adapters).

    Returns:
        The embedding (and GPT-2's table of positions), the blocks, the final norm and the head. `Layer.tied` of the head
        names the embedding if they share a weight.

    Raises:
        ConfigError: if transformers or peft is not installed, `model` is none of these, or the adapters cannot be split.
        DataError: if the folder's files cannot be read, or tensors are missing, unknown or misshapen; lists all of
            them, and nothing is built.
        SplitError: if the family, or this variant of it, cannot be split.
    """
    require_library()
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(model, str | os.PathLike):
        path = Path(model).expanduser()
        if not os.path.isfile(path):
            return _of_folder(local_folder(model), adapters, seed)
        model = read_config(path)
    if adapters is not None:
        raise ConfigError(
            "adapters are added to the weights of a folder; of a model in memory give peft.get_peft_model(model, config)"
        )
    if is_peft_model(model):
        in_model, base = adapters_in(model), _base_of(model)
        return with_adapters(_of_model(base), in_model)
    if isinstance(model, PreTrainedModel):
        return _of_model(model)
    if isinstance(model, PreTrainedConfig):
        family_of(model)
        pattern = on_meta(model)
        _require_known_ties(pattern)
        return _layers(pattern, partial(_initialised, pattern, seed))
    raise ConfigError(
        f"from_transformers takes a transformers model, a config or a local folder, got a {type(model).__name__}"
    )


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


def read_config(path: Path) -> Any:
    """Read a ``config.json`` as the library's config.

    Raises:
        DataError: if it cannot be read, or the library refuses it.
        SplitError: if its family cannot be split.
    """
    require_library()
    return config_from(model_folder.read_json(path), path)


def config_from(table: dict[str, Any], path: str | Path) -> Any:
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
        config = CONFIG_MAPPING[kind].from_dict(table)
        # For another kernel, the library would download code from the hub.
        if config._attn_implementation not in _OWN_KERNELS:
            config._attn_implementation = None
        config._experts_implementation = None
    except Exception as error:  # the library's own checks raise many kinds
        raise DataError(f"transformers cannot use {path}: {describe_error(error)}") from error
    if (reason := refused_architecture(table)) is not None:
        raise SplitError(reason)
    family_of(config)
    return config


def on_meta(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Build the library's model on the meta device, from a copy of the config."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if dtype is not None:
        config.dtype = dtype
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a value that the library has not checked, such as the name of an activation
        raise DataError(
            f"transformers cannot build the model of this {type(config).__name__}: {describe_error(error)}"
        ) from error


def _of_model(model: Any) -> list[Layer]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family_of(model.config)
    if not isinstance(model, MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]):
        raise SplitError(
            f"a {type(model).__name__} is not a causal language model; give what AutoModelForCausalLM makes"
        )
    built = [(layer, layer.build()) for layer in _layers(model, model.get_submodule)]
    # The modules show which weights are tied, also those that the user has tied.
    return [replace(layer, build=partial(_itself, module), module=module) for layer, module in built]


def _base_of(model: Any) -> Any:
    """Return the library's model within one of peft, whose modules have the adapters."""
    return model.get_base_model()


def _itself(module: nn.Module) -> nn.Module:
    return module


def _of_folder(folder: Path, adapters: object, seed: int) -> list[Layer]:
    config = read_config(folder / model_folder.CONFIG)
    stored = model_folder.stored_tensors(folder)
    if not stored:
        raise DataError(f"the weights in {folder} are empty")
    _require_blocks(folder, config, stored)
    head = family_of(config).stored_head
    if f"{head}.weight" in stored:
        stored[f"{HEAD}.weight"] = stored.pop(f"{head}.weight")
    pattern = on_meta(config, config.dtype or model_folder.dtype_of(stored))
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
    if adapters is None:
        return _layers(pattern, partial(_loaded, pattern, matches))
    stored_adapters: dict[str, model_folder.Stored] | None = None
    if isinstance(adapters, str | os.PathLike):
        adapters_folder = Path(adapters).expanduser()
        adapters, stored_adapters = read_adapter_folder(adapters_folder)
    added = add_adapters(pattern, adapters, str(folder.resolve()), new=stored_adapters is None)
    if stored_adapters is not None:
        fill.require_fitting(adapters_folder, added, stored_adapters)
    return with_adapters(
        _layers(pattern, partial(_adapted, pattern, matches, added, stored_adapters, seed)), added
    )


def _require_blocks(folder: Path, config: Any, stored: Iterable[str]) -> None:
    """Raise `DataError` if the weights have fewer blocks than the config says, before so many are made."""
    blocks = family_of(config).blocks.rpartition(".")[2]
    found = {match[1] for name in stored if (match := re.search(rf"(?:^|\.){blocks}\.(\d+)\.", name))}
    if config.num_hidden_layers > len(found):
        raise DataError(
            f"{folder / model_folder.CONFIG} says that the model has {config.num_hidden_layers:,} blocks, and the weights "
            f"beside it have {len(found):,}; they do not belong together"
        )


def tied_names(model: Any) -> dict[str, str]:
    """Return the names of the head's and the embedding's weight, if they are one parameter; else nothing."""
    family = family_of(model.config)
    head, embedding = f"{HEAD}.weight", f"{family.embedding}.weight"
    return {head: embedding} if model.get_parameter(head) is model.get_parameter(embedding) else {}


def _layers(model: Any, make: Make) -> list[Layer]:
    config, family = model.config, family_of(model.config)
    tables = Tables(config, _rotary(model, family), family.rotary_by_kind)

    def with_dropout(name: str, kind: type[nn.Module]) -> Callable[[], nn.Module]:
        assert family.dropout is not None
        dropout = family.dropout
        return lambda: twin(make(name), kind, dropout=make(dropout))

    def block(name: str, attention: Attention) -> Callable[[], nn.Module]:
        return lambda: twin(make(name), BlockLayer, tables=tables, attention_kind=attention)

    def head() -> nn.Module:
        cap = config.final_logit_softcapping if family.capped else None
        return make(HEAD) if cap is None else twin(make(HEAD), CappedHead, cap=cap)

    layers: list[Layer] = []
    if family.positions is not None:
        layers.append(Layer(family.embedding, partial(make, family.embedding), "embedding"))
        layers.append(Layer(family.positions, with_dropout(family.positions, Positions), "embedding"))
    elif family.dropout is not None:
        layers.append(Layer(family.embedding, with_dropout(family.embedding, Tokens), "embedding"))
    else:
        layers.append(Layer(family.embedding, partial(make, family.embedding), "embedding"))
    for n, attention in enumerate(family.kinds(config)):
        layers.append(Layer(f"{family.blocks}.{n}", block(f"{family.blocks}.{n}", attention)))
    layers.append(Layer(family.norm, partial(make, family.norm), "head"))
    tied = {name.removeprefix(f"{HEAD}."): embedding for name, embedding in tied_names(model).items()}
    layers.append(Layer(HEAD, head, "head", tied=tied))
    others = frozenset(("attention_mask", "position_ids"))
    return [replace(layers[0], batch=BatchNames("input_ids", "labels", others)), *layers[1:]]


def _rotary(model: Any, family: ModelFamily) -> nn.Module | None:
    """Return the rotary module on its device; on the CPU if it is on the meta device."""
    if family.rotary is None:
        return None
    rotary: nn.Module = model.get_submodule(family.rotary)
    if not any(b.is_meta for b in rotary.buffers()):
        return rotary
    return _require_buffers(_real(model, rotary), family.rotary)


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
    known = {name for pair in tied_names(pattern).items() for name in pair}
    for same in names.values():
        if len(same) > 1 and same != known:
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
    for embedding in tied_names(pattern).values() if name == HEAD else ():
        module.weight = _initialised(pattern, seed, embedding.removesuffix(".weight")).weight
    return _require_buffers(module, name)


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


def _adapted(
    pattern: Any,
    stored: dict[str, model_folder.Stored],
    adapters: Adapters,
    stored_adapters: dict[str, model_folder.Stored] | None,
    seed: int,
    name: str,
) -> nn.Module:
    """Build a module with adapters: its base from the files, the adapters from theirs or initialised."""
    module = _real(pattern, pattern.get_submodule(name))
    bases = {inner: adapters.base_name(f"{name}.{inner}") for inner in module.state_dict()}
    base = model_folder.read_tensors({inner: stored[full] for inner, full in bases.items() if full in stored})
    module.load_state_dict(base, strict=False)
    if stored_adapters is None:
        fill.initialise(module, name, adapters, seed)
    else:
        fill.load(module, name, adapters, stored_adapters)
    return _require_buffers(module, name)
