from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.schedule.placement import Placement
from penstock.show.picture import LABELLED, PictureStyle, draw_picture
from tests.support.measured import measured
from tests.support.simulated import built, timed, written
from tests.support.traces import trace_of


def words_of(path: Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())


def test_a_vector_picture_has_a_bar_an_op_its_microbatch_and_a_unit_and_is_always_the_same(tmp_path: Path):
    for name in ("a.svg", "b.svg"):
        draw_picture(measured(scale=0.01), tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert len(re.findall(r'<g id="PolyCollection_\d+">', text)) == 2
    words = words_of(tmp_path / "a.svg")
    assert {"forward", "backward", "rank", "time (ms)", "1f1b"} <= set(words)
    assert all(words.count(str(microbatch)) >= 4 for microbatch in range(3))


def test_backwards_are_hatched_while_blocks_can_be_told_apart(tmp_path: Path):
    draw_picture(timed(built("zb-h1", 2, 3), 1, 1, 1), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().count("<pattern") == 2  # input and weight gradients
    draw_picture(timed(built("zb-h1", 2, LABELLED), 1, 1, 1), tmp_path / "b.svg")
    assert "<pattern" not in (tmp_path / "b.svg").read_text()
    assert str(LABELLED // 2 + 1) not in words_of(tmp_path / "b.svg")


def test_gathers_and_reductions_have_a_strip_below_the_ops(tmp_path: Path):
    def heights(line: str) -> list[float]:
        """Heights of the bars of each kind."""
        draw_picture(trace_of(line), tmp_path / "a.svg")
        text = (tmp_path / "a.svg").read_text()
        bars = re.findall(r'<g id="PolyCollection_\d+">.*? d="([^"]*)"', text, re.DOTALL)
        ends = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", bar)] for bar in bars]
        return [max(ys) - min(ys) for ys in ends]

    (alone,), (op, gather) = heights("0F0@0-2"), heights("0F0@0-2 0GATHER@1-4")
    assert (op / alone, gather / alone) == pytest.approx((0.68 / 0.84, 0.16 / 0.84), rel=0.05)
    assert "gather of weights" in words_of(tmp_path / "a.svg")
    # Those that cross, as on the link of a store, have one each.
    op, reduction, gather = heights("0F0@0-2 0GATHER@1-4 0REDUCE@2-3")
    assert (op / alone, gather / alone, reduction / alone) == pytest.approx(
        (0.52 / 0.84, *2 * [0.16 / 0.84]), rel=0.05
    )


def test_numbers_that_do_not_fit_a_block_are_left_out(tmp_path: Path):
    trace = timed(built("1f1b", 2, 40), 1, 1, 1)
    draw_picture(trace, tmp_path / "wide.svg", PictureStyle(width=20))
    draw_picture(trace, tmp_path / "narrow.svg", PictureStyle(width=2))
    assert "39" in words_of(tmp_path / "wide.svg")
    assert "39" not in words_of(tmp_path / "narrow.svg")


def test_a_pdf_has_fonts_that_journals_accept(tmp_path: Path):
    pair = written(Placement.loop(1), 2, "0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    draw_picture(timed(pair, 1, 1, 1), tmp_path / "a.pdf")
    content = (tmp_path / "a.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert b"/Type3" not in content
    assert b"/TrueType" in content or b"/CIDFontType2" in content
    assert b"CreationDate" not in content


def test_a_trace_without_events_is_an_empty_picture(tmp_path: Path):
    draw_picture(trace_of("", ""), tmp_path / "a.svg")
    assert "PolyCollection" not in (tmp_path / "a.svg").read_text()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for look, says in (
        ({"width": 0.5}, "the width of a picture must be 1 to 100 inches, got 0.5"),
        ({"width": float("inf")}, "the width of a picture must be 1 to 100 inches, got inf"),
        ({"font": "9"}, "the font of a picture must be 1 to 100 points, got '9'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            PictureStyle(**look)
    trace = trace_of("0F0@0-1")
    with pytest.raises(ConfigError, match=r"cannot draw a\.bmp: the name must end in \.svg, \.png, \.pdf"):
        draw_picture(trace, tmp_path / "a.bmp")
    with pytest.raises(ConfigError, match=r"cannot write the picture .*: No such file or directory"):
        draw_picture(trace, tmp_path / "no" / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-torch\[pictures\]'"):
        draw_picture(trace, tmp_path / "a.svg")


def test_the_axis_of_a_single_rank_has_its_number_alone(tmp_path: Path):
    draw_picture(timed(built("gpipe", 1, 1), 1, 1, 1), tmp_path / "a.svg")
    assert "\N{MINUS SIGN}" not in "".join(words_of(tmp_path / "a.svg"))
