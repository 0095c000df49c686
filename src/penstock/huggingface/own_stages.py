"""Loading of a model in processes, each with the weights of its own stages alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from threading import get_ident
from typing import Any

from torch import nn

from penstock.base.errors import ConfigError, DataError
from penstock.huggingface.conversion import Renamed, renamed
from penstock.huggingface.from_transformers import layers_of
from penstock.huggingface.library import require_library
from penstock.huggingface.trainer_options import require_known_options, trainer_mesh
from penstock.parallel.mesh import Mesh, MeshShape, given_mesh
from penstock.runtime.model.measured_split import is_measured
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.place import Place, current_place
from penstock.runtime.validation import resolve_mesh, resolve_schedule
from penstock.runtime.workers.agreement import STANDS_FOR
from penstock.stage.layers import Layer, begins_in, prefixes
from penstock.stage.split import split_layers


@contextmanager
def own_stages(pipeline: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which ``from_pretrained`` loads the weights of this process's own stages alone.

    The model has all its modules. Those of other stages are on the meta device, where they take no memory; their tensors
    are neither read nor quantised. Adapters of peft can be added to such a model, whose initial values are those of the
    whole one, if they do not depend on the weights (PiSSA and OLoRA do). Its token table cannot be resized. Where the
    ranks are threads of one process, it loads the whole model, as other threads of the process do meanwhile.

    Args:
        pipeline: the options that the `PipelineTrainer`, or the `Pipeline`, is given afterwards; the number of ranks, the
            schedule, the split and the mesh decide which stages a process has.

    Raises:
        ConfigError: if transformers is not installed, or the options do not say which stages these are.
        DataError: from ``from_pretrained``, if the weights are not safetensors files.
        SplitError: from ``from_pretrained``, if the model cannot be split.
    """
    require_library()
    from transformers import PreTrainedModel

    if not isinstance(pipeline, Mapping):
        raise ConfigError(f"own_stages takes the options of the pipeline as a dict, got {pipeline!r:.80}")
    require_known_options(pipeline)
    place = current_place()
    if place is None or place.size == 1:
        yield
        return
    # transformers has no public way to load a part of a model.
    whole = PreTrainedModel._load_pretrained_model
    PreTrainedModel._load_pretrained_model = staticmethod(_OwnLoader(whole, dict(pipeline), place))
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(whole)


class _OwnLoader:
    """transformers' function that loads the weights of a model, for those of own stages alone.

    Args:
        load: transformers' own function.
    """

    def __init__(
        self, load: Callable[..., tuple[Any, Any]], options: Mapping[str, Any], place: Place
    ) -> None:
        self._load, self._options, self._place = load, options, place
        self._thread = get_ident()

    def __call__(
        self,
        model: Any,
        state_dict: Mapping[str, Any] | None,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        expected_keys: Iterable[str] | None = None,
    ) -> tuple[Any, Any]:
        """Load a model; arguments and results are those of transformers' function."""
        if get_ident() != self._thread:
            return self._load(model, state_dict, checkpoint_files, load_config, expected_keys=expected_keys)
        elsewhere = _names_elsewhere(model, self._options, self._place)
        with ExitStack() as files:
            stored = _slices(checkpoint_files or (), files) if state_dict is None else state_dict
            names = renamed(stored, model, load_config.weight_mapping or ())
            # Every process refuses a tensor of another shape, or draws one in its place, as it would of the whole model.
            elsewhere -= _of_other_shapes(names, stored, model, load_config.hf_quantizer)
            kept = {each.name: stored[each.name] for each in names if each.new not in elsewhere}
            every = model.state_dict() if expected_keys is None else expected_keys
            expected = [name for name in every if name not in elsewhere]
            info, offloaded = self._load(model, kept, None, load_config, expected_keys=expected)
        # What no file has, such as a new head, is drawn by every process: all have drawn the same numbers afterwards.
        skipped = {name for each in names for name in each.made} & elsewhere
        info.missing_keys -= skipped
        for name in skipped:
            model.get_parameter_or_buffer(name)._is_hf_initialized = True  # or its rules would draw numbers
        if skipped:
            vars(model)["resize_token_embeddings"] = partial(_resize, model, model.resize_token_embeddings)
        _take_quantisation_off(model, elsewhere)
        return info, offloaded


def _own_layers(layers: Sequence[Layer], options: Mapping[str, Any], place: Place) -> set[str]:
    """Return the names of the layers that a process has in a pipeline with these options."""
    split = options.get("split", "even")
    if is_measured(split):
        raise ConfigError(
            "a measured split needs the whole model, and own_stages loads a part; give the number of blocks of each stage, "
            "as in split=[6, 10]"
        )
    if options.get("mesh") is None:
        mesh: MeshShape | Mesh | None = trainer_mesh(options, place.size)
    else:
        mesh, _ = given_mesh(options["mesh"])
    assert mesh is not None
    ranks, processes = resolve_mesh(mesh, None, place)
    schedule = resolve_schedule(
        options.get("schedule", signature(Pipeline).parameters["schedule"].default),
        ranks,
        # Which stages a rank has does not depend on their number, which tokens_per_microbatch leaves open.
        options.get("microbatches", ranks),
        options.get("virtual_stages"),
        processes,
    )
    rank = mesh.coordinate("pp") if isinstance(mesh, Mesh) else mesh.coordinate(place.rank, "pp")
    stages = split_layers(layers, schedule.stages, split)
    return {layer.name for stage in schedule.placement.stages_of[rank] for layer in stages[stage]}


def _names_elsewhere(model: Any, options: Mapping[str, Any], place: Place) -> set[str]:
    """Return the names of the parameters and buffers of other stages' layers, without those that own ones share."""
    layers = layers_of(model)
    here = [path for layer in _own_layers(layers, options, place) for path in prefixes(layer)]
    there = [path for layer in layers for path in prefixes(layer.name) if path not in here]
    names = {name for name in model.state_dict() if begins_in(name, there)}
    for pair in model.all_tied_weights_keys.items():
        if not names.issuperset(pair):
            names.difference_update(pair)
    return names


def _of_other_shapes(
    names: Sequence[Renamed], stored: Mapping[str, Any], model: Any, quantizer: Any
) -> set[str]:
    """Return the names in a model whose stored tensors, which nothing converts, have another shape than the model's."""
    wanted, found = model.state_dict(), set()
    for each in names:
        if each.converter is not None or each.new not in wanted:
            continue
        if quantizer is not None and quantizer.param_needs_quantization(model, each.new):
            continue
        tensor = stored[each.name]
        if (
            tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
            != wanted[each.new].shape
        ):
            found.add(each.new)
    return found


def _take_quantisation_off(model: Any, names: Iterable[str]) -> None:
    """Replace quantised layers without values by plain ones, which peft can copy, and whose adapters are the same."""
    for path in {name.rpartition(".")[0] for name in names}:
        module = model.get_submodule(path)
        if (
            isinstance(module, nn.Linear)
            and type(module.weight) is not nn.Parameter
            and module.weight.is_meta
        ):
            has_bias = module.bias is not None
            plain = nn.Linear(module.in_features, module.out_features, has_bias, "meta", model.dtype)
            setattr(plain.requires_grad_(False).weight, STANDS_FOR, type(module.weight).__name__)
            model.set_submodule(path, plain)


def _resize(model: nn.Module, resize: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Resize the token table, unless this process has only the weights of its own stages."""
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            "this process has the weights of its own stages alone, and new rows of the token table would be drawn by some "
            "processes only; resize the table in one process, without own_stages, save the model and load that"
        )
    return resize(*given, **named)


def _slices(paths: Sequence[str], files: ExitStack) -> dict[str, Any]:
    """Return the tensors of safetensors files by name, which are read when they are indexed."""
    from safetensors import safe_open

    stored: dict[str, Any] = {}
    for path in paths:
        if not str(path).endswith(".safetensors"):
            raise DataError(
                f"{path} is not a safetensors file, and other files cannot be read in part; load the model where you trust "
                "the file and save it again with save_pretrained, or load it outside of own_stages"
            )
        file = files.enter_context(safe_open(path, framework="pt", device="cpu"))
        stored |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    return stored
