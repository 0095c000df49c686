"""What a failed rank says: where it was, what it waited for, and who keeps everybody waiting."""

from __future__ import annotations

from penstock.errors import PeerError, ReplicaError, StageError, TransportError, WaitTimeoutError
from penstock.runtime.health.hang import dump_stacks
from penstock.runtime.health.rank_progress import (
    ROW,
    STEP,
    WAITS,
    RankProgress,
    awaited,
    culprit,
    place_of,
    rows_of,
)
from penstock.runtime.transport.channel import Channel
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.stage.compute.runner import Messages
from penstock.stage.values import describe


def explained(
    error: BaseException,
    rank: int,
    program: Program,
    channel: Channel | None,
    words: RankProgress,
    inputs: Messages | None,
) -> BaseException:
    """The error to raise: it names rank, stage, microbatch and op, unless another rank has named its own.

    Args:
        error: what stopped the rank.
        rank: which.
        program: of the step.
        channel: its end of the transport.
        words: what it was doing.
        inputs: what its last forward took; None if there was none.
    """
    if isinstance(error, TransportError) and channel is not None and not channel.one_process:
        _show(error, rank, channel)
    if not isinstance(error, Exception) or (isinstance(error, PeerError) and error.failure is not None):
        return error
    if isinstance(error, ReplicaError):  # no rank's own fault
        return error
    where, given = _where(rank, program, words), ""
    if isinstance(error, TransportError):
        text = f"{error}{_awaited(program, words)} (at {where})"
        if channel is not None:
            # Where a connection broke, somebody is gone, or will be in a moment.
            gone = channel.guilty(1.0 if isinstance(error, PeerError) else 0.0)
            text += _blame(program, channel, words, str(error), gone)
        return type(error)(text)
    row = words[ROW]
    if inputs is not None and row >= 0 and program.schedule.kind[row] == Kind.F:
        given = f" (the stage's input was {describe(inputs[0])})"
    kind = type(error) if isinstance(error, StageError) else StageError
    return kind(f"{where}: {type(error).__name__}: {error}{given}")


def _show(error: TransportError, rank: int, channel: Channel) -> None:
    """Show what this process was doing, if it waited in vain, or somebody is stopped for whom all wait."""
    late = isinstance(error, WaitTimeoutError) and not error.shown
    if late or " is stopped " in (channel.guilty() or ""):
        dump_stacks(f"rank {rank}: {error}")


def _where(rank: int, program: Program, words: RankProgress) -> str:
    step, row, schedule = words[STEP], words[ROW], program.schedule
    if row < 0:
        return f"rank {rank}, at the end of step {step}"
    op = schedule.op(row)
    ops = " and ".join(str(schedule.op(r)) for r in rows_of(program, row))
    return f"rank {rank}, stage {op.stage}, microbatch {op.microbatch}, op {ops} of step {step}"


def _awaited(program: Program, words: RankProgress) -> str:
    found = awaited(program, words[ROW], words[WAITS] - 1)
    return f"; it was to send what {found}" if found else ""


def _blame(program: Program, channel: Channel, words: RankProgress, said: str, gone: str | None) -> str:
    """Who it is that the others wait for, and what that rank does."""
    if gone is not None:
        return "" if gone in said else f". {gone[:1].upper()}{gone[1:]}"
    first = words[WAITS] - 1
    if not 0 <= first < len(channel.others):
        return ""
    rank = culprit(first, channel.others)
    theirs = channel.others[rank]
    return "" if theirs is None else f". Rank {rank} is {place_of(program, theirs)}"
