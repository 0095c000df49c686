"""The error that a failed rank raises: where it was, what it waited for, and which rank keeps the others waiting."""

from __future__ import annotations

from penstock.base.errors import (
    CallOrderError,
    PeerError,
    ReplicaError,
    StageError,
    TransportError,
    WaitTimeoutError,
    describe_error,
)
from penstock.runtime.health.hang import dump_stacks
from penstock.runtime.health.rank_progress import (
    ROW,
    STEP,
    WAITS,
    RankProgress,
    awaited_output,
    blocking_rank,
    describe_progress,
    rows_of,
)
from penstock.runtime.transport.channel import Channel, Failure
from penstock.schedule.ops import Kind
from penstock.schedule.program import Program
from penstock.stage.compute.runner import Messages
from penstock.stage.values import describe


def explain_error(
    error: BaseException,
    rank: int,
    program: Program,
    channel: Channel | None,
    progress: RankProgress,
    inputs: Messages | None,
) -> BaseException:
    """Return the error to raise: it names rank, stage, microbatch and op, unless it comes from another rank."""
    if isinstance(error, TransportError) and channel is not None and not channel.one_process:
        _show_stacks(error, rank, channel)
    if not isinstance(error, Exception) or (isinstance(error, PeerError) and error.failure is not None):
        return error
    if isinstance(error, ReplicaError):  # no single rank is at fault
        return error
    where = _where(rank, program, progress)
    if isinstance(error, CallOrderError):
        return CallOrderError(f"{error} (at {where})")
    if isinstance(error, TransportError):
        output = awaited_output(program, progress[ROW], progress[WAITS] - 1)
        awaited = f"; it was to send the output of {output}" if output else ""
        text = f"{error}{awaited} (at {where})"
        if channel is not None:
            # A connection may break a moment before its process has ended.
            broke = isinstance(error, PeerError) and not error.told
            failed = channel.find_failed(1.0 if broke else 0.0)
            text += _describe_blocker(program, channel, progress, str(error), failed)
        return type(error)(text)
    row, shapes = progress[ROW], ""
    if inputs is not None and row >= 0 and program.schedule.kind[row] == Kind.F:
        shapes = f" (the stage's input was {describe(inputs[0])})"
    kind = type(error) if isinstance(error, StageError) else StageError
    return kind(f"{where}: {describe_error(error)}{shapes}")


def failure_of(
    error: BaseException,
    report: BaseException,
    rank: int,
    step: int,
    program: Program,
    progress: RankProgress,
) -> Failure:
    """Return the notice for the other ranks: the first cause, by rank, stage, microbatch and op."""
    if isinstance(error, PeerError) and isinstance(error.failure, Failure):
        return error.failure
    if isinstance(report, Exception):
        return Failure(rank, step, str(report) or type(report).__name__)
    return Failure(rank, step, f"{_where(rank, program, progress)}: {describe_error(report)}")


def _show_stacks(error: TransportError, rank: int, channel: Channel) -> None:
    """Write this process's stacks if its wait timed out, or another process is stopped."""
    late = isinstance(error, WaitTimeoutError) and not error.shown
    if late or " is stopped " in (channel.find_failed() or ""):
        dump_stacks(f"rank {rank}: {error}")


def _where(rank: int, program: Program, progress: RankProgress) -> str:
    step, row, schedule = progress[STEP], progress[ROW], program.schedule
    if row < 0:
        return f"rank {rank}, at the end of step {step}"
    op = schedule.op(row)
    ops = " and ".join(str(schedule.op(r)) for r in rows_of(program, row))
    return f"rank {rank}, stage {op.stage}, microbatch {op.microbatch}, op {ops} of step {step}"


def _describe_blocker(
    program: Program, channel: Channel, progress: RankProgress, text: str, failed: str | None
) -> str:
    """Describe the failed process, or else the rank that keeps the others waiting; empty if `text` names it already."""
    awaited = progress[WAITS] - 1
    rank = (
        blocking_rank(awaited, channel.all_progress) if 0 <= awaited < len(channel.all_progress) else awaited
    )
    unseen = 0 <= rank < len(channel.hosts) and channel.all_progress[rank] is None
    # A process of this host with an error of its own has ended because of another one, perhaps of the unseen host.
    if failed is not None and not (unseen and "; its error: " in failed):
        return "" if failed in text else f". {failed[:1].upper()}{failed[1:]}"
    if unseen:
        where = f"Rank {rank} is" if rank == awaited else f"The chain of waits ends at rank {rank},"
        return f". {where} on host {channel.hosts[rank]}; check that host, and the link to it"
    blocker = channel.all_progress[rank] if 0 <= rank < len(channel.all_progress) else None
    return "" if blocker is None else f". Rank {rank} is {describe_progress(program, blocker)}"
