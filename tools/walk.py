"""Print the files of Penstock that a training step enters: ``python -m tools.walk [--markdown]``.

The second ``Pipeline.step`` and ``optimizer.step`` of a pipeline of two ranks that are threads are watched with
`sys.setprofile`, in all threads. Each file has the name of its public function that does most in the phase that enters it.
``--markdown`` prints the list of CONTRIBUTING's *How a step runs*, by phase.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import penstock

SOURCE = Path(penstock.__file__).parent
PHASES = {
    "Pipeline.step": "Check, and split the batch",
    "Executor.run": "Run the ops of a rank",
    "Executor._finish_gradients": "Sum gradients that several ranks hold, and agree on the outcome",
    "PipelineOptimizer.step": "Update the weights",
}
"""Function whose first call begins a phase of the step, and the phase."""


class Walk:
    """Profile function that notes each file of Penstock in the order in which functions of it are first called.

    Attributes:
        files: paths below the package.
        phases: paths below the package, with the phase in which they were entered.
        watching: whether calls are noted.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.phases: dict[str, str] = {}
        self.watching = False
        self._phase = ""
        self._made: Counter[int] = Counter()  # by thread, the calls so far
        self._before: dict[
            int, tuple[int, str]
        ] = {}  # by frame, the calls of its thread before it, and the phase
        self._work: dict[str, Counter[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call, or the end of one."""
        if not self.watching:
            return
        thread = threading.get_ident()
        path, function = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and path.is_relative_to(SOURCE):
            name = path.relative_to(SOURCE).as_posix()
            self._phase = PHASES.get(function, self._phase)
            if name not in self.phases:
                self.files.append(name)
                self.phases[name] = self._phase
            self._before[id(frame)] = self._made[thread], self._phase
        self._made[thread] += event in ("call", "c_call")
        if event == "return" and id(frame) in self._before:
            before, phase = self._before.pop(id(frame))
            name = path.relative_to(SOURCE).as_posix()
            if self.phases[name] == phase:
                self._work.setdefault(name, Counter())[function] += self._made[thread] - before

    def function(self, name: str) -> str:
        """Return the function of a file within which most calls of its phase are made, a public one if there is one."""
        calls = self._work.get(name, Counter())
        public = [f for f in calls if not f.rpartition(".")[2].startswith("_")]
        return max(public or calls, key=calls.__getitem__, default="").replace("<locals>.", "")


def walk() -> Walk:
    """Return the files that the second step of a pipeline enters."""
    seen = Walk()
    threading.setprofile(seen)  # before the rank threads start
    sys.setprofile(seen)
    try:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        with penstock.Pipeline(model, nn.functional.mse_loss, ranks=2, microbatches=4) as pipe:
            optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3, clip=1.0)
            for number in range(2):
                seen.watching = number == 1
                pipe.step(torch.randn(8, 8), torch.randn(8, 8))
                optimizer.step()
            seen.watching = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def purpose(name: str) -> str:
    """Return the first line of a file's docstring, up to a colon, semicolon or comma unless that says little."""
    docstring = ast.get_docstring(ast.parse((SOURCE / name).read_text())) or ""
    line = docstring.splitlines()[0].replace("``", "`").removesuffix(".")
    for mark in ":;,":
        if len((before := line.partition(mark)[0]).split()) > 4:
            line = before
    return line


def markdown(seen: Walk) -> str:
    """Return the files as a numbered list for every phase."""
    lines: list[str] = []
    number = 0
    for phase in PHASES.values():
        lines += [f"**{phase}**", ""]
        for name in (name for name in seen.files if seen.phases[name] == phase):
            number += 1
            lines.append(f"{number}. `{name}`, `{seen.function(name)}`. {purpose(name)}.")
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    """Print one line per file, and their number; or the list in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tools.walk", description="files that a step enters")
    parser.add_argument("--markdown", action="store_true", help="print the list of CONTRIBUTING.md")
    options = parser.parse_args()
    seen = walk()
    if options.markdown:
        print(markdown(seen))
        return
    for path in seen.files:
        print(f"{path:45} {seen.function(path)}")
    print(f"{len(seen.files)} files")


if __name__ == "__main__":
    main()
