"""Lines of code to train a GPT of one's own: the plain loop, Penstock, and torch.distributed.pipelining by hand.

Counts the lines of the programs in examples/own_gpt, without comments, docstrings and blank lines; the model and the data
are in a file of their own, which all import. Runs every program, and compares losses and saved weights: two ranks as
threads, two as processes, and plain PyTorch.

    python -m bench.lines [--quick] [--json]
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.compare import Figures, main

FOLDER = Path(__file__).parents[1] / "examples" / "own_gpt"
LAUNCHED = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain loop": ("plain.py", ()),
    "Penstock, threads": ("with_penstock.py", ()),
    "Penstock, processes": ("with_penstock.py", LAUNCHED),
    "torch.distributed.pipelining": ("torch_pipelining.py", LAUNCHED),
}


def lines_of(path: Path) -> int:
    """Return the number of a program's lines that have code: no comments, docstrings or blank lines."""
    tree = ast.parse(path.read_text())
    numbers = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.stmt | ast.arg)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            text = node.body[0]
            numbers -= {*range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    return len(numbers)


def run(name: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run a program in a folder; return its losses, and the weights that it saves."""
    file, launcher = PROGRAMS[name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(FOLDER / file)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{file} failed: {done.stderr[:2000]}\n...\n{done.stderr[-1000:]}")
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d{4})", done.stdout)]
    return losses, torch.load(folder / "gpt.pt", weights_only=True)


def measure(_: argparse.Namespace) -> Figures:
    """Count and run every program."""
    counts = {name: lines_of(FOLDER / file) for name, (file, _) in PROGRAMS.items()}
    yield f"{'':30} {'lines':>6} {'first loss':>11} {'last loss':>10} {'largest difference of a weight':>31}"
    differences: dict[str, float] = {}
    expected: tuple[list[float], dict[str, torch.Tensor]] | None = None
    for name, count in counts.items():
        with tempfile.TemporaryDirectory() as folder:
            losses, weights = run(name, Path(folder))
        if expected is None:
            expected = losses, weights
        if weights.keys() != expected[1].keys():
            raise SystemExit(f"{name} saved {sorted(weights.keys() ^ expected[1].keys())} alone")
        times = len(losses) // len(expected[0])  # of two processes, each may print all
        pairs = zip(sorted(losses)[::times], sorted(expected[0]), strict=True)
        apart = max(abs(ours - plain) for ours, plain in pairs)
        if apart > 2e-4:
            raise SystemExit(f"{name} has other losses than plain PyTorch, by {apart}")
        differences[name] = max((weights[n] - w).abs().max().item() for n, w in expected[1].items())
        yield f"{name:30} {count:6} {max(losses):11.4f} {min(losses):10.4f} {differences[name]:31.1e}"
    return {"lines": counts, "weights": differences}


if __name__ == "__main__":
    main(measure, __doc__)
