"""Colours, letters and words for everything that is drawn, the same on the page, in pictures and in the terminal.

The colours of kinds stay apart for people who confuse red and green, or see no colour. Every kind has two shades: one for
the first, third, ... stage of a rank, and a lighter one for the second, fourth, ... White text is legible on the
first shade, black on the second. The tests check this for simulated deuteranopia and protanopia.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.trace.events import Activity


class KindStyle(NamedTuple):
    """The look of one kind of event."""

    full: str  # first shade, #rrggbb
    light: str  # second shade, #rrggbb
    meaning: str  # name in a legend
    letter: str  # name on a block
    terminal: tuple[str, str]  # both shades as styles of rich


class CauseStyle(NamedTuple):
    """The look of one cause of idle time."""

    colour: str  # fill, #rrggbb
    meaning: str  # name in a legend
    sentence: str  # end of a sentence that begins with "the largest part was"


def _black_on(colour: str) -> tuple[str, str]:
    return f"black on bright_{colour}", f"black on {colour}"


KINDS: dict[Activity, KindStyle] = {
    Activity.F: KindStyle("#1f5fa8", "#7fb2e5", "forward", "F", _black_on("blue")),
    Activity.B: KindStyle("#a65300", "#f0a04b", "backward", "B", _black_on("green")),
    Activity.I: KindStyle("#a3123f", "#ee7f95", "input gradient", "I", _black_on("cyan")),
    Activity.W: KindStyle("#007a5a", "#86e0bd", "weight gradient", "W", _black_on("yellow")),
    Activity.R: KindStyle("#35104f", "#e6d6fa", "recompute", "R", _black_on("magenta")),
    Activity.SEND: KindStyle("#5f6b73", "#aab4ba", "send", "S", ("bright_black", "bright_black")),
    Activity.RECV: KindStyle("#5f6b73", "#aab4ba", "receive", "V", ("bright_black", "bright_black")),
    Activity.REDUCE: KindStyle("#9c1f8a", "#e58ad8", "reduction", "=", ("red", "red")),
    Activity.OPTIMIZER: KindStyle("#3b3b3b", "#cfcfcf", "optimizer", "O", ("white on red", "white on red")),
    Activity.GATHER: KindStyle("#5b6d00", "#c3d94f", "gather of weights", "+", ("cyan", "cyan")),
}
"""Every `Activity`, in the order of its numbers: the page's script looks styles up by number."""

_MESSAGES = (Activity.SEND, Activity.RECV)
WITHOUT_MESSAGES = {kind: style for kind, style in KINDS.items() if kind not in _MESSAGES}

BUSY = "#4a5a6a"
CAUSES = {
    "warm_up": CauseStyle("#88ccee", "warm-up", "warm-up: the pipeline fills"),
    "cool_down": CauseStyle("#4477aa", "cool-down", "cool-down: the pipeline drains"),
    "activation": CauseStyle("#ddcc77", "waiting for an activation", "waiting for an activation"),
    "gradient": CauseStyle("#cc6677", "waiting for a gradient", "waiting for a gradient"),
    "communication": CauseStyle(
        "#aa4499", "exposed communication", "communication that no computation hides"
    ),
    "overhead": CauseStyle("#117733", "overhead", "overhead between ops, whose inputs were all there"),
    "imbalance": CauseStyle(
        "#bbbbbb", "imbalance", "imbalance: some ranks have less work than the busiest one"
    ),
}
"""Every cause of `penstock.trace.bubbles.CAUSES`, in that order."""

HEADINGS = {
    "warm_up": ("warm-up", "warm-up"),
    "cool_down": ("cool-down", "cool-\ndown"),
    "activation": ("wait for\nactivation", "wait for\nacti-\nvation"),
    "gradient": ("wait for\ngradient", "wait for\ngradient"),
    "communication": ("commu-\nnication", "commu-\nnication"),
    "overhead": ("overhead", "over-\nhead"),
    "imbalance": ("imbalance", "imbal-\nance"),
}
"""Head of each cause's column in a wide and in a narrow terminal."""

MEMORY_PARTS = {
    "weights": ("#5046b4", "weights"),
    "gradients": ("#4477aa", "gradients"),
    "optimizer": ("#88ccee", "optimizer's state"),
    "activations": ("#cc6677", "activations"),
    "recompute": ("#aa4499", "recomputed layer"),
    "logits": ("#ddcc77", "gradient of the logits"),
    "messages": ("#999933", "messages"),
    "buckets": ("#117733", "gradients under reduction"),
    "margin": ("#bbbbbb", "allocator's margin"),
}
"""Colour and meaning of every part of a device's memory, in the order of the bars."""
