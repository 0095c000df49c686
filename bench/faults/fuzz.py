"""Corrupted and malicious files: config, data, schedules, checkpoints, traces; each must be refused clearly, or read.

Every case is drawn from its kind, the seed and its number, so that a failing case can be repeated alone. Each kind is read
in a separate process with a memory limit. A case is listed under "others", and the command then ends with 1, if it takes
too long or too much memory, ends the process, runs code, starts a program, or raises anything but a PenstockError.

    python -m bench.faults.fuzz [--count N] [--kind KIND] [--seed N] [--case N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from bench.compare import Figures, main
from bench.faults.samples import KINDS
from penstock.base.errors import PenstockError
from penstock.runtime.workers.pool import process_context

SECONDS = 30.0
"""That a case may take."""

COUNT, QUICK = 10_000, 40

MEMORY = 1 << 30
"""Bytes that a case may take beyond what the process had before."""

_CODE = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")


@dataclass
class Outcome:
    """Outcome of one kind.

    Attributes:
        kind: kind of file.
        cases: number of cases run.
        refused: number of cases that raised a PenstockError.
        read: number of cases read as if they were sound.
        others: number and outcome of every other case.
    """

    kind: str
    cases: int = 0
    refused: int = 0
    read: int = 0
    others: list[tuple[int, str]] = field(default_factory=list)


class _TooLong(BaseException):
    pass


def fuzz(kind: str, numbers: Iterable[int], seed: int = 0) -> Outcome:
    """Read the cases with these numbers, in a process that is replaced when it ends."""
    found, waiting = Outcome(kind), list(numbers)
    context = process_context()  # imports torch once for all kinds
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-", ignore_cleanup_errors=True) as place:
        while waiting:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, kind, waiting, seed, Path(place)))
            process.start()
            theirs.close()
            done = _listen(ours, found, waiting)
            if not done:
                process.kill()
            process.join()
            if waiting and not done:
                number = waiting.pop(0)
                found.cases += 1
                found.others.append((number, f"the process ended or hung (exit code {process.exitcode})"))
    return found


def _listen(connection: Connection, found: Outcome, waiting: list[int]) -> bool:
    """Receive results until all cases are done; return False if the process ended or hung before."""
    patience = 300.0  # for its start
    while waiting:
        try:
            if not connection.poll(patience):
                return False
            number, what = connection.recv()
        except EOFError:
            return False
        patience = 3 * SECONDS
        if number < 0:
            continue
        assert number == waiting.pop(0), "cases are told in their order"
        found.cases += 1
        found.refused += what == "refused"
        found.read += what == "read"
        if what not in ("refused", "read"):
            found.others.append((number, what))
    return True


def _work(connection: Connection, kind: str, numbers: list[int], seed: int, place: Path) -> None:
    os.environ["NUMBA_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sound, case, sprung = place / "sound", place / "case", place / "sprung"
    shutil.rmtree(sound, ignore_errors=True)
    sound.mkdir()
    read = KINDS[kind].prepare(sound)
    read(sound)  # load now all that is loaded on first use
    ran: list[str] = []
    sys.addaudithook(lambda event, values: ran.append(event) if _runs_code(event, values) else None)
    signal.signal(signal.SIGALRM, _too_long)
    limit = _in_use() + 4 * MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send((-1, ""))
    for number in numbers:
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(sound, case)
        must_fail = KINDS[kind].spoil(Random(f"{seed} {kind} {number}"), case, sprung)
        del ran[:]
        _forget_peak()
        before = _peak()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            read(case)
            what = "read, but it must be refused" if must_fail else "read"
        except PenstockError as error:
            what = "refused" if str(error).strip() else "refused without a word"
        except _TooLong:
            what = f"took more than {SECONDS:g} s: {_where()}"
        except BaseException as error:  # any other error is a finding
            what = f"{type(error).__name__}: {error}"[:200] + f" ({_where()})"
        signal.setitimer(signal.ITIMER_REAL, 0)
        if ran or sprung.exists():
            what = f"ran code: {', '.join(ran) or 'a pickle'}"
            sprung.unlink(missing_ok=True)
        if (took := _peak() - before) > MEMORY and what in ("read", "refused"):
            what = f"took {took / 2**30:.1f} GiB"
        connection.send((number, what))


def _runs_code(event: str, values: tuple[Any, ...]) -> bool:
    """Return whether an audit event shows that a file could run code."""
    # A folder of torch.distributed.checkpoint may name classes that only hold data.
    harmless = event == "pickle.find_class" and str(values[0]).startswith(("torch", "collections"))
    return event in _CODE and not harmless


def _too_long(*_: Any) -> None:
    raise _TooLong


def _where() -> str:
    """Return the error's last place in Penstock."""
    _, _, trace = sys.exc_info()
    own = [frame for frame in traceback.extract_tb(trace) if "penstock" in frame.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"


def _in_use() -> int:
    """Return the address space, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _peak() -> int:
    """Return the peak memory since `_forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(options: argparse.Namespace) -> Figures:
    """Fuzz every kind of file."""
    count = options.count or (QUICK if options.quick else COUNT)
    numbers = range(count) if options.case is None else [options.case]
    began = time.monotonic()
    outcomes = []
    yield f"{'kind':<12}{'cases':>8}{'refused':>9}{'read':>8}{'others':>8}"
    for kind in [options.kind] if options.kind else KINDS:
        outcome = fuzz(kind, numbers, options.seed)
        outcomes.append(asdict(outcome))
        yield f"{kind:<12}{outcome.cases:>8}{outcome.refused:>9}{outcome.read:>8}{len(outcome.others):>8}"
        for number, what in outcome.others[:20]:
            yield f"  --kind {kind} --seed {options.seed} --case {number}: {what}"
    yield f"seed {options.seed}, {time.monotonic() - began:.0f} s"
    return {"kinds": outcomes}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--count", type=int, help=f"number of cases of each kind (default {COUNT:,})")
    parser.add_argument("--kind", choices=list(KINDS), help="read only files of this kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="read only this case of --kind")


if __name__ == "__main__":
    sys.exit(any(outcome["others"] for outcome in main(measure, __doc__, add=add)["kinds"]))
