"""A pipeline over several hosts: the same numbers, the right transports; failures of links and hosts end in time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hosts.programs import LAYERS, MICROBATCHES
from tests.support import plain
from tests.support.hosts.agent import ip
from tests.support.hosts.hosts import Hosts, Job, every
from tests.support.lanes import exhaustive

pytestmark = pytest.mark.slow

PAIR = (0, 1)
CORES = sorted(os.sched_getaffinity(0))[:2]
CASES = [
    ("1f1b", 4, 1, ["pp", "dp", "tp"]),
    ("interleaved-1f1b", 4, 1, ["pp", "dp", "tp"]),
    ("1f1b", 2, 2, ["pp", "dp", "tp"]),  # the stages on different hosts
    ("1f1b", 2, 2, ["dp", "pp", "tp"]),  # the replicas on different hosts
]
STEPS = "tests.hosts.programs:steps"


def lines(job: Job, *keys: str) -> list[dict[str, Any]]:
    """The lines of a process that have these keys."""
    said = [json.loads(line) for line in job.out.splitlines() if line.startswith("{")]
    return [one for one in said if all(key in one for key in keys)]


def errors(jobs: Sequence[Job]) -> list[str]:
    """The error with which each process ended."""
    return [one["error"] for job in jobs for one in lines(job, "error")]


def stepping(hosts: Hosts, dp: int = 1) -> list[Job]:
    """Ranks of two hosts in their fourth step of many, with a timeout of 5 s."""
    jobs = hosts.spread(STEPS, 10_000, 5.0, dp, hosts=PAIR)
    jobs[0].until('"step": 3,')
    return jobs


def plain_losses(count: int) -> list[str]:
    net, found = plain.model(LAYERS), []
    for n in range(count):
        losses, _ = plain.step(net, nn.functional.mse_loss, *plain.batch(n, 2 * MICROBATCHES), MICROBATCHES)
        found.append(losses.mean().item().hex())
    return found


def trained(dp: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and weights of plain PyTorch; the gradients of each replica's part are summed alone, then added."""
    net = plain.model(LAYERS)
    optimizer, history = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for n in range(3):
        parts, losses = [], []
        x, y = plain.batch(n, 2 * MICROBATCHES * dp)
        for a, b in zip(x.chunk(dp), y.chunk(dp), strict=True):
            net.zero_grad()
            losses.append(plain.step(net, nn.functional.mse_loss, a, b, MICROBATCHES)[0])
            parts.append([p.grad.clone() for p in net.parameters()])
        for parameter, *grads in zip(net.parameters(), *parts, strict=True):
            parameter.grad = sum(grads) / dp
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        history.append(torch.cat(losses))
    return history, dict(net.named_parameters())


@pytest.fixture(scope="module")
def trained_on_hosts(three_hosts: Hosts) -> tuple[Path, list[Job]]:
    jobs = three_hosts.spread("tests.hosts.programs:train", str(three_hosts.folder), CASES, hosts=PAIR)
    assert every(jobs) == [0] * 4, jobs[0].err
    return three_hosts.folder, jobs


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_numbers_are_those_of_plain_pytorch(trained_on_hosts, number):
    folder, _ = trained_on_hosts
    history, weights = trained(CASES[number][2])
    seen: dict[str, torch.Tensor] = {}
    for rank in range(4):
        losses, part = torch.load(folder / f"{number}-{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(losses, history, strict=True))
        assert all(torch.equal(part[name], seen.setdefault(name, part[name])) for name in part)
    assert seen.keys() == weights.keys()
    assert all(torch.equal(seen[name], weights[name]) for name in weights)


def test_messages_go_through_shared_memory_within_a_host_and_over_the_network_between_two(trained_on_hosts):
    for process, job in enumerate(trained_on_hosts[1]):
        for case, one in zip(CASES, lines(job, "ways"), strict=True):
            stages_apart = case[1] == 2 and case[3][0] == "pp"
            assert one["ways"]
            for peer, way in one["ways"].items():
                near = not stages_apart and (case[1] == 2 or int(peer) // 2 == process // 2)
                assert way == ("shared memory" if near else "process group"), (case, one)


def test_clocks_that_differ_by_hours_are_aligned_within_the_error_that_is_named(hosts: Hosts):
    for delay in (0.0, 0.005):
        hosts.link(delay=delay)
        jobs = hosts.spread("tests.hosts.programs:clocks", hosts=PAIR)
        assert every(jobs) == [0] * 4, jobs[0].err
        found = lines(jobs[0], "offset")[0]
        for rank, (offset, error) in enumerate(zip(found["offset"], found["error"], strict=True)):
            true = 0.0 if rank < 2 else -1000.0
            assert abs(offset - true) <= error
            assert offset == found["offset"][rank // 2 * 2]  # one clock on a host
        # On the joint clock stages begin one after another, within the error that the trace names.
        assert all(b - a > -2 * found["bound"] for a, b in pairwise(found["starts"]))


def test_a_link_that_is_down_for_a_while_delays_the_step_and_changes_no_number(hosts: Hosts):
    jobs = hosts.spread(STEPS, 60, 60.0, hosts=PAIR)
    jobs[0].until('"step": 3,')
    hosts.cut(1)
    time.sleep(1)
    done = len(lines(jobs[0], "step"))
    assert done < 60
    hosts.mend()
    assert every(jobs) == [0] * 4, jobs[0].err
    for job in jobs:
        assert [one["loss"] for one in lines(job, "loss")] == plain_losses(60)


def test_a_link_that_stays_down_ends_all_processes_and_each_names_the_other_host(hosts: Hosts):
    jobs = stepping(hosts)
    hosts.cut(1)
    assert every(jobs) == [1] * 4
    for text, other in zip(errors(jobs), ("host2", "host2", "host1", "host1"), strict=True):
        assert "waited 5 s for rank" in text
        assert f"on host {other}; check that host, and the link to it" in text


def test_replicas_on_a_host_that_is_unreachable_are_named_with_their_host(hosts: Hosts):
    jobs = stepping(hosts, 2)
    hosts.cut(1)
    assert every(jobs) == [1] * 4
    first = errors(jobs[:2])
    assert any("on host host2 did not come" in text for text in first), first


@pytest.mark.exhaustive  # beside a process that is frozen (tests/runtime/health) and a host that is gone
def test_a_frozen_host_is_named_and_its_own_processes_end_once_it_thaws(hosts: Hosts):
    jobs = stepping(hosts)
    hosts.all[1].signal_all(signal.SIGSTOP)
    assert every(jobs[:2]) == [1, 1]
    assert all("on host host2" in text for text in errors(jobs[:2]))
    hosts.all[1].signal_all(signal.SIGCONT)
    assert every(jobs[2:]) == [1, 1]
    assert all("on host host1" in text for text in errors(jobs[2:]))


def test_a_host_that_is_gone_without_a_word_is_named_and_a_new_one_takes_its_place(hosts: Hosts):
    jobs = stepping(hosts)
    hosts.cut(1)
    hosts.all[1].kill()
    assert every(jobs[:2]) == [1, 1]
    assert all("on host host2" in text for text in errors(jobs[:2]))
    hosts.recover()
    jobs = hosts.spread(STEPS, 3, 60.0, hosts=PAIR)
    assert every(jobs) == [0] * 4, jobs[0].err
    assert [one["loss"] for one in lines(jobs[3], "loss")] == plain_losses(3)


@pytest.mark.parametrize("unusable", ["127.0.1.1 {name}", *exhaustive("")], ids=["loopback", "unknown"])
def test_a_host_whose_name_is_no_address_that_others_reach_is_reached_all_the_same(
    hosts: Hosts, unusable: str
):
    """Debian writes the first; the second is a container without an entry."""
    for host in hosts.all:
        host.names.write_text(f"127.0.0.1 localhost\n{unusable.format(name=host.name)}\n")
    jobs = hosts.spread(STEPS, 2, 10.0, hosts=PAIR, MASTER_ADDR=ip(0, 0))
    assert every(jobs) == [0] * 4, [job.out + job.err for job in jobs]


def test_the_interface_that_the_user_names_carries_all_messages(hosts: Hosts):
    hosts.link(cut=True)
    jobs = hosts.spread(STEPS, 2, 10.0, hosts=PAIR, MASTER_ADDR=ip(1, 0), GLOO_SOCKET_IFNAME="eth1")
    assert every(jobs) == [0] * 4, [job.out + job.err for job in jobs]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_each_host_divides_its_own_cores(hosts: Hosts):
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "host1", "MASTER_PORT": hosts.port()}
    environment = {**world, "OMP_NUM_THREADS": "", "CORES": ""}
    jobs = [
        hosts.all[n].start("tests.hosts.programs:threads", cores=cores, **environment, RANK=str(n))
        for n, cores in enumerate((CORES[:1], CORES))
    ]
    assert every(jobs) == [0, 0], jobs[0].err
    assert [lines(job, "threads")[0]["threads"] for job in jobs] == [1, 2]


@pytest.mark.exhaustive
def test_steps_survive_a_link_that_loses_frames(hosts: Hosts):
    hosts.link(delay=0.002, jitter=0.002, loss=0.02)
    jobs = hosts.spread(STEPS, 8, 60.0, hosts=PAIR)
    assert every(jobs) == [0] * 4, jobs[0].err
    assert [one["loss"] for one in lines(jobs[3], "loss")] == plain_losses(8)
