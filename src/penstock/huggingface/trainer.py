"""Hugging Face's Trainer, with a pipeline in the place of its forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.huggingface.from_transformers import from_transformers
from penstock.huggingface.loss import IGNORED
from penstock.runtime.pipeline import Pipeline

_OURS = {
    "loss_fn": "the model's own loss is used",
    "reduction": "losses are weighted by num_items_in_batch, as Trainer does",
    "seed": "set it in the training arguments",
    "autocast": "set bf16=True in the training arguments",
    "device": "it is that of the training arguments",
    "mesh": "ranks are threads of one process",
    "parallel": "ranks are threads of one process",
}
"""Options of `Pipeline` that the trainer sets, and what to do instead of giving them."""


class _TokenLoss:
    """A model's own loss, summed over a microbatch's targets and divided by the number of targets of the whole step."""

    def __init__(self, model: Any) -> None:
        self._loss, self._vocabulary = model.loss_function, model.config.vocab_size
        self.tokens: Tensor | int = 1

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._loss(
            logits=logits, labels=labels, vocab_size=self._vocabulary, num_items_in_batch=self.tokens
        )
        return loss


class PipelineTrainerMixin:
    """Trains by a pipeline in any subclass of ``transformers.Trainer``: ``class T(PipelineTrainerMixin, SFTTrainer)``.

    The ranks are threads of this process and use the model's own modules and parameters, so optimizers, schedules, clipping,
    callbacks, checkpoints and adapters of peft are the Trainer's. Loss, gradients and weights are the Trainer's up to the
    order in which microbatches are summed. Where a subclass computes a loss of its own in ``compute_loss``, it is not used:
    the loss is the model's, by the labels that the data collator makes.

    Args:
        pipeline: keyword arguments of `Pipeline`: ``microbatches`` (required), ``ranks``, ``schedule``, ``virtual_stages``,
            ``split``, ``recompute``, ``timeout``, ``execution``. A batch whose rows do not divide into the microbatches is
            filled up with rows that count for nothing.
        model, args, others, kwargs: arguments of the Trainer. ``activation_checkpointing=True``, once called
            ``gradient_checkpointing``, becomes ``recompute="full"``, unless `pipeline` says otherwise.

    Attributes:
        pipe: the pipeline.

    Raises:
        ConfigError: if an argument cannot work with a pipeline; says which and what to do instead.
    """

    pipe: Pipeline

    def __init__(
        self, model: Any = None, args: Any = None, *others: Any, pipeline: Mapping[str, Any], **kwargs: Any
    ) -> None:
        options = dict(pipeline)
        for name, instead in _OURS.items():
            if name in options:
                raise ConfigError(f"pipeline[{name!r}] cannot be given to a trainer: {instead}")
        if "microbatches" not in options:
            raise ConfigError(
                'pipeline must say how many microbatches, as in {"ranks": 2, "microbatches": 8}'
            )
        if kwargs.get("compute_loss_func") is not None:
            raise ConfigError(
                "compute_loss_func needs the logits of the whole batch, which a pipeline never has at once; use "
                "penstock.Pipeline with your loss_fn and a loop of your own"
            )
        if args is not None:
            _require_supported(args)
            args = copy.copy(args)
            for name in (
                "activation_checkpointing",
                "gradient_checkpointing",
            ):  # the new name and the old one
                if getattr(args, name, None):
                    setattr(args, name, False)
                    options.setdefault("recompute", "full")
        super().__init__(model, args, *others, **kwargs)  # type: ignore[call-arg]  # object is not the next class
        trainer: Any = self
        settings = trainer.args
        settings._n_gpu = min(settings.n_gpu, 1)  # with more, Trainer would copy the model to every GPU
        base = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        # TRL replaces it by one that computes its loss in chunks; here, the loss is the pipeline's.
        vars(base).pop("forward", None)
        self._loss = _TokenLoss(base)
        self._index, self._updates, self._logits_asked = 0, -1, True
        self.pipe = Pipeline(
            from_transformers(trainer.model),
            self._loss,
            reduction="sum",
            seed=settings.seed,
            device=settings.device,
            autocast=torch.bfloat16 if settings.bf16 else None,
            **options,
        )

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the forward and backward of a batch; gradients accumulate in the parameters.

        Args:
            model: the model, which is the trainer's own.
            inputs: what the data collator made.
            num_items_in_batch: targets of all batches of the optimizer's step; None if Trainer does not count them: batches
                then have equal weights.

        Returns:
            The loss, a 0-d tensor.
        """
        trainer: Any = self
        model.train()
        self.pipe.train()
        if hasattr(trainer.optimizer, "train"):  # optimizers without a schedule switch their weights
            trainer.optimizer.train()
        batch = _Batch(trainer._prepare_inputs(inputs), self.pipe.microbatches)
        if num_items_in_batch is None:
            num_items_in_batch = batch.targets() * trainer.current_gradient_accumulation_steps
        self._loss.tokens = num_items_in_batch
        self._count_steps(trainer.state.global_step, trainer.args.gradient_accumulation_steps)
        loss = self.pipe.step(batch.ids, batch.labels, **batch.named).loss
        assert loss is not None, "the batch has labels"
        return loss.detach()

    def _count_steps(self, updates: int, accumulated: int) -> None:
        """Number the batch from the start of the run, also in a resumed one: dropout depends on this number."""
        self._index = self._index + 1 if updates == self._updates else 0
        self._updates = updates
        self.pipe.steps = updates * accumulated + self._index

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, *others: Any, **kwargs: Any
    ) -> Any:
        """Return loss, logits and labels of a batch of an evaluation, as Trainer does.

        Args:
            prediction_loss_only: whether the loss is enough; logits are then not kept.
        """
        self._logits_asked = not prediction_loss_only
        trainer: Any = super()
        return trainer.prediction_step(model, inputs, prediction_loss_only, *others, **kwargs)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss of a batch of an evaluation, and its logits, (batch, tokens, vocabulary), if they are asked for.

        Args:
            return_outputs: also return a dictionary with the loss and the logits (default False).
            num_items_in_batch: number by which the summed loss is divided; None for the number of targets.
        """
        batch = _Batch(inputs, self.pipe.microbatches)
        self._loss.tokens = batch.targets() if num_items_in_batch is None else num_items_in_batch
        keep = return_outputs and self._logits_asked
        result = self.pipe.evaluate(batch.ids, batch.labels, outputs=keep, **batch.named)
        if not return_outputs:
            return result.loss
        logits = torch.cat(result.outputs)[: batch.rows] if keep else None
        return result.loss, {"loss": result.loss, "logits": logits}


class PipelineTrainer(PipelineTrainerMixin, transformers.Trainer):  # type: ignore[misc]  # transformers is untyped here
    """``transformers.Trainer`` that trains a causal language model by a pipeline; see `PipelineTrainerMixin`."""


class _Batch:
    """A batch of a data collator, filled up to a multiple of the microbatches.

    Attributes:
        ids, labels: int64, (rows, tokens).
        named: the other inputs of the model's forward.
        rows: rows before it was filled up.
    """

    def __init__(self, inputs: Mapping[str, Any], microbatches: int) -> None:
        values = {name: value for name, value in inputs.items() if value is not None}
        missing = [name for name in ("input_ids", "labels") if name not in values]
        if missing:
            raise ConfigError(
                f"the data collator gives {', '.join(values)} and no {' and no '.join(missing)}; take one that makes "
                "labels, such as DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            )
        if "cu_seq_lens_q" in values or "seq_idx" in values:
            raise ConfigError(
                "the data collator put all rows of the batch into one (padding_free, or TRL's packing), which a pipeline "
                "cannot divide into microbatches; take packing_strategy='wrapped', and padding_free=False"
            )
        self.rows = len(values["input_ids"])
        more = -self.rows % microbatches
        if more:
            values = {
                name: torch.cat([value, value[-1:].expand(more, *value.shape[1:])])
                if isinstance(value, Tensor) and value.dim() and len(value) == self.rows
                else value
                for name, value in values.items()
            }
            values["labels"][self.rows :] = IGNORED
        self.ids, self.labels = values.pop("input_ids"), values.pop("labels")
        self.named = values

    def targets(self) -> Tensor:
        """Return the number of targets: labels after the first of each row that are not ignored; at least 1."""
        count: Tensor = (self.labels[:, 1:] != IGNORED).sum().clamp(min=1)
        return count


def _require_supported(args: Any) -> None:
    """Raise ConfigError if a training argument cannot work with a pipeline."""
    refused = {
        "fsdp": (args.fsdp, "the pipeline divides the model; take fsdp out"),
        "deepspeed": (args.deepspeed, "the pipeline divides the model; take deepspeed out"),
        "torch_compile": (
            args.torch_compile,
            'compile the stages with pipeline={"execution": penstock.ExecutionOptions(compile=...)}',
        ),
        "fp16": (args.fp16, "take bf16=True, which needs no loss scale"),
        "label_smoothing_factor": (
            args.label_smoothing_factor,
            "Trainer computes it from the logits of the whole batch, which a pipeline never has at once; set it to 0",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha,
            "its noise would depend on the microbatches; unset it",
        ),
        "predict_with_generate": (
            getattr(args, "predict_with_generate", False),
            "a pipeline evaluates losses and logits; generate with the saved model",
        ),
    }
    for name, (value, instead) in refused.items():
        if value:
            raise ConfigError(f"{name}={value!r} cannot be used with a pipeline: {instead}")
    if args.world_size > 1:
        raise ConfigError(
            f"the trainer runs the ranks of its pipeline as threads of one process, and there are {args.world_size} "
            "processes; start it without torchrun, or train with penstock.Pipeline, which runs in processes"
        )
