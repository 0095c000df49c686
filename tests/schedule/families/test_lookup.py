"""Families of the user, by registration and by MODULE:FUNCTION."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import penstock
from penstock.base.errors import ScheduleCodeError, ScheduleError
from penstock.schedule.families import build_schedule, find_family, lookup
from penstock.schedule.families.own_family import OwnFamily
from tests.support import own_schedules as own


@pytest.fixture(autouse=True)
def no_family_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_registered", {})


# By registration


def test_a_registered_family_is_found_by_its_name():
    penstock.register_family("waiting", own.waiting)
    assert build_schedule("waiting", 2, 4, hold=2) == OwnFamily("x", own.waiting).build(2, 4, hold=2)
    with pytest.raises(ScheduleError, match=r"no schedule family 'waitin' \(did you mean 'waiting'"):
        build_schedule("waitin", 2, 4)


def test_a_cell_that_runs_twice_replaces_its_function_and_another_one_does_not():
    code = "def again(ranks, microbatches):\n    return ['0F0 0B0']\n"
    functions = []
    for _ in range(2):
        cell: dict[str, object] = {"__name__": "__main__"}
        exec(code, cell)
        functions.append(cell["again"])
        penstock.register_family("again", cell["again"])
    assert find_family("again").rule is functions[1]
    with pytest.raises(
        ScheduleError, match="a family again is registered already, from <string>, line 1; take"
    ):
        penstock.register_family("again", own.waiting)


@pytest.mark.parametrize("name", ["1f1b", "searched"])
def test_names_of_the_catalogue_are_taken(name: str):
    with pytest.raises(ScheduleError, match=f"{name} is a family of the catalogue; take another name"):
        penstock.register_family(name, own.waiting)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a,b", "mine.csv", "-a", None, 3])
def test_names_that_mean_something_else_are_refused(name: object):
    with pytest.raises(ScheduleError, match="a family's name must be letters, digits"):
        penstock.register_family(name, own.waiting)


def test_what_is_no_function_is_refused():
    with pytest.raises(ScheduleError, match="the family mine must be a function, got 'own:waiting'"):
        penstock.register_family("mine", "own:waiting")
    with pytest.raises(ScheduleCodeError, match="mine must have the parameters ranks and microbatches"):
        penstock.register_family("mine", lambda p, m: [])


# By MODULE:FUNCTION


def test_a_function_is_found_in_its_module():
    name = "tests.support.own_schedules:waiting"
    schedule = build_schedule(name, 2, 4)
    assert schedule.name == name
    assert schedule == OwnFamily("x", own.waiting).build(2, 4)


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zigzag_here.py").write_text("def zig(ranks, microbatches):\n    return ['0F0 0B0']\n")
    assert build_schedule("zigzag_here:zig", 1, 1).text(0) == "0F0 0B0"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:f", "there is no module 'no_such_module' on Python's path or in the current folder"),
        ("tests.no_such_module:f", "there is no module 'tests.no_such_module'"),
        ("tests.support.own_schedules:wating", "has no 'wating' (did you mean 'waiting'"),
        ("tests.support.own_schedules:Kind.Q", "has no 'Kind.Q'"),
        ("tests.support.own_schedules:HERE.x", "has no 'HERE.x'"),
        ("tests.support.own_schedules:__doc__", "must be a function, got str"),
        ("folder/zigzag.py:build", "such as zigzag:build, got 'folder/zigzag.py:build'; write zigzag:build in"),
        ("zigzag.py:build", "got 'zigzag.py:build'; write zigzag:build in the folder of the file"),
        (":f", "is MODULE:FUNCTION, such as zigzag:build, got ':f'"),
        ("a:", "got 'a:'"),
        (".a:b", "got '.a:b'"),
        ("a b:c", "got 'a b:c'"),
        ("a:b:c", "got 'a:b:c'"),
        ("zigzag.py", "no schedule family 'zigzag.py'"),
    ],
)  # fmt: skip
def test_a_name_that_leads_nowhere_says_why(name: str, says: str):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        find_family(name) or build_schedule(name, 2, 2)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def f(ranks, microbatches)\n    pass\n", r"failed with SyntaxError: .*broken_1\.py, line 1\)"),
        ("import json\n\nx = nothing\n", r"failed with NameError: name 'nothing' is not defined \(broken_1\.py, line 3\)"),
        ("import no_such_thing\n", r"failed with ModuleNotFoundError: .*\(broken_1\.py, line 1\)"),
        ("raise SystemExit(3)\n", r"failed with SystemExit: 3 \(broken_1\.py, line 1\)"),
        ("raise ValueError('bad')\n", r"failed with ValueError: bad \(broken_1\.py, line 1\)"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_is_named_with_the_line(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_1.py").write_text(code)
    with pytest.raises(ScheduleCodeError, match=r"^broken_1:f, when broken_1 was imported, " + says):
        find_family("broken_1:f")
    sys.modules.pop("broken_1", None)
