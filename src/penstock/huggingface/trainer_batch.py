"""Batches of a data collator as a pipeline takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.huggingface.heads import CAUSAL, QUESTIONS, SEQUENCE
from penstock.huggingface.image_division import BY_IMAGE, divided_images
from penstock.huggingface.loss import ModelLoss
from penstock.stage.compute.linear_cross_entropy import IGNORED
from penstock.stage.compute.shifted_loss import next_targets
from penstock.stage.microbatches import Microbatches

_OFFSETS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Names of where the sequences of a packed row begin, for kernels that take no mask; positions that restart say the same."""


class TrainerBatch:
    """A batch of a data collator, filled up to a multiple of the microbatches of all replicas.

    Args:
        counts: whether its targets count (default True).

    Attributes:
        ids: int64, (rows, tokens); of a model of images alone, the images.
        target: labels; of a filled batch with a label for each row, also which rows count, bool (rows).
        named: the other inputs of the model's forward.
        rows: rows before it was filled up.
        targets: number of targets that count.
        count: number of microbatches.
        takes_items: whether the model divides its loss by a number of targets that Trainer gives it.
    """

    def __init__(
        self, inputs: Mapping[str, Any], microbatches: int, loss: ModelLoss, counts: bool = True
    ) -> None:
        values = {name: value for name, value in inputs.items() if value is not None}
        answers = "start_positions", "end_positions"
        if loss.head == QUESTIONS and {*answers} <= values.keys():
            values["labels"] = torch.stack([values.pop(name).flatten() for name in answers], 1)
        missing = [name for name in (loss.first, "labels") if name not in values]
        if missing:
            raise ConfigError(
                f"the data collator gives {', '.join(values)} and no {' and no '.join(missing)}; take one that makes "
                "labels, such as DataCollatorForLanguageModeling(tokenizer, mlm=False) for a causal language model"
            )
        values = without_offsets(values)
        self.rows, self.count = len(values[loss.first]), microbatches
        self.takes_items = loss.takes_items(values["labels"])
        self.targets = loss.count(values["labels"]) * int(counts)
        more = -self.rows % microbatches
        if microbatches > 1:
            values = divided_images(values[loss.first], values, loss.config, self.rows + more, microbatches)
        values = for_every_row(values, self.rows)
        values = filled(values, self.rows, more)
        self.ids, labels = values.pop(loss.first), values.pop("labels")
        self.target: Tensor | tuple[Tensor, Tensor] = labels
        counted = self.rows if counts else 0
        if counted < len(labels) and loss.head in (
            SEQUENCE,
            QUESTIONS,
        ):  # numbers have no value that is ignored
            self.target = labels, torch.arange(len(labels), device=labels.device) < counted
        elif counted < len(labels):
            labels = self.target = labels.clone()
            labels[counted:] = IGNORED
        if loss.head == CAUSAL and not loss.shifts:
            self.target = next_targets(labels, IGNORED)
        self.named = values


def for_every_row(values: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return inputs with what is given for one row, such as positions, for each; the model would broadcast it."""
    return {
        name: value.expand(rows, *value.shape[1:])
        if isinstance(value, Tensor) and value.dim() and len(value) == 1 and name not in BY_IMAGE
        else value
        for name, value in values.items()
    }


def filled(values: Mapping[str, Any], rows: int, more: int) -> dict[str, Any]:
    """Return inputs with more rows, copies of the last one."""
    return {
        name: torch.cat([value, value[-1:].expand(more, *value.shape[1:])])
        if more and isinstance(value, Tensor) and value.dim() and len(value) == rows
        else value
        for name, value in values.items()
    }


def without_offsets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a collator made of packed rows without the offsets of their sequences, which their positions tell.

    Raises:
        ConfigError: if there are offsets and no positions.
    """
    if _OFFSETS & values.keys() and values.get("position_ids") is None:
        raise ConfigError(
            "the data collator packs rows (cu_seq_lens_q, seq_idx) and gives no position_ids, by which stages know where "
            "each begins; take one that gives them, as DataCollatorWithFlattening does"
        )
    return {name: value for name, value in values.items() if name not in _OFFSETS}


class PartsBatch:
    """Microbatches of a data collator, as a pipeline takes them.

    Args:
        parts: what the collator made for each.
        examples: number of examples in each; one with none fills up the batch and counts for nothing.

    Attributes:
        ids, target, named, targets, takes_items: those of `TrainerBatch`, of all microbatches.
        count: number of microbatches.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]], examples: Sequence[int], loss: ModelLoss) -> None:
        batches = [TrainerBatch(part, 1, loss, bool(n)) for part, n in zip(parts, examples, strict=True)]
        rows = [batch.rows for batch in batches]
        self.count = len(rows)
        # A microbatch without images has none of their inputs.
        names = dict.fromkeys(name for batch in batches for name in batch.named)
        self.named = {name: joined([b.named.get(name) for b in batches], rows) for name in names}
        ids = [b.ids for b in batches]
        # Rows of two microbatches cannot be compared as one without what is given for each.
        apart = any(isinstance(value, Microbatches) for value in self.named.values())
        self.ids = Microbatches(ids) if apart else joined(ids, rows)
        self.target = joined([b.target for b in batches], rows)
        self.takes_items = batches[0].takes_items
        self.targets = torch.stack([batch.targets for batch in batches]).sum()


def joined(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the values of microbatches, as one tensor where they have a row for each row, and all have one shape.

    The rows of one tensor are compared in a pipeline's first step; those of `Microbatches` cannot be.
    """
    if not any(isinstance(value, Tensor) for value in values):
        return values[0]
    shapes = {getattr(value, "shape", None) for value in values}
    by_row = all(isinstance(v, Tensor) and v.dim() and len(v) == n for v, n in zip(values, rows, strict=True))
    return torch.cat([*values]) if by_row and len(shapes) == 1 else Microbatches(values)
