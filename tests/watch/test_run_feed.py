"""What a page is told of a run's folder, before, during and after the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.heartbeat import Heartbeat, LifeSign, read_signs
from penstock.watch import run_feed
from penstock.watch.run_feed import MAX_ROWS, RunFeed
from tests.support.measured import kept_run


@pytest.fixture(autouse=True)
def read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_feed, "_REFRESH", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def write(run: Path, *rows: dict[str, Any], mode: str = "a") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def row(step: int, kind: str = "train", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "loss": 1 / step, **more}


def state_of(feed: RunFeed) -> tuple[str, str]:
    state = feed.state(-1, 0)
    return state["state"], state["message"]


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path):
    feed = RunFeed(tmp_path / "later")
    assert state_of(feed) == ("waiting", "The run has not begun. This page waits for it.")
    state = feed.state(-1, 0)
    assert (state["title"], state["step"], state["steps"], state["rows"], state["ranks"]) == (
        "later",
        0,
        0,
        [],
        [],
    )
    (tmp_path / "later").mkdir()
    with Heartbeat(tmp_path / "later", 0):
        assert state_of(feed)[0] in ("waiting", "running")


def test_only_new_rows_are_sent_and_a_replaced_file_begins_again(run: Path):
    feed = RunFeed(run)
    write(run, row(1), row(2))
    first = feed.state(-1, 0)
    assert [one["step"] for one in first["rows"]] == [1, 2]
    assert feed.state(first["generation"], first["count"])["rows"] == []
    write(run, row(3))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4')  # a line that is being written
    second = feed.state(first["generation"], first["count"])
    assert [one["step"] for one in second["rows"]] == [3]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(', "loss": 0.25}\n')
    assert feed.state(second["generation"], second["count"])["rows"] == [row(4)]
    # A resumed run goes back: the file is replaced.
    (run / "new").write_text(json.dumps(row(1)) + "\n")
    os.replace(run / "new", run / "metrics.jsonl")
    third = feed.state(second["generation"], second["count"])
    assert third["generation"] != second["generation"]
    assert third["rows"] == [row(1)]


def test_of_very_many_rows_evenly_spaced_ones_are_sent(run: Path):
    write(run, *(row(step) for step in range(1, 3 * MAX_ROWS)))
    state = RunFeed(run).state(-1, 0)
    steps = [one["step"] for one in state["rows"]]
    assert (len(steps), steps[0], steps[-1], state["count"]) == (
        MAX_ROWS,
        1,
        3 * MAX_ROWS - 1,
        3 * MAX_ROWS - 1,
    )
    assert steps == sorted(set(steps))


def test_lines_that_are_no_metrics_are_left_out(run: Path):
    bad = ["", "[]", "{", "null", "[" * 9000, '{"kind": "train"}', '{"kind": "evil", "step": 1}']
    bad += [
        '{"kind": "train", "step": "1"}',
        '{"kind": "train", "step": 2, "loss": NaN, "lr": 1e999, "rss": ["x"]}',
    ]
    (run / "metrics.jsonl").write_text("\n".join(bad) + "\n")
    state = RunFeed(run).state(-1, 0)
    assert state["rows"] == [{"kind": "train", "step": 2}]
    json.dumps(state, allow_nan=False)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert RunFeed(run).state(-1, 0)["rows"] == []


@pytest.mark.parametrize(
    "text", ["[train]\nsteps = 30\n", "[train]\n", "steps", "[train]\nsteps = true\n", "train = 3\n"]
)
def test_the_number_of_steps_is_the_configs(run: Path, text: str):
    (run / "config.toml").write_text(text)
    assert RunFeed(run).state(-1, 0)["steps"] == (30 if "30" in text else 0)


@pytest.fixture
def sign(run: Path) -> LifeSign:
    """The sign of a process that lives: this one."""
    with Heartbeat(run, 0, step=5):
        pass
    (sign,) = read_signs(run)
    return replace(sign, state="running")


def put(run: Path, *signs: LifeSign) -> None:
    for sign in signs:
        (run / "logs" / f"rank-{sign.rank}.json").write_text(json.dumps(asdict(sign)))


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_ranks_that_live_died_failed_or_stopped(run: Path, sign: LifeSign):
    other = replace(sign, rank=1)
    feed = RunFeed(run)
    put(run, sign, other)
    assert state_of(feed) == ("running", "")
    assert [(one["rank"], one["health"], one["step"]) for one in feed.state(-1, 0)["ranks"]] == [
        (0, "running", 5), (1, "running", 5),
    ]  # fmt: skip
    put(run, replace(other, pid=dead_process()))
    dead = "Rank 1 ended without a word: killed, or out of memory. The log has the last lines."
    assert state_of(feed) == ("dead", dead)
    put(run, replace(sign, state="failed", error="a peer is gone", time=sign.time + 3))
    put(run, replace(other, state="failed", error="no memory"))
    fresh = RunFeed(run)
    assert fresh.state(-1, 0)["state"] == "failed"
    put(run, replace(sign, state="stopped", error="stopped after step 5"), replace(other, state="stopped"))
    assert state_of(feed) == ("stopped", "The run stopped after step 5.")
    put(run, replace(sign, state="done"), replace(other, state="done"))
    write(run, row(5), row(5, "final"))
    assert state_of(feed) == ("done", "The run is finished.")


def test_a_rank_elsewhere_is_silent_when_its_signs_stop(
    run: Path, sign: LifeSign, monkeypatch: pytest.MonkeyPatch
):
    now = [1000.0]
    monkeypatch.setattr(run_feed.time, "monotonic", lambda: now[0])
    feed = RunFeed(run)
    # The clock of its host is an hour slow.
    far = replace(sign, rank=1, place="another machine", time=sign.time - 3600)
    put(run, sign, far)
    assert feed.state(-1, 0)["ranks"][1]["health"] == "silent"
    put(run, sign, replace(far, time=far.time + 1))
    assert state_of(feed) == ("running", "")
    now[0] += 9
    assert state_of(feed) == ("running", "")
    now[0] += 2
    assert state_of(feed) == ("silent", "No heartbeat from rank 1 for 11 s.")
    put(run, sign, replace(far, time=far.time + 12))
    assert state_of(feed) == ("running", "")


def test_a_run_of_an_older_version_shows_its_rows(tmp_path: Path):
    run = kept_run(tmp_path)
    feed = RunFeed(run)
    assert state_of(feed)[0] == "unknown"
    assert (feed.state(-1, 0)["traced"], feed.traced()) == (10, [1, 10])
    write(run, row(10, "final"))
    assert state_of(feed) == ("done", "The run is finished.")
    for name in ("step-1.npz", "step-000011.rank-0.npz", "step-x.npz", "step-9999999999999999.npz"):
        (run / "traces" / name).write_text("")
    assert feed.traced() == [1, 10]
