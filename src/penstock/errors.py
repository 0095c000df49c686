"""Every error Penstock raises on purpose, in one tree.

::

    PenstockError
    ├── ConfigError          a value the user gave that cannot be used (exit code 2 on the command line)
    │   ├── ScheduleError    a schedule that is malformed, incomplete, out of order or can deadlock
    │   ├── SplitError       a model that cannot be cut as asked
    │   ├── BatchError       a batch that does not fit the microbatches or the labels
    │   └── DataError        training data or a file that cannot be read
    ├── StageError           a stage's own code failed: names rank, stage, op and microbatch
    │   ├── StageShapeError  a stage handed over something the next one cannot take
    │   ├── SplitBackwardError  strict=True: a layer's backward cannot be split with the same numbers
    │   └── NonFiniteError   a loss or a gradient is NaN or infinite
    ├── TransportError       a message that did not come, or came wrong
    │   ├── PeerError         another rank failed first; the message carries what it said
    │   └── WaitTimeoutError  a bounded wait ran out
    │       └── HangError     a rank of this process hangs, and cannot be ended
    ├── ReplicaError         copies of one parameter or buffer are no longer the same
    └── StoppedError         the run was asked to stop and did; its state is saved

``ConfigError`` is also a ``ValueError`` so that code that knows nothing of Penstock reacts as it would to
any bad argument.
"""

from __future__ import annotations


class PenstockError(Exception):
    """The root of everything Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """A value the user gave that cannot be used."""


class ScheduleError(ConfigError):
    """A schedule that is malformed, incomplete, out of order, or can deadlock."""


class SplitError(ConfigError):
    """A model that cannot be cut into stages as asked."""


class BatchError(ConfigError):
    """A batch that does not fit the microbatches or the labels."""


class DataError(ConfigError):
    """Training data, or another file, that cannot be read as what it should be."""


class StageError(PenstockError):
    """A stage's own code failed. The cause is chained and has its own traceback."""


class StageShapeError(StageError):
    """A stage handed over something the next stage cannot take."""


class SplitBackwardError(StageError):
    """The split backward of a layer gives other gradients than the full one, and ``strict`` forbids to fall back."""


class NonFiniteError(StageError):
    """A loss or a gradient is NaN or infinite.

    Attributes:
        stage: where it was seen first, looking back from the loss; -1 for the norm of all gradients.
        microbatch: of which; -1 for a weight's gradient.
        what: the number that is not finite, in words.
    """

    def __init__(
        self, message: str, stage: int = -1, microbatch: int = -1, what: str = "a loss or gradient"
    ) -> None:
        super().__init__(message)
        self.what = what
        self.stage = stage
        self.microbatch = microbatch


class TransportError(PenstockError):
    """A message between ranks did not come, or came wrong."""


class PeerError(TransportError):
    """Another rank failed first. The message names the rank and carries what it said.

    Attributes:
        failure: the word that came, to be passed on; None if the connection itself broke.
    """

    def __init__(self, message: str, failure: object = None) -> None:
        super().__init__(message)
        self.failure = failure


class WaitTimeoutError(TransportError):
    """A bounded wait ran out.

    Attributes:
        shown: whether the stacks of this process are on stderr already.
    """

    shown = False


class HangError(WaitTimeoutError):
    """A rank of this process hangs. Its thread cannot be ended: only the end of the process does that.

    The message names the rank, and the stage, op and microbatch it is in; the stacks of all threads are on stderr.
    """


class ReplicaError(PenstockError):
    """Copies of one parameter or buffer (on replicas, on ranks that hold the same stage) are no longer the same.

    Every rank raises it. No weight was changed since; load a checkpoint to continue.

    Attributes:
        name: of the first parameter or buffer that differs.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class StoppedError(PenstockError):
    """The run was asked to stop, did so after a step, and can go on from there; says how."""


def nearest(given: str, allowed: list[str]) -> str:
    """Return ``' (did you mean ...?)'`` with the closest allowed names, or an empty string."""
    import difflib

    close = difflib.get_close_matches(given, allowed, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(repr(name) for name in close)}?)" if close else ""
