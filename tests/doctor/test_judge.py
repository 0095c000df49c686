"""Findings from plain values, for facts that a test machine does not have."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.doctor import judge
from penstock.measure.links import pairs

ALL = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "penstock": "0.1.0"}


def fact(**changes: Any) -> dict[str, Any]:
    return {
        "host": "a", "machine": "1", "versions": ALL, "cores": 8, "core_quota": None, "threads": 4,
        "memory": 64 << 30, "memory_available": 32 << 30, "devices": [], "device_trouble": "", "open_files": 1024,
        "open_files_most": 4096, "shm": 8 << 30, "shared_memory": "", "forgets_window": False, **changes,
    }  # fmt: skip


def gpu(name: str, count: int = 2) -> list[dict[str, Any]]:
    return [{"name": name, "memory": 80 << 30, "capability": "9.0"}] * count


def said(findings: Any) -> list[tuple[str, str]]:
    listed = list(findings)
    assert all(f.what and f.why and f.do for f in listed)
    return [(f.level, f.what) for f in listed]


@pytest.mark.parametrize(
    ("second", "level", "what"),
    [
        ({"versions": ALL | {"torch": "2.12.0"}}, "problem", "torch differs: 2.13.0 on rank 0; 2.12.0 on rank 1"),
        ({"versions": ALL | {"penstock": "0.2"}}, "problem", "penstock differs: 0.1.0 on rank 0; 0.2 on rank 1"),
        ({"versions": ALL | {"numpy": "1.26"}}, "warning", "numpy differs: 2.4.6 on rank 0; 1.26 on rank 1"),
        ({"machine": "2", "host": "b", "core_quota": 0.5, "threads": 1}, "warning", "1 rank on 0.5 cores of b"),
        ({"threads": 8}, "warning", "OMP_NUM_THREADS gives 2 ranks 12 threads on 8 cores of a"),
        ({"machine": "2", "host": "b", "memory_available": 1 << 29}, "warning", "b has 0.5 GiB free for 1 rank"),
        ({"device_trouble": "out of memory"}, "problem", "the GPU of rank 1 on a: out of memory"),
        ({"devices": gpu("H100")}, "problem", "rank 0 of 2: no GPU"),
    ],
)  # fmt: skip
def test_a_rank_that_is_another_way_is_named(second, level, what):
    assert said(judge.judge_machines({0: fact(), 1: fact(**second)})) == [(level, what)]
    assert said(judge.judge_machines({0: fact(), 1: fact()})) == []  # equal, with enough of everything


def test_gpus_that_differ_or_are_too_few_and_a_small_shm_are_told():
    facts = {0: fact(devices=gpu("H100"), shm=64 << 20), 1: fact(devices=gpu("A100"), shm=64 << 20)}
    assert said(judge.judge_machines(facts)) == [
        ("warning", "/dev/shm of a has 0.06 GiB"),
        ("warning", "the GPUs differ: H100 on rank 0; A100 on rank 1"),
    ]
    facts = {rank: fact(devices=gpu("H100", 1)) for rank in range(2)}
    assert said(judge.judge_machines(facts)) == [("warning", "a has 1 GPU for 2 ranks")]


def test_a_limit_of_open_files_below_what_a_run_needs_is_a_problem():
    assert said(judge.judge_files({0: fact(), 1: fact()}, {0: 40, 1: 40})) == []
    (finding,) = judge.judge_files({0: fact(open_files=256)}, {0: 200})
    told = ("problem", "rank 0 on a may open 256 files; a run needs about 500", "ulimit -n 4096")
    assert (finding.level, finding.what, finding.do) == told
    (finding,) = judge.judge_files({0: fact(open_files=256, open_files_most=256)}, {0: 200})
    assert "the hard limit is 256" in finding.do


def links(size: int, **odd: Any) -> dict[int, list[dict[str, Any]]]:
    """Return equal links, except for the one from 1 to 2."""
    usual = {"way": "process group", "latency": 50e-6, "bandwidth": 2e9}
    return {
        a: [usual | {"to": b} | (odd if (a, b) == (1, 2) else {}) for b in range(size) if b != a]
        for a in range(size)
    }


def test_the_slow_link_is_flagged_and_no_other():
    facts = {rank: fact(machine=str(rank)) for rank in range(4)}
    assert said(judge.judge_links(facts, links(4))) == []
    ((level, what),) = said(judge.judge_links(facts, links(4, latency=1e-3)))
    assert (level, what) == ("warning", "rank 1 to rank 2 is slow: 1000 µs per message, 20.0 x the median")
    apart = {rank: fact(machine=str(rank), host=f"host{rank}") for rank in range(4)}
    ((_, what),) = said(judge.judge_links(apart, links(4, latency=1e-3)))
    assert what.startswith("rank 1 on host1 to rank 2 on host2 is slow: ")
    ((_, what),) = said(judge.judge_links(facts, links(4, bandwidth=0.1e9)))
    assert what == "rank 1 to rank 2 is slow: 0.10 GB/s, 0.05 x the median"
    broken = links(4)
    broken[1][1] = {"to": 2, "way": "process group", "trouble": "waited 60 s"}
    assert said(judge.judge_links(facts, broken)) == [("problem", "rank 1 to rank 2: waited 60 s")]


def test_ranks_of_one_machine_that_do_not_share_memory_are_told_why():
    (finding,) = judge.judge_links({0: fact(), 1: fact()}, links(2))
    assert (finding.level, finding.subject) == ("warning", "transport")
    assert "one container" in finding.do
    (finding,) = judge.judge_links({0: fact(), 1: fact(shared_memory="it needs Linux on x86-64")}, links(2))
    assert finding.do == "remove the reason: it needs Linux on x86-64"


def test_a_clock_that_is_off_by_more_than_its_error_is_told():
    assert said(judge.judge_clocks([0.0, 3.0, -0.5], [0.0, 2.5, 0.1])) == []
    ((level, what),) = said(judge.judge_clocks([0.0, 3.0, -75.0], [0.0, 0.1, 0.1]))
    assert (level, what) == ("warning", "the clock of ranks 1, 2 is off, by -75.0 s on rank 2")


def test_a_folder_that_is_not_the_same_everywhere_is_a_problem():
    good = {"free": 10 << 30, "unseen": []}
    assert said(judge.judge_folder("f", {0: (good, ""), 1: (good, "")})) == []
    lost = {0: (good | {"unseen": [1]}, ""), 1: (None, "PenstockError: cannot write in f: Read-only")}
    assert said(judge.judge_folder("f", lost)) == [
        ("problem", "rank 1: cannot write in f: Read-only"),
        ("problem", "rank 0 does not see what rank 1 wrote in f"),
    ]
    full = {0: (good | {"free": 1 << 29}, "")}
    assert said(judge.judge_folder("f", full)) == [("warning", "f has 0.50 GiB free")]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_every_pair_meets_once_and_nobody_is_in_two_at_a_time(size):
    rounds = pairs(size)
    every = [(a, b) for a in range(size) for b in range(a + 1, size)]
    assert sorted(pair for met in rounds for pair in met) == every
    for met in rounds:
        assert len({rank for pair in met for rank in pair}) == 2 * len(met)
        assert size > 8 or len(met) == 1


def test_a_long_link_whose_window_is_forgotten_is_told_once_with_the_setting():
    link = {"latency": 0.02, "bandwidth": 1e8, "way": "process group"}
    links = {0: [link | {"to": 1}], 1: [link | {"to": 0}]}
    facts = {r: fact(machine=str(r), forgets_window=True) for r in range(2)}
    assert said(judge.judge_links(facts, links)) == [
        ("warning", "rank 0 to rank 1 takes 20 ms, and TCP on a starts slowly again after a pause")
    ]
    near = {rank: [one | {"latency": 1e-4} for one in own] for rank, own in links.items()}
    assert said(judge.judge_links(facts, near)) == []
    assert said(judge.judge_links({r: fact(machine=str(r)) for r in range(2)}, links)) == []
