"""All checks of a machine or a cluster, in an order in which each relies only on those before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from penstock.base.errors import ConfigError, PenstockError, first_line
from penstock.base.scratch import Scratch
from penstock.doctor import judge
from penstock.doctor.judge import PROBLEM, Finding
from penstock.doctor.machine import add_threads, machine_facts
from penstock.doctor.shared_folder import check_folder
from penstock.measure.links import measure, unanswered
from penstock.measure.measured_cluster import require_writable, write_measured_cluster
from penstock.measure.rounds import Answer, Rounds
from penstock.runtime.gather_trace import align_clocks
from penstock.runtime.health.hang import require_timeout
from penstock.runtime.start.launch_environment import meeting_url
from penstock.runtime.start.place import Place
from penstock.runtime.workers.pool import LocalProcesses
from penstock.runtime.workers.world import World

UNANSWERED = 1.0
"""Timeout in seconds of the wait that is never answered."""

_LATE = 5.0  # seconds after its timeout at which a wait still counts as ended in time


@dataclass(kw_only=True)
class Report:
    """Results of all checks, equal on every rank."""

    ranks: int
    # Results of `machine.machine_facts` by rank.
    machines: dict[int, dict[str, Any]] = field(default_factory=dict)
    # Results of `links.measure` by rank: its links to all other ranks.
    links: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    # Offset and error of each rank's wall clock against rank 0's, in seconds.
    clocks: dict[int, dict[str, float]] = field(default_factory=dict)
    # Seconds that a wait with a timeout of `UNANSWERED` took, by rank.
    waits: dict[int, float] = field(default_factory=dict)
    # Results of `shared_folder.check_folder` by rank; None where it failed.
    folder: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    # Contents of the cluster's file that was measured and written; empty if none was.
    cluster: Mapping[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # problems, then warnings

    @property
    def sound(self) -> bool:
        """True if there are no problems; warnings do not count."""
        return not any(finding.level == PROBLEM for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON can hold it."""
        return {"sound": self.sound, **asdict(self)}


def examine_here(ranks: int, folder: Path | None, timeout: float, cluster: Path | None = None) -> Report:
    """Check this machine with processes that are started for it and talk over the loopback interface."""
    require_timeout(timeout)
    if cluster is not None:
        require_writable(cluster)
    with Scratch() as scratch, LocalProcesses(ranks) as processes:
        store = str(scratch.path / "store")
        reports = processes.run(
            ranks, _examine_started, store, ranks, folder, timeout, cluster, timeout=20 * timeout
        )
    report = reports[0]
    assert isinstance(report, Report)
    return report


def _examine_started(
    rank: int, store: str, ranks: int, folder: Path | None, timeout: float, cluster: Path | None
) -> Report:
    shared = dist.FileStore(store, ranks)  # type: ignore[attr-defined]  # torch does not annotate it
    return examine(Rounds(shared, rank, ranks, timeout), folder, cluster)


def examine_together(
    place: Place, folder: Path | None, timeout: float, cluster: Path | None = None
) -> Report:
    """Check the machines of all processes that a launcher has started; every process calls it, before it joins."""
    require_timeout(timeout)
    try:
        meeting = dist.rendezvous(  # type: ignore[attr-defined]  # torch does not annotate it
            meeting_url(), place.rank, place.size, timeout=timedelta(seconds=timeout)
        )
        store, rank, size = next(iter(meeting))
    except (RuntimeError, ValueError) as error:
        raise PenstockError(
            f"rank {place.rank} cannot meet the other ranks at MASTER_ADDR and MASTER_PORT: {first_line(error)}; start rank "
            "0's machine first, and open the port"
        ) from error
    rounds = Rounds(store, rank, size, timeout)
    try:
        return examine(rounds, folder, cluster)
    finally:
        rounds.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def examine(rounds: Rounds, folder: Path | None, cluster: Path | None = None) -> Report:
    """Make all checks; every rank calls it.

    A cluster's file is measured only if there is no problem.
    """
    if cluster is not None:
        _require_writable_on_rank_0(rounds, cluster)
    report = Report(ranks=rounds.size)
    with _sorted_findings(report):
        report.machines = _sound(
            report, "machine", rounds.each("machine", lambda: machine_facts(rounds.rank))
        )
        add_threads(report.machines)
        report.findings += judge.judge_machines(report.machines)
        if folder is not None:
            answers = dict(enumerate(check_folder(rounds, folder)))
            report.folder = {rank: answer.value for rank, answer in answers.items()}
            report.findings += judge.judge_folder(str(folder), answers)
        world = None
        if len(report.machines) == rounds.size and rounds.size > 1:
            world = _check_messages(rounds, report)
        if cluster is not None and report.sound:
            _measure(rounds, world, report, cluster)
    return report


@contextmanager
def _sorted_findings(report: Report) -> Iterator[None]:
    yield
    report.findings.sort(key=lambda finding: finding.level != PROBLEM)


def _require_writable_on_rank_0(rounds: Rounds, cluster: Path) -> None:
    def reason() -> str:
        try:
            require_writable(cluster)
        except ConfigError as error:
            return str(error)
        return ""

    answer = rounds.each("cluster path", lambda: reason() if rounds.rank == 0 else "")[0]
    if answer.value or answer.trouble:
        raise ConfigError(answer.value or answer.trouble)


def _measure(rounds: Rounds, world: World | None, report: Report, cluster: Path) -> None:
    machines = [report.machines[rank]["machine"] for rank in range(rounds.size)]
    measurement = write_measured_cluster(rounds, world, machines, cluster)
    report.cluster = measurement.table
    report.findings += judge.judge_rates(report.cluster.get("error", 0.0))
    for rank, reason in measurement.trouble:
        what = f"rank {rank}: {reason}"
        why = f"{cluster} was not written"
        do = "remove the reason, and give a longer --timeout if a rank did not answer"
        report.findings.append(Finding(PROBLEM, "cluster", what, why, do))


def _check_messages(rounds: Rounds, report: Report) -> World | None:
    """Make the checks that need a process group, each only if all ranks passed the one before; return the joined world."""
    joined: list[World] = []
    opened = rounds.each(
        "group", lambda: _timed(lambda: joined.append(World(rounds.rank, rounds.size, rounds.timeout)))
    )
    if len(_sound(report, "group", opened)) < rounds.size:
        return None
    (world,) = joined
    clocks = _sound(report, "clocks", rounds.each("clocks", lambda: _clocks(world)))
    if len(clocks) < rounds.size:
        return None
    report.clocks = {rank: one[rank] for rank, one in clocks.items()}
    report.findings += judge.judge_clocks(
        *zip(*((c["offset"], c["error"]) for c in report.clocks.values()), strict=True)
    )
    waits = rounds.each("wait", lambda: unanswered(world, UNANSWERED, rounds.timeout))
    report.waits = _sound(report, "wait", waits)
    for rank, took in report.waits.items():
        if took > UNANSWERED + _LATE:
            what = f"on rank {rank} a wait of {UNANSWERED:g} s ended after {took:.1f} s"
            why = "a run would notice a hanging rank just as late"
            do = "find out why the process is held up, for example by a debugger or swapping"
            report.findings.append(Finding(PROBLEM, "wait", what, why, do))
    measured = _sound(report, "links", rounds.each("links", lambda: measure(world, rounds.timeout)))
    report.links = {rank: one["links"] for rank, one in measured.items()}
    report.findings += judge.judge_links(report.machines, report.links)
    used = {rank: one["open_files"] for rank, one in measured.items()}
    report.findings += judge.judge_files(report.machines, used)
    return world


def _timed(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def _clocks(world: World) -> list[dict[str, float]]:
    alignment = align_clocks(world, time.time)
    return [{"offset": float(o), "error": float(e)} for o, e in zip(*alignment, strict=True)]


_CHECKS: Mapping[str, tuple[str, str]] = {
    "machine": (
        "nothing else can be checked without it",
        "check whether that rank was started, and read its output",
    ),
    "group": (
        "the ranks of a run exchange messages in this group",
        "open all ports between the machines; set GLOO_SOCKET_IFNAME to the interface to use, and make each host's name "
        "resolve to its address",
    ),
    "clocks": ("sums over all ranks do not work", "open all ports between the machines"),
    "wait": ("a run would hang where it should stop", "open all ports between the machines"),
    "links": ("stages hand over activations through these links", "open all ports between the machines"),
}


def _sound(report: Report, check: str, answers: list[Answer]) -> dict[int, Any]:
    """Return the sound answers by rank; a failed answer becomes a finding."""
    why, do = _CHECKS[check]
    for rank, answer in enumerate(answers):
        if answer.trouble:
            what = f"rank {rank}, check '{check}': {answer.trouble}"
            report.findings.append(Finding(PROBLEM, check, what, why, do))
    return {rank: answer.value for rank, answer in enumerate(answers) if not answer.trouble}
