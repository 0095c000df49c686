"""What an op's closure is made of: functions that take its inputs and give its outputs away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.stage.compute.runner import Messages
from penstock.stage.values import Message

Take = Callable[[], Message]
Give = Callable[[Message], None]
TakeAll = Callable[[], Messages]
GiveAll = Callable[[Messages], None]


def one_after_another(parts: Sequence[Callable[[], None]]) -> None:
    """Call all of them."""
    for part in parts:
        part()


def all_taken(takes: Sequence[Take]) -> TakeAll:
    """One function that takes everything an op needs."""
    if len(takes) == 1:
        only = takes[0]
        return lambda: (only(),)
    return lambda: tuple([take() for take in takes])


def all_given(gives: Sequence[Give]) -> GiveAll:
    """One function that gives everything an op makes."""
    if len(gives) == 1:
        only = gives[0]
        return lambda messages: only(messages[0])

    def give(messages: Messages) -> None:
        for one, message in zip(gives, messages, strict=True):
            one(message)

    return give
