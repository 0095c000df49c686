"""What the executor asks of a transport: one rank's end of the directed edges between ranks.

A message is known by the row of the op that takes it (its `tag`: stage, microbatch and direction in one number), so
that no two can be confused. On an edge messages travel in the order in which they are sent; a message that is
taken later than one behind it is kept aside until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.runtime.health.rank_progress import RankProgress
from penstock.stage.values import Message


class Failure(NamedTuple):
    """Word that a rank failed, passed on until every rank knows.

    Attributes:
        rank: who failed first.
        step: in which step.
        message: what it said, with stage, op and microbatch.
    """

    rank: int
    step: int
    message: str


class Channel(Protocol):
    """One rank's end.

    Attributes:
        one_process: whether the ranks are threads of one process, so that what one has found the others have, too.
        words: what the rank is doing (see `status`); the channel writes for whom it waits.
        others: the words of all ranks; None where they cannot be seen.
    """

    one_process: bool
    words: RankProgress
    others: Sequence[RankProgress | None]

    def guilty(self, patience: float = 0.0) -> str | None:
        """Whose process is stopped or has ended, and where it was; None if that is nobody's, as far as can be seen.

        Args:
            patience: seconds to look for.
        """

    def open(self, step: int) -> None:
        """Begin a step; whatever a failed earlier step left behind is dropped."""

    def send(self, peer: int, tag: int, message: Message) -> None:
        """Send to a rank; waits only if more than the edge's capacity were under way.

        Raises:
            PeerError, WaitTimeoutError: as `recv`.
        """

    def recv(self, peer: int, tag: int) -> Message:
        """Wait for the message with this tag from a rank, for `timeout` seconds at the most.

        Raises:
            PeerError: a rank failed.
            WaitTimeoutError: nothing came in time.
        """

    def fail(self, failure: Failure) -> None:
        """Tell every rank that the step failed, in place of what it still waits for."""

    def finish(self) -> None:
        """End a step: let go of what was sent."""

    def close(self) -> None:
        """Release everything; may be called twice."""
