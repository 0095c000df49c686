"""A page of the documentation as a reader follows it: its files, code, commands and their output, in an empty folder.

Blocks of a page by their first words:

- ``python`` and ``toml`` with a first line ``# NAME`` are files; other Python runs, all of a page in one namespace.
- ``text`` that begins with ``$`` has commands and what they print; other text is what the Python before it prints.
- ``other-tool`` after the language marks code of a program that is not here: it is not run.

Lines of the page must be printed, in their order; numbers of measured runs may differ, and ``...`` stands for any text.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import click
from click.testing import CliRunner

from penstock.cli import group
from tests.support.commands import python
from tests.support.documentation import DOCS, blocks

OTHER_TOOL = "other-tool"
COMPUTED = ("simulate", "plan", "schedule", "config")
"""Commands that measure nothing, so that their numbers are always the same."""

SHORTER = ("train.eval_batches=1", "sample.length=4")
"""Values that make a run short, which its lines do not show."""

_FILE = re.compile(r"# ([\w.]+\.(?:py|toml))\n")
_PROGRAMS = {"penstock": ("-m", "penstock"), "python": (), "torchrun": ("-m", "torch.distributed.run")}


def masked(line: str, exact: bool) -> str:
    """Return a line with single blanks and, unless `exact`, without its numbers."""
    line = " ".join(line.split())
    return line if exact else re.sub(r"\d[\d.,:]*(e-?\d+)?", "#", line)


def require_lines(printed: str, shown: str, exact: bool = False) -> None:
    """Raise AssertionError unless all lines that are shown were printed, in this order."""
    rest = [masked(line, exact) for line in printed.splitlines()]
    for line in filter(None, (masked(line, exact) for line in shown.splitlines())):
        if line == "...":
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
        at = [n for n, other in enumerate(rest) if pattern.fullmatch(other)]
        assert at, f"no line {line!r} in what was printed:\n{printed}"
        rest = rest[at[0] + 1 :]


class Reader:
    """A reader who does what a page says.

    Args:
        folder: empty folder in which the page is followed; the current one.
        skip: programs whose commands are left out, such as "pip".
        shorter: values of the config that are added to each run.
        instead: texts in files of the page, and what is written for them so that the programs take less time.
    """

    def __init__(
        self,
        folder: Path,
        skip: tuple[str, ...] = (),
        shorter: tuple[str, ...] = SHORTER,
        instead: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder, self.skip, self.shorter, self.instead = folder, skip, shorter, instead
        self.names: dict[str, object] = {"__name__": "a_page"}
        self.outputs: dict[str, str] = {}
        self._printed = ""

    def follow(self, page: str) -> None:
        """Do everything on a page, from top to bottom."""
        for block in blocks(DOCS / page):
            language, _, marks = block.kind.partition(" ")
            body = block.text
            if OTHER_TOOL in marks or block.kind == "indented":
                continue
            if file := _FILE.match(body):
                program = body.removeprefix(file[0])
                for text, other in self.instead.items():
                    program = program.replace(text, other)
                (self.folder / file[1]).write_text(program)
            elif language == "python":
                self._python(page, body)
            elif language == "text":
                self._text(body)

    def _python(self, page: str, code: str) -> None:
        name = f"{page}-{len(linecache.cache)}"  # for models, whose layers are found in their source
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, name, "exec"), self.names)
        self._printed = output.getvalue()

    def _text(self, text: str) -> None:
        first, *commands = re.split(r"^\$ ", text, flags=re.M)
        if first:
            require_lines(self._printed, first)
        for command in commands:
            line, _, shown = command.partition("\n")
            program, *words = shlex.split(line)
            if program not in self.skip:
                self.outputs[line] = self._run(program, [*words, *self._shorter(program, words)])
                computed = program == "penstock" and words[0] in COMPUTED
                require_lines(self.outputs[line], shown, exact=computed)

    def _shorter(self, program: str, words: list[str]) -> tuple[str, ...]:
        trains = program == "penstock" and words[0] == "train" and "--print-config" not in words
        return self.shorter if trains else ()

    def _run(self, program: str, words: list[str]) -> str:
        if program == "penstock" and words[0] in COMPUTED:
            done = CliRunner().invoke(group, words, env={"COLUMNS": "160"}, catch_exceptions=False)
            return done.output
        search = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
        return python([*_PROGRAMS[program], *words], self.folder, environment, merged=True).stdout


def require_options(words: list[str]) -> None:
    """Raise click.UsageError unless a command of penstock and all options written after it exist.

    Args:
        words: words after ``penstock``; ``...`` stands for others.
    """
    command: click.Command = group
    context = click.Context(command, info_name="penstock")
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            return
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=name)
    known = {text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        option = word.startswith("-") and not word[1:2].isdigit()
        if option and word.partition("=")[0] not in {*known, "--help"}:
            raise click.NoSuchOption(word, ctx=context)
