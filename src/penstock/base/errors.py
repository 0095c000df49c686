"""Errors that Penstock raises on purpose, in one tree.

::

    PenstockError
    ├── ConfigError          a value the user gave that cannot be used (exit code 2 on the command line, before a run begins)
    │   ├── ScheduleError    a schedule that is malformed, incomplete, out of order or can deadlock
    │   │   └── ScheduleCodeError  a schedule function of the user that failed, or returned no schedule
    │   ├── SplitError       a model that cannot be split as requested
    │   ├── ProfileError     a model whose layers cannot be profiled
    │   ├── BatchError       a batch that does not fit the microbatches or the labels
    │   └── DataError        training data or a file that cannot be read
    ├── StageError           a stage's own code failed; names rank, stage, op and microbatch
    │   ├── StageShapeError  a stage's output does not fit the next stage
    │   ├── SplitBackwardError  strict=True: a layer's backward cannot be split with the same numbers
    │   └── NonFiniteError   a loss or a gradient is NaN or infinite
    ├── TransportError       a message that did not arrive, or arrived damaged
    │   ├── PeerError         another rank failed first; the message includes that rank's error
    │   └── WaitTimeoutError  a wait timed out
    │       └── HangError     a rank of this process hangs, and its thread cannot be ended
    ├── CallOrderError       ranks that do not make the same calls in the same order
    ├── ReplicaError         copies of one parameter or buffer have diverged
    └── StoppedError         the run stopped on request; its state is saved

``ConfigError`` is also a ``ValueError``, so that code without knowledge of Penstock treats it as a bad argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class PenstockError(Exception):
    """Base class of the errors that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """A value the user gave that cannot be used.

    Attributes:
        begun: whether it ended a training run that had begun, and may have written files.
    """

    begun = False


class ScheduleError(ConfigError):
    """A schedule that is malformed, incomplete, out of order, or can deadlock."""


class ScheduleCodeError(ScheduleError):
    """A schedule function of the user that cannot be imported, failed, or returned no schedule; names file and line."""


class SplitError(ConfigError):
    """A model that cannot be split into stages as requested."""


class ProfileError(ConfigError):
    """A model whose layers cannot be profiled."""


class BatchError(ConfigError):
    """A batch that does not fit the microbatches, or whose input and target do not match."""


class DataError(ConfigError):
    """Training data, or another file, that cannot be read or has the wrong content."""


class StageError(PenstockError):
    """A failure of a stage's own code. The cause is chained and has its own traceback."""


class StageShapeError(StageError):
    """A stage's output that does not fit the next stage."""


class SplitBackwardError(StageError):
    """A layer whose split backward gives other gradients than the full one, while ``strict`` forbids the full one."""


class NonFiniteError(StageError):
    """A loss or a gradient that is NaN or infinite; its message names the stage.

    Attributes:
        stage: first stage with such a number, counted back from the loss; -1 for the norm of all gradients.
        microbatch: microbatch of the number; -1 for a weight's gradient.
        what: description of the number.
    """

    def __init__(
        self, message: str, stage: int = -1, microbatch: int = -1, what: str = "a loss or gradient"
    ) -> None:
        super().__init__(message)
        self.what = what
        self.stage = stage
        self.microbatch = microbatch


class TransportError(PenstockError):
    """A message between ranks that did not arrive, or arrived damaged."""


class PeerError(TransportError):
    """A failure of another rank. The message names the rank and includes its error.

    Attributes:
        failure: the other rank's report, for passing on; None if the connection itself broke.
        told: whether another replica has told its failure, so that no connection broke.
    """

    def __init__(self, message: str, failure: object = None, told: bool = False) -> None:
        super().__init__(message)
        self.failure = failure
        self.told = told


class WaitTimeoutError(TransportError):
    """A wait that timed out.

    Attributes:
        shown: whether the stacks of this process have been printed to stderr.
    """

    shown = False


class HangError(WaitTimeoutError):
    """A rank of this process that hangs. Its thread can only be ended together with the process.

    The message names the rank with its stage, op and microbatch; the stacks of all threads are on stderr.
    """


class CallOrderError(PenstockError):
    """Ranks that do not all make the same calls of a pipeline in the same order, such as ``step`` and ``full_state_dict``.

    The ranks that notice raise it; all other ranks raise a `PeerError` with its text, which names the ranks and their calls.
    """


class ReplicaError(PenstockError):
    """Copies of one parameter or buffer, on replicas or on ranks with the same stage, that have diverged.

    Every rank raises it, with the same message. No weight has changed since; load a checkpoint to continue.

    Attributes:
        name: name of the first parameter or buffer that differs.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class StoppedError(PenstockError):
    """A run that stopped after a step on request; the message says how to continue it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def describe_error(error: BaseException) -> str:
    """Return an error's class and message; its class alone if the message is empty."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@contextmanager
def os_errors_as(kind: type[PenstockError], text: str) -> Iterator[None]:
    """Return a context in which an error of the operating system becomes one of a kind, with its reason behind a text."""
    try:
        yield
    except OSError as error:
        raise kind(f"{text}: {error.strerror or error}") from error


def is_gloo_timeout(error: RuntimeError) -> bool:
    """Return whether gloo raised an error because a wait timed out; else the connection broke."""
    return "imed out" in str(error)  # "Timed out" or "timed out"; gloo has no class of its own for it


def nearest(given: str, allowed: list[str], cutoff: float = 0.6) -> str:
    """Return ``' (did you mean ...?)'`` with the closest allowed names, or an empty string."""
    import difflib

    close = difflib.get_close_matches(given, allowed, n=3, cutoff=cutoff)
    return f" (did you mean {' or '.join(repr(name) for name in close)}?)" if close else ""
