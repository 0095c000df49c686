"""Garbage collection while a process loads its modules.

Torch alone makes 300,000 objects that stay to the end. With Python's defaults, a quarter of the time that it takes to import
torch is spent on looking for garbage among them, and each full collection afterwards takes 0.2 s to look at them again.
"""

from __future__ import annotations

import gc

_WHILE_LOADING = 50_000
_USUAL = gc.get_threshold()


def begin_loading() -> None:
    """Collect garbage rarely until `end_loading`, after 50,000 new objects instead of 700."""
    gc.set_threshold(_WHILE_LOADING)


def end_loading() -> None:
    """Collect garbage as usual from now on, and leave out all objects that there are; may be called several times.

    What is left out is freed as usual once nothing refers to it, unless it is in a reference cycle.
    """
    gc.freeze()
    gc.set_threshold(*_USUAL)
