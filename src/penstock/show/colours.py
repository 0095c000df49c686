"""The colours of everything drawn, chosen so that kinds stay apart for people who confuse red and green, or see no colour.

Every kind has two shades, one for the first, third, ... of a rank's stages and a lighter one for the others. White text is
legible on the first, black on the second. The tests hold this, on simulated deuteranopia and protanopia.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.trace.events import Activity


class Colour(NamedTuple):
    """How a kind of event is drawn.

    Attributes:
        full: the first shade, ``#rrggbb``.
        light: the second.
        meaning: what it is called in a legend.
        letter: what it is called on a block.
    """

    full: str
    light: str
    meaning: str
    letter: str


KINDS = {
    Activity.F: Colour("#1f5fa8", "#7fb2e5", "forward", "F"),
    Activity.B: Colour("#a65300", "#f0a04b", "backward", "B"),
    Activity.I: Colour("#a3123f", "#ee7f95", "input gradient", "I"),
    Activity.W: Colour("#007a5a", "#86e0bd", "weight gradient", "W"),
    Activity.R: Colour("#35104f", "#e6d6fa", "recompute", "R"),
    Activity.SEND: Colour("#5f6b73", "#aab4ba", "send", "S"),
    Activity.RECV: Colour("#5f6b73", "#aab4ba", "receive", "V"),
    Activity.REDUCE: Colour("#9c1f8a", "#e58ad8", "reduction", "="),
    Activity.OPTIMIZER: Colour("#3b3b3b", "#cfcfcf", "optimizer", "O"),
}
BUSY = "#4a5a6a"
CAUSES = {
    "warm_up": ("#88ccee", "warm-up"),
    "cool_down": ("#4477aa", "cool-down"),
    "activation": ("#ddcc77", "waiting for an activation"),
    "gradient": ("#cc6677", "waiting for a gradient"),
    "communication": ("#aa4499", "exposed communication"),
    "overhead": ("#117733", "overhead"),
    "imbalance": ("#bbbbbb", "imbalance"),
}
