"""Mutants, and how one is planted: functions of a module are replaced while a run is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.mutants.subjects import SUBJECTS, Subject
from penstock.recordings.files import Kind

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
Plant = Callable[["Changes"], None]

BY_NAME = {subject.name: subject for subject in SUBJECTS}


class Changes:
    """Replaced functions, and the number of times that one of them changed something."""

    def __init__(self) -> None:
        self.count = 0
        self._stack = ExitStack()

    def replace(self, owner: Any, name: str, make: Make) -> None:
        """Replace a function or a method: `make` gets the right one, and returns the wrong one."""
        original = vars(owner)[name]
        self._stack.callback(setattr, owner, name, original)
        setattr(owner, name, make(original))

    def made(self, wrong: Any, right: Any = None) -> Any:
        """Return a wrong value in the place of the right one; a tensor that has the same values is no change."""
        same = isinstance(wrong, Tensor) and isinstance(right, Tensor) and wrong.dtype == right.dtype
        if not (same and wrong.shape == right.shape and bool((wrong == right).all())):
            self.count += 1  # after the comparison, in which other threads may count
        return wrong

    @contextmanager
    def planted(self, plant: Plant) -> Iterator[None]:
        """Return a context in which the functions that `plant` replaces are the wrong ones."""
        with self._stack:
            plant(self)
            yield


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A small wrong change.

    Attributes:
        source: where the idea comes from.
        name_is: regular expression of the modules or parameters that are right to name first.
        kinds: what of them is wrong first.
        refused: regular expression of what an error of Penstock's own must name; empty if there is no such error.
    """

    name: str
    source: str
    subject: Subject
    name_is: str
    kinds: tuple[Kind, ...]
    plant: Plant
    refused: str = ""


MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str, source: str, subject: str, name_is: str, *kinds: Kind, refused: str = ""
) -> Callable[[Plant], Plant]:
    """Return a decorator of a function that plants a mutant."""

    def register(plant: Plant) -> Plant:
        assert name not in MUTANTS, name
        MUTANTS[name] = Mutant(
            name=name,
            source=source,
            subject=BY_NAME[subject],
            name_is=name_is,
            kinds=kinds,
            plant=plant,
            refused=refused,
        )
        return plant

    return register
