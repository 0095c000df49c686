"""A simulated change of a step, and the lines that make it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChangeLines:
    """The lines that make a change."""

    train: str = ""  # options of penstock train; empty if it has none for the change
    pipeline: str = ""  # keywords of `Pipeline`; empty for the step as it is

    @property
    def all(self) -> list[str]:
        """Both as they are written, without those that are missing."""
        train = [f"penstock train {self.train}"] if self.train else []
        return [*train, f"Pipeline(..., {self.pipeline})"] if self.pipeline else train


@dataclass(frozen=True)
class Change:
    """A simulated change of a step."""

    words: str  # the change, as in "with zb-v in the same memory"
    schedule: str
    virtual_stages: float
    # The most that a rank holds for backwards, in the unit of the trace's `held`; in forwards of a present
    # stage, if the trace does not tell.
    memory: float
    makespan: float  # simulated makespan, in the trace's unit of time
    bubble: float  # idle share of ranks × makespan
    # Blocks of every stage (layers, if the trace does not tell blocks) where they move.
    split: tuple[int, ...] | None = None
    lines: ChangeLines = ChangeLines()
