"""All that a GPU shows and a CPU does not, in one command of at most eight minutes, for whoever has a card.

Parts run one after the other, each in a process of its own with a limit of its own, so that one that hangs or fails does not
stop the rest: the tests marked ``gpu``, the overhead of an op, a step beside the peer's, the split backward, the loss in
chunks, QLoRA of a small model beside plain Trainer, and predicted beside measured steps and bytes at three sizes. With two
cards or more also ranks over NCCL beside plain PyTorch, a pipeline beside stages that compute in turn (``device_map``), and
replicas beside stages. It prints each part's tables, a table of the parts for RESULTS.md, and what failed; then the exit
code is 1. With ``--device cpu`` all parts run that a CPU can, at small sizes, with gloo in place of NCCL.

    python -m bench.gpu [--device cpu] [--only PART ...] [--limit SECONDS] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from bench.compare import Figures, main

ROOT = Path(__file__).parents[1]
LIMIT = 480.0
"""Seconds of all parts together."""
MARK = "pytest.mark.gpu"
"""Mark of a test that needs a GPU, as it stands in a file."""
_SHOWN = 8
"""Lines of what a failed part said last."""


class Part(NamedTuple):
    """One part of the bench.

    Attributes:
        command: arguments of Python; the device is added to those of benches.
        share: of the limit of all parts, that this one may take.
        cards: CUDA devices that it needs.
        rounds: its rounds on a GPU; on a CPU it runs with ``--quick``.
    """

    command: Sequence[str]
    share: float
    cards: int = 1
    rounds: int | None = None


PARTS: Mapping[str, Part] = {
    "tests": Part(("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"), 0.30),
    "overhead": Part(("-m", "bench.overhead"), 0.15, rounds=5),
    "step": Part(("-m", "bench.step", "--schedule", "1f1b", "interleaved-1f1b"), 0.25, rounds=3),
    "split": Part(("-m", "bench.split"), 0.12, rounds=9),
    "chunked-loss": Part(("-m", "bench.chunked_loss"), 0.10, rounds=3),
    "qlora": Part(("-m", "bench.gpu_parts", "qlora"), 0.15),
    "predicted": Part(("-m", "bench.gpu_parts", "predicted"), 0.20),
    "processes": Part(("-m", "bench.gpu_parts", "processes"), 0.15, cards=2),
    "device-map": Part(("-m", "bench.gpu_parts", "device-map"), 0.10, cards=2),
    "replicas": Part(("-m", "bench.gpu_parts", "replicas"), 0.10, cards=2),
}


class Outcome(NamedTuple):
    """Result of a part: "passed", "failed", "out of time" or "needs N cards"; its seconds, and what it printed."""

    result: str
    seconds: float = 0.0
    lines: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        """True if the part ran, and not to its end."""
        return self.result in ("failed", "out of time")


def files_of_tests() -> list[str]:
    """Return the files with tests of a GPU."""
    found = sorted(ROOT.glob("tests/**/test_*.py"))
    return [str(path.relative_to(ROOT)) for path in found if MARK in path.read_text("utf-8")]


def command_of(name: str, device: str) -> list[str]:
    """Return the command of a part."""
    part = PARTS[name]
    if name == "tests":
        return [sys.executable, *part.command, *files_of_tests()]
    quick = ["--quick"] if device == "cpu" else [] if part.rounds is None else ["--rounds", str(part.rounds)]
    return [sys.executable, *part.command, "--device", device, *quick]


def run(command: Sequence[str], seconds: float, cards: int | None) -> Outcome:
    """Run a command for so many seconds at most, and end all that it has started.

    Args:
        cards: CUDA devices that it may see; None for all.
    """
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if cards == 1:  # with more, the Trainer would divide each batch over all
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    begin = monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=max(1.0, seconds))
        result = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        result = "out of time"
        _kill(process.pid)
        text, _ = process.communicate()
    finally:
        _kill(process.pid)
    return Outcome(result, monotonic() - begin, text.splitlines())


def _kill(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def measure(options: argparse.Namespace) -> Figures:
    """Run every part that the devices here allow."""
    cards = torch.cuda.device_count() if options.device == "cuda" else 2
    if not cards:
        print(
            "bench.gpu needs a CUDA device, and torch sees none; python -m bench.gpu --device cpu runs what a CPU can",
            file=sys.stderr,
        )
        sys.exit(2)
    name = "CPU" if options.device == "cpu" else f"{cards} x {torch.cuda.get_device_name()}"
    end = monotonic() + options.limit
    outcomes: dict[str, Outcome] = {}
    for part in options.only or PARTS:
        if cards < PARTS[part].cards:
            outcomes[part] = Outcome(f"needs {PARTS[part].cards} cards")
            continue
        seconds = min(PARTS[part].share * options.limit, end - monotonic())
        seen = PARTS[part].cards if options.device == "cuda" and part != "tests" else None
        outcome = outcomes[part] = run(command_of(part, options.device), seconds, seen)
        yield f"## {part}: {outcome.result} after {outcome.seconds:.0f} s"
        yield ""
        yield from outcome.lines if not outcome.failed else outcome.lines[-_SHOWN:]
        yield ""
    yield f"| part, on {name} | result | seconds |"
    yield "|---|---|---|"
    for part, outcome in outcomes.items():
        yield f"| {part} | {outcome.result} | {outcome.seconds:.0f} |"
    failed = [part for part, outcome in outcomes.items() if outcome.failed]
    yield f"failed: {', '.join(failed) or 'none'}"
    return {
        "device": name,
        "failed": failed,
        "parts": {part: outcome._asdict() for part, outcome in outcomes.items()},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this bench."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument(
        "--only", choices=tuple(PARTS), action="append", help="a part to run; may be repeated"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help=f"seconds of all parts together (default {LIMIT:g})"
    )


if __name__ == "__main__":
    sys.exit(1 if main(measure, __doc__, add=add_options)["failed"] else 0)
