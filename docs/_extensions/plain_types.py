"""Types of classes that pydantic checks, without its conditions: ``int`` in place of ``Annotated[int, Field(ge=1)]``."""

from __future__ import annotations

import contextlib
import pkgutil
from importlib import import_module
from types import FunctionType
from typing import get_type_hints

from sphinx.application import Sphinx

ROOMS = ("penstock.plan", "penstock.profile")
"""Rooms whose dataclasses and named tuples are read from tables and have a page."""


def _strip(app: Sphinx) -> None:
    """Replace the types of the classes before any is printed."""
    for room in ROOMS:
        for found in pkgutil.walk_packages(import_module(room).__path__, f"{room}."):
            for kind in vars(import_module(found.name)).values():
                if not isinstance(kind, type) or not kind.__module__.startswith(room):
                    continue
                made = [each for each in (kind.__init__, kind.__new__) if isinstance(each, FunctionType)]
                for each in (kind, *made):
                    # A name that is imported for type checkers alone has no conditions of pydantic beside it.
                    with contextlib.suppress(NameError):
                        each.__annotations__ = get_type_hints(each)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", _strip)
    return {"parallel_read_safe": True}
