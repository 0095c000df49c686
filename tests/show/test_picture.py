from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.schedule.placement import Placement
from penstock.show.picture import draw_picture
from tests.support.measured import measured
from tests.support.simulated import built, timed, written
from tests.support.traces import trace_of

pytest.importorskip("matplotlib")


def test_a_vector_picture_has_a_bar_an_op_and_its_microbatch(tmp_path: Path):
    draw_picture(timed(built("1f1b", 2, 3), 1, 1, 1), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert len(re.findall(r'<g id="PolyCollection_\d+">', text)) == 2
    words = re.findall(r"<text [^>]*>([^<]*)</text>", text)
    assert {"forward", "backward", "rank", "time", "1f1b"} <= set(words)
    assert all(words.count(str(microbatch)) >= 4 for microbatch in range(3))


def test_a_measured_step_is_drawn_in_a_unit_that_suits(tmp_path: Path):
    draw_picture(measured(scale=0.01), tmp_path / "a.svg")
    assert ">time (ms)</text>" in (tmp_path / "a.svg").read_text()


def test_the_same_trace_gives_the_same_file(tmp_path: Path):
    trace = timed(built("1f1b", 2, 3), 1, 1, 1)
    for name in ("a.svg", "b.svg"):
        draw_picture(trace, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_pixels_and_pages(tmp_path: Path, name: str, magic: bytes):
    pair = written(Placement.loop(1), 2, "0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    draw_picture(timed(pair, 1, 1, 1), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_trace_without_events_is_an_empty_picture(tmp_path: Path):
    draw_picture(trace_of("", ""), tmp_path / "a.svg")
    assert "PolyCollection" not in (tmp_path / "a.svg").read_text()


def test_another_ending_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot draw a\.bmp: the name must end in \.svg, \.png, \.pdf"):
        draw_picture(trace_of("0F0@0-1"), tmp_path / "a.bmp")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot write the picture .*: No such file or directory"):
        draw_picture(trace_of("0F0@0-1"), tmp_path / "no" / "a.svg")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[pictures\]'"):
        draw_picture(trace_of("0F0@0-1"), tmp_path / "a.svg")
