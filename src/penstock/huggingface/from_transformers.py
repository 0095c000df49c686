"""A Hugging Face causal language model as layers: embedding, blocks, final norm, head.

The library's model is built on the meta device, where it takes no memory, and serves as the pattern from which every
layer is made where it is needed. It is not traced, and its own forward is never called.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, DataError, SplitError
from penstock.huggingface import model_folder as checkpoint
from penstock.huggingface.block_layers import BlockLayer, CappedHead, Positions, Tokens, twin
from penstock.huggingface.families import HEAD, Attention, ModelFamily, require_library
from penstock.huggingface.family_of import family_of
from penstock.huggingface.tables import Tables
from penstock.stage.layers import Layer
from penstock.stage.rng.initial import generator_for

Make = Callable[[str], nn.Module]
"""From a module's name in the whole model to a module with its weights."""


def from_transformers(model: object, *, seed: int = 0) -> list[Layer]:
    """Cut a causal language model of Hugging Face transformers into layers that a `Pipeline` takes.

    The first layer takes token ids, int64 (batch, sequence); between layers goes the hidden state, (batch, sequence,
    width); the last gives logits, (batch, sequence, vocabulary). Masks and positions are named inputs of a step:
    ``pipe.step(ids, labels, attention_mask=mask)``, 1 for a token and 0 for padding, on the left or on the right. Where
    there is no mask, ``position_ids`` that begin anew mark sequences packed into one row, which then do not see each other.
    Parameters have the names they have in the library's model.

    Args:
        model: one of

            - a model, as ``AutoModelForCausalLM`` gives it: its own modules and parameters are used;
            - a config, or the path of a ``config.json``: every process builds only its own layers, with weights by the
              library's own rules, drawn from `seed` and the names of the modules alone;
            - a local folder with ``config.json`` and safetensors files, one or several with an index: every process
              reads only the tensors of its own layers. Nothing is ever downloaded.
        seed: of the initial weights where the model is a config.

    Returns:
        The embedding (and GPT-2's table of positions), the blocks, the final norm and the head. A head whose weight is
        the embedding's says so in `Layer.tied`.

    Raises:
        ConfigError: transformers is not installed, or `model` is none of these.
        DataError: a folder whose files cannot be read, or whose tensors are missing, unknown or misshapen: all of them
            are listed, and nothing has been built.
        SplitError: a family, or a variant of one, that cannot be split.
    """
    require_library()
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(model, str | os.PathLike):
        path = Path(model).expanduser()
        if not os.path.isfile(path):
            return _of_folder(local_folder(model))
        model = read_config(path)
    if isinstance(model, PreTrainedModel):
        return _of_model(model)
    if isinstance(model, PreTrainedConfig):
        family_of(model)
        pattern = on_meta(model)
        _require_known_ties(pattern)
        return _layers(pattern, partial(_initialised, pattern, seed))
    raise ConfigError(
        f"from_transformers takes a transformers model, a config or a local folder, not a {type(model).__name__}"
    )


def local_folder(given: str | os.PathLike[str]) -> Path:
    """The folder that is meant.

    Raises:
        ConfigError: it is none on this machine.
    """
    folder = Path(given).expanduser()
    if not os.path.isdir(folder):
        raise ConfigError(
            f"there is no local folder {os.fspath(given)!r}; Penstock downloads nothing: fetch a model first, as with "
            "hf download NAME --local-dir FOLDER, and give that folder"
        )
    return folder


def read_config(path: Path) -> Any:
    """The library's config of a ``config.json``.

    Raises:
        DataError: it cannot be read, or the library refuses it.
        SplitError: a family that is not known here.
    """
    require_library()
    return config_from(checkpoint.read_json(path), path)


def config_from(found: dict[str, Any], path: str | Path) -> Any:
    """The library's config of the contents of a ``config.json``; `path`, errors, as for `read_config`."""
    from transformers import CONFIG_MAPPING

    kind = str(found.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise DataError(f"{path} has model_type {kind!r}, which the installed transformers does not know")
    try:
        config = CONFIG_MAPPING[kind].from_dict(found)
    except Exception as error:  # the library's own checks raise many kinds
        raise DataError(f"transformers cannot use {path}: {error}") from error
    family_of(config)
    return config


def on_meta(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The library's model of a config without memory for weights; the config is copied."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if dtype is not None:
        config.dtype = dtype
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _of_model(model: Any) -> list[Layer]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family_of(model.config)
    if not isinstance(model, MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]):
        raise SplitError(
            f"a {type(model).__name__} is no causal language model; give what AutoModelForCausalLM makes"
        )
    built = [(layer, layer.build()) for layer in _layers(model, model.get_submodule)]
    # With its module a layer tells which weights are one, also where that is no custom of the family.
    return [replace(layer, build=partial(_itself, module), module=module) for layer, module in built]


def _itself(module: nn.Module) -> nn.Module:
    return module


def _of_folder(folder: Path) -> list[Layer]:
    config = read_config(folder / checkpoint.CONFIG)
    stored = checkpoint.stored_tensors(folder)
    if not stored:
        raise DataError(f"the weights in {folder} are empty")
    head = family_of(config).stored_head
    if f"{head}.weight" in stored:
        stored[f"{HEAD}.weight"] = stored.pop(f"{head}.weight")
    pattern = on_meta(config, config.dtype or checkpoint.dtype_of(stored))
    wanted = {name: tuple(tensor.shape) for name, tensor in pattern.state_dict().items()}
    # A buffer that old files have and the library now computes.
    ignored = [*(pattern._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    _require_known_ties(pattern)
    tied = tied_names(pattern)
    found = checkpoint.matched(folder, stored, wanted, tied, ignored, pattern.base_model_prefix)
    for one, other in tied.items():
        if found[one] != found[other] and not checkpoint.equal(found[one], found[other]):
            raise DataError(
                f"{one} and {other} in {folder} differ, but its {checkpoint.CONFIG} ties them; set "
                "tie_word_embeddings to false there, or leave one of them out"
            )
    return _layers(pattern, partial(_loaded, pattern, found))


def tied_names(model: Any) -> dict[str, str]:
    """The head's weight and the embedding's name, if they are one parameter; else nothing."""
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

    found: list[Layer] = []
    if family.positions is not None:
        found.append(Layer(family.embedding, partial(make, family.embedding), "embedding"))
        found.append(Layer(family.positions, with_dropout(family.positions, Positions), "embedding"))
    elif family.dropout is not None:
        found.append(Layer(family.embedding, with_dropout(family.embedding, Tokens), "embedding"))
    else:
        found.append(Layer(family.embedding, partial(make, family.embedding), "embedding"))
    for n, attention in enumerate(family.kinds(config)):
        found.append(Layer(f"{family.blocks}.{n}", block(f"{family.blocks}.{n}", attention)))
    found.append(Layer(family.norm, partial(make, family.norm), "head"))
    tied = {name.removeprefix(f"{HEAD}."): embedding for name, embedding in tied_names(model).items()}
    found.append(Layer(HEAD, head, "head", tied=tied))
    return found


def _rotary(model: Any, family: ModelFamily) -> nn.Module | None:
    """The rotary module on its device; on the CPU where the model has none."""
    if family.rotary is None:
        return None
    rotary: nn.Module = model.get_submodule(family.rotary)
    if not any(b.is_meta for b in rotary.buffers()):
        return rotary
    return _require_buffers(_real(model, rotary), family.rotary)


def _real(pattern: Any, module: nn.Module) -> nn.Module:
    """A copy of a module of the pattern on the CPU, its computed buffers in place and its parameters yet to be filled."""
    # The config stays one object for all layers.
    found: nn.Module = copy.deepcopy(module, {id(pattern.config): pattern.config})
    found.to_empty(device="cpu")
    for buffer in found.buffers():
        buffer.fill_(_unset(buffer))
    parameters: list[Any] = list(found.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = True  # the library's rules then pass it over
    with torch.no_grad():
        for part in found.modules():
            if next(part.buffers(recurse=False), None) is not None:
                pattern._init_weights(part)
    for parameter in parameters:
        del parameter._is_hf_initialized
    return found


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
    """A module with weights by the library's rules, drawn from the seed and its parts' names alone."""
    module = _real(pattern, pattern.get_submodule(name))
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            # As the library does: children first, for some rules of a parent replace those of its children.
            for inner, part in _children_first(module):
                torch.set_rng_state(generator_for(seed, f"{name}.{inner}").get_state())
                pattern._init_weights(part)
    finally:
        torch.set_rng_state(before)
    for embedding in tied_names(pattern).values() if name == HEAD else ():
        module.weight = _initialised(pattern, seed, embedding.removesuffix(".weight")).weight
    return _require_buffers(module, name)


def _children_first(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for inner, child in module.named_children():
        found += _children_first(child, f"{name}.{inner}" if name else inner)
    return [*found, (name, module)]


def _loaded(pattern: Any, stored: dict[str, checkpoint.Stored], name: str) -> nn.Module:
    """A module with its tensors from the files, in the pattern's dtype."""
    module = _real(pattern, pattern.get_submodule(name))
    module.load_state_dict(
        checkpoint.read_tensors({inner: stored[f"{name}.{inner}"] for inner in module.state_dict()})
    )
    return _require_buffers(module, name)
