"""Families of the user: a function of the counts that returns a schedule, or the ops of every rank.

The function's code is not ours, so whatever it raises or returns is reported with the file and line it comes from.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from penstock.base.errors import ScheduleCodeError, ScheduleError, first_line, nearest
from penstock.schedule.families.family import COUNTS, Family
from penstock.schedule.ops import Kind, Op, Pair, parse_op
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import from_lists

_MAX_OPS = 1_000_000  # of a rank; a generator that has more is taken for an endless one
_PENSTOCK = str(Path(__file__).parents[2])
_IMPORTLIB = str(Path(importlib.__file__).parent)
_MOST = 10**9

RankOps = str | Iterable[Op | Pair | str]
"""Ops of one rank, in order."""

ScheduleFunction = Callable[..., Schedule | Iterable[RankOps]]
"""A function of the keywords ``ranks`` and ``microbatches``, and of options, that returns a schedule or every rank's ops."""


@dataclass(frozen=True)
class OwnFamily(Family):
    """A family whose function the user wrote.

    The function is called with keywords: ``rule(ranks=..., microbatches=...)``, with ``virtual_stages`` if it has a
    parameter of that name, and with the options that were given. It returns a `Schedule`, or the ops of every rank: a text
    such as ``"0F0 0F1 0B0 0B1"``, or an iterable of `Op`, `Pair` and texts of one op. It refuses counts by a `ValueError`.
    """

    rule: ScheduleFunction

    def __post_init__(self) -> None:
        """Raise `ScheduleCodeError` unless the function can be called with the counts."""
        try:
            parameters = self.parameters
        except (TypeError, ValueError) as error:
            raise ScheduleCodeError(f"{self.name} cannot be a schedule: {first_line(error)}") from error
        by_keyword = [
            name
            for name, parameter in parameters.items()
            if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        ]
        if not set(COUNTS[:2]) <= set(by_keyword):
            taken = f"has {', '.join(parameters)}" if parameters else "has none"
            raise ScheduleCodeError(
                f"{self.name} must have the parameters ranks and microbatches, and {taken} ({where_defined(self.rule)})"
            )

    @property
    def default_virtual_stages(self) -> int:
        parameter = self.parameters.get("virtual_stages")
        default = 1 if parameter is None else parameter.default
        return default if isinstance(default, int) and default >= 1 else 1

    def make(
        self, ranks: int, microbatches: int, virtual_stages: int | None, options: Mapping[str, object]
    ) -> Schedule:
        counts: dict[str, object] = {"ranks": ranks, "microbatches": microbatches}
        if self.chooses_virtual_stages:
            counts["virtual_stages"] = (
                self.default_virtual_stages if virtual_stages is None else virtual_stages
            )
        needed = [
            name
            for name in self.options
            if self.parameters[name].default is inspect.Parameter.empty and name not in options
        ]
        if needed:
            raise ScheduleError(f"{self.name} needs the option {needed[0]}; give it, as in {needed[0]}=VALUE")
        asked = ", ".join(f"{name}={value}" for name, value in {**counts, **options}.items())
        with _user_code(f"{self.name} with {asked}", self.rule):
            made: object = self.rule(**counts, **options)  # the user's code may return anything
            if not isinstance(made, Schedule | str | bytes | Mapping) and isinstance(made, Iterable):
                # One more than there may be, so that an endless generator is noticed.
                made = [ops if isinstance(ops, str) else _listed(ops) for ops in islice(made, ranks + 1)]
        schedule = self._schedule(made, ranks, microbatches)
        held = schedule.stages / schedule.ranks
        if not self.chooses_virtual_stages and virtual_stages not in (None, 1, held):
            raise ScheduleError(
                f"{self.name} has {held:g} stages per rank, got virtual_stages={virtual_stages}; leave it out, or give the "
                f"function a parameter virtual_stages ({where_defined(self.rule)})"
            )
        return schedule

    def _schedule(self, made: object, ranks: int, microbatches: int) -> Schedule:
        """Return the schedule that the function has returned, as a schedule or as ops."""
        if isinstance(made, Schedule):
            if (made.ranks, made.microbatches) != (ranks, microbatches):
                raise self._wrong(
                    f"a schedule of {made.ranks} ranks and {made.microbatches} microbatches, not of {ranks} and "
                    f"{microbatches}"
                )
            if not _fits(made):
                raise self._wrong(
                    "a Schedule whose columns do not fit each other; make it by Schedule.from_ops or Schedule.from_columns"
                )
            return replace(made, name=self.name)
        if not isinstance(made, list):
            raise self._wrong(f"{_described(made)}, not a Schedule or a list with the ops of every rank")
        if len(made) != ranks:
            count = len(made) if len(made) < ranks else f"more than {ranks}"
            raise self._wrong(f"{count} lists of ops with ranks={ranks}; return one for each rank")
        lists = [self._ops(rank, ops) for rank, ops in enumerate(made)]
        try:
            return from_lists(self.name, lists, microbatches)
        except ScheduleError as error:
            raise ScheduleCodeError(f"{error} ({where_defined(self.rule)})") from error

    def _ops(self, rank: int, ops: object) -> list[Op | Pair]:
        if isinstance(ops, str):
            ops = [word for word in re.split(r"[\s,]+", ops) if word]
        if not isinstance(ops, list):
            raise self._wrong(f"{_described(ops)} for rank {rank}, not a list of ops or a text of ops")
        if not ops:
            raise self._wrong(f"no ops for rank {rank}")
        if len(ops) > _MAX_OPS:
            raise self._wrong(f"more than {_MAX_OPS:,} ops for rank {rank}")
        parsed = []
        for number, op in enumerate(ops):
            try:
                parsed.append(_op(op))
            except ScheduleError as error:
                raise self._wrong(f"no op at place {number} of rank {rank}: {error}") from error
        return parsed

    def _wrong(self, returned: str) -> ScheduleCodeError:
        return ScheduleCodeError(f"{self.name} returned {returned} ({where_defined(self.rule)})")


def _fits(schedule: Schedule) -> bool:
    """Return whether a schedule's columns are as long as its offsets say, and of whole numbers."""
    size, offsets = len(schedule), np.asarray(schedule.offsets)
    columns = (schedule.stage, schedule.kind, schedule.microbatch, schedule.paired)
    return (
        all(isinstance(column, np.ndarray) and column.shape == (size,) for column in columns)
        and all(column.dtype.kind in "iu" for column in columns[:3])
        and schedule.paired.dtype.kind == "b"
        and offsets.shape == (schedule.ranks + 1,)
        and offsets[0] == 0
        and offsets[-1] == size
        and bool((np.diff(offsets) >= 0).all())
    )


def load_function(module: str, path: str, name: str) -> ScheduleFunction:
    """Import a module and return a function of it."""
    try:
        with _user_code(f"{name}, when {module} was imported,", None):
            found: object = importlib.import_module(module)
    except ScheduleCodeError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."):
            raise ScheduleCodeError(
                f"{name}: there is no module {cause.name!r} on Python's path or in the current folder"
            ) from error
        raise
    home = getattr(found, "__file__", None)
    for attribute in path.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            at = f" ({_short(home)})" if home else ""
            near = nearest(attribute, [name for name in dir(found) if not name.startswith("_")])
            raise ScheduleCodeError(f"{name}: the module {module}{at} has no {path!r}{near}") from None
    if not callable(found):
        raise ScheduleCodeError(f"{name} must be a function, got {_described(found)}")
    return cast(ScheduleFunction, found)


def where_defined(function: Callable[..., object]) -> str:
    """Return the file and first line of a function, as in ``zigzag.py, line 3``; its name if it has none."""
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return repr(function) if code is None else f"{_short(code.co_filename)}, line {code.co_firstlineno}"


@contextmanager
def _user_code(what: str, function: Callable[..., object] | None) -> Iterator[None]:
    """Turn errors of the user's code into errors that name its file and line."""
    try:
        yield
    # SystemExit, too: a module that calls sys.exit() when it is imported would end the run without a word.
    except (Exception, SystemExit) as error:
        where = _where_raised(error, function)
        if isinstance(error, ValueError) and function is not None:
            raise ScheduleError(f"{what}: {first_line(error)} ({where})") from error
        raise ScheduleCodeError(
            f"{what} failed with {type(error).__name__}: {first_line(error)} ({where})"
        ) from error


def _where_raised(error: BaseException, function: Callable[..., object] | None) -> str:
    """Return file and line of the last call in the user's code that led to an error."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short(error.filename)}, line {error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PENSTOCK, _IMPORTLIB, "<frozen"))
    ]
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    of_function = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    for frame in reversed(of_function or frames):
        return f"{_short(frame.filename)}, line {frame.lineno}"
    return where_defined(function) if function is not None else "in no file"


def _short(path: str) -> str:
    """Return a path relative to the current folder if it is below it."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative


def _listed(ops: object) -> object:
    if not isinstance(ops, Iterable) or isinstance(ops, bytes | Mapping):
        return ops
    return list(islice(ops, _MAX_OPS + 1))


def _op(op: object) -> Op | Pair:
    if isinstance(op, str):
        return parse_op(op)
    if isinstance(op, Pair):
        return Pair(_whole(op.forward), _whole(op.backward))
    if isinstance(op, Op):
        return _whole(op)
    raise ScheduleError(f"{_described(op)} is not an op; an op is an Op, a Pair, or a text such as '3F0'")


def _whole(op: Op) -> Op:
    """Return an op with plain numbers."""
    kind: object = getattr(op, "kind", op)  # the user may give anything
    if not isinstance(kind, Kind):
        raise ScheduleError(f"the kind of an op must be one of Kind.F, B, I, W, R, got {kind!r}")
    try:
        # numpy's integers have __index__, floats have not.
        numbers = [op.stage.__index__(), op.microbatch.__index__()]
    except (AttributeError, TypeError):
        numbers = [-1]
    if not all(0 <= number < _MOST for number in numbers):
        raise ScheduleError(
            f"stage and microbatch must be whole numbers from 0, got {op.stage!r} and {op.microbatch!r}"
        )
    return Op(numbers[0], op.kind, numbers[1])


def _described(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
