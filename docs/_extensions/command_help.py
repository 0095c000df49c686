"""Reference of the command line: examples as blocks of code, and no list of arguments, which the usage line has."""

from __future__ import annotations

import re

import click
from sphinx.application import Sphinx

OPTION = re.compile(r"(?<![\w`-])(--[a-z][\w-]*)(?![\w`-])")


def as_code(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Replace the lines of an epilog by a block of code, without the word in front of the first one."""
    commands = [line.strip().removeprefix("Example:").removeprefix("Examples:").strip() for line in lines]
    shown = [f"   $ {line}" if line.startswith("penstock") else f"   {line}" for line in commands if line]
    if shown:
        lines[:] = [".. rubric:: Example", "", ".. code-block:: text", "", *shown, ""]


def quote(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Put options in running text between backticks, so that their hyphens stay two."""
    lines[:] = [line if line.startswith("..") else OPTION.sub(r"``\1``", line) for line in lines]


def drop(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Leave out the list of arguments."""
    lines.clear()


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("sphinx-click-process-epilog", as_code)
    app.connect("sphinx-click-process-arguments", drop)
    app.connect("sphinx-click-process-options", quote)
    app.connect("sphinx-click-process-description", quote)
    return {"parallel_read_safe": True}
