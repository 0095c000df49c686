"""Options that write a timeline to a file: a picture for a page or a paper, or JSON for ui.perfetto.dev."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from penstock.base.errors import ConfigError
from penstock.base.output_files import OutputFile, kind_of_start
from penstock.cli.options import Command
from penstock.show.chrome import write_chrome
from penstock.show.picture import PictureStyle, draw_picture
from penstock.trace.events import Trace

_KINDS = {
    ".svg": kind_of_start("an SVG", b"<?xml", b"<svg"),
    ".pdf": kind_of_start("a PDF", b"%PDF"),
    ".png": kind_of_start("a PNG", b"\x89PNG"),
    ".json": kind_of_start("a timeline that penstock wrote", b'{"traceEvents"'),
}
"""Kinds of the files that ``--out`` writes, by ending."""


class FigureFile(NamedTuple):
    """A figure to write, and its look."""

    path: Path
    style: PictureStyle

    @property
    def output(self) -> OutputFile:
        return OutputFile("--out", self.path, _KINDS[self.path.suffix.lower()])


def figure_options(function: Command) -> Command:
    """Add the options of a figure, given to the command as one `figure`, None if they ask for none."""

    @wraps(function)
    def command(*args: Any, out: Any, title: Any, width: Any, font: Any, **named: Any) -> object:
        return function(*args, figure=_figure_of(out, title=title, width=width, font=font), **named)

    for decorate in reversed((
        click.option(
            "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
            help="Write the timeline to a file: .svg, .pdf or .png, or .json for ui.perfetto.dev.",
        ),
        click.option("--title", metavar="TEXT", help="Title of the picture. Default: the schedule's name; '' for none."),
        click.option("--width", type=float, metavar="INCHES", help="Width of the picture. Default: 12."),
        click.option("--font", type=float, metavar="POINTS", help="Font size of the picture. Default: 10."),
    )):  # fmt: skip
        command = decorate(command)
    return command  # type: ignore[return-value]  # takes other options than the function


def _figure_of(out: Path | None, **look: Any) -> FigureFile | None:
    given: dict[str, Any] = {name: value for name, value in look.items() if value is not None}
    if out is None or out.suffix.lower() == ".json":
        if given:
            raise ConfigError(f"--{next(iter(given))} is for a picture; give --out PATH.svg, .pdf or .png")
        if out is None:
            return None
    if out.suffix.lower() not in _KINDS:
        raise ConfigError(f"--out {out}: the name must end in {', '.join(_KINDS)}")
    return FigureFile(out, PictureStyle(**given))


def write_figure(trace: Trace, figure: FigureFile) -> None:
    if figure.path.suffix.lower() == ".json":
        write_chrome(trace, figure.path)
    else:
        draw_picture(trace, figure.path, figure.style)
