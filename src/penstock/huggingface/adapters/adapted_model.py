"""LoRA adapters (2106.09685) in a model of Hugging Face: their modules are peft's own, within the blocks.

peft replaces a matrix by a module with the matrix (its *base*) and two low-rank ones. So a layer of the pipeline has more
parameters than the base model's layer, and the base's have longer names. `Adapters` has the names of all of them in peft's
files.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.base.errors import ConfigError, nearest
from penstock.huggingface.adapters.supported import require_peft, require_supported
from penstock.huggingface.heads import HEADS, head_of
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import Layer, whole_name

_PREFIX = "base_model.model."  # of the names in a PeftModel, before those of the base model


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        config: peft's ``LoraConfig``.
        name: name of the adapters in the model; peft's own is ``default``.
        base: folder or name of the base model, for peft's files; empty if unknown.
        saved_names: name in the model → name in peft's files, for every parameter that these files have.
        shapes: shapes of these parameters by their names in the model.
        matrices: number of modules with an adapter.
        weights: number of weights in the whole model, those of the adapters included.
    """

    config: Any
    name: str
    base: str
    saved_names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    matrices: int
    weights: int

    @property
    def trained(self) -> int:
        """Number of weights that are trained."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def base_name(self, name: str) -> str:
        """Return the name in the base model of a parameter or of its trained copy; a name of the adapters' own stays."""
        for marker in (".base_layer.", ".original_module.", f".modules_to_save.{self.name}."):
            name = name.replace(marker, ".")
        return name

    @staticmethod
    def is_added(name: str) -> bool:
        """Return whether a parameter is one that the base model has not, as a low-rank matrix."""
        return any(part.startswith("lora_") for part in name.split("."))

    def __str__(self) -> str:
        """Return a line for people."""
        kind = "DoRA" if self.config.use_dora else "rsLoRA" if self.config.use_rslora else "LoRA"
        return (
            f"{kind} of rank {self.config.r} on {self.matrices} matrices: {self.trained:,} of {self.weights:,} weights "
            f"are trained ({self.trained / self.weights:.2%})"
        )


@dataclass(frozen=True)
class AdaptedLayer(Layer):
    """A layer of a model with adapters.

    Attributes:
        adapters: adapters of the whole model.
    """

    adapters: Adapters | None = field(default=None)


def with_adapters(layers: Sequence[Layer], adapters: Adapters) -> list[Layer]:
    """Return layers that know the adapters of their model."""
    return [
        AdaptedLayer(each.name, each.build, each.role, each.tied, each.module, each.batch, adapters)
        for each in layers
    ]


def adapters_of(layers: Sequence[Layer]) -> Adapters | None:
    """Return the adapters of a model's layers; None if it has none."""
    return next((each.adapters for each in layers if isinstance(each, AdaptedLayer)), None)


def add_adapters(pattern: Any, config: Any, base: str, new: bool) -> Adapters:
    """Add adapters to a model on the meta device, in place, as ``peft.get_peft_model`` does.

    Args:
        pattern: the base model; its parameters are frozen.
        config: peft's ``LoraConfig``; it is not changed.
        base: folder of the base model.
        new: whether the adapters are to be initialised, or exist already.

    Raises:
        ConfigError: if the config cannot be used, or names no module of the model.
    """
    require_peft()
    require_supported(config, new)
    from peft import get_peft_model
    from transformers.pytorch_utils import Conv1D

    _require_names(pattern, config)
    config = copy.deepcopy(config)
    config.inference_mode, config.base_model_name_or_path = False, None
    config.task_type = config.task_type or HEADS[head_of(pattern)][2]
    # GPT-2's matrices have their inputs first. peft sees that, too, but warns.
    config.fan_in_fan_out = config.fan_in_fan_out or any(isinstance(m, Conv1D) for m in pattern.modules())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
            # Tied tables are refused below, with a reason.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            model = get_peft_model(pattern, config)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"peft cannot add these adapters: {error}") from error
    adapters = _adapters(model, "default", base)
    _require_low_rank(pattern, config.r)
    return adapters


def adapters_in(model: Any) -> Adapters:
    """Return the adapters of a ``PeftModel``.

    Raises:
        ConfigError: if it has none, several, or other ones than LoRA; or if they are merged or disabled.
    """
    names = list(model.peft_config)
    if len(names) != 1:
        raise ConfigError(
            f"the model must have one adapter, got {', '.join(names) or 'none'}; delete_adapter others"
        )
    config = model.peft_config[names[0]]
    require_supported(config, new=False)
    return _adapters(model, names[0], config.base_model_name_or_path or "")


def _adapters(model: Any, name: str, base: str) -> Adapters:
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    inner = model.get_base_model()
    _require_splittable(inner)
    adapted = [module for module in inner.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        if module.merged or module.disable_adapters:
            state = "merged into the base" if module.merged else "disabled"
            raise ConfigError(
                f"the adapters are {state}; call {'unmerge_adapter' if module.merged else 'enable_adapter_layers'}() first"
            )
    # Names in place of tensors: peft chooses which belong to the adapters, and renames the keys.
    state = model.state_dict()
    saved = get_peft_model_state_dict(
        model, state_dict={key: key for key in state}, adapter_name=name, save_embedding_layers=False
    )
    names = {key.removeprefix(_PREFIX): saved_name for saved_name, key in saved.items()}
    config = copy.deepcopy(model.peft_config[name])
    return Adapters(
        config=config,
        name=name,
        base=base,
        saved_names=names,
        shapes={key: tuple(state[_PREFIX + key].shape) for key in names},
        matrices=len(adapted),
        weights=sum(parameter.numel() for parameter in inner.parameters()),
    )


def _require_splittable(model: Any) -> None:
    """Raise if adapters are on a token table or the head: peft's files then need the tables, too, and ties are lost."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [name for name, module in model.named_modules() if module in tables]
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and (
            name in names or isinstance(module.get_base_layer(), nn.Embedding)
        ):
            raise ConfigError(
                f"{name} cannot have an adapter, since peft's folder would need the table, too; leave it out of "
                "target_modules, or train all of it: modules_to_save"
            )
        if name in names and isinstance(module, ModulesToSaveWrapper) and model.config.tie_word_embeddings:
            raise ConfigError(
                f"{name} in modules_to_save is tied to the other table (tie_word_embeddings), and a folder of adapters "
                "cannot say that; leave it out"
            )


def _require_names(pattern: Any, config: Any) -> None:
    """Raise if a name in a list of modules is that of no module; peft ignores it if another one is."""
    paths = [name for name, _ in pattern.named_modules() if name]
    last = sorted({path.rpartition(".")[2] for path in paths if not path.rpartition(".")[2].isdecimal()})
    for key in ("target_modules", "modules_to_save"):
        given = getattr(config, key)
        for name in () if given is None or isinstance(given, str) else sorted(given):
            if not any(path == name or path.endswith(f".{name}") for path in paths):
                raise ConfigError(
                    f"{key} has {name!r}, which no module of the model is called{nearest(name, last)}; its modules are "
                    f"{', '.join(last)}"
                )


def _require_low_rank(pattern: Any, rank: int) -> None:
    """Raise if no matrix with an adapter has as large a rank as the adapter."""
    from peft.tuners.lora import LoraLayer

    sides = [min(m.in_features, m.out_features) for m in pattern.modules() if isinstance(m, LoraLayer)]
    if rank > max(sides, default=rank):
        raise ConfigError(
            f"the rank of the adapters must be at most that of the largest matrix, {max(sides)}, got {rank}; 8 to 64 are "
            "usual"
        )


def merged_state(pipe: Pipeline, state: Mapping[str, Any], adapters: Adapters) -> dict[str, Any]:
    """Return this process's weights by their names in the base model, with the adapters merged by peft's own rules.

    The pipeline's own weights are not changed: one module at a time is copied and merged.

    Args:
        pipe: pipeline of the model with adapters.
        state: this process's weights by their names in that model.
        adapters: adapters of the whole model.

    Raises:
        ConfigError: if an adapter cannot be merged, as one that is not finite.
    """
    from peft.tuners.lora import LoraLayer

    of_base = {name: value for name, value in state.items() if not adapters.is_added(name)}
    merged = {adapters.base_name(n): value for n, value in of_base.items() if n in adapters.saved_names}
    for stage in pipe.stages.values():
        for layer_name, layer in stage.module.named_layers():
            for inner, module in layer.named_modules():
                weight = whole_name(layer_name, f"{inner}.weight")
                name = weight.removesuffix(".weight")
                if isinstance(module, LoraLayer) and f"{name}.base_layer.weight" in state:
                    merged[weight] = _merged_weight(name, module)
    for name, value in of_base.items():
        merged.setdefault(adapters.base_name(name), value)
    return merged


def _merged_weight(name: str, module: nn.Module) -> Any:
    copied: Any = copy.deepcopy(module)
    try:
        copied.merge(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"peft cannot merge the adapter of {name}: {error}") from error
    return copied.get_base_layer().weight.detach()
