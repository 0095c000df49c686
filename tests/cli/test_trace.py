from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.base.errors import ConfigError, DataError
from penstock.cli.simulate import command as simulate
from penstock.cli.trace import command
from penstock.show import analysis
from penstock.show.planned import plan
from penstock.trace.events import Trace
from penstock.trace.folder import step_path
from tests.support.measured import kept_run


def run(*words: object) -> Result:
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_the_table_and_the_timeline_fit_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(kept_run(tmp_path)).stdout.splitlines()
    assert lines[0] == "my-run, step 10; traced steps: 1, 10"
    assert lines[1] == "1f1b, 2 ranks, 120 ms"
    assert lines[3].startswith("25.0% of the ranks' time was idle. The largest part, 12.5%, was")
    (row,) = [line.split() for line in lines if line.startswith("   0 ")]
    assert row == ["0", "90", "30", "20", "10", "2", "MiB"]
    assert any(line.startswith("rank 0 F0") for line in lines)
    assert len(lines) < 32
    assert max(map(len, lines)) <= 110


def test_a_step_is_chosen_and_json_gives_the_figures(tmp_path: Path):
    path = kept_run(tmp_path)
    assert "600 ms" in run(path, "--step", 1).stdout
    with pytest.raises(ConfigError, match="no trace of step 3"):
        run(path, "--step", 3)
    report = json.loads(run(kept_run(tmp_path), "--json").stdout)
    assert (report["step"], report["steps"], report["ranks_present"]) == (10, [1, 10], [0, 1])
    assert report["makespan"] == pytest.approx(0.12)
    assert report["bubble_of_makespan"] == pytest.approx(0.25)
    assert report["bubble_causes"]["warm_up"] == pytest.approx([0.02, 0.01])
    assert report["planned_makespan"] == pytest.approx(0.12)
    assert report["changes"][0]["schedule"] == "1f1b"


def test_costs_are_written_as_simulate_reads_them(tmp_path: Path):
    path = kept_run(tmp_path)
    for costs in (tmp_path / "costs.toml", tmp_path / "costs.json"):
        run(path, "--costs", costs)
        words = ["1f1b", "--ranks", "2", "--microbatches", "3", "--costs", str(costs), "--json"]
        simulated = CliRunner().invoke(simulate, words, catch_exceptions=False)
        assert json.loads(simulated.stdout)["makespan"] == pytest.approx(0.12)


@pytest.mark.slow
def test_everything_asked_for_is_written_and_named(tmp_path: Path):
    path = kept_run(tmp_path)
    for ending in ("json", "png", "svg", "pdf"):
        files = {"page": tmp_path / "a.html", "timeline": tmp_path / f"a.{ending}"}
        lines = run(path, "--html", files["page"], "--out", files["timeline"]).stdout.splitlines()
        assert lines[-2:] == [f"{what}: {file}" for what, file in files.items()]
        assert all(file.stat().st_size > 1000 for file in files.values())
    with pytest.raises(ConfigError, match=r"--html and --out both write"):
        run(path, "--html", tmp_path / "b.svg", "--out", tmp_path / "b.svg")


def test_two_runs_are_compared_as_text_and_page(tmp_path: Path):
    first, second = kept_run(tmp_path, "first"), kept_run(tmp_path, "second")
    lines = run(first, second, "--html", tmp_path / "c.html").stdout.splitlines()
    assert lines[:2] == ["A  first, step 10", "B  second, step 10"]
    assert "The steps of A and B take the same time, 120 ms." in lines
    assert "The configs are equal." in lines
    assert lines[-1] == f"page: {tmp_path / 'c.html'}"
    drawn = [line for line in lines if line.startswith("rank 0 F0")]
    assert len(drawn) == 2
    table = json.loads(run(first, second, "--step", 1, "--json").stdout)
    assert [r["makespan"] for r in table["runs"]] == pytest.approx([0.6, 0.6])


def test_a_shorter_step_is_drawn_shorter(tmp_path: Path):
    path = kept_run(tmp_path)
    slow, fast = step_path(path, 1), step_path(path, 10)
    drawn = [line for line in run(slow, fast).stdout.splitlines() if line.startswith("rank 0")]
    assert len(drawn[1]) < len(drawn[0]) / 2


def test_what_is_of_one_run_is_refused_for_two(tmp_path: Path):
    path = kept_run(tmp_path)
    for words, problem in (
        ([path, path, "--out", tmp_path / "a.png"], "--out takes one run, got two"),
        ([path, path, path], "give one run, or two to compare, got 3"),
    ):
        result = CliRunner().invoke(command, [str(word) for word in words])
        assert result.exit_code == 2
        assert problem in result.output
    page = path / "x.html"
    page.write_text("")
    with pytest.raises(ConfigError, match="which this command reads"):
        run(page, path, "--html", page)


def test_the_terminal_says_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sentences are the same, and the lines to paste are among them; each of the two steps is planned once."""
    planned: list[Trace] = []
    monkeypatch.setattr(analysis, "plan", lambda trace: planned.append(trace) or plan(trace))
    shown = " ".join(run(kept_run(tmp_path), "--html", tmp_path / "a.html").stdout.split())
    assert len(planned) == 2
    page = unescape((tmp_path / "a.html").read_text())
    sentences = re.findall(r'<div class="say">(.*?)</div>', page, re.S)
    last = re.findall(r"<p>(.*?)</p>", sentences[-1], re.S)
    assert len(last) == 4
    last = [re.sub("</?code>", "", sentence) for sentence in last]
    shown = shown.replace(" or: ", " or ")
    assert all(" ".join(sentence.split()) in shown for sentence in last)


def test_what_is_broken_is_told_beside_what_can_be_shown(tmp_path: Path):
    path = kept_run(tmp_path)
    step_path(path, 1).write_bytes(step_path(path, 1).read_bytes()[:200])
    result = run(path)
    assert f"penstock: cannot read {step_path(path, 1)} as a trace" in result.stderr
    assert result.stdout.startswith("my-run, step 10\n")
    step_path(path, 10).unlink()
    with pytest.raises(DataError, match="step-000001"):
        run(path)
