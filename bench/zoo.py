"""A longer run of the zoo: ``python -m bench.zoo --count N``.

Every case runs in a process with a time limit. A case that crashes or hangs is an outcome like any other, and the next
one continues. See `tests.zoo` for the cases and their possible outcomes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from tests.zoo.case import Case, draw, read
from tests.zoo.forward import FORWARDS
from tests.zoo.judge import Verdict, judge
from tests.zoo.kind import KINDS
from tests.zoo.not_yet import known
from tests.zoo.piped import piped, piped_many
from tests.zoo.shrink import shrink

from bench.compare import Figures, main
from penstock.runtime.workers.pool import LocalProcesses

LIMIT = 90.0
COUNT, QUICK = 100, 24
WORKER = "--worker"
BATCH = 12
OUTCOMES = ("bit-equal", "bounded", "refused", "FAILED")


class Worker:
    """A process that runs cases in threads, one after the other, and is replaced if it dies or hangs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: SimpleQueue[str] = SimpleQueue()

    def verdict(self, case: Case) -> Verdict:
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(case.text() + "\n")
        process.stdin.flush()
        try:
            line = self._lines.get(timeout=LIMIT)
        except Empty:
            self.close()
            return Verdict("FAILED", f"hung: no end within {LIMIT:g} s")
        if not line:
            code = process.wait()
            self.close()
            return Verdict("FAILED", f"the process died, exit status {code}")
        return Verdict(*json.loads(line))

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.zoo", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines = SimpleQueue()
        Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: SimpleQueue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def serve() -> None:
    """Run a worker: read one case per line, write one verdict per line."""
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        verdict = run_in_threads(read(line))
        out.write(json.dumps([verdict.outcome, verdict.why]) + "\n")
        out.flush()


def run_in_threads(case: Case) -> Verdict:
    return judge(case, [piped(0, case)])


def run_in_processes(pool: LocalProcesses, cases: Sequence[Case]) -> Iterator[tuple[Case, Verdict]]:
    """Run cases that need equally many processes in one call of the pool, or one by one if that call fails."""
    try:
        runs = pool.run(cases[0].processes, piped_many, [case.text() for case in cases], timeout=LIMIT)
    except Exception as error:
        if len(cases) == 1:
            yield cases[0], Verdict("FAILED", f"the processes: {type(error).__name__}: {error}")
            return
        for case in cases:
            yield from run_in_processes(pool, [case])
        return
    for n, case in enumerate(cases):
        yield case, judge(case, [run[n] for run in runs])


class Zoo:
    """All workers and processes in which cases run."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.pool = LocalProcesses(4)

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Verdict]]:
        waiting: dict[int, list[Case]] = defaultdict(list)
        for case in cases:
            if case.transport == "threads":
                yield case, self.worker.verdict(case)
                continue
            group = waiting[case.processes]
            group.append(case)
            if len(group) == BATCH:
                yield from run_in_processes(self.pool, group)
                group.clear()
        for group in waiting.values():
            if group:
                yield from run_in_processes(self.pool, group)

    def shrunk(self, case: Case, verdict: Verdict) -> Case:
        """Return the simplest case found that fails in the same way."""

        def fails(smaller: Case) -> bool:
            found = next(iter(self.run([smaller])))[1]
            return found.outcome == "FAILED" and way(found) == way(verdict)

        return shrink(case, fails)

    def close(self) -> None:
        self.worker.close()
        self.pool.close()


def way(verdict: Verdict) -> str:
    """Return the kind of a case's failure, without numbers and names."""
    return re.sub(r"\d+", "", verdict.why)[:30]


def table(found: Sequence[tuple[Case, Verdict]]) -> list[str]:
    """Return outcomes by kind."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in (*KINDS, *FORWARDS)}
    for case, verdict in found:
        for name in (*case.kinds, *([case.forward] if case.forward else ())):
            counts[name][verdict.outcome] += 1
    lines = [f"{'kind':34s}" + "".join(f"{outcome:>11s}" for outcome in OUTCOMES)]
    for name, count in counts.items():
        lines.append(f"{name:34s}" + "".join(f"{count[outcome]:11d}" for outcome in OUTCOMES))
    return lines


def measure(options: argparse.Namespace) -> Figures:
    """Draw cases, run them, and count the outcomes."""
    torch.set_num_threads(1)
    names = tuple(options.kinds.split(",")) if options.kinds else None
    if options.case:
        cases = [read(options.case)]
    else:
        count = 1 if options.only else options.count or (QUICK if options.quick else COUNT)
        forwards = tuple(filter(None, options.forwards.split(","))) if options.forwards is not None else None
        seeds = range(options.seed, options.seed + count)
        cases = [draw(seed, names, options.transport, forwards, options.sharded) for seed in seeds]
    if options.skip_known:
        cases = [case for case in cases if not known(case)]
    began, zoo = time.perf_counter(), Zoo()
    ended: list[tuple[Case, Verdict]] = []
    failures = []
    try:
        for case, verdict in zoo.run(cases):
            ended.append((case, verdict))
            if options.only or options.case:
                print(f"{case}\n{verdict.outcome}: {verdict.why}", file=sys.stderr)
            if verdict.outcome == "FAILED":
                small = case if options.no_shrink else zoo.shrunk(case, verdict)
                print(
                    f"seed {case.seed}: {verdict.why}\n  --case '{small.text()}'", file=sys.stderr, flush=True
                )
                failures.append({"seed": case.seed, "why": verdict.why, "case": small.text()})
    finally:
        zoo.close()
    totals = Counter(verdict.outcome for _, verdict in ended)
    seconds = time.perf_counter() - began
    yield from table(ended)
    yield f"{len(ended)} cases: {', '.join(f'{totals[outcome]} {outcome}' for outcome in OUTCOMES)}; {seconds:.0f} s"
    return {"cases": len(ended), "outcomes": totals, "failures": failures, "seconds": seconds}


def add(parser: argparse.ArgumentParser) -> None:
    """Add this bench's arguments."""
    parser.add_argument("--count", type=int, help=f"number of cases (default {COUNT})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case (default 0)")
    parser.add_argument(
        "--only", action="store_true", help="run only this seed, and print the case and its outcome"
    )
    parser.add_argument("--case", help="case to run, as JSON, as a failure prints it")
    parser.add_argument("--kinds", help="kinds to draw from, separated by commas")
    parser.add_argument(
        "--forwards", help="the model's own forwards to draw from, separated by commas; empty for none"
    )
    parser.add_argument("--transport", choices=["threads", "processes"], help="run only this transport")
    parser.add_argument(
        "--sharded",
        action="store_true",
        help="only cases whose replicas divide weights, gradients or the optimizer",
    )
    parser.add_argument("--skip-known", action="store_true", help="skip the cases in tests/zoo/not_yet.py")
    parser.add_argument("--no-shrink", action="store_true", help="do not simplify failing cases")


if __name__ == "__main__":
    if sys.argv[1:] == [WORKER]:
        serve()
    else:
        sys.exit(bool(main(measure, __doc__, add=add)["failures"]))
