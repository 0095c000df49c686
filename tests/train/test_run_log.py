"""Logs of a run and what it shows: what is in them, and at which level."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from penstock.base.errors import ConfigError, NonFiniteError
from penstock.train.callbacks.callback import Callback, StepEvent
from penstock.train.loop import train
from penstock.train.run_log import Bar, Lines, Reporter, reporter, run_log
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import Said, quietly

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) +\S+ penstock\S*: ")


def log_of(tmp_path: Path, rank: int = 0, name: str = "tiny") -> str:
    return (tmp_path / "runs" / name / "logs" / f"rank-{rank}.log").read_text()


def test_the_log_has_the_lines_of_the_run_with_time_and_level(tmp_path: Path):
    said = Said()
    train(tiny(tmp_path, text_folder(tmp_path), train={"checkpoint_every": 2}), lambda steps, leads: said)
    found = log_of(tmp_path).splitlines()
    assert all(LINE.match(line) for line in found), found
    texts = [LINE.sub("", line) for line in found]
    assert [text for text in texts if text in said.lines] == said.lines
    assert texts[0] == said.lines[0]
    assert re.search(r"\(cpu, 1 CPU thread per rank\)", texts[0])
    assert any(text.startswith("step 3: loss ") for text in texts)
    assert any(text.startswith("checkpoint complete: ") for text in texts)
    assert not any(line.split()[1] == "DEBUG" for line in found)
    assert logging.getLogger("penstock").handlers[1:] == []


class Warns(Callback):
    def on_step(self, event: StepEvent) -> None:
        warnings.warn("this will change", FutureWarning, stacklevel=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("always::FutureWarning")
def test_the_level_is_the_configs_or_the_variables_and_warnings_are_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    text = text_folder(tmp_path)
    for name, level in (("quiet", "warning"), ("loud", "debug")):
        config = tiny(tmp_path, text, train={"name": name, "log_level": level})
        quietly(config, callbacks=[Warns()])
    assert "INFO" not in log_of(tmp_path, name="quiet")
    assert "FutureWarning: this will change" in log_of(tmp_path, name="quiet")
    assert "step 2 done, loss" in log_of(tmp_path, name="loud")
    monkeypatch.setenv("PENSTOCK_LOG", "ERROR")
    config = tiny(tmp_path, text, train={"name": "error", "log_level": "debug"})
    quietly(config, callbacks=[Warns()])
    assert log_of(tmp_path, name="error") == ""
    assert any("this will change" in str(warning.message) for warning in recwarn)  # they are shown, too
    monkeypatch.setenv("PENSTOCK_LOG", "loud")
    with pytest.raises(ConfigError, match="PENSTOCK_LOG must be debug, info, warning or error, got 'loud'"):
        quietly(tiny(tmp_path, text, train={"name": "none"}))
    assert not (tmp_path / "runs" / "none").exists()


def test_an_error_that_ends_the_run_is_in_the_log_with_its_traceback(tmp_path: Path):
    config = tiny(tmp_path, text_folder(tmp_path), optim={"lr": 1e30, "clip": 0.0})
    with pytest.raises(NonFiniteError):
        quietly(config)
    assert "ERROR   MainThread penstock.run: the run ends with an error\nTraceback" in log_of(tmp_path)


def test_a_log_that_cannot_be_written_is_told_once(tmp_path: Path):
    said: list[str] = []
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    with run_log(tmp_path, 0, logging.INFO, said.append, ["one", "two"]):
        logging.getLogger("penstock.any").info("three")
    (tmp_path / "no").write_text("a file")
    with run_log(tmp_path / "no", 0, logging.INFO, said.append):
        pass
    assert [line.partition(": ")[0] for line in said] == [
        f"{tmp_path}/logs/rank-0.log lacks lines",
        f"no log {tmp_path}/no/logs/rank-0.log",
    ]


def test_the_library_prints_nothing_by_itself():
    assert isinstance(logging.getLogger("penstock").handlers[0], logging.NullHandler)


def drive(report: Reporter) -> None:
    with report:
        report.say("hello [bold]")
        report.step(1, 5.5)
        report.measured(2, 4.25, 12345.6, 0.125)


def test_elsewhere_than_on_a_terminal_there_are_plain_lines():
    out = io.StringIO()
    drive(Lines(Console(file=out, width=20), 100))
    assert out.getvalue() == "hello [bold]\nstep   2/100  loss 4.2500  12,346 tokens/s  bubble 12.5%\n"


def test_on_a_terminal_there_is_one_live_line():
    out = io.StringIO()
    drive(Bar(Console(file=out, width=120, force_terminal=True, color_system=None), 100))
    assert "hello [bold]" in out.getvalue()
    assert "nan" not in out.getvalue()
    last = [line for line in out.getvalue().splitlines() if "loss" in line][-1]
    for part in ("2/100", "loss 4.2500", "12,346 tokens/s", "bubble 12.5%"):
        assert part in last


def test_only_the_leading_rank_speaks(capsys: pytest.CaptureFixture[str]):
    drive(reporter(10, leads=False))
    assert capsys.readouterr() == ("", "")
    drive(reporter(10, leads=True))
    assert "step  2/10" in capsys.readouterr().out
    drive(reporter(10, leads=True, to_stderr=True))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step  2/10" in captured.err


def test_a_terminal_that_mpirun_made_gets_lines():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, contextlib.redirect_stdout(terminal):
        assert isinstance(reporter(10, leads=True, env={}), Bar)
        assert isinstance(reporter(10, leads=True, env={"OMPI_COMM_WORLD_RANK": "0"}), Lines)
    os.close(leader)
