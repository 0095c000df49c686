"""The doctor's checks on real processes: sound ones pass, and problems are named by rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

import penstock
from penstock.doctor import shared_folder
from penstock.doctor.examine import Report, examine
from penstock.measure.rounds import Rounds
from penstock.plan.cluster import read_cluster
from penstock.runtime.transport.processes import SWITCH
from penstock.runtime.workers.pool import LocalProcesses

SEEN = shared_folder._SEEN


def examined(rank: int, ranks: int, place: Path, folder: Path | None, change: str = "") -> Report:
    """Make all checks on a rank, after a change to it."""
    if change == "no shared memory":
        os.environ[SWITCH] = "0"
    if change == "rank 1 sees another folder":
        shared_folder._SEEN = 0.5  # this machine's own file system shows a file at once
        folder = folder / "other" if rank == 1 else folder
    try:
        return examine(Rounds(dist.FileStore(str(place / "store"), ranks), rank, ranks, 20.0), folder)
    finally:
        os.environ.pop(SWITCH, None)
        shared_folder._SEEN = SEEN


def test_processes_of_this_machine_are_measured_pair_by_pair(tmp_path: Path, processes: LocalProcesses):
    folder = tmp_path / "runs"
    folder.mkdir()
    reports = processes.run(3, examined, 3, tmp_path, folder)
    report = reports[0]
    assert all(other.plain() == report.plain() for other in reports)
    assert report.sound, report.findings
    others = {r: [link["to"] for link in own] for r, own in report.links.items()}
    assert others == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    assert all(link["latency"] > 0 < link["bandwidth"] for own in report.links.values() for link in own)
    assert all(took >= 1.0 for took in report.waits.values())
    assert report.clocks[0] == {"offset": 0.0, "error": 0.0}
    assert all(abs(clock["offset"]) <= clock["error"] + 1e-3 for clock in report.clocks.values())
    assert all(report.folder[rank]["free"] > 0 for rank in range(3))
    assert list(folder.iterdir()) == []  # nothing is left behind


def test_a_folder_that_cannot_be_written_is_named_by_every_rank(tmp_path: Path, processes: LocalProcesses):
    (tmp_path / "file").write_text("in its place")
    report, _ = processes.run(2, examined, 2, tmp_path, tmp_path / "file", "no shared memory")
    assert not report.sound
    first, *others = report.findings
    assert first.subject == "folder"
    assert first.what == f"ranks 0, 1: cannot write in {tmp_path / 'file'}: Not a directory"
    assert any(f.subject == "transport" and f.do == f"remove the reason: {SWITCH} is 0" for f in others)
    assert {link["way"] for own in report.links.values() for link in own} == {"process group"}


def test_a_folder_that_is_another_one_elsewhere_is_found(tmp_path: Path, processes: LocalProcesses):
    (tmp_path / "runs" / "other").mkdir(parents=True)
    report, _ = processes.run(2, examined, 2, tmp_path, tmp_path / "runs", "rank 1 sees another folder")
    (finding,) = [f for f in report.findings if f.subject == "folder"]
    assert finding.what.startswith("rank 1: cannot write in")
    assert [path.name for path in (tmp_path / "runs").rglob("*")] == ["other"]


def missing(rank: int, place: Path) -> list[tuple[object, str]]:
    rounds = Rounds(dist.FileStore(str(place / "store"), 3), rank, 3, 1.0)
    return [tuple(answer) for answer in rounds.each("x", lambda: 1 // (1 - rank))]


@pytest.mark.slow
def test_a_rank_that_does_not_answer_and_one_that_fails_are_told_apart(
    tmp_path: Path, processes: LocalProcesses
):
    told = processes.run(2, missing, tmp_path)
    assert told[0] == told[1]
    assert told[0] == [
        (1, ""),
        (None, "ZeroDivisionError: integer division or modulo by zero"),
        (None, "did not answer within 1 s"),
    ]


@pytest.fixture
def store():
    """A store on a free port of this machine, as torchrun's agent opens for its processes."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launched(
    store: dist.TCPStore, paths: list[Path], place: Path, *words: str
) -> list[subprocess.Popen[str]]:
    """One doctor for each path of packages, as ranks that torchrun's agent started."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", "penstock", "doctor", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place,
            env=os.environ | {
                "PYTHONPATH": str(path), "RANK": str(rank), "WORLD_SIZE": str(len(paths)), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
            },
        )
        for rank, path in enumerate(paths)
    ]  # fmt: skip


@pytest.mark.slow
def test_ranks_of_a_launcher_measure_together_and_rank_0_writes(tmp_path: Path, store: dist.TCPStore):
    source, words = Path(penstock.__file__).parent.parent, ("--timeout", "40", "--json", "--measure")
    started = launched(store, [source] * 2, tmp_path, *words, "mine.toml")
    (told, errors), (nothing, others) = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], errors + others
    assert nothing == ""
    table = json.loads(told)["cluster"]
    cluster = read_cluster(tmp_path / "mine.toml")
    assert (cluster.ranks_per_node, cluster.nodes) == (table["ranks_per_node"], table["nodes"]) == (2, 1)
    assert cluster.node.bandwidth == table["node"]["bandwidth"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.slow
def test_a_cluster_file_that_rank_0_cannot_write_is_bad_input_on_every_rank(
    tmp_path: Path, store: dist.TCPStore
):
    source, words = Path(penstock.__file__).parent.parent, ("--timeout", "40", "--measure", "none/mine.toml")
    started = launched(store, [source] * 2, tmp_path, *words)
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert all("there is no folder none; make it, or give another --measure" in text for text in errors)


@pytest.mark.slow
def test_a_rank_with_another_penstock_ends_all_with_exit_code_1(tmp_path: Path, store: dist.TCPStore):
    source = Path(penstock.__file__).parent
    shutil.copytree(source, tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "penstock" / "base" / "version.py").write_text('__version__ = "9.9.9"\n')
    started = launched(store, [source.parent, tmp_path], tmp_path / "penstock", "--timeout", "40")
    (told, errors), (nothing, others) = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [1, 1], errors + others
    assert f"PROBLEM  penstock differs: {penstock.__version__} on rank 0; 9.9.9 on rank 1" in told
    assert "latency" in told  # what could be checked nevertheless was
    assert nothing == ""
