"""A predicted layout beside another one, and what a whole training takes with it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.base.counts import plural
from penstock.base.errors import ConfigError
from penstock.plan.prediction import Prediction
from penstock.schedule.ops import Kind
from penstock.show.units import interval_text, size_text, time_text

_DAY, _HOUR = 86400.0, 3600.0


class Messages(NamedTuple):
    """Activations and gradients that go from one rank of a pipeline to another in a step."""

    number: int
    size: float  # bytes on one device of each rank


def messages_of(plan: Prediction) -> Messages:
    """Return the messages of a step that is predicted in full."""
    program, costs = plan.program, plan.costs
    assert program is not None, "the prediction is of a whole step"
    assert costs is not None, "the prediction is of a whole step"
    schedule, source = program.schedule, program.source
    sent = (source >= 0) & (program.rank[source] != program.rank)
    forward = sent & (schedule.kind == Kind.F)
    # A forward receives what the stage before hands on, a backward the gradient of what its own stage hands on.
    boundary = np.concatenate((schedule.stage[forward] - 1, schedule.stage[sent & ~forward]))
    return Messages(len(boundary), float(costs.messages[boundary].sum()))


def side_by_side(today: Prediction, proposed: Prediction) -> list[tuple[str, str, str]]:
    """Return the names and figures of a layout beside those of another one; hosts' bytes if either has a store."""
    stored = any(any(plan.store_room) for plan in (today, proposed))
    pairs = zip(figures(today, stored), figures(proposed, stored), strict=True)
    return [(name, of_today, of_proposed) for (name, of_today), (_, of_proposed) in pairs]


def figures(plan: Prediction, stored: bool = False) -> list[tuple[str, str]]:
    """Return the names and figures of a layout.

    Args:
        stored: whether bytes that a store takes of a host are among them (default False).
    """
    rooms = plan.store_room._asdict() if stored else {}
    messages = messages_of(plan)
    fits = "" if plan.fits else f", does NOT fit in {size_text(plan.capacity)}"
    return [
        ("layout", str(plan.layout)),
        ("step", f"{time_text(plan.step_seconds)} ({interval_text(plan.low, plan.high)})"),
        (f"{plan.unit}/s", f"{plan.tokens_per_second:,.0f}"),
        ("fullest rank", f"{size_text(plan.peak_bytes)}{fits}"),
        *((f"store, {where} of a host", size_text(size)) for where, size in rooms.items()),
        ("bubble", f"{plan.bubble:.1%}"),
        ("messages", f"{messages.number:,}, {size_text(messages.size)} a step and pipeline"),
        ("devices", f"{plan.layout.devices:,}"),
    ]


class Training(NamedTuple):
    """Days and hours times devices that a training over a number of tokens takes with one layout."""

    tokens: float
    days: float
    device_hours: float

    @classmethod
    def of(cls, plan: Prediction, tokens: float) -> Training:
        """Return the training over so many tokens.

        Raises:
            ConfigError: if samples of the model have no tokens.
        """
        if plan.unit != "tokens":
            raise ConfigError(
                f"--tokens needs a model whose samples have tokens, and this one's have none; a step takes "
                f"{time_text(plan.step_seconds)}"
            )
        seconds = tokens / plan.tokens_per_second
        return cls(tokens, seconds / _DAY, plan.layout.devices * seconds / _HOUR)

    def text(self, plan: Prediction) -> str:
        """Return a sentence about the training; `plan` is the prediction that it is of."""
        either = ""
        if plan.low is not None and plan.high is not None:
            low, high = (self.days * each / plan.step_seconds for each in (plan.low, plan.high))
            either = f" ({low:,.3g} to {high:,.3g})"
        return (
            f"{self.tokens:,.0f} tokens take {self.days:,.3g} days{either} and {self.device_hours:,.0f} device hours on "
            f"{plural(plan.layout.devices, 'device')}."
        )
