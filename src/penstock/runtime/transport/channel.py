"""The interface that the executor needs of a transport: one rank's end of the directed edges between ranks.

A message is identified by the row of the op that takes it (its `tag`: stage, microbatch and direction in one number), so no
two can be confused. Messages travel on an edge in the order in which they are sent. A message that arrives before the one
that is awaited is kept until its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.base.encoding import sendable
from penstock.runtime.health.rank_progress import RankProgress
from penstock.stage.values import Message


@sendable
class Failure(NamedTuple):
    """Notice that a rank failed, passed on until every rank has it."""

    rank: int
    step: int
    message: str


class Channel(Protocol):
    """One rank's end of its edges.

    Attributes:
        one_process: whether the ranks are threads of one process, so that what one rank learns the others know too.
    """

    one_process: bool
    progress: RankProgress
    all_progress: Sequence[RankProgress | None]
    hosts: Sequence[str]

    def find_failed(self, patience: float = 0.0) -> str | None:
        """Describe the process that is stopped or has ended, and where it was; None if none is seen to be."""

    def open(self, step: int, trains: bool = True, microbatches: int = 0) -> None:
        """Begin a step, and drop the messages that a failed step left."""

    def send(self, peer: int, tag: int, message: Message) -> None:
        """Send a message to a rank; waits only while as many as the edge's capacity are under way."""

    def recv(self, peer: int, tag: int) -> Message:
        """Wait for the message with this tag from a rank."""

    def fail(self, failure: Failure) -> None:
        """Tell every rank that the step failed, in place of the messages it waits for."""

    def drain(self, senders: Sequence[int]) -> None:
        """Take what is still sent in a step that failed, so that no rank waits to send.

        Args:
            senders: the sender of each message that this rank takes in a step, in the order in which it takes them.
        """

    def finish(self) -> None:
        """End a step, and release the messages that were sent."""

    def close(self) -> None:
        """Release everything; may be called twice."""
