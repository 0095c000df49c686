"""The starts of a run, in its ``run.json``: when, where and how it was started, for the report page."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.base.atomic import write_text
from penstock.base.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.base.version import __version__

START_RECORD = "run.json"
_MAX_BYTES = 16 * MEGABYTE
_MAX_STARTS = 1000


def keep_start(
    run: Path,
    say: Callable[[str], None],
    start: Mapping[str, Any],
) -> None:
    """Add a start, as `start_of` returns it, to a run's folder; a failed write is reported, and training continues."""
    path = run / START_RECORD
    try:
        starts = [*_earlier(path), start][-_MAX_STARTS:]
        write_text(path, json.dumps({"starts": starts}, indent=1) + "\n")
    except OSError as error:
        say(f"cannot write {path}: {error.strerror or error}. Training continues")


def start_of(
    *,
    step: int,
    layout: str,
    device: torch.device,
    processes: int,
    threads: int,
    dtype: str,
    rated: Callable[[str, str], float | None],
) -> dict[str, Any]:
    """Return a start's entry in ``run.json``.

    Args:
        rated: returns the rated FLOP/s of a device by its name and a dtype, None where they are not known.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "command": command_line(sys.argv),
        "step": step,
        "layout": layout,
        "device": name,
        "rated_flops": rated(name, dtype),
        "processes": processes,
        "threads": threads,
        "dtype": dtype,
        "versions": {
            "penstock": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return a process's arguments as a line for a shell, with the command's name for the path of its file."""
    file = Path(arguments[0])
    command = ["python", "-m", file.parent.name] if file.name == "__main__.py" else [file.name]
    # Text of other bytes than Unicode's is kept readable.
    return shlex.join([*command, *arguments[1:]]).encode(errors="replace").decode()


def _earlier(path: Path) -> list[object]:
    """Return the starts so far; none if the file is missing or damaged."""
    try:
        table = parse_json(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError):
        return []
    starts = table.get("starts") if isinstance(table, dict) else None
    return starts if isinstance(starts, list) else []
