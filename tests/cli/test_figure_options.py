"""`penstock schedule draw` and `penstock simulate` write the same figures from the same costs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.base.errors import ConfigError
from penstock.cli import group
from tests.support.lanes import slow

DRAW, SIMULATE = ("schedule", "draw"), ("simulate",)
COUNTS = ("zb-h1", "-p", "3", "-m", "4")


def run(*words: object) -> Result:
    result = CliRunner().invoke(group, [str(word) for word in words])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("ending", "magic"),
    [("SVG", b"<?xml"), ("json", b'{"traceEvents"'), *slow(("pdf", b"%PDF"), ("png", b"\x89PNG"))],
)
def test_both_commands_write_the_same_file_by_its_ending(tmp_path: Path, ending: str, magic: bytes):
    costs = ("--costs", "2,3,1", "--latency", "0.5")
    for name, command in (("a", DRAW), ("b", SIMULATE)):
        path = tmp_path / f"{name}.{ending}"
        result = run(*command, *COUNTS, *costs, "--out", path)
        assert result.exit_code == 0, result.output
        assert result.output.endswith(f"drawn to {path}\n")
    first, second = (tmp_path / f"{name}.{ending}" for name in "ab")
    assert first.read_bytes().startswith(magic)
    assert first.read_bytes() == second.read_bytes()


def test_costs_from_a_file_and_latency_shape_the_drawing(tmp_path: Path):
    (tmp_path / "costs.toml").write_text("F = [1, 2, 1]\nB = 2\nW = 1\n")
    ends = []
    for costs in (("--costs", tmp_path / "costs.toml"), ("--costs", "1,1,1", "--latency", "1"), ()):
        run(*DRAW, *COUNTS, *costs, "--out", tmp_path / "a.json")
        slices = [e for e in json.loads((tmp_path / "a.json").read_text())["traceEvents"] if e["ph"] == "X"]
        figures = json.loads(run(*SIMULATE, *COUNTS, *costs, "--json").output)
        ends.append(max(e["ts"] + e["dur"] for e in slices))
        assert ends[-1] == pytest.approx(figures["makespan"] * 1e6)
    assert len(set(ends)) == 3


def test_title_width_and_font_are_those_of_the_picture(tmp_path: Path):
    look = ("--title", "Ours, 3 ranks", "--width", "3.3", "--font", "7")
    run(*DRAW, *COUNTS, "--out", tmp_path / "a.svg", *look)
    text = (tmp_path / "a.svg").read_text()
    assert 'width="237.6pt"' in text
    assert ">Ours, 3 ranks</text>" in text
    # Older versions of Matplotlib write the size among the other values of "font:".
    sizes = re.findall(r"font(?:-size)?: [^;\"]*?([\d.]+)px", text)
    assert max(map(float, sizes)) <= 7 * 1.2
    run(*SIMULATE, *COUNTS, "--out", tmp_path / "b.svg", "--title", "")
    assert ">zb-h1<" not in (tmp_path / "b.svg").read_text()
    assert 'width="864pt"' in (tmp_path / "b.svg").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "a.bmp"), "--out a.bmp: the name must end in .svg, .pdf, .png, .json"),
        (("--title", "T"), "--title is for a picture; give --out PATH.svg, .pdf or .png"),
        (("--out", "a.json", "--font", "8"), "--font is for a picture"),
        (("--out", "a.svg", "--font", "1000"), "the font of a picture must be 1 to 100 points, got 1000"),
        (("--out", "no/a.svg"), "there is no folder no"),
        (("--out", "notes.svg"), "notes.svg exists and is not an SVG; delete it, or give another --out"),
        (("--costs", "1,2", "--out", "a.svg"), "--costs must be three numbers"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_written(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.svg").write_text("my notes")
    for command in (DRAW, SIMULATE):
        with pytest.raises(ConfigError, match=re.escape(says)):
            run(*command, *COUNTS, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.svg"]
    assert (tmp_path / "notes.svg").read_text() == "my notes"


def test_several_schedules_are_not_one_picture(tmp_path: Path):
    result = run(*SIMULATE, "--compare", "1f1b,gpipe", "-p", 2, "-m", 2, "--out", tmp_path / "a.svg")
    assert result.exit_code == 2
    assert "--out draws one schedule" in result.output


def test_what_was_dropped_from_a_file_is_printed(tmp_path: Path):
    (tmp_path / "s.csv").write_text("0F0,0SEND_F0,0RECV_B0,0B0,0W0\n1RECV_F0,1F0,1B0,1SEND_B0,1W0\n")
    dropped = "dropped 1 SEND_F, 1 RECV_B, 1 RECV_F, 1 SEND_B: communication follows from the compute ops"
    assumed = "read 2 B as I, the input gradient: a W of the same stage and microbatch is there"
    for words in (("schedule", "check"), DRAW, SIMULATE):
        output = run(*words, tmp_path / "s.csv").output
        assert f"{dropped}\n{assumed}\n" in output
    report = json.loads(run("schedule", "check", tmp_path / "s.csv", "--json").output)
    assert report["notes"] == [dropped, assumed]
    with pytest.raises(ConfigError, match="0B0 and 0W0 both appear"):
        run("schedule", "check", tmp_path / "s.csv", "-o", "backward=full")
