"""Output files of commands: a command replaces no file but one of the kind that it writes, and never its own input."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.base.bounded_io import MEGABYTE, read_bytes
from penstock.base.errors import ConfigError

_CHECKSUM = "# Checksum of the lines above: "
# Of a file that may be replaced: it is read whole to see what it is.
_MAX_BYTES = 256 * MEGABYTE


OutputKind = Callable[[bytes], str | None]
"""A kind of file: a function of a file's bytes that returns why a file of the kind may not replace it, or None."""


class OutputFile(NamedTuple):
    """A file that a command is asked to write."""

    option: str
    path: Path
    kind: OutputKind


def kind_of_start(what: str, *starts: bytes, within: int = 0) -> OutputKind:
    """Return the kind of files that begin with certain bytes, or have them `within` the first so many, in any case."""

    def objection(content: bytes) -> str | None:
        head = content[:within].lower() if within else content.lstrip().lower()
        known = any(start.lower() in head if within else head.startswith(start.lower()) for start in starts)
        return None if known else f"is not {what}"

    return objection


PAGE = kind_of_start("a page of Penstock", b'<meta name="generator" content="Penstock">', within=1000)


def SCHEDULE(content: bytes) -> str | None:  # noqa: N802 - a kind, like PAGE
    """Return why a schedule in CSV may not replace a file; None if it is one, too."""
    first = content.lstrip(b", \r\n")
    return None if re.match(rb"\(?[0-9]+[FBIWR]", first) else "is not a schedule in CSV"


def signed(text: str) -> str:
    """Return a text whose last line is a comment with the checksum of the lines above, by which an edit is noticed."""
    return f"{text}{_CHECKSUM}{_checksum(text.encode())}\n"


def signed_kind(command: str, first_line: str) -> OutputKind:
    """Return the kind of texts that a command wrote by `signed` and that have not been edited since."""

    def objection(content: bytes) -> str | None:
        if not content.startswith(first_line.encode()):
            return f"was not written by {command}"
        text, mark, checksum = content.rpartition(_CHECKSUM.encode())
        sound = bool(mark) and checksum == f"{_checksum(text)}\n".encode()
        return None if sound else f"was edited after {command} wrote it"

    return objection


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def require_outputs(outputs: Iterable[OutputFile | None], inputs: Sequence[str | Path] = ()) -> None:
    """Check that files can be written, before a command does its work; an input that does not exist is skipped."""
    checked: dict[Path, str] = {}
    for output in outputs:
        if output is None:
            continue
        _require_output(output, inputs)
        path = output.path.resolve()
        if path in checked:
            raise ConfigError(
                f"{checked[path]} and {output.option} both write {output.path}; give them different paths"
            )
        checked[path] = output.option


def _require_output(output: OutputFile, inputs: Sequence[str | Path]) -> None:
    option, path, kind = output
    other = f"give another {option}"
    if "\0" in str(path):
        raise ConfigError(f"{option} must be the path of a file, got one with a null character")
    if str(path) == "-":
        raise ConfigError(f"{option} must be the path of a file, got '-'; {option} /dev/stdout prints it")
    if path.is_dir():
        raise ConfigError(f"{option} must be the path of a file, got the folder {str(path)!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; make it, or {other}")
    if not path.is_file():
        return  # new, or a device
    if any(os.path.exists(name) and os.path.samefile(name, path) for name in inputs):
        raise ConfigError(f"{option} must not replace {path}, which this command reads; {other}")
    try:
        content = read_bytes(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}; {other}") from error
    if content and (objection := kind(content)) is not None:
        raise ConfigError(f"{path} exists and {objection}; delete it, or {other}")
