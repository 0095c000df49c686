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
        what = f"the measured rates differ by {error:.0%} from pass to pass"
        why = "other work ran on the machines, or their speed drifts; a plan by these rates is as uncertain"
        do = "measure again while the machines do nothing else, or with a longer --timeout"
        yield Finding(WARNING, "rates", what, why, do)


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
            do = f"install the same {name} everywhere"
            yield Finding(level, "versions", f"{name} differs: {what}", why, do)


def _machine(facts: Facts, ranks: Sequence[int]) -> Iterator[Finding]:
    one = facts[ranks[0]]
    host, count = one["host"], len(ranks)
    cores = min(one["cores"], one["core_quota"] or math.inf)
    if count > cores:
        what = f"{plural(count, 'rank')} on {cores:g} cores of {host}"
        why = "ranks that wait for a core look like slow ranks, and every wait gets longer"
        do = "start fewer ranks on it, or give it more cores"
        yield Finding(WARNING, "cores", what, why, do)
    threads = sum(facts[rank]["threads"] for rank in ranks)
    if threads > max(cores, count):
        what = f"OMP_NUM_THREADS gives {plural(count, 'rank')} {threads} threads on {cores:g} cores of {one['host']}"
        why = "every operation waits for its last thread, and that one for a core: steps take several times as long"
        do = "unset OMP_NUM_THREADS: each rank then takes its share of the cores"
        yield Finding(WARNING, "threads", what, why, do)
    free = one["memory_available"]
    if free is not None and free < count * GIB:
        what = f"{host} has {free / GIB:.1f} GiB free for {plural(count, 'rank')}"
        why = "the system kills a process that needs more, without a message"
        do = "end other processes there; penstock simulate --json shows how much a schedule holds"
        yield Finding(WARNING, "memory", what, why, do)
    shm = one["shm"]
    if count > 1 and len(one["devices"]) > 1 and shm is not None and shm < GIB:
        what = f"/dev/shm of {host} has {shm / GIB:.2f} GiB"
        why = "NCCL sends through it between GPUs of one machine, and fails when it is full"
        do = "start the container with --shm-size=1g or --ipc=host"
        yield Finding(WARNING, "shm", what, why, do)


def _devices(facts: Facts, beside: Mapping[int, Sequence[int]]) -> Iterator[Finding]:
    for rank, one in facts.items():
        if one["device_trouble"]:
            what = f"the GPU of rank {rank} on {one['host']}: {one['device_trouble']}"
            why = "the rank cannot compute"
            do = "run nvidia-smi there; remove the device from CUDA_VISIBLE_DEVICES"
            yield Finding(PROBLEM, "devices", what, why, do)
    kinds = {rank: sorted({d["name"] for d in one["devices"]}) for rank, one in facts.items()}
    without = [rank for rank, names in kinds.items() if not names]
    if without and len(without) < len(facts):
        what = f"{_ranks(without)} of {len(facts)}: no GPU"
        why = "ranks on CPUs and ranks on GPUs cannot be in one process group"
        do = "install the driver and a CUDA build of torch there, or set CUDA_VISIBLE_DEVICES to an empty string everywhere"
        yield Finding(PROBLEM, "devices", what, why, do)
    elif len({tuple(names) for names in kinds.values()}) > 1:
        each = "; ".join(f"{', '.join(names)} on rank {rank}" for rank, names in kinds.items())
        what = f"the GPUs differ: {each}"
        why = "all ranks wait for the slowest"
        do = "give the slower ranks fewer layers (split by weight), or use equal GPUs"
        yield Finding(WARNING, "devices", what, why, do)
    for ranks in {tuple(ranks) for ranks in beside.values()}:
        count = len(facts[ranks[0]]["devices"])
        if 0 < count < len(ranks):
            what = f"{facts[ranks[0]]['host']} has {plural(count, 'GPU')} for {plural(len(ranks), 'rank')}"
            why = "the ranks would train on the CPU"
            do = f"start {plural(count, 'rank')} there (--nproc-per-node {count})"
            yield Finding(WARNING, "devices", what, why, do)


def judge_files(facts: Facts, used: Mapping[int, int]) -> Iterator[Finding]:
    """Compare the limit of open files with the links' use of them; a run opens about twice as many groups."""
    for rank, one in facts.items():
        limit, need = one["open_files"], 2 * used.get(rank, 0) + 100
        if limit is not None and limit < need:
            most = one["open_files_most"]
            allowed = (
                "" if most is None or most >= need else f" (the hard limit is {most}: ask the administrator)"
            )
            what = f"rank {rank} on {one['host']} may open {limit} files; a run needs about {need}"
            why = "every rank has sockets to all other ranks"
            do = f"ulimit -n {max(need, 4096)}{allowed}"
            yield Finding(PROBLEM, "open files", what, why, do)


def judge_links(facts: Facts, links: Mapping[int, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """Return findings about links that are broken or slow, or that could use shared memory and do not."""
    sound = [(rank, link) for rank, own in links.items() for link in own if "trouble" not in link]
    for rank, own in links.items():
        for link in own:
            if "trouble" in link:
                what = f"{_ends(facts, rank, link['to'])}: {link['trouble']}"
                why = "stages could not hand over activations between them"
                do = "open all ports between the machines; GLOO_SOCKET_IFNAME names the interface to use"
                yield Finding(PROBLEM, "links", what, why, do)
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
                what = f"{_ends(facts, rank, link['to'])} is slow: {'; '.join(slow)}"
                why = "a pipeline waits for its slowest link"
                do = "check the cable, the switch, and other processes on the two machines"
                yield Finding(WARNING, "links", what, why, do)
    far = [
        (rank, link)
        for rank, link in sound
        if link["latency"] > _FAR and facts.get(rank, {}).get("forgets_window")
    ]
    if far:
        rank, link = max(far, key=lambda one: one[1]["latency"])
        what = (
            f"rank {rank} to rank {link['to']} takes {link['latency'] * 1e3:.0f} ms, and TCP on {facts[rank]['host']} "
            "starts slowly again after a pause"
        )
        why = "every step pays several extra round trips for large messages after a pause"
        do = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on every machine"
        yield Finding(WARNING, "links", what, why, do)
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
        what = f"{len(apart)} pairs of ranks on one machine do not share memory, such as ranks {a} and {b}"
        why = "their messages go through the loopback interface, which is several times slower"
        do = (
            f"remove the reason: {reason}"
            if reason
            else "run them as one user in one container, so that each may open the other's files in /proc"
        )
        yield Finding(WARNING, "transport", what, why, do)


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
        what = f"the clock of {_ranks(off)} is off, by {offsets[most]:+.1f} s on rank {most}"
        why = "times in logs and of files cannot be compared (timelines can: traces align the clocks)"
        do = "start an NTP client there (chronyd, systemd-timesyncd)"
        yield Finding(WARNING, "clocks", what, why, do)


def judge_folder(
    folder: str, answers: Mapping[int, tuple[Mapping[str, Any] | None, str]]
) -> Iterator[Finding]:
    """Return findings about the shared folder: ranks that cannot write, files that do not appear, and free space."""
    failed: dict[str, list[int]] = {}
    for rank, (value, trouble) in answers.items():
        if value is None:
            failed.setdefault(trouble, []).append(rank)
    for trouble, ranks in failed.items():
        what = f"{_ranks(ranks)}: {trouble.partition(': ')[2] or trouble}"
        why = "every rank writes its part of a checkpoint there"
        do = f"make {folder} a folder that is mounted on every machine and writable by this user"
        yield Finding(PROBLEM, "folder", what, why, do)
    sound = {rank: value for rank, (value, _) in answers.items() if value is not None}
    for rank, value in sound.items():
        if value["unseen"]:
            what = f"rank {rank} does not see what {_ranks(value['unseen'])} wrote in {folder}"
            why = "the parts of a checkpoint would be in different places"
            do = "mount the same folder on every machine"
            yield Finding(PROBLEM, "folder", what, why, do)
    free = min((value["free"] for value in sound.values()), default=GIB)
    if free < GIB:
        what = f"{folder} has {free / GIB:.2f} GiB free"
        why = "a checkpoint that does not fit is not written, and training continues without it"
        do = "free some space, or keep fewer checkpoints (train.keep_last)"
        yield Finding(WARNING, "folder", what, why, do)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (f" ... ({len(ranks)} of them)" if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
