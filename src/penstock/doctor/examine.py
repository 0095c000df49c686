"""All checks of a machine or a cluster, in their order: what a later one needs is known to work by then."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from penstock.doctor import judge
from penstock.doctor.judge import PROBLEM, Finding
from penstock.doctor.links import measure, unanswered
from penstock.doctor.machine import look
from penstock.doctor.rounds import Answer, Rounds
from penstock.doctor.shared_folder import look_at_folder
from penstock.errors import PenstockError
from penstock.runtime.tracing.gather import align_clocks
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.timeout import require_timeout
from penstock.runtime.workers.world import World, meeting_url
from penstock.scratch import Scratch

UNANSWERED = 1.0
"""Limit of the wait that nobody answers, in seconds."""

_LATE = 5.0  # seconds after its limit at which a wait still counts as ended in time


@dataclass
class Report:
    """What was found; equal on every rank.

    Attributes:
        ranks: how many there are.
        machines: by rank, as `machine.look` gives it.
        links: by rank, its links to all others, as `links.measure` gives them.
        clocks: by rank, ``offset`` and ``error`` of the wall clock against rank 0's, in seconds.
        waits: by rank, how long a wait lasted that was to end after `UNANSWERED` seconds.
        folder: by rank, as `folder.look_at_folder` gives it, or None where it failed.
        findings: problems and warnings, the problems first.
    """

    ranks: int
    machines: dict[int, dict[str, Any]] = field(default_factory=dict)
    links: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    clocks: dict[int, dict[str, float]] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)
    folder: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether there is no problem; warnings do not count."""
        return not any(finding.level == PROBLEM for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return {"sound": self.sound, **asdict(self)}


def examine_here(ranks: int, folder: Path | None, timeout: float) -> Report:
    """Check this machine: start so many processes, which talk over the loopback interface.

    Args:
        ranks: at least 1.
        folder: that runs will be kept in; None checks none.
        timeout: the longest a check may last, in seconds.
    """
    require_timeout(timeout)
    with Scratch() as scratch, LocalProcesses(ranks) as processes:
        reports = processes.run(
            ranks, _examine_started, str(scratch.path / "store"), ranks, folder, timeout, timeout=20 * timeout
        )
    found = reports[0]
    assert isinstance(found, Report)
    return found


def _examine_started(rank: int, store: str, ranks: int, folder: Path | None, timeout: float) -> Report:
    shared = dist.FileStore(store, ranks)  # type: ignore[attr-defined]  # torch does not annotate it
    return examine(Rounds(shared, rank, ranks, timeout), folder)


def examine_together(world: World, folder: Path | None, timeout: float) -> Report:
    """Check the machines that this process and the others of its run are on; every process calls it.

    Args:
        world: not yet joined; where the others are is in the environment, as launchers set it.
        folder, timeout: as for `examine_here`.

    Raises:
        PenstockError: the processes could not meet.
    """
    require_timeout(timeout)
    try:
        meeting = dist.rendezvous(  # type: ignore[attr-defined]  # torch does not annotate it
            meeting_url(), world.rank, world.size, timeout=timedelta(seconds=timeout)
        )
        store, rank, size = next(iter(meeting))
    except (RuntimeError, ValueError) as error:
        raise PenstockError(
            f"rank {world.rank} cannot meet the others (MASTER_ADDR, MASTER_PORT): {str(error).splitlines()[0]}; start rank "
            "0's machine first, and open the port"
        ) from error
    rounds = Rounds(store, rank, size, timeout)
    try:
        return examine(rounds, folder)
    finally:
        rounds.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def examine(rounds: Rounds, folder: Path | None) -> Report:
    """Make all checks; every rank calls it.

    Args:
        rounds: of all ranks; ``torch.distributed`` may be initialised, or else the environment says how.
        folder: that runs will be kept in; None checks none.
    """
    report = Report(rounds.size)
    with _sorted_findings(report):
        report.machines = _take(report, "machine", rounds.each("machine", lambda: look(rounds.rank)))
        report.findings += judge.judge_machines(report.machines)
        if folder is not None:
            answers = dict(enumerate(look_at_folder(rounds, folder)))
            report.folder = {rank: answer.value for rank, answer in answers.items()}
            report.findings += judge.judge_folder(str(folder), answers)
        if len(report.machines) == rounds.size and rounds.size > 1:
            _talk(rounds, report)
    return report


@contextmanager
def _sorted_findings(report: Report) -> Iterator[None]:
    yield
    report.findings.sort(key=lambda finding: finding.level != PROBLEM)


def _talk(rounds: Rounds, report: Report) -> None:
    """What takes a process group: each check only if all ranks came through the one before."""
    world = World(rounds.rank, rounds.size)
    opened = rounds.each("group", lambda: _timed(lambda: world.join(rounds.timeout)))
    if len(_take(report, "group", opened)) < rounds.size:
        return
    clocks = _take(report, "clocks", rounds.each("clocks", lambda: _clocks(world)))
    if len(clocks) < rounds.size:
        return
    report.clocks = {rank: one[rank] for rank, one in clocks.items()}
    report.findings += judge.judge_clocks(
        *zip(*((c["offset"], c["error"]) for c in report.clocks.values()), strict=True)
    )
    waits = rounds.each("wait", lambda: unanswered(world, UNANSWERED))
    report.waits = _take(report, "wait", waits)
    for rank, took in report.waits.items():
        if took > UNANSWERED + _LATE:
            report.findings.append(
                Finding(
                    PROBLEM, "wait", f"on rank {rank} a wait of {UNANSWERED:g} s ended after {took:.1f} s",
                    "a run would notice a rank that hangs as late",
                    "look for what stops the process, such as a debugger or swapping",
                )
            )  # fmt: skip
    measured = _take(report, "links", rounds.each("links", lambda: measure(world, rounds.timeout)))
    report.links = {rank: one["links"] for rank, one in measured.items()}
    report.findings += judge.judge_links(report.machines, report.links)
    used = {rank: one["open_files"] for rank, one in measured.items()}
    report.findings += judge.judge_files(report.machines, used)


def _timed(job: Any) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def _clocks(world: World) -> list[dict[str, float]]:
    found = align_clocks(world, time.time)
    return [{"offset": float(o), "error": float(e)} for o, e in zip(*found, strict=True)]


_CHECKS: Mapping[str, tuple[str, str]] = {
    "machine": (
        "nothing else can be checked without it",
        "look at that rank's output, and whether it was started",
    ),
    "group": (
        "the ranks of a run talk in it",
        "open all ports between the machines; GLOO_SOCKET_IFNAME names the interface, and each host's name must lead to it",
    ),
    "clocks": ("sums over all ranks do not work", "open all ports between the machines"),
    "wait": ("a run would hang where it should stop", "open all ports between the machines"),
    "links": ("activations are handed over this way", "open all ports between the machines"),
}


def _take(report: Report, check: str, answers: list[Answer]) -> dict[int, Any]:
    """The sound answers by rank; the others become findings."""
    why, do = _CHECKS[check]
    for rank, answer in enumerate(answers):
        if answer.trouble:
            what = f"rank {rank}, check '{check}': {answer.trouble}"
            report.findings.append(Finding(PROBLEM, check, what, why, do))
    return {rank: answer.value for rank, answer in enumerate(answers) if not answer.trouble}
