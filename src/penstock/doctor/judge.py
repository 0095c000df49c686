"""Findings: problems and warnings derived from the plain values that the checks return."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.counts import plural
from penstock.plan.cluster import UNSTEADY

PROBLEM, WARNING = "problem", "warning"

GIB = 1 << 30
SLOW = 4.0
"""A link is slow if its latency is this many times the median, or its bandwidth the median divided by this."""

_CLOCKS = 1.0  # seconds by which clocks may differ without a warning
_FAR = 2e-3  # seconds of latency above which extra round trips matter
_NOISE = 100e-6  # seconds; smaller differences of latency mean nothing


@dataclass(frozen=True)
class Finding:
    """Something that will not work, or that costs time."""

    level: str  # `PROBLEM` or `WARNING`
    subject: str  # versions, devices, memory, links, ...
    what: str
    why: str
    do: str


Facts = Mapping[int, Mapping[str, Any]]
"""Rank → `machine.machine_facts`."""


def judge_rates(error: float) -> Iterator[Finding]:
    """Return a warning if measured rates differed too much from pass to pass to plan by."""
    if error > UNSTEADY:
        yield Finding(
            WARNING, "rates", f"the measured rates differ by {error:.0%} from pass to pass",
            "other work ran on the machines, or their speed drifts, and a plan by these rates is as uncertain",
            "measure again while the machines do nothing else, or with a longer --timeout",
        )  # fmt: skip


def judge_machines(facts: Facts) -> Iterator[Finding]:
    """Return findings about versions, cores, memory, devices and limits."""
    yield from _versions(facts)
    beside = {
        rank: [r for r in facts if facts[r]["machine"] == one["machine"]] for rank, one in facts.items()
    }
    for ranks in {tuple(ranks) for ranks in beside.values()}:
        yield from _machine(facts, ranks)
    yield from _devices(facts, beside)


def _versions(facts: Facts) -> Iterator[Finding]:
    names = {name: None for one in facts.values() for name in one["versions"]}
    for name in names:
        by_version: dict[str, list[int]] = {}
        for rank, one in facts.items():
            by_version.setdefault(one["versions"].get(name, "none"), []).append(rank)
        if len(by_version) > 1:
            what = "; ".join(f"{version} on {_ranks(ranks)}" for version, ranks in by_version.items())
            if name in ("torch", "penstock", "nccl"):
                why = "different versions may not understand each other's messages, or may compute different results"
                level = PROBLEM
            else:
                why, level = "a run may behave differently from rank to rank", WARNING
            yield Finding(
                level, "versions", f"{name} differs: {what}", why, f"install the same {name} everywhere"
            )


def _machine(facts: Facts, ranks: Sequence[int]) -> Iterator[Finding]:
    one = facts[ranks[0]]
    host, count = one["host"], len(ranks)
    cores = min(one["cores"], one["core_quota"] or math.inf)
    if count > cores:
        yield Finding(
            WARNING, "cores", f"{plural(count, 'rank')} on {cores:g} cores of {host}",
            "ranks that wait for a core look like slow ranks, and every wait gets longer",
            "start fewer ranks on it, or give it more cores",
        )  # fmt: skip
    threads = sum(facts[rank]["threads"] for rank in ranks)
    if threads > max(cores, count):
        yield Finding(
            WARNING, "threads",
            f"OMP_NUM_THREADS gives {plural(count, 'rank')} {threads} threads on {cores:g} cores of {one['host']}",
            "every operation waits for its last thread, and that one for a core: steps take several times as long",
            "unset OMP_NUM_THREADS: each rank then takes its share of the cores",
        )  # fmt: skip
    free = one["memory_available"]
    if free is not None and free < count * GIB:
        yield Finding(
            WARNING, "memory", f"{host} has {free / GIB:.1f} GiB free for {plural(count, 'rank')}",
            "the system kills a process that needs more, without a message",
            "end other processes there; penstock simulate --json shows how much a schedule holds",
        )  # fmt: skip
    shm = one["shm"]
    if count > 1 and len(one["devices"]) > 1 and shm is not None and shm < GIB:
        yield Finding(
            WARNING, "shm", f"/dev/shm of {host} has {shm / GIB:.2f} GiB",
            "NCCL sends through it between GPUs of one machine, and fails when it is full",
            "start the container with --shm-size=1g or --ipc=host",
        )  # fmt: skip


def _devices(facts: Facts, beside: Mapping[int, Sequence[int]]) -> Iterator[Finding]:
    for rank, one in facts.items():
        if one["device_trouble"]:
            yield Finding(
                PROBLEM, "devices", f"the GPU of rank {rank} on {one['host']}: {one['device_trouble']}",
                "the rank cannot compute", "run nvidia-smi there; remove the device from CUDA_VISIBLE_DEVICES",
            )  # fmt: skip
    kinds = {rank: sorted({d["name"] for d in one["devices"]}) for rank, one in facts.items()}
    without = [rank for rank, names in kinds.items() if not names]
    if without and len(without) < len(facts):
        yield Finding(
            PROBLEM, "devices", f"{_ranks(without)} of {len(facts)}: no GPU",
            "ranks on CPUs and ranks on GPUs cannot be in one process group",
            "install the driver and a CUDA build of torch there, or set CUDA_VISIBLE_DEVICES to an empty string everywhere",
        )  # fmt: skip
    elif len({tuple(names) for names in kinds.values()}) > 1:
        each = "; ".join(f"{', '.join(names)} on rank {rank}" for rank, names in kinds.items())
        yield Finding(
            WARNING, "devices", f"the GPUs differ: {each}", "all ranks wait for the slowest",
            "give the slower ranks fewer layers (split by weight), or use equal GPUs",
        )  # fmt: skip
    for ranks in {tuple(ranks) for ranks in beside.values()}:
        count = len(facts[ranks[0]]["devices"])
        if 0 < count < len(ranks):
            yield Finding(
                WARNING, "devices", f"{facts[ranks[0]]['host']} has {plural(count, 'GPU')} for {plural(len(ranks), 'rank')}",
                "the ranks would train on the CPU", f"start {plural(count, 'rank')} there (--nproc-per-node {count})",
            )  # fmt: skip


def judge_files(facts: Facts, used: Mapping[int, int]) -> Iterator[Finding]:
    """Compare the limit of open files with the links' use of them; a run opens about twice as many groups."""
    for rank, one in facts.items():
        limit, need = one["open_files"], 2 * used.get(rank, 0) + 100
        if limit is not None and limit < need:
            most = one["open_files_most"]
            allowed = (
                "" if most is None or most >= need else f" (the hard limit is {most}: ask the administrator)"
            )
            yield Finding(
                PROBLEM, "open files", f"rank {rank} on {one['host']} may open {limit} files; a run needs about {need}",
                "every rank has sockets to all other ranks", f"ulimit -n {max(need, 4096)}{allowed}",
            )  # fmt: skip


def judge_links(facts: Facts, links: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """Return findings about links that are broken or slow, or that could use shared memory and do not."""
    sound = [(rank, link) for rank, own in links.items() for link in own if "trouble" not in link]
    for rank, own in links.items():
        for link in own:
            if "trouble" in link:
                yield Finding(
                    PROBLEM, "links", f"{_ends(facts, rank, link['to'])}: {link['trouble']}",
                    "stages could not hand over activations between them",
                    "open all ports between the machines; GLOO_SOCKET_IFNAME names the interface to use",
                )  # fmt: skip
    for way in {link["way"] for _, link in sound}:
        alike = [(rank, link) for rank, link in sound if link["way"] == way]
        latency = statistics.median(link["latency"] for _, link in alike)
        bandwidth = statistics.median(link["bandwidth"] for _, link in alike)
        for rank, link in alike:
            slow = []
            if link["latency"] > SLOW * latency and link["latency"] - latency > _NOISE:
                slow.append(
                    f"{link['latency'] * 1e6:.0f} µs per message, {link['latency'] / latency:.1f} x the median"
                )
            if link["bandwidth"] * SLOW < bandwidth:
                slow.append(
                    f"{link['bandwidth'] / 1e9:.2f} GB/s, {link['bandwidth'] / bandwidth:.2f} x the median"
                )
            if slow:
                yield Finding(
                    WARNING, "links", f"{_ends(facts, rank, link['to'])} is slow: {'; '.join(slow)}",
                    "a pipeline waits for its slowest link",
                    "check the cable, the switch, and other processes on the two machines",
                )  # fmt: skip
    far = [
        (rank, link)
        for rank, link in sound
        if link["latency"] > _FAR and facts.get(rank, {}).get("forgets_window")
    ]
    if far:
        rank, link = max(far, key=lambda one: one[1]["latency"])
        yield Finding(
            WARNING, "links",
            f"rank {rank} to rank {link['to']} takes {link['latency'] * 1e3:.0f} ms, and TCP on {facts[rank]['host']} "
            "starts slowly again after a pause",
            "every step pays several extra round trips for large messages after a pause",
            "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on every machine",
        )  # fmt: skip
    apart = {
        (min(rank, link["to"]), max(rank, link["to"]))
        for rank, link in sound
        if link["way"] != "shared memory"
        and link["to"] in facts
        and facts[rank]["machine"] == facts[link["to"]]["machine"]
    }
    if apart:
        a, b = min(apart)
        reason = facts[a]["shared_memory"] or facts[b]["shared_memory"]
        yield Finding(
            WARNING, "transport",
            f"{len(apart)} pairs of ranks on one machine do not share memory, such as ranks {a} and {b}",
            "their messages go through the loopback interface, which is several times slower",
            f"remove the reason: {reason}" if reason else "run them as one user in one container, so that each may open the "
            "other's files in /proc",
        )  # fmt: skip


def _ends(facts: Facts, rank: int, other: int) -> str:
    """Name the two ends of a link, with their hosts if these differ."""
    hosts = [facts.get(one, {}).get("host", "") for one in (rank, other)]
    names = (f" on {host}" if host and hosts[0] != hosts[1] else "" for host in hosts)
    return " to ".join(f"rank {one}{name}" for one, name in zip((rank, other), names, strict=True))


def judge_clocks(offsets: Sequence[float], errors: Sequence[float]) -> Iterator[Finding]:
    """Return findings about wall clocks, given their offsets from rank 0's and the errors of these, in seconds."""
    off = [r for r, (o, e) in enumerate(zip(offsets, errors, strict=True)) if abs(o) - e > _CLOCKS]
    if off:
        most = max(off, key=lambda rank: abs(offsets[rank]))
        yield Finding(
            WARNING, "clocks", f"the clock of {_ranks(off)} is off, by {offsets[most]:+.1f} s on rank {most}",
            "times in logs and of files cannot be compared (timelines can: traces align the clocks)",
            "start an NTP client there (chronyd, systemd-timesyncd)",
        )  # fmt: skip


def judge_folder(
    folder: str, answers: Mapping[int, tuple[Mapping[str, Any] | None, str]]
) -> Iterator[Finding]:
    """Return findings about the shared folder: ranks that cannot write, files that do not appear, and free space."""
    failed: dict[str, list[int]] = {}
    for rank, (value, trouble) in answers.items():
        if value is None:
            failed.setdefault(trouble, []).append(rank)
    for trouble, ranks in failed.items():
        yield Finding(
            PROBLEM, "folder", f"{_ranks(ranks)}: {trouble.partition(': ')[2] or trouble}",
            "every rank writes its part of a checkpoint there",
            f"make {folder} a folder that is mounted on every machine and writable by this user",
        )  # fmt: skip
    sound = {rank: value for rank, (value, _) in answers.items() if value is not None}
    for rank, value in sound.items():
        if value["unseen"]:
            yield Finding(
                PROBLEM, "folder", f"rank {rank} does not see what {_ranks(value['unseen'])} wrote in {folder}",
                "the parts of a checkpoint would be in different places", "mount the same folder on every machine",
            )  # fmt: skip
    free = min((value["free"] for value in sound.values()), default=GIB)
    if free < GIB:
        yield Finding(
            WARNING, "folder", f"{folder} has {free / GIB:.2f} GiB free",
            "a checkpoint that does not fit is not written, and training continues without it",
            "free some space, or keep fewer checkpoints (train.keep_last)",
        )  # fmt: skip


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (f" ... ({len(ranks)} of them)" if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
