"""Garbage collection while a process loads its modules.

Torch alone makes some 300,000 objects that stay to the end. With Python's defaults, they are searched for garbage again and
again while torch is imported, and once more by each full collection afterwards.
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
    # Moves all objects to a generation that no collection searches.
    gc.freeze()
    gc.set_threshold(*_USUAL)
