"""A simulated change of a step, and the lines that make it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChangeLines:
    """The lines that make a change.

    Attributes:
        train: options of ``penstock train``; empty if it has none for the change.
        pipeline: keywords of `Pipeline`; empty for the step as it is.
    """

    train: str = ""
    pipeline: str = ""

    @property
    def all(self) -> list[str]:
        """Both as they are written, without those that are missing."""
        train = [f"penstock train {self.train}"] if self.train else []
        return [*train, f"Pipeline(..., {self.pipeline})"] if self.pipeline else train


@dataclass(frozen=True, kw_only=True)
class Change:
    """A simulated change of a step.

    Attributes:
        words: the change, as in "with zb-v in the same memory".
        memory: the most that a rank holds for backwards, in the unit of the trace's `held`; in forwards of a present stage,
            if the trace does not tell.
        makespan: simulated makespan, in the trace's unit of time.
        bubble: idle share of ranks × makespan.
        split: number of blocks of every stage (of layers, if the trace does not tell blocks) where they move; else None.
    """

    words: str
    schedule: str
    virtual_stages: float
    memory: float
    makespan: float
    bubble: float
    split: tuple[int, ...] | None = None
    lines: ChangeLines = ChangeLines()
