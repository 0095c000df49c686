"""Optimizers by name, and the defaults of ``[optim]`` that depend on other keys.

The optimizers are the classes of ``torch.optim`` with the arguments that ``[optim]`` gives them. Defaults are for
fine-tuning, and for each of torch's optimizers.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

from penstock.base.errors import ConfigError, first_line, nearest
from penstock.train.config.sections import OptimConfig

_REFUSED = {
    "LBFGS": "it runs the model itself, several times a step, through a closure",
    "Muon": "it updates matrices only, and models have vectors (norms, biases), too; set optim.matrices to it",
    "SparseAdam": "it takes sparse gradients only, and a pipeline has dense ones",
}
_FUSED = ("Adam", "AdamW")
_ADAM_KEYS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
"""Keys of ``[optim]`` for optimizers with ``betas`` alone, and their defaults."""


def optimizer_class(name: str, key: str = "name") -> type[torch.optim.Optimizer]:
    """Return the optimizer that a key of ``[optim]`` names."""
    kinds = {
        kind.__name__: kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    refused = {other: why for other, why in _REFUSED.items() if (key, other) != ("matrices", "Muon")}
    usable = sorted(set(kinds) - set(refused))
    if name in refused:
        raise ConfigError(f"optim.{key} cannot be {name}: {refused[name]}; take one of {', '.join(usable)}")
    if name not in kinds:
        alike = [known for known in usable if known.lower() == name.lower()]
        near = f" (did you mean {alike[0]!r}?)" if alike else nearest(name, usable)
        raise ConfigError(f"optim.{key} must be one of {', '.join(usable)}, got {name!r}{near}")
    return kinds[name]


def matrices_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer of ``optim.matrices``."""
    return optimizer_class(name, "matrices")


def is_of_adam(name: str) -> bool:
    """Return whether an optimizer has the parameters of Adam, ``betas`` and ``eps``."""
    return "betas" in _parameters(name)


def torch_defaults(name: str) -> dict[str, float]:
    """Return torch's defaults of the keys of ``[optim]`` that an optimizer has."""
    parameters = _parameters(name)
    values: dict[str, Any] = {
        key: parameters[key].default for key in ("lr", "weight_decay") if key in parameters
    }
    if "weight_decay" not in parameters:
        values["weight_decay"] = 0.0
    if "betas" in parameters:
        values["beta1"], values["beta2"] = parameters["betas"].default
        values["epsilon"] = parameters["eps"].default
    return {key: float(value) for key, value in values.items()}


def keywords(config: OptimConfig) -> dict[str, Any]:
    """Return the keyword arguments of an optimizer, without weight decay."""
    values: dict[str, Any] = {"lr": config.lr}
    if is_of_adam(config.name):
        values |= {"betas": (config.beta1, config.beta2), "eps": config.epsilon}
    if config.name in _FUSED and not {"fused", "foreach", "differentiable"} & set(config.arguments):
        values["fused"] = True
    return values | {key: _as_tuple(value) for key, value in config.arguments.items()}


def has_weight_decay(name: str) -> bool:
    return "weight_decay" in _parameters(name)


def require_optimizer(config: OptimConfig) -> None:
    """Check an optimizer and its arguments, by making one for a single number."""
    kind = optimizer_class(config.name)
    parameters = _parameters(config.name)
    keys = {"lr": "lr", "weight_decay": "weight_decay"}
    if is_of_adam(config.name):
        keys |= {"betas": "beta1 and optim.beta2", "eps": "epsilon"}
    known = sorted(set(parameters) - {"params", *keys})
    for argument in config.arguments:
        if argument in keys:
            raise ConfigError(f"optim.arguments.{argument} has keys of its own; set optim.{keys[argument]}")
        if argument not in known:
            raise ConfigError(
                f"no argument {argument!r} of {config.name}{nearest(argument, known)}; [optim.arguments] has "
                f"{', '.join(known)}"
            )
        _require_kind(argument, config.arguments[argument], parameters[argument])
    if not is_of_adam(config.name):
        for key, default in _ADAM_KEYS.items():
            if getattr(config, key) != default:
                raise ConfigError(
                    f"optim.{key} belongs to optimizers of Adam's kind, but optim.name is {config.name}; leave it out. "
                    f"[optim.arguments] has {', '.join(known)}"
                )
    if config.weight_decay and not has_weight_decay(config.name):
        raise ConfigError(
            f"optim.weight_decay must be 0 with {config.name}, which has none, got {config.weight_decay:g}"
        )
    if config.matrices:
        matrices_class(config.matrices)
    try:
        kind([torch.nn.Parameter(torch.zeros(1))], **keywords(config))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{config.name} refuses its arguments: {first_line(error)}; see [optim]") from error


def _require_kind(name: str, value: Any, parameter: inspect.Parameter) -> None:
    """Raise `ConfigError` if an argument is not of its default's kind; torch takes any text for true."""
    default = parameter.default
    flag = isinstance(default, bool) or (default is None and "bool" in str(parameter.annotation))
    number = isinstance(default, int | float) and not flag
    if flag and not isinstance(value, bool):
        raise ConfigError(f"optim.arguments.{name} must be true or false, got {value!r}")
    if number and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"optim.arguments.{name} must be a number, got {value!r}")


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(optimizer_class(name)).parameters)


def _as_tuple(value: Any) -> Any:
    """Return a list of TOML as the tuple that torch expects."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


OURS = "AdamW"
"""Optimizer that the defaults of `OptimConfig` are for."""
FINE_TUNING = {"lr": 2e-5, "weight_decay": 0.01, "beta2": 0.999}
"""Defaults with ``model.path``, of AdamW; the rate suits all optimizers of Adam's kind."""


def optim_defaults(config: OptimConfig, given: set[str], *, fine_tunes: bool) -> OptimConfig:
    """Fill in the keys that are not given and whose default depends on the optimizer or the model.

    Args:
        fine_tunes: whether the run starts from trained weights (``model.path``).
    """
    values = {} if config.name == OURS else torch_defaults(config.name)
    if fine_tunes and config.name == OURS:
        values |= FINE_TUNING
    elif fine_tunes and is_of_adam(config.name):
        values["lr"] = FINE_TUNING["lr"]
    elif fine_tunes and "lr" not in given:
        raise ConfigError(
            f"optim.lr must be given with model.path and optim.name = {config.name}: torch's default of {values['lr']:g} "
            "may destroy the weights that the run starts from"
        )
    unset: dict[str, Any] = {key: value for key, value in values.items() if key not in given}
    return dataclasses.replace(config, **unset)


def fine_tuning_note(config: OptimConfig) -> str:
    """Return a sentence about the learning rate and the weight decay of a run that starts from trained weights."""
    course = (
        "constant"
        if config.lr_schedule == "constant"
        else f"{config.lr_schedule} to {config.final_lr:.0%} of it"
    )
    return (
        f"fine-tuning with {config.name}: learning rate {config.lr:g} (warm-up over {config.warmup:.0%} of the steps, then "
        f"{course}), weight decay {config.weight_decay:g} (none for norms, biases and embeddings); set [optim] for others"
    )
