"""Families by registration, by entry points of installed packages, and by MODULE:FUNCTION."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.errors import ScheduleCodeError, ScheduleError
from penstock.schedule.families import FAMILIES, build_schedule, find_family, own_families, plugins
from penstock.schedule.families.own_family import OwnFamily
from tests.support import own_schedules as own
from tests.support.packages import package


@pytest.fixture(autouse=True)
def no_family_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.syspath_prepend(str(folder))


# By registration


def test_a_registered_family_is_found_by_its_name():
    penstock.register_family("waiting", own.waiting)
    assert build_schedule("waiting", 2, 4, hold=2) == OwnFamily("x", own.waiting, "").build(2, 4, hold=2)
    assert find_family("waiting").origin.startswith("registered (")
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
    assert schedule == OwnFamily("x", own.waiting, "").build(2, 4)


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zigzag_here.py").write_text("def zig(ranks, microbatches):\n    return ['0F0 0B0']\n")
    assert build_schedule("zigzag_here:zig", 1, 1).text(0) == "0F0 0B0"
    assert find_family("zigzag_here:zig").origin == "zigzag_here.py, line 1"


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
    on_path(monkeypatch, tmp_path)
    (tmp_path / "broken_1.py").write_text(code)
    with pytest.raises(ScheduleCodeError, match=r"^broken_1:f, when broken_1 was imported, " + says):
        find_family("broken_1:f")
    sys.modules.pop("broken_1", None)


# By entry points


def test_a_package_offers_families_by_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package(tmp_path, "zigzag-schedules", "1.2", {"zigzag": "zigzag_a:build"}, zigzag_a=own.waiting)
    on_path(monkeypatch, tmp_path)
    family = find_family("zigzag")
    assert family.origin == "package zigzag-schedules 1.2 (zigzag_a:build)"
    assert build_schedule("zigzag", 2, 4).name == "zigzag"
    assert own_families().families == {"zigzag": family}
    assert own_families().problems == []
    with pytest.raises(ScheduleError, match=r"no schedule family 'zigzagg' \(did you mean 'zigzag'"):
        build_schedule("zigzagg", 2, 4)


def test_nothing_of_a_package_is_imported_before_its_name_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package(tmp_path, "lazy-schedules", "1", {"lazy": "zigzag_b:build"}, zigzag_b=own.waiting)
    on_path(monkeypatch, tmp_path)
    build_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"there are .*, lazy$"):
        build_schedule("no-such", 2, 2)
    assert "zigzag_b" not in sys.modules


def test_a_broken_package_is_named_and_breaks_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package(tmp_path, "good", "1", {"good": "zigzag_c:build"}, zigzag_c=own.waiting)
    package(tmp_path, "gone", "2", {"gone": "no_such_module_c:build"})
    package(tmp_path, "thief", "3", {"1f1b": "zigzag_c:build", "a b": "zigzag_c:build"})
    package(tmp_path, "vague", "4", {"vague": "zigzag_c"})
    on_path(monkeypatch, tmp_path)
    families, problems = own_families()
    assert list(families) == ["good"]
    assert sorted(problems) == [
        "package gone 2 (no_such_module_c:build): gone: there is no module 'no_such_module_c' on Python's path or in the "
        "current folder",
        "package thief 3 (zigzag_c:build): 1f1b is a family of the catalogue; take another name",
        "package thief 3 (zigzag_c:build): a family's name must be letters, digits, and any of _ . + - between them, such "
        "as my-zigzag, got 'a b'",
        "package vague 4 (zigzag_c): vague must be MODULE:FUNCTION, got 'zigzag_c'",
    ]
    assert find_family("1f1b") is FAMILIES["1f1b"]
    with pytest.raises(
        ScheduleCodeError, match=r"package gone 2 \(no_such_module_c:build\): gone: there is no module"
    ):
        build_schedule("gone", 2, 2)


def test_entry_points_that_cannot_be_read_are_named_and_break_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package(tmp_path, "good", "1", {"good": "zigzag_h:build"}, zigzag_h=own.waiting)
    package(tmp_path, "odd", "2", {"odd": "mod attr!!", "more": "zigzag_h:build [extra]"})
    package(tmp_path, "torn", "3", {})
    (tmp_path / "torn-3.dist-info" / "entry_points.txt").write_text("[penstock.schedules]\nno value\n= a:b\n")
    nameless = tmp_path / "nameless-4.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text("[penstock.schedules]\nlast = zigzag_h:build\n")
    on_path(monkeypatch, tmp_path)
    families, problems = own_families()
    assert {"good", "more"} <= set(families)
    assert "package torn: its entry points cannot be read: " in "".join(problems)
    assert "package odd 2 (mod attr!!): odd must be MODULE:FUNCTION, got 'mod attr!!'" in problems
    with pytest.raises(ScheduleError, match=r"no schedule family '1f1c' \(did you mean '1f1b'"):
        build_schedule("1f1c", 2, 2)


def test_two_packages_with_one_name_are_told_apart_by_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package(tmp_path, "first", "1", {"twice": "zigzag_d:build"}, zigzag_d=own.waiting)
    package(tmp_path, "second", "2", {"twice": "zigzag_e:build"}, zigzag_e=own.waiting)
    on_path(monkeypatch, tmp_path)
    says = (
        r"several offer a family twice: package first 1 \(zigzag_d:build\) and package second 2 \(zigzag_e:build\); name "
        "the one you mean as MODULE:FUNCTION"
    )
    with pytest.raises(ScheduleError, match=says):
        build_schedule("twice", 2, 2)
    assert re.match(says, own_families().problems[0])
    assert build_schedule("zigzag_e:build", 2, 2).ranks == 2


def test_a_registered_name_may_be_that_of_the_same_function_of_a_package_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package(tmp_path, "both", "1", {"both": "zigzag_f:build"}, zigzag_f=own.waiting)
    on_path(monkeypatch, tmp_path)
    import zigzag_f

    penstock.register_family("both", zigzag_f.build)
    assert find_family("both").rule is zigzag_f.build
    monkeypatch.setattr(plugins, "_registered", {})
    penstock.register_family("both", own.waiting)
    with pytest.raises(
        ScheduleError, match=r"several offer a family both: registered \(.* and package both 1"
    ):
        find_family("both")


def test_an_installed_package_is_found_by_a_fresh_process(tmp_path: Path):
    package(tmp_path, "fresh", "1", {"fresh": "zigzag_g:build"}, zigzag_g=own.waiting)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import penstock; "
        "print(penstock.build_schedule('fresh', 2, 2).text(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], done.stderr
