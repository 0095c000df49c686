"""Models of Hugging Face's peft with LoRA (2106.09685): which can be split, and saving of their adapters by peft itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from penstock.base.counts import few
from penstock.base.errors import ConfigError
from penstock.huggingface.weights import own_state
from penstock.runtime.model.pipeline_model import gather_state
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup
from penstock.stage.layers import whole_name

_PREFIX = "base_model.model."  # of the names in a PeftModel, before the base model's names

_CONFIGS = ("arrow_config", "kasa_config", "megatron_config", "monteclora_config", "velora_config")
_REFUSED = (*_CONFIGS, "alora_invocation_tokens", "target_parameters", "use_bdlora", "use_qalora")
"""Keys of peft's ``LoraConfig`` that ask for more than modules within layers, such as a term of the loss."""


def is_peft_model(model: object) -> bool:
    """Return whether a model is one of peft; without peft it cannot be."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_with_adapters(model: Any) -> Any:
    """Return the library's model within a ``PeftModel``; its modules have the adapters.

    Raises:
        ConfigError: if no adapter is active, or several, or they are others than LoRA, rsLoRA and DoRA, or merged or
            disabled.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    names, active = list(model.peft_config), list(model.active_adapters)
    if len(active) != 1:
        raise ConfigError(
            f"one adapter of the model must be active, got {', '.join(active) or 'none'} of {', '.join(names) or 'none'}; "
            "set_adapter one"
        )
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            raise ConfigError(f"adapters must be of peft's type LORA, got {kind}; use peft.LoraConfig")
        if (key := next((key for key in _REFUSED if getattr(config, key, None)), None)) is not None:
            raise ConfigError(
                f"{key} of the LoraConfig is set, and such adapters cannot be split; leave it unset"
            )
    base = model.get_base_model()
    adapted = [module for module in base.modules() if isinstance(module, BaseTunerLayer)]
    if any(module.merged for module in adapted):
        raise ConfigError("the adapters are merged into the base; call unmerge_adapter() first")
    if any(module.disable_adapters for module in adapted):
        raise ConfigError("the adapters are disabled; call enable_adapter_layers() first")
    return base


def save_adapters(pipe: Pipeline, folder: str | os.PathLike[str], like: Any) -> None:
    """Write a pipeline's adapters as ``like.save_pretrained`` does, for ``PeftModel.from_pretrained``.

    In processes every rank calls this, and the first one writes the adapters of all. Adapters of an earlier save are
    replaced.

    Args:
        pipe: pipeline of a ``PeftModel``.
        folder: folder to write; created if it does not exist.
        like: the ``PeftModel``.

    Raises:
        ConfigError: on every process, before anything is written: if `like` is not the pipeline's model with adapters, or
            weights outside the adapters are trained, which the folder would lose.
        PenstockError: on every process, if peft cannot write the folder.
    """
    if not is_peft_model(like):
        raise ConfigError(
            f"like must be the PeftModel that the pipeline trains, got a {type(like).__name__}; "
            "penstock.save_transformers saves whole models"
        )
    from peft import get_peft_model_state_dict

    # Names in place of tensors: peft chooses which belong to the adapters.
    names = {name: name for name in like.state_dict()}
    chosen = {*get_peft_model_state_dict(like, names, like.active_adapter).values()}
    state = {_PREFIX + name: value for name, value in own_state(pipe).items()}
    tied = {
        f"{_PREFIX}{whole_name(layer.name, inner)}": _PREFIX + first
        for layer in pipe.layers
        for inner, first in layer.tied.items()
    }
    needed = {tied.get(name, name) for name in chosen}
    trained = [_PREFIX + name for name, p in pipe.named_parameters() if p.requires_grad]
    run_group = RunGroup.of(pipe.world)
    parts = run_group.each(lambda: ({*state}, {*trained}))
    if missing := needed.difference(*(held for held, _ in parts)):
        raise ConfigError(f"like must be the PeftModel that the pipeline trains, which has no {min(missing)}")
    if others := sorted({name for _, part in parts for name in part} - needed):
        listed = few([name.removeprefix(_PREFIX) for name in others], 12)
        raise ConfigError(
            f"weights outside the adapters are trained, and a folder of adapters would lose them: {listed}; freeze "
            "them, or name their modules in modules_to_save"
        )
    whole = gather_state({n: v for n, v in state.items() if n in needed}, pipe.world, keeps=run_group.leads)

    def write() -> None:
        saved = {name: whole[tied.get(name, name)] for name in chosen}
        like.save_pretrained(str(Path(folder).expanduser()), state_dict=saved)

    run_group.decide(write)
