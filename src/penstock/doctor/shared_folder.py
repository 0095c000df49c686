"""A check of a folder that all ranks share: each writes a file, looks for every rank's file, and measures the time."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.base.errors import PenstockError, os_errors_as
from penstock.measure.rounds import Answer, Rounds

BYTES = 1 << 20
"""Size of the file that each rank writes."""

_SEEN = 5.0  # seconds that a network file system may take to show a file of another machine


def check_folder(rounds: Rounds, folder: Path) -> list[Answer]:
    """Write, sync, rename, read and delete files in the folder; every rank calls it.

    By rank: ``write``, ``fsync``, ``rename`` and ``see`` in seconds; ``unseen``, the ranks whose files did not
    appear; ``free``, in bytes.
    """
    made = rounds.each("folder made", lambda: _make(folder) if rounds.rank == 0 else "")
    if made[0].trouble:
        # Without rank 0's folder, each rank still reports whether it can write itself.
        return rounds.each("folder tried", lambda: _write(folder, rounds.rank, keep=False))
    place = folder / made[0].value
    written = rounds.each("folder written", lambda: _write(place, rounds.rank, keep=True))
    writers = [rank for rank, answer in enumerate(written) if not answer.trouble]
    seen = rounds.each("folder seen", lambda: _see(place, writers))
    if rounds.rank == 0:
        shutil.rmtree(place, ignore_errors=True)
    return [
        Answer({**write.value, **see.value}, "")
        if not write.trouble and not see.trouble
        else Answer(None, write.trouble or see.trouble)
        for write, see in zip(written, seen, strict=True)
    ]


def _make(folder: Path) -> str:
    place = folder / f".penstock-doctor-{os.getpid()}-{time.time_ns()}"
    with os_errors_as(PenstockError, f"cannot write in {folder}"):
        place.mkdir()
    return place.name


def _write(place: Path, rank: int, *, keep: bool) -> dict[str, Any]:
    unfinished = place / f".penstock-doctor-rank-{rank}.unfinished"
    times = [time.perf_counter()]
    try:
        with unfinished.open("xb") as file:
            file.write(_content(rank))
            file.flush()
            times.append(time.perf_counter())
            os.fsync(file.fileno())
        times.append(time.perf_counter())
        path = _path(place, rank)
        unfinished.rename(path)
        times.append(time.perf_counter())
        free = shutil.disk_usage(place).free
        if not keep:
            path.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise PenstockError(f"cannot write in {place}: {error.strerror}") from error
    write, fsync, rename = (b - a for a, b in pairwise(times))
    return {"write": write, "fsync": fsync, "rename": rename, "free": free, "unseen": [], "see": 0.0}


def _see(place: Path, writers: list[int]) -> dict[str, Any]:
    began = time.perf_counter()
    unseen = writers
    while unseen and time.perf_counter() - began < _SEEN:
        unseen = [rank for rank in unseen if not _is_complete(place, rank)]
        if unseen:
            time.sleep(0.05)
    return {"see": time.perf_counter() - began, "unseen": unseen}


def _is_complete(place: Path, rank: int) -> bool:
    try:
        return _path(place, rank).read_bytes() == _content(rank)
    except OSError:
        return False


def _path(place: Path, rank: int) -> Path:
    return place / f".penstock-doctor-rank-{rank}"


def _content(rank: int) -> bytes:
    return rank.to_bytes(8, "little") * (BYTES // 8)
