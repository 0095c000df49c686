"""Colours differ, and the text on them is legible, also for people who see fewer colours."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.show import palette
from penstock.show.palette import BUSY, CAUSES, KINDS
from penstock.show.picture import HATCHES
from penstock.trace import bubbles
from penstock.trace.events import Activity

# Viénot, Brettel and Mollon (1999), "Digital video colourmaps for checking the legibility of displays by dichromats":
# what is left of linear RGB.
SEEN = {
    "all": np.eye(3),
    "protanopia": np.array([[0.1124, 0.8876, 0.0], [0.1124, 0.8876, 0.0], [0.0040, -0.0040, 1.0]]),
    "deuteranopia": np.array([[0.2927, 0.7073, 0.0], [0.2927, 0.7073, 0.0], [-0.0223, 0.0223, 1.0]]),
}


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """Convert linear sRGB to CIE L*a*b* (D65)."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio of WCAG 2.1."""
    light, dark = sorted((linear(c) @ [0.2126, 0.7152, 0.0722] for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def distance(a: str, b: str, seen: str) -> float:
    return float(np.linalg.norm(lab(SEEN[seen] @ linear(a)) - lab(SEEN[seen] @ linear(b))))


WORK = [Activity.F, Activity.B, Activity.I, Activity.W, Activity.R]


def test_every_kind_and_cause_has_its_style_in_order():
    assert list(KINDS) == list(Activity)
    assert tuple(CAUSES) == bubbles.CAUSES


@pytest.mark.parametrize("seen", SEEN)
def test_kinds_their_shades_and_causes_side_by_side_differ_for_everyone(seen):
    for shade in ("full", "light"):
        colours = [getattr(KINDS[kind], shade) for kind in WORK]
        assert min(distance(a, b, seen) for a, b in combinations(colours, 2)) >= 10, shade
    assert min(distance(c.full, c.light, seen) for c in KINDS.values()) >= 20
    stacked = [BUSY, *(cause.colour for cause in CAUSES.values())]
    assert min(distance(a, b, seen) for a, b in pairwise(stacked)) >= 10


@pytest.mark.parametrize("shade", ["full", "light"])
def test_kinds_of_ops_differ_on_a_grey_print_by_lightness_or_by_hatch(shade):
    def lightness(kind: Activity) -> float:
        return lab(linear(getattr(KINDS[kind], shade)))[0]

    for a, b in combinations(WORK, 2):
        assert HATCHES.get(a) != HATCHES.get(b) or abs(lightness(a) - lightness(b)) >= 10, (a, b)


@pytest.mark.parametrize(("scheme", "back"), [("light", "#ffffff"), ("dark", "#14181c")])
def test_lines_of_memory_are_legible_on_their_background(scheme: str, back: str):
    from penstock.show.figures import rank_colours

    style = Path(palette.__file__).with_name("templates").joinpath("page.css").read_text()
    assert f"--back: {back}" in style
    assert min(contrast(colour, back) for colour in rank_colours(12)[scheme]) >= 3


def test_text_on_blocks_is_legible():
    assert min(contrast(colour.full, "#ffffff") for colour in KINDS.values()) >= 4.5
    assert min(contrast(colour.light, "#000000") for colour in KINDS.values()) >= 4.5
