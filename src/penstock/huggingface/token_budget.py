"""Microbatches of a trainer by a number of tokens: the examples of each, and how many a step has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.base.counts import is_count
from penstock.base.errors import BatchError, ConfigError, ScheduleCodeError, ScheduleError
from penstock.huggingface.library import package_of
from penstock.runtime.validation import resolve_schedule
from penstock.schedule.families import CatalogueFamily, require_family
from penstock.schedule.text import is_csv
from penstock.stage.layers import Layer
from penstock.stage.token_groups import grouped

NAME = "tokens_per_microbatch"
"""Name of the option of a trainer's pipeline."""
_BESIDE = ("position_ids", "token_type_ids")
"""Columns of numbers that belong to other tokens."""


@dataclass(frozen=True)
class TokenBudget:
    """Number of padded tokens that a microbatch may have, and what a pipeline asks of the number of microbatches.

    Attributes:
        tokens: most tokens of a microbatch, rows x longest row.
        schedule, virtual_stages: those of the pipeline.
        ranks: ranks of the pipeline; each replica has at least as many microbatches in a step.
        replicas: number of replicas.
        attention: see `attention_share`.
    """

    tokens: int
    schedule: str
    virtual_stages: int | None
    ranks: int
    replicas: int
    attention: float = 0.0

    @property
    def least(self) -> int:
        """The smallest number of microbatches of a replica."""
        return self._allowed(1)

    def groups(self, examples: Sequence[Any], collator: object) -> tuple[list[list[int]], int]:
        """Return the indices of the examples of each microbatch, and how many microbatches all replicas need.

        Raises:
            BatchError: if an example has no list of tokens, or more tokens than a microbatch may have.
        """
        sizes = [_size(example, collator) for example in examples]
        rows = max(n for n, _ in sizes)
        lengths = [length for _, length in sizes]
        if (most := rows * max(lengths)) > self.tokens:
            pair = f" ({rows} rows of up to {max(lengths)})" if rows > 1 else ""
            raise BatchError(
                f"an example has {most} tokens{pair}, and pipeline[{NAME!r}] is {self.tokens}; give at least {most}, or cut "
                "longer examples or leave them out of the data"
            )
        return grouped(lengths, self.tokens // rows, self._allowed, self.replicas, self.attention)

    def _allowed(self, needed: int) -> int:
        return _number(self.schedule, self.ranks, self.virtual_stages, max(needed, self.ranks))


def read_budget(options: dict[str, Any], replicas: int, cp: object) -> TokenBudget | None:
    """Take the number of tokens out of a trainer's options, and put the smallest number of microbatches there.

    Returns:
        The budget; None if the options have ``microbatches``.

    Raises:
        ConfigError: if it is not a positive number of tokens, or cannot be with another option.
    """
    if NAME not in options:
        return None
    tokens, schedule = options.pop(NAME), options.get("schedule", "1f1b")
    if not is_count(tokens):
        raise ConfigError(f"pipeline[{NAME!r}] must be a positive whole number of tokens, got {tokens!r}")
    named = isinstance(schedule, str) and not is_csv(schedule)
    refused = [
        (
            "collate",
            options.get("collate") == "batch",
            "the data collator makes each microbatch; leave it out",
        ),
        (
            "recompute",
            options.get("recompute") == "auto",
            "it measures microbatches of one size; give 'full' or k",
        ),
        ("cp", cp != 1, "it divides rows whose lengths are multiples of 2 * cp; leave it at 1"),
        ("schedule", not named, "a schedule or a file has one number of microbatches; name a family"),
    ]
    for name, given, instead in refused:
        if given:
            raise ConfigError(
                f"pipeline[{NAME!r}] makes microbatches of other lengths, and another number of them, of each batch, and "
                f"pipeline[{name!r}] cannot be used with it: {instead}; or give pipeline['microbatches'] in its place"
            )
    ranks = options.get("ranks", 1)
    # The pipeline refuses what is not a number of ranks.
    budget = TokenBudget(
        tokens, schedule, options.get("virtual_stages"), ranks if is_count(ranks) else 1, replicas
    )
    options["microbatches"] = budget.least
    return budget


def attention_share(layers: Sequence[Layer], config: Any) -> float:
    """Return b / a of the cost a * L + b * L**2 of a row of L tokens in the blocks of a model.

    A forward takes 2 FLOPs for each weight that a token meets, a = 2 N, and 4 L for each layer and element of a head's
    query, b = 4 * layers * heads * width of a head: scores, and their product with the values. A backward takes twice as
    many of both (PaLM, 2204.02311, appendix B). Windows of attention are not counted, nor the embedding and the head.
    """
    config = config.get_text_config()
    blocks, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not blocks or not is_count(heads):  # no attention, or other numbers of heads by layer
        return 0.0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    # Experts are stacked, (experts, out, in), and a token meets some.
    weights = sum(
        p.numel() * min(chosen / len(p), 1.0) if p.dim() == 3 else p.numel()
        for layer in layers
        if layer.role == "block" and layer.module is not None
        for p in layer.module.parameters()
        if p.dim() > 1
    )
    return float(4 * blocks * heads * width / (2 * weights)) if weights else 0.0


@cache
def _number(schedule: str, ranks: int, virtual_stages: int | None, least: int) -> int:
    """Return the smallest number of microbatches, not below another one, that a schedule takes."""
    if isinstance(require_family(schedule), CatalogueFamily):  # these take any
        return least
    last = 2 * least + 4 * ranks
    for number in range(least, last + 1):
        try:
            resolve_schedule(schedule, ranks, number, virtual_stages, None)
        except ScheduleCodeError:
            raise
        except ScheduleError:
            continue
        return number
    raise ConfigError(
        f"the schedule {schedule} takes no number of microbatches from {least} to {last}; give pipeline['microbatches'] in "
        f"place of pipeline[{NAME!r}]"
    )


def _size(example: Any, collator: object) -> tuple[int, int]:
    """Return the number of rows that a collator makes of an example, and their length."""
    columns = example if isinstance(example, Mapping) else {}
    found = {
        str(name): len(value)
        for name, value in columns.items()
        if str(name).endswith("_ids") and name not in _BESIDE and isinstance(value, Sized) and len(value)
    }
    if not found:
        has = f"the columns {', '.join(map(str, columns))}" if columns else f"is a {type(example).__name__}"
        raise BatchError(
            f"an example {'has ' if columns else ''}{has}, and no list of tokens such as input_ids, by whose length "
            f"pipeline[{NAME!r}] makes microbatches; tokenize the data before, or give pipeline['microbatches'] in its place"
        )
    if "input_ids" in found:
        rows, length = 1, found["input_ids"]
    else:
        # As for DPO: a row of the prompt and each answer.
        answers = [size for name, size in found.items() if not name.startswith("prompt")]
        rows = max(1, len(answers))
        length = max(answers, default=0) + sum(
            size for name, size in found.items() if name.startswith("prompt")
        )
    if (most := getattr(collator, "max_length", None)) and package_of(type(collator)) == "trl":
        length = min(length, most)  # those of transformers pad to it, or leave it
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    return rows, -(-length // multiple) * multiple
