"""Options of a trainer's pipeline, and the mesh that they make of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from penstock.base.counts import is_count
from penstock.base.errors import ConfigError, nearest
from penstock.huggingface.token_budget import NAME as TOKENS
from penstock.parallel.mesh import MeshShape
from penstock.runtime.pipeline import Pipeline

_OURS = {
    "loss_fn": "the model's own loss is used",
    "reduction": "losses are weighted by num_items_in_batch, as Trainer does",
    "seed": "set it in the training arguments",
    "autocast": "set bf16=True in the training arguments",
    "device": "it is the training arguments' device; devices=[...] gives each rank of one process its own",
    "mesh": "give ranks, the size of one pipeline; processes beyond them are replicas of it",
    "parallel": "the trainer sets it",
}
"""Options of `Pipeline` that the trainer sets, and what to do instead of giving them."""


def require_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of a trainer's pipeline is unknown, or the microbatches are missing."""
    for name, instead in _OURS.items():
        if name in options:
            raise ConfigError(f"pipeline[{name!r}] cannot be given to a trainer: {instead}")
    require_known_options(options)
    if "microbatches" not in options and TOKENS not in options:
        raise ConfigError(
            'pipeline must say how many microbatches, as in {"ranks": 2, "microbatches": 8}, or how many tokens each may '
            f'have, padding included, as in {{"ranks": 2, "{TOKENS}": 4096}}'
        )
    if "microbatches" in options and TOKENS in options:
        raise ConfigError(
            f"give pipeline['microbatches'] or pipeline[{TOKENS!r}], not both: with the latter a batch has as many "
            "microbatches as its examples need, and at least as many as there are ranks"
        )


def require_known_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option is neither one of a pipeline nor of a trainer's."""
    more = [TOKENS, "devices", "report", "trace_every", "collate", "optimizer", "ep", "cp"]
    allowed = [*signature(Pipeline).parameters, *more]
    for name in options:
        if name not in allowed:
            raise ConfigError(
                f"pipeline has no option {name!r}{nearest(name, allowed)}; it takes Pipeline's options, "
                f"{', '.join(more[:-1])} and {more[-1]}"
            )


def trainer_mesh(options: Mapping[str, Any], processes: int) -> MeshShape:
    """Return the mesh of a trainer's processes: replicas of a pipeline whose ranks are processes.

    Raises:
        ConfigError: if the ranks do not divide the processes.
    """
    ranks, ep, cp = options.get("ranks", processes), options.get("ep", 1), options.get("cp", 1)
    if not is_count(cp):
        raise ConfigError(f"pipeline['cp'] must be a positive number of processes, got {cp!r}")
    if not is_count(ranks) or processes % (ranks * cp):
        times = f" x cp {cp}" if cp > 1 else ""
        raise ConfigError(
            f"pipeline['ranks'] is {ranks!r}{times}, and there are {processes} processes; start a multiple of the "
            "ranks, one for each rank of each replica"
        )
    return MeshShape(pp=ranks, dp=processes // (ranks * cp), ep=ep, cp=cp)
