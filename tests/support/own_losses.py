"""Trainers with a loss of their own, of which plain Trainer with accumulated batches is the measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, Trainer

import penstock
from tests.support import hf_models, hf_trainer

MICROBATCHES = 4


class Weighted(Trainer):
    """Cross entropy with a weight for each class."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 3.0, 0.5]), reduction="none").mean()
        return (loss, outputs) if return_outputs else loss


class Distilled(Trainer):
    """The model's own loss, and the distance to a teacher, with a metric that it logs."""

    teacher: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, **({} if kwargs.get("num_items_in_batch") is None else kwargs))
        with torch.no_grad():
            expected = self.teacher(input_ids=inputs["input_ids"]).logits
        distance = F.kl_div(outputs.logits.log_softmax(-1), expected.softmax(-1), reduction="batchmean")
        self.log({"distance": float(distance.detach())})
        loss = outputs.loss + 0.1 * distance
        return (loss, outputs) if return_outputs else loss


class AgainstBase(Trainer):
    """The model's loss above that of the model without its adapters, which is asked after it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        with torch.no_grad(), model.disable_adapter():
            base = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
        loss = F.softplus(outputs.loss - base.loss) + 0.01 * (outputs.logits - base.logits).square().mean()
        return (loss, outputs) if return_outputs else loss


class AgainstMean(Trainer):
    """Compares what each row has gained on the model without its adapters with the mean of the batch: nothing at first."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        with torch.no_grad(), model.disable_adapter():
            base = model(input_ids=inputs["input_ids"])
        gains = (outputs.logits - base.logits)[:, 0].mean(-1)
        loss = F.softplus(100 * (gains.mean().detach() - gains)).mean()
        return (loss, outputs) if return_outputs else loss


class Contrastive(Trainer):
    """Rows of a batch are each other's negatives."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        vectors = F.normalize(outputs.logits, dim=-1)
        loss = F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))
        return (loss, outputs) if return_outputs else loss


class MeanOfTokens(Trainer):
    """The mean over the tokens of a batch, whatever is counted."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


KINDS: dict[str, type[Trainer]] = {
    "weighted": Weighted, "distilled": Distilled, "against base": AgainstBase, "against mean": AgainstMean,
    "contrastive": Contrastive, "mean of tokens": MeanOfTokens,
}  # fmt: skip


NO_MEANS = ("against base", "contrastive")


def classifier() -> Any:
    torch.manual_seed(0)
    config = hf_models.config("llama", num_labels=3, pad_token_id=0, vocab_size=hf_trainer.VOCABULARY)
    return AutoModelForSequenceClassification.from_config(config)


def rows_of(kind: str) -> list[dict[str, Tensor]]:
    rows = hf_trainer.rows(24)
    if kind in ("weighted", "contrastive"):
        return [{**row, "labels": torch.tensor(n % 3)} for n, row in enumerate(rows)]
    return rows


def net_of(kind: str) -> Any:
    if kind in ("weighted", "contrastive"):
        return classifier()
    return hf_trainer.adapted() if kind.startswith("against") else hf_trainer.model()


def make(
    folder: Path, pipeline: dict[str, Any] | None, *, kind: str, replicas: int = 1, **changes: Any
) -> Any:
    """Make a trainer; where a loss is no mean over examples, the plain one accumulates microbatches, as a pipeline does."""
    sizes = {"per_device_train_batch_size": 8 // replicas}
    if pipeline is None and kind in NO_MEANS:
        sizes = {
            "per_device_train_batch_size": 8 // MICROBATCHES,
            "gradient_accumulation_steps": MICROBATCHES,
        }
    args = hf_trainer.arguments(folder, **{**sizes, "per_device_eval_batch_size": 8 // replicas, **changes})
    own = KINDS[kind]
    if pipeline is not None:
        own = type(f"Piped{own.__name__}", (penstock.PipelineTrainerMixin, own), {})
    data = rows_of(kind)
    made = hf_trainer.trainer(net_of(kind), args, pipeline, own, train_dataset=data, eval_dataset=data[:16])
    made.loss_is_scaled_for_ga = False
    if kind == "distilled":
        made.teacher = hf_trainer.model(seed=9)
    return made
