"""What an op's closure is made of: functions that take its inputs and give its outputs away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.stage.compute.runner import Parcels
from penstock.stage.values import Parcel

Take = Callable[[], Parcel]
Give = Callable[[Parcel], None]
TakeAll = Callable[[], Parcels]
GiveAll = Callable[[Parcels], None]


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
        return lambda parcels: only(parcels[0])

    def give(parcels: Parcels) -> None:
        for one, parcel in zip(gives, parcels, strict=True):
            one(parcel)

    return give
