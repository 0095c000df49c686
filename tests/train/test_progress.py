from __future__ import annotations

import contextlib
import io
import os
import pty

import pytest
from rich.console import Console

from penstock.train.run_log import Bar, Lines, Reporter, reporter


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
