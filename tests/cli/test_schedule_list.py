"""`penstock schedule list` has the families of installed packages, and warns of those that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.schedule import command
from tests.support import own_schedules as own
from tests.support.packages import package


def test_families_of_packages_are_listed_with_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package(tmp_path, "waiting-schedules", "1.2", {"waiting": "waiting_l:build"}, waiting_l=own.waiting)
    package(tmp_path, "picky", "1", {"picky": "picky_l:build"}, picky_l=own.refuses)
    package(tmp_path, "gone", "2", {"gone": "no_such_module_l:build"})
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(command, ["list", "-p", "4", "-m", "8"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    at = lines.index(
        "waiting           package waiting-schedules 1.2 (waiting_l:build); 1F1B whose weight gradients wait for `hold` "
        "more microbatches"
    )
    assert lines[at + 1 : at + 3] == ["  bubble  6", "  peak    5 4 3 2"]
    assert "4 ranks are too few (" in next(line for line in lines if line.startswith("picky"))
    assert result.stderr == (
        "penstock: warning: package gone 2 (no_such_module_l:build): gone: there is no module 'no_such_module_l' on "
        "Python's path or in the current folder\n"
    )
    report = json.loads(CliRunner().invoke(command, ["list", "--json"]).stdout)
    rows = {row["name"]: row for row in report["families"]}
    assert rows["waiting"]["source"] == "package waiting-schedules 1.2 (waiting_l:build)"
    assert rows["waiting"]["in_order"] is True
    assert rows["waiting"]["options"] == ["hold"]
    assert rows["waiting"]["bubble"] == {"formula": None, "value": 6.0}
    assert rows["picky"]["refused"]
    assert len(report["problems"]) == 1


def test_a_broken_package_does_not_break_the_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package(tmp_path, "broken", "1", {"broken": "broken_l:build"}, broken_l=own.waiting)
    (tmp_path / "broken_l.py").write_text("raise SystemExit('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(command, ["show", "1f1b", "-p", "2", "-m", "2"])
    assert (result.exit_code, result.stderr) == (0, "")
    listed = CliRunner().invoke(command, ["list"])
    assert listed.exit_code == 0
    assert (
        "package broken 1 (broken_l:build): broken, when broken_l was imported, failed with SystemExit: broken"
        in (listed.stderr)
    )
