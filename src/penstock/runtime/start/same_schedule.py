"""Proof that all processes have the same schedule: files and the user's own code may differ between machines."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.parallel.data.replica_checks import digest
from penstock.runtime.workers.world import World
from penstock.schedule.schedule import Schedule


def require_same_schedule(schedule: Schedule, world: World) -> None:
    """Check that all processes of a run have the same ops in the same order; every process calls it.

    Raises:
        ScheduleError: on every process, if they do not; names the processes that differ from the first, and the ranks whose
            ops differ.
    """
    action = "compare their schedules"
    digests = world.all_gather_run(schedule_digest(schedule), action)
    if len(set(digests)) == 1:
        return
    lists = world.all_gather_run((schedule.name, _digests_of_ranks(schedule)), action)
    odd = [number for number, other in enumerate(digests) if other != digests[0]]
    name, first = lists[0]
    other_name, other = lists[odd[0]]
    pairs = zip(first, other, strict=False)
    ranks = [str(rank) for rank, (a, b) in enumerate(pairs) if a != b]
    differ = f"other ops on rank(s) {', '.join(ranks[:8])}{' and more' if len(ranks) > 8 else ''}"
    if not ranks:
        differ = "another placement of the stages"
    if len(first) != len(other):
        differ = f"{len(other)} ranks, not {len(first)}"
    named = f"{name}" if name == other_name else f"{name} and {other_name}"
    raise ScheduleError(
        f"the processes have different schedules ({named}): process(es) {', '.join(map(str, odd))} have {differ}, compared "
        "with process 0; give every process the same file or the same version of the code"
    )


def schedule_digest(schedule: Schedule) -> int:
    """Return a digest of a schedule's placement and ops, which its name does not change."""
    return digest(repr((schedule.microbatches, schedule.placement, _digests_of_ranks(schedule))).encode())


def _digests_of_ranks(schedule: Schedule) -> list[int]:
    """Return a digest of every rank's ops."""
    return [
        digest(b"".join(column.tobytes() for column in schedule.columns(rank)))
        for rank in range(schedule.ranks)
    ]
