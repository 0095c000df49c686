"""Counts with their nouns."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 rank" or "2 ranks"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count} {noun}{ending}"


def describe_size(ranks: int, stages: int, microbatches: int) -> str:
    """Return the size of a schedule, such as "2 ranks, 4 stages, 8 microbatches"."""
    return f"{plural(ranks, 'rank')}, {plural(stages, 'stage')}, {plural(microbatches, 'microbatch')}"
