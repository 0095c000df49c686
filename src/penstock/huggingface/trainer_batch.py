"""Batches of a data collator as a pipeline takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.huggingface.heads import CAUSAL, SEQUENCE
from penstock.huggingface.loss import ModelLoss
from penstock.huggingface.own_forward import IMAGE_INPUTS
from penstock.stage.compute.linear_cross_entropy import IGNORED
from penstock.stage.compute.shifted_loss import next_targets


class TrainerBatch:
    """A batch of a data collator, filled up to a multiple of the microbatches of all replicas.

    Attributes:
        ids: int64, (rows, tokens).
        target: labels; of a filled batch with a label for each row, also which rows count, bool (rows).
        named: the other inputs of the model's forward.
        rows: rows before it was filled up.
        targets: number of targets that count; at least 1.
    """

    def __init__(self, inputs: Mapping[str, Any], microbatches: int, loss: ModelLoss) -> None:
        values = {name: value for name, value in inputs.items() if value is not None}
        missing = [name for name in ("input_ids", "labels") if name not in values]
        if missing:
            raise ConfigError(
                f"the data collator gives {', '.join(values)} and no {' and no '.join(missing)}; take one that makes "
                "labels, such as DataCollatorForLanguageModeling(tokenizer, mlm=False) for a causal language model"
            )
        if "cu_seq_lens_q" in values or "seq_idx" in values:
            raise ConfigError(
                "the data collator put all rows of the batch into one (padding_free, or TRL's packing), which a pipeline "
                "cannot divide into microbatches; take packing_strategy='wrapped', and padding_free=False"
            )
        self.rows, self.targets = len(values["input_ids"]), loss.count(values["labels"]).clamp(min=1)
        for name in IMAGE_INPUTS:
            if name in values and len(values[name]) != self.rows:
                raise ConfigError(
                    f"the data collator gives {len(values[name])} {name} for {self.rows} rows, and a batch is divided into "
                    "microbatches by rows; give every row one image"
                )
        # The model would broadcast what it gets for one row, such as positions.
        values = {
            name: value.expand(self.rows, *value.shape[1:])
            if isinstance(value, Tensor) and value.dim() and len(value) == 1
            else value
            for name, value in values.items()
        }
        more = -self.rows % microbatches
        if more:
            values = {
                name: torch.cat([value, value[-1:].expand(more, *value.shape[1:])])
                if isinstance(value, Tensor) and value.dim() and len(value) == self.rows
                else value
                for name, value in values.items()
            }
        self.ids, labels = values.pop("input_ids"), values.pop("labels")
        self.target: Tensor | tuple[Tensor, Tensor] = labels
        if more and loss.head == SEQUENCE:  # numbers have no value that is ignored
            self.target = labels, torch.arange(len(labels), device=labels.device) < self.rows
        elif more:
            labels[self.rows :] = IGNORED
        if loss.head == CAUSAL and not loss.shifts:
            self.target = next_targets(labels, IGNORED)
        self.named = values
