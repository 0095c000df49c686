"""Launchers over several hosts: torchrun restarts a run on a new host, and the doctor names a slow link."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.find import is_whole, steps_in
from penstock.doctor.judge import SLOW
from penstock.train.config import file as config_file
from tests.support.hosts.hosts import Hosts, Job, every
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, run, same
from tests.support.waiting import until

pytestmark = pytest.mark.exhaustive

TORCHRUN = "torch.distributed.run:main"


def torchrun(hosts: Hosts, number: int, endpoint: str, *words: str) -> Job:
    """Start the torchrun of one of two hosts, with one process."""
    rendezvous = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"
    return hosts.all[number].start(
        TORCHRUN,
        ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--monitor-interval=0.1", "--rdzv-backend=c10d",
         f"--rdzv-endpoint={endpoint}", f"--local-addr={hosts.all[number].ip}", rendezvous, *words],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", OMP_NUM_THREADS="1",
    )  # fmt: skip


def saved(folder: Path) -> int:
    """The step of the newest complete checkpoint; -1 if there is none."""
    return next((step for step, path in steps_in(folder / "checkpoints") if is_whole(path)), -1)


def test_torchrun_continues_on_a_new_host_with_the_numbers_of_a_run_that_was_not_disturbed(hosts: Hosts):
    torch.set_num_threads(1)
    root = hosts.folder
    text = text_folder(root)
    run(config_of(root, text, "once", 12))
    config = config_of(root, text, "again", 12, runtime={"timeout": 8.0, "first_timeout": 60.0})
    file, folder = root / "again.toml", root / "runs" / "again"
    file.write_text(config_file.dump(config))
    words = (f"host1:{hosts.port()}", "-m", "penstock", "train", str(file), "--resume")
    hosts.link(delay=0.05)  # so that there is time before the last step
    jobs = [torchrun(hosts, n, *words) for n in (0, 1)]
    until(lambda: saved(folder) >= 2, 90)
    hosts.cut(1)
    hosts.all[1].kill()
    assert saved(folder) < 12
    hosts.recover((1,))
    jobs[1] = torchrun(hosts, 1, *words)
    assert every(jobs, 120) == [0, 0], jobs[0].err
    assert "on host host2" in jobs[0].err + jobs[0].out
    same(folder, root / "runs" / "once")


def test_the_doctor_measures_the_links_between_hosts_and_names_the_slow_one(hosts: Hosts):
    hosts.link(delay=0.001)
    hosts.link((1, 2), delay=0.12)
    words = ("doctor", "--json", "--timeout", "60")
    jobs = hosts.spread("tests.hosts.programs:command", *words, per_host=1)
    assert every(jobs) == [0, 0, 0], jobs[0].err
    report = json.loads(jobs[0].out)
    links = {(int(rank), link["to"]): link for rank, own in report["links"].items() for link in own}
    for (rank, other), link in links.items():
        assert link["way"] == "process group"
        assert link["latency"] >= (0.12 if {rank, other} == {1, 2} else 0.001)
    slow = [finding["what"] for finding in report["findings"] if "is slow" in finding["what"]]
    named = {tuple(re.findall(r"rank \d on host\d", text)) for text in slow}
    # Other work on this machine can make others slow, too: then they are named, and no other is.
    usual = {
        what: statistics.median(link[what] for link in links.values()) for what in ("latency", "bandwidth")
    }

    def is_slow(link: dict) -> bool:
        return link["latency"] > SLOW * usual["latency"] or link["bandwidth"] * SLOW < usual["bandwidth"]

    measured = {ends for ends, link in links.items() if is_slow(link)}
    assert named == {(f"rank {a} on host{a + 1}", f"rank {b} on host{b + 1}") for a, b in measured}
    assert measured >= {(1, 2), (2, 1)}
    restart = "tcp_slow_start_after_idle=0" in str(report["findings"])
    assert restart == any(one["forgets_window"] for one in report["machines"].values())
    for offset, error in ((one["offset"], one["error"]) for one in report["clocks"].values()):
        assert abs(offset) <= error  # the wall clocks are one
