"""Recording of the references and of runs with a mutant, and the judgement of what `penstock.compare` says of them."""

from __future__ import annotations

import re
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

import penstock
from bench.mutants import (
    backward_plants,
    batch_plants,
    forward_plants,
    peer_plants,
    replica_plants,
    update_plants,
)
from bench.mutants.mutant import BY_NAME, MUTANTS, Changes, Mutant
from bench.mutants.subjects import RUNS, Subject, plain
from penstock.base.errors import PenstockError
from penstock.base.scratch import Scratch
from penstock.recordings.compare import Comparison
from penstock.runtime.workers.pool import LocalProcesses

PLANTS = (batch_plants, forward_plants, backward_plants, update_plants, replica_plants, peer_plants)
"""Modules that register mutants as they are imported."""


@dataclass(frozen=True)
class Found:
    """What was found of one mutant.

    Attributes:
        reached: whether a replaced function changed something.
        said: the first difference, or the error that refused the run.
        error: an error that is not Penstock's refusal.
    """

    reached: bool
    detected: bool
    named: bool
    said: str
    refused: bool = False
    error: bool = False

    @property
    def good(self) -> bool:
        """True if the mutant was planted as it should be."""
        return self.reached and not self.error


def record(rank: int, subject: str, mutant: str | None, folder: str) -> tuple[int, str, bool]:
    """Record a run on this process.

    Returns:
        number of changes that the mutant made, the error of the run ("" without one), and whether it is Penstock's.
    """
    torch.set_num_threads(1)
    run, changes = BY_NAME[subject], Changes()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # a mutant gives cause for some
        if mutant is not None:
            stack.enter_context(changes.planted(MUTANTS[mutant].plant))
        try:
            RUNS[run.run](run, Path(folder))
        except PenstockError as error:
            # An error of torch or of a mutant itself, which Penstock passes on with its place, refuses nothing.
            own = error.__cause__ is None or isinstance(error.__cause__, PenstockError)
            return changes.count, f"{type(error).__name__}: {error}", own
        except Exception:
            return changes.count, traceback.format_exc(limit=-2), False
    return changes.count, "", False


class Bench:
    """References by what decides their numbers, and processes for the runs that need some."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._pool = LocalProcesses(4)
        self._references: dict[tuple[object, ...], Path] = {}
        self._runs = 0

    def compare(
        self, subject: Subject, mutant: str | None = None
    ) -> tuple[int, list[tuple[str, bool]], Comparison | None]:
        """Record a run, with a mutant or without, and compare it with its reference.

        Returns:
            number of changes, the errors of processes that had one, and the comparison, if there is none.
        """
        reference = self._reference(subject)
        self._runs += 1
        folder = self._scratch.path / f"run-{self._runs}"
        given = subject.name, mutant, str(folder)
        if subject.processes == 1:
            results = [record(0, *given)]
        else:
            results = self._pool.run(subject.processes, record, *given, timeout=120)
        errors = [(error, refused) for _, error, refused in results if error]
        changes = sum(count for count, *_ in results)
        return changes, errors, None if errors else penstock.compare(reference, folder, scale=subject.scale)

    def find(self, mutant: Mutant) -> Found:
        """Plant a mutant, and judge what is said of it."""
        changes, errors, comparison = self.compare(mutant.subject, mutant.name)
        if errors:
            # Of several processes one has the reason, and the others report that it failed.
            why = mutant.refused or "(?!)"
            told = [text for text, refused in errors if refused and re.search(why, text)]
            foreign = [text for text, refused in errors if not refused]
            text = " ".join((told or foreign or [errors[0][0]])[0].split())
            refused = bool(told) or not foreign
            return Found(bool(changes), refused, bool(told), text, refused=refused, error=not refused)
        assert comparison is not None, "there is no error"
        first = comparison.first
        if first is None:
            return Found(bool(changes), False, False, str(comparison).splitlines()[0])
        named = bool(re.search(mutant.name_is, first.key.name)) and first.key.kind in mutant.kinds
        return Found(bool(changes), True, named, str(first))

    def close(self) -> None:
        """End the processes, and remove the recordings."""
        self._pool.close()
        self._scratch.close()

    def _reference(self, subject: Subject) -> Path:
        if subject.reference not in self._references:
            torch.set_num_threads(1)
            folder = self._scratch.path / f"plain-{len(self._references)}"
            plain(subject, folder)
            self._references[subject.reference] = folder
        return self._references[subject.reference]
