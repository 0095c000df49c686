"""Time of building, proving, lowering and simulating a schedule, each case in a separate process.

    python -m bench.scaling FAMILY RANKS MICROBATCHES VIRTUAL_STAGES [--check] [--warm]

prints one case as JSON. `case` runs this in a fresh process, so that the peak memory is that of the case alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

ROOT = Path(__file__).parents[1]
WARMING = 16_384


def case(
    family: str, ranks: int, microbatches: int, virtual_stages: int, *flags: str, compiled: bool = True
) -> dict[str, float]:
    """Return wall and CPU seconds, ops and peak memory (GiB) of one case in a fresh process.

    Args:
        family, ranks, microbatches, virtual_stages: schedule to build.
        flags: ``--check`` to prove the schedule as well; ``--warm`` to load the compiled kernels first.
        compiled: whether numba finds the kernels it compiled in an earlier run, or has to compile them.
    """
    line = [sys.executable, "-m", "bench.scaling", family, str(ranks), str(microbatches), str(virtual_stages)]
    with tempfile.TemporaryDirectory() as empty:
        cache = {} if compiled else {"NUMBA_CACHE_DIR": empty}
        done = subprocess.run(
            [*line, *flags],
            cwd=ROOT, env={**os.environ, **cache}, check=True, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("counts", nargs=3, type=int)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--warm", action="store_true")
    given = parser.parse_args()
    begin = perf_counter()
    from penstock.schedule.check import check
    from penstock.schedule.families import build_schedule
    from penstock.schedule.program import lower
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulator import simulate
    from penstock.trace.bubbles import makespan

    imports = perf_counter() - begin
    result: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        begin = perf_counter()
        done = step()
        result[name] = perf_counter() - begin
        return done

    def run(ranks: int, microbatches: int, virtual_stages: int) -> None:
        schedule = timed("build", lambda: build_schedule(given.family, ranks, microbatches, virtual_stages))
        if given.check:
            program = timed("check_and_lower", lambda: check(schedule).program)
        else:
            program = timed("lower", lambda: lower(schedule))
        costs = Costs.of(schedule.placement, virtual_stages, virtual_stages, virtual_stages)
        trace = timed("simulate", lambda: simulate(program, costs))
        result["total"] = sum(result.values())
        result["ops"] = len(schedule)
        result["makespan"] = int(makespan(trace))

    if given.warm:
        run(2, WARMING, given.counts[2])
        result.clear()
    before = process_time()
    run(*given.counts)
    result["cpu"] = process_time() - before
    result["imports"] = imports
    result["peak_gib"] = _peak_kib() / 2**20
    print(json.dumps(result))


def _peak_kib() -> int:
    """Return the peak memory of this process. Linux only: unlike getrusage's, this leaves out the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    main()
