"""The page of a run: drawn while the run goes on, and a last time at its end, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.base.errors import PenstockError, StoppedError
from penstock.show import run_page
from penstock.show.run import read_run, write_report
from penstock.show.run_page import RunPage
from penstock.train.config.config import Config
from penstock.train.loop import Outcome, train
from penstock.train.run_log import Reporter
from tests.support.measured import kept_run
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import Said, quietly
from tests.support.waiting import until


def run(config: Config, said: Reporter | None = None) -> Outcome:
    outcome = train(config, lambda steps, leads: said or Reporter())
    assert outcome is not None
    return outcome


@pytest.mark.slow
def test_a_run_ends_with_its_page(tmp_path: Path):
    outcome = run(tiny(tmp_path, text_folder(tmp_path), train={"report": True}))
    assert outcome.report == str(tmp_path / "runs" / "tiny" / "report.html")
    page = Path(outcome.report).read_text("utf-8")
    assert "<title>tiny</title>" in page
    assert '<option value="1" selected>step 3</option>' in page
    assert "blocks.2, blocks.3, head" in page
    assert "Training</h2>" in page
    assert "trace_every = 100" in page
    assert "Not everything could be read" not in page
    without = run(tiny(tmp_path, tmp_path / "text", train={"report": False, "name": "without"}))
    assert without.report is None
    folder = Path(without.folder)
    assert not (folder / "report.html").exists()
    page = write_report(read_run(folder), folder / "later.html").read_text("utf-8")
    assert '<option value="1" selected>step 3</option>' in page


def test_without_bokeh_a_line_says_how_to_get_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_page, "find_spec", lambda name: None if name == "bokeh" else find_spec(name))
    said = Said()
    outcome = run(tiny(tmp_path, text_folder(tmp_path), train={"report": True}), said)
    folder = tmp_path / "runs" / "tiny"
    assert outcome.report is None
    assert said.lines[-1] == (
        "no report without Bokeh: pip install 'penstock-torch[report]'; "
        f"penstock trace {folder} --html {folder / 'report.html'}"
    )
    assert not (folder / "report.html").exists()
    assert list(read_run(folder).traces) == [1, 3]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, request) -> list[subprocess.Popen[str]]:
    """Pages are due at once; the processes that draw them, or that run another command."""
    started: list[subprocess.Popen[str]] = []
    start, other = subprocess.Popen, getattr(request, "param", None)

    def begin(command, **named):
        assert all(process.poll() is not None for process in started), "two at once"
        started.append(start(other or command, **named))
        return started[-1]

    monkeypatch.setattr(run_page, "EVERY", 0)
    monkeypatch.setattr(run_page.subprocess, "Popen", begin)
    return started


@pytest.mark.slow
def test_while_the_run_goes_on_its_page_is_drawn_again_and_again_and_reloads_itself(tmp_path: Path, at_once):
    folder = kept_run(tmp_path)
    with RunPage(folder, 1000, pytest.fail) as page:

        def step_and_look() -> bool:
            page.after_step(7)
            return len(at_once) == 3

        until(step_and_look, limit=300)
        at_once[1].wait()
        text = (folder / "report.html").read_text("utf-8")
        assert "The run is under way: step 7 of 1,000" in text
        assert 'data-reload="10"' in text
        assert page.finish() == folder / "report.html"
        assert at_once[2].returncode is not None
    text = (folder / "report.html").read_text("utf-8")
    assert 'id="note"' not in text
    assert "data-reload=" not in text
    assert list(folder.glob("*.unfinished")) == []


@pytest.mark.parametrize("at_once", [["sleep", "60"]], indirect=True)
def test_what_still_draws_at_the_end_is_ended(tmp_path: Path, at_once):
    with RunPage(tmp_path, 9, pytest.fail) as page:
        while not at_once:
            page.after_step(1)
    assert at_once[0].returncode is not None


@pytest.mark.parametrize("at_once", [["sh", "-c", "echo from; echo no room >&2; exit 3"]], indirect=True)
def test_a_page_that_cannot_be_drawn_is_said_once(tmp_path: Path, at_once):
    said = Said()
    with RunPage(tmp_path, 9, said.say) as page:

        def step_and_look() -> bool:
            page.after_step(1)
            return len(at_once) == 3

        until(step_and_look, limit=300)
        assert said.lines == ["no report during the run: no room. Training continues"]
        assert page.finish() is None
    assert said.lines[1].startswith("no report: ")
    assert str(tmp_path) in said.lines[1]


@pytest.mark.slow
def test_a_process_that_draws_for_a_run_that_was_killed_leaves_the_page_alone(tmp_path: Path):
    folder = kept_run(tmp_path)
    command = [sys.executable, "-m", run_page.__name__, str(folder), "a note"]
    subprocess.run([*command, str(os.getppid())], check=True, timeout=300)
    assert not (folder / "report.html").exists()
    subprocess.run([*command, str(os.getpid())], check=True, timeout=300)
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_the_page_of_a_run_that_is_stopped_or_fails_says_so_and_is_the_last(tmp_path: Path):
    text, asked = text_folder(tmp_path), iter([False, False, True])
    config = tiny(tmp_path, text, train={"report": True})
    with pytest.raises(StoppedError):
        quietly(config, stopping=lambda: next(asked))
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text("utf-8")
    assert "The run stopped after step 2, saved in" in page
    assert "data-reload=" not in page
    told = {"name": "bad", "report": True, "steps": 9}
    with pytest.raises(PenstockError):
        run(tiny(tmp_path, text, train=told, optim={"lr": 1e30, "clip": 0.0}))
    page = (tmp_path / "runs" / "bad" / "report.html").read_text("utf-8")
    assert "The run failed after step " in page
    assert "NaN or infinite" in page
    assert "data-reload=" not in page


def test_an_error_of_drawing_does_not_take_the_place_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments, **named):
        raise MemoryError("no room")

    monkeypatch.setattr(run_page, "write_report", fail)
    said = Said()
    assert run(tiny(tmp_path, text_folder(tmp_path), train={"report": True}), said).report is None
    folder = tmp_path / "runs" / "tiny"
    assert said.lines[-1].startswith("no report: MemoryError: no room; later, penstock trace ")
    assert "Traceback" in (folder / "logs" / "rank-0.log").read_text()
