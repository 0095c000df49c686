"""Microbatches that a data collator makes, each of a part of the batch's examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import BatchError, describe_error
from penstock.huggingface.image_division import BY_IMAGE
from penstock.huggingface.token_budget import TokenBudget
from penstock.stage.microbatches import even_cuts

PARTS = "parts"
"""Key of the microbatches in a batch that was collated in parts."""
EXAMPLES = "examples"
"""Key of the number of examples in each of them."""
TOGETHER = "together"
"""Key of what the collator makes of the first two microbatches' examples as one, in batches that are compared."""
_COMPARED = 3
"""First batches that are compared: in one with examples of equal length, a mean over tokens is one over examples."""


class PartCollator:
    """Data collator that gives the examples of a batch to another one in parts; each part is a microbatch.

    A batch with fewer examples than parts is filled up with copies of its last part, which count for nothing.

    Args:
        collator: the data collator.
        parts: number of microbatches of a batch, of all replicas; or the tokens that each may have, by which examples of
            about the same length become a part.
        main_input: name of the tensor by which Trainer counts the tokens of a run.
        compares: whether some batches also have two microbatches as one (default False): the first ones, and those whose
            number is a power of two, since some losses differ only once the model has left its reference.
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], Mapping[str, Any]],
        parts: int | TokenBudget,
        main_input: str,
        compares: bool = False,
    ) -> None:
        self.collator, self.parts, self.main_input = collator, parts, main_input
        self._compares, self._batches = compares, 0

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return the microbatches, the number of examples in each, and the token ids and masks of all in one dimension."""
        examples = list(examples)
        groups: Sequence[Sequence[int]]
        if isinstance(self.parts, TokenBudget):
            groups, count = self.parts.groups(examples, self.collator)
        else:
            groups, count = even_cuts(len(examples), min(self.parts, len(examples))), self.parts
        parts = [
            self._collated([examples[i] for i in group], n, len(groups)) for n, group in enumerate(groups)
        ]
        for name in BY_IMAGE & {key for part in parts for key in part}:
            for part in parts:
                part.setdefault(name, None)  # of rows without images
        _require_same_keys(parts)
        missing = count - len(groups)
        flat = {
            name: _flat([part[name] for part in parts])
            for name in (self.main_input, "attention_mask")
            if all(isinstance(part.get(name), Tensor) for part in parts)
        }
        together = {}
        if self._compares and len(groups) > 1:
            self._batches += 1
            if self._batches <= _COMPARED or self._batches.bit_count() == 1:
                together = {TOGETHER: self._collated([examples[i] for i in (*groups[0], *groups[1])], 0, 1)}
        return {
            **flat,
            **together,
            PARTS: parts + [dict(parts[-1]) for _ in range(missing)],
            EXAMPLES: [len(group) for group in groups] + [0] * missing,
        }

    def _collated(self, examples: list[Any], number: int, count: int) -> dict[str, Any]:
        try:
            return dict(self.collator(examples))
        except Exception as error:  # of any collator
            raise BatchError(
                f"the data collator fails on part {number} of {count} of a batch, {len(examples)} of its examples: "
                f"{describe_error(error)}. Each part becomes a microbatch; a collator that needs the whole batch is asked "
                "for by pipeline={'collate': 'batch'}"
            ) from error


def _flat(values: Sequence[Tensor]) -> Tensor:
    """Return as many numbers as tensors have: theirs if they are tokens, and zeros without memory if they are pixels."""
    if values[0].is_floating_point():
        return torch.zeros((), dtype=torch.int8).expand(sum(value.numel() for value in values))
    return torch.cat([value.flatten() for value in values])


def _require_same_keys(parts: Sequence[Mapping[str, Any]]) -> None:
    for n, part in enumerate(parts):
        if different := sorted(map(str, part.keys() ^ parts[0].keys())):
            raise BatchError(
                f"the data collator gives {different[0]!r} for some parts of a batch only, of parts 0 and {n} for one; each "
                "part becomes a microbatch, and all need the same keys; pipeline={'collate': 'batch'} collates the whole "
                "batch"
            )


def divided_by_rows(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return a batch that was collated as a whole as if it had been collated in parts, whose tensors are cut by rows."""
    rows = next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()), 0)
    if rows < count:
        raise BatchError(
            f"the data collator gives a batch of {rows} rows, too few for {count} microbatches; with "
            "pipeline={'collate': 'parts'}, the default, it makes each microbatch of a part of the examples"
        )
    cuts = even_cuts(rows, count)
    parts = [
        {
            name: value[cut.start : cut.stop]
            if isinstance(value, Tensor) and value.shape[:1] == (rows,)
            else value
            for name, value in batch.items()
        }
        for cut in cuts
    ]
    return {PARTS: parts, EXAMPLES: [len(cut) for cut in cuts]}


def counted(batch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the microbatches of a batch that count; a batch that was not collated in parts is one."""
    if PARTS not in batch:
        return [batch]
    return [part for part, examples in zip(batch[PARTS], batch[EXAMPLES], strict=True) if examples]
