"""Refusals of what a Trainer cannot do with a pipeline, with what to do instead."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from penstock.base.errors import ConfigError
from penstock.huggingface.library import package_of
from penstock.huggingface.loss import StepLoss, has_library_loss


def require_same_loss(trainer: Any, model: Any, loss: StepLoss) -> None:
    """Raise ConfigError if the loss of Trainer or of the model is not, or no longer, the one that the stages compute."""
    if trainer.compute_loss_func is not None or "compute_loss" in vars(trainer):
        name = "compute_loss_func" if trainer.compute_loss_func is not None else "trainer.compute_loss"
        raise ConfigError(
            f"{name} needs the logits of the whole batch, which a pipeline never has at once; use penstock.Pipeline "
            "with your loss_fn and a loop of your own"
        )
    if not has_library_loss(model):
        raise ConfigError(
            f"the loss_function of the {type(model).__name__} is {model.loss_function!r}, and only "
            "losses of transformers are known to be sums that microbatches can divide; delete model._loss_function, or "
            "use penstock.Pipeline with yours as loss_fn and a loop of your own"
        )
    if trainer.label_smoother is not loss.smoother:
        raise ConfigError(
            "trainer.label_smoother was changed after the pipeline was built with the loss; set label_smoothing_factor "
            "in the training arguments"
        )


def require_plain_gradients(model: Any) -> None:
    """Raise ConfigError if a parameter's gradient has hooks: they would see each microbatch's gradient."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"parameter {name} has a hook of its gradient, which Trainer runs once a batch, and a pipeline once a "
                "microbatch; change gradients in a callback's on_pre_optimizer_step"
            )


def require_known_step(kind: type, mixin: type) -> None:
    """Raise ConfigError if a trainer's class runs a step of its own, or generates what it trains on."""
    for base in kind.__mro__[kind.__mro__.index(mixin) + 1 :]:
        if "training_step" in vars(base) and package_of(base) not in ("transformers", "trl"):
            raise ConfigError(
                f"{base.__name__} has a training_step of its own, which the pipeline's would replace; define it in a class "
                "that inherits from PipelineTrainerMixin, where super().training_step is the pipeline's"
            )
        if "_prepare_inputs" in vars(base) and package_of(base) == "trl":
            raise ConfigError(
                f"{base.__name__} generates answers with the model while it trains, and each stage has a part of it; "
                "generate with another copy of the model, and use penstock.Pipeline with a loop of your own: docs/models.md "
                "has one in the shape of GRPO"
            )


def require_own_parameters(trainer: Any) -> None:
    """Raise ConfigError if a trainer in processes has parameters to train that are not its model's."""
    of_model = {id(p) for p in trainer.model.parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if any(id(p) not in of_model for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "the optimizer has parameters that are not the model's, such as a temperature of the loss; they would train on "
            "the process of the last stage alone, and not be saved. Make them part of the model, or run the ranks as threads"
        )


def computes_own_loss(trainer: Any, model: Any, mixin: type, cp: int) -> bool:
    """Return whether a trainer's loss is computed by its ``compute_loss``; otherwise it is the model's own, or smoothed.

    Raises:
        ConfigError: if it is, and samples are divided over processes (cp), so that each has the outputs of some tokens.
    """
    by_function = trainer.compute_loss_func is not None or not has_library_loss(model)
    owner = _owner_of_loss(type(trainer), mixin)
    if not by_function and owner is None:
        return False
    if cp == 1:
        return True
    # With these, SFTTrainer's loss is the model's.
    if (
        not by_function
        and owner is not None
        and package_of(owner) == "trl"
        and getattr(trainer.args, "loss_type", "") == "nll"
    ):
        return False
    raise ConfigError(
        f"pipeline['cp'] is {cp}, so that each process has the outputs of some tokens, and {type(trainer).__name__} "
        "computes its loss from those of whole samples; leave cp at 1"
    )


def is_of_libraries(trainer: Any, mixin: type) -> bool:
    """Return whether a trainer's loss is computed by code of transformers or TRL alone."""
    owner = _owner_of_loss(type(trainer), mixin)
    of_class = owner is None or package_of(owner) in ("transformers", "trl")
    return of_class and trainer.compute_loss_func is None and "compute_loss" not in vars(trainer)


def _owner_of_loss(kind: type, mixin: type) -> type | None:
    """Return the class whose ``compute_loss`` is a trainer's; None if it is Trainer's."""
    others = (base for base in kind.__mro__ if base not in (mixin, transformers.Trainer))
    return next((base for base in others if "compute_loss" in vars(base)), None)


_BY_LAYER = ("galore_adamw_layerwise", "galore_adafactor_layerwise", "apollo_adamw_layerwise")
_UPDATES_IN_BACKWARD = (*_BY_LAYER, "galore_adamw_8bit_layerwise", "lomo", "adalomo")
_OF_EACH_PARAMETER = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Optimizers that update each parameter by itself, and so on the rank that has it."""


_REFUSED = {
    "fsdp": "the pipeline divides the model; take fsdp out",
    "deepspeed": "the pipeline divides the model; take deepspeed out",
    "parallelism_config": "the pipeline divides the model; give ranks in pipeline={...}",
    "torch_compile": 'compile stages with pipeline={"execution": penstock.ExecutionOptions(compile=...)}',
    "fp16": "take bf16=True, which needs no loss scale",
    "neftune_noise_alpha": "its noise would depend on the microbatches; unset it",
    "predict_with_generate": "a pipeline evaluates losses and logits; generate with the saved model",
    "auto_find_batch_size": "a pipeline is built for its microbatches; choose per_device_train_batch_size",
    "use_liger_kernel": "its kernels replace modules that the stages have; apply them to the model before",
    "optim": "it updates weights within the backward of each batch; take another one, such as adamw_torch",
}
"""Training arguments that a pipeline cannot have, and what to do instead."""
_REFUSED_IN_PROCESSES = {
    "split_batches": "every process takes the batch of all replicas; set it to False in accelerator_config",
    "dispatch_batches": "every process reads the rows itself; leave it out of accelerator_config",
    "save_on_each_node": "the first process writes for all; set it to False",
    "eval_use_gather_object": "set it to False",
    "fp16_full_eval": "the weights that train would be converted; set it to False",
    "bf16_full_eval": "the weights that train would be converted; set it to False",
}
"""The same for ranks that are processes."""


def require_supported_arguments(args: Any, in_processes: bool, ep: int) -> None:
    """Raise ConfigError if a training argument cannot work with a pipeline."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer == "adafactor" and ep > 1:
        raise ConfigError(
            f"optim='adafactor' cannot be used with ep = {ep}: transformers' own computes with whole matrices, and ep "
            "divides the experts'; take adamw_torch, or leave ep at 1"
        )
    values = {name: getattr(args, name, None) for name in _REFUSED}
    values["optim"] = optimizer if optimizer in _UPDATES_IN_BACKWARD else None
    instead = dict(_REFUSED)
    if in_processes:
        instead |= _REFUSED_IN_PROCESSES
        of_accelerator = vars(args.accelerator_config)
        values |= {
            name: of_accelerator.get(name, getattr(args, name, None)) for name in _REFUSED_IN_PROCESSES
        }
        if optimizer not in _OF_EACH_PARAMETER:
            values["optim"] = optimizer
            instead["optim"] = f"in processes, take one of {', '.join(_OF_EACH_PARAMETER)}"
    for name, value in values.items():
        if value:
            raise ConfigError(f"{name}={value!r} cannot be used with a pipeline: {instead[name]}")


def require_supported_trainer(trainer: Any, in_processes: bool) -> None:
    """Raise ConfigError if an argument of the Trainer itself cannot work with a pipeline."""
    if trainer.model_init is not None:
        raise ConfigError(
            "model_init makes a new model when training begins, and the pipeline is built before; give model=model_init()"
        )
    if getattr(getattr(trainer.model, "config", None), "output_router_logits", False):
        raise ConfigError(
            "the config's output_router_logits is set, and Trainer adds the auxiliary loss of the whole batch's routers, "
            "which a pipeline never has at once; set it to False (TRL's SFTTrainer sets it unless router_aux_loss_coef=0.0 "
            "in SFTConfig), or use penstock.Pipeline, which adds each microbatch's loss"
        )
    others = {name: each for name, each in vars(trainer).items() if not name.startswith("model")}
    for name, other in others.items() if in_processes else ():
        if isinstance(other, nn.Module) and any(p.is_meta for p in other.parameters()):
            raise ConfigError(
                f"trainer.{name} has the weights of some stages alone, and a model beside the one that is trained is "
                f"needed whole: load it outside of penstock.own_stages, and give it as {name}="
            )
    if in_processes and (trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None):
        raise ConfigError(
            "in processes the optimizer is made of each rank's own parameters, by the training arguments (optim, "
            "learning_rate); leave out optimizers and optimizer_cls_and_kwargs"
        )
