"""Hints for keys of the config that are misspelt, in another section, or named as in other tools."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping

_NAMES = {
    "data.held_out_path": "dev_file eval_data eval_dataset eval_file eval_path val_data val_file val_path valid_data "
    "validation_data validation_file validation_path",
    "data.path": "data dataset dataset_name dataset_path text text_path train_file training_data",
    "data.sequence": "block_size context context_length max_length max_seq_len max_seq_length seq seq_len seq_length "
    "sequence_length",
    "model.auxiliary_loss": "aux_loss_coef load_balance_coeff moe_aux_loss_coeff router_aux_loss_coef",
    "model.bias_update_rate": "load_balance_bias_rate moe_router_bias_update_rate",
    "model.expert_hidden": "moe_ffn_hidden_size moe_inter_dim moe_intermediate_size",
    "model.experts": "moe_num_experts n_experts n_routed_experts num_experts num_local_experts",
    "model.experts_per_token": "moe_router_topk moe_top_k n_activated_experts num_experts_per_tok router_topk",
    "model.hidden": "ffn intermediate_size",
    "model.layers": "blocks depth n_layer n_layers num_hidden_layers num_layers",
    "model.path": "model model_name model_name_or_path model_path pretrained",
    "model.router": "moe_router_score_function score_func scoring_func",
    "model.shared_hidden": "moe_shared_expert_intermediate_size shared_expert_intermediate_size",
    "model.vocabulary": "vocab vocab_size",
    "model.width": "dim d_model hidden_size n_embd",
    "optim.arguments.momentum": "momentum",
    "optim.beta1": "adam_beta1 betas",
    "optim.beta2": "adam_beta2",
    "optim.clip": "clip_grad_norm clipping grad_clip gradient_clip_val gradient_clipping max_grad_norm",
    "optim.epsilon": "adam_epsilon eps",
    "optim.final_lr": "min_lr_ratio",
    "optim.final_lr=SHARE_OF_LR": "min_lr",
    "optim.loss_scale": "init_scale initial_scale_power",
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.lr_schedule": "decay lr_decay lr_decay_style lr_scheduler lr_scheduler_type scheduler",
    "optim.name": "optim optimizer optimiser",
    "optim.warmup": "lr_warmup_fraction warmup_ratio",
    "optim.warmup=SHARE_OF_STEPS": "lr_warmup lr_warmup_iters num_warmup_steps warm_up warmup_iters warmup_steps",
    "optim.weight_decay": "wd",
    "parallel.cp": "context_parallel context_parallel_degree context_parallel_size cp_degree cp_size "
    "sequence_parallel_degree sequence_parallel_size sp_size",
    "parallel.dp": "data_parallel data_parallel_size dp_size replicas",
    "parallel.ep": "ep_size expert_model_parallel_size expert_parallel expert_parallel_size",
    "parallel.pp": "num_stages pipeline_parallel_size pp_size stages",
    "parallel.tp": "tensor_parallel tensor_parallel_size tp_size",
    "parallel.shard": "zero_stage sharding sharding_strategy",
    "parallel.shard=gradients": "zero2",
    "parallel.shard=weights": "fsdp fully_shard use_fsdp zero3",
    "parallel.zero=true": "use_distributed_optimizer zero1",
    "runtime.compile=block": "torch_compile",
    "runtime.precision": "amp autocast dtype mixed_precision torch_dtype",
    "runtime.precision=bf16": "bf16 bfloat16",
    "runtime.precision=fp16": "fp16 float16 half",
    "runtime.recompute=full": "activation_checkpointing checkpointing gradient_checkpointing remat",
    "schedule.microbatches": "micro_batches num_microbatches",
    "schedule.name": "pipeline_schedule schedule schedule_name",
    "train.accumulate": "accumulate_grad_batches accumulation accumulation_steps grad_accum gradient_accumulation "
    "gradient_accumulation_steps",
    "train.batch": "batch_size bs global_batch_size micro_batch_size per_device_train_batch_size train_batch_size",
    "train.checkpoint_every": "save_every save_interval save_steps",
    "train.epochs": "max_epochs num_epochs num_train_epochs",
    "train.eval_every": "eval_interval eval_steps",
    "train.folder": "out output output_dir output_folder",
    "train.keep_last": "save_total_limit",
    "train.log_every": "log_interval logging_steps",
    "train.loggers": "logger report_to tensorboard wandb",
    "train.name": "exp_name experiment run_name",
    "train.steps": "iterations iters max_iters max_steps num_steps total_steps train_iters train_steps training_steps",
}
"""Names that other tools have for a key, or for a key with a value; in capitals where their unit is another one."""


class KeyHints:
    """Hints for names that are no key of the config."""

    def __init__(self, sections: Mapping[str, type]) -> None:
        self._keys = [
            (section, field.name) for section, kind in sections.items() for field in dataclasses.fields(kind)
        ]

    def exact(self, name: str) -> list[str]:
        """Return the keys that have a name in any section, or that other tools call by it, as ``section.key``.

        Args:
            name: name with or without a section, leading dashes, and dashes for underscores.
        """
        section, key = _parts(name)
        keys = [f"{s}.{k}" for s, k in self._keys if k == key]
        if f"{section}.{key}" in keys:
            return [f"{section}.{key}"]
        return keys or [known for known, others in _NAMES.items() if key in others.split()]

    def nearest(self, name: str) -> list[str]:
        """Return the keys that a name may have meant, as ``section.key``, the likeliest first, at most three."""
        if exact := self.exact(name):
            return exact[:3]
        section, key = _parts(name)
        spelt = {k: f"{s}.{k}" for s, k in self._keys if s == section} or {
            **{other: known for known, others in _NAMES.items() for other in others.split()},
            **{k: f"{s}.{k}" for s, k in self._keys},
        }
        close = difflib.get_close_matches(key, list(spelt), n=3, cutoff=0.7)
        return list(dict.fromkeys(spelt[name] for name in close))


def assignments(keys: list[str], value: str) -> str:
    """Return keys with a value, as they are written on the command line."""
    return " or ".join(key if "=" in key else f"{key}={value}" for key in keys)


def _parts(name: str) -> tuple[str, str]:
    section, _, key = name.strip().lstrip("-").replace("-", "_").rpartition(".")
    return section, key
