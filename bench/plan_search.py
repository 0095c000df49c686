"""Seconds and memory of `penstock plan`, and its plans beside those of an exhaustive search.

Every search is a fresh process on one core: `penstock plan CONFIG --cluster C --json`. Its seconds are those from start to
end; CPU is the processor time of them, for machines on which other work runs. The 20 small spaces have 12 to 1,338 layouts
on 2 to 8 devices, half of them with overlapping reductions and a third with little memory; every layout is predicted.

    python -m bench.plan_search [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from tests.support.small_spaces import every_plan, small_space

from bench.compare import Figures, main
from penstock.plan.explore.branch_and_bound import search

GPT_175B = {
    "model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "vocab_size": 51200,
}  # fmt: skip
LLAMA_405B = {
    "model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "intermediate_size": 53248, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


class Case(NamedTuple):
    """A search, and a smaller one for ``--quick``."""

    name: str
    model: dict[str, Any]
    cluster: str
    sequence: int
    batch: int
    quick: tuple[str, int]


CASES = (
    Case("Llama-3 8B", LLAMA_8B, "h100*8", 8192, 128, ("h100*8", 32)),
    Case("GPT 175B", GPT_175B, "a100-80gb*8x64", 2048, 1536, ("a100-80gb*8x8", 64)),
    Case("Llama-3 405B", LLAMA_405B, "h100*8x2048", 8192, 2048, ("h100*8x64", 64)),
)
SPACES = 20


def searched(case: Case, quick: bool, folder: Path) -> dict[str, Any]:
    """Return the figures of one search in a fresh process."""
    model = folder / case.name / "config.json"
    model.parent.mkdir()
    model.write_text(json.dumps(case.model))
    cluster, batch = case.quick if quick else (case.cluster, case.batch)
    words = [sys.executable, "-m", "penstock", "plan", str(model), "--cluster", cluster, "--json"]
    began = perf_counter()
    with (folder / "plan.json").open("w+") as output:
        process = subprocess.Popen(
            [*words, "--sequence", str(case.sequence), "--batch", str(batch)], stdout=output, cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = perf_counter() - began
        if process.returncode:
            raise RuntimeError(f"{case.name}: exit code {process.returncode}")
        output.seek(0)
        result = json.load(output)
    best = result["plans"][0]
    return {
        "name": case.name, "cluster": cluster, "batch": batch, "seconds": seconds,
        "cpu": usage.ru_utime + usage.ru_stime, "gib": usage.ru_maxrss / 2**20, "layouts": result["evaluated"],
        "simulated": result["simulated"], "complete": result["complete"], "step_seconds": best["step_seconds"],
        "layout": best["layout"],
    }  # fmt: skip


def compared(seed: int) -> dict[str, Any]:
    """Return the best plan of a search, and that of all layouts, of one small space."""
    small = small_space(seed)
    began = perf_counter()
    layouts = every_plan(small)
    middle = perf_counter()
    result = search(
        small.profile, small.cluster, sequence=small.sequence, batch=small.batch, fixed=small.fixed
    )
    ended = perf_counter()
    best = min(plan.step_seconds for plan in layouts if plan.fits)
    return {
        "seed": seed, "layouts": len(layouts), "simulated": result.simulated, "exhaustive_seconds": middle - began,
        "search_seconds": ended - middle, "ratio": result.best.step_seconds / best,
    }  # fmt: skip


def measure(options: argparse.Namespace) -> Figures:
    """Search the large spaces, then the small ones."""
    yield "model         cluster          batch  layouts  simulated  seconds    CPU    GiB   step s"
    large = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            row = searched(case, options.quick, Path(folder))
            large.append(row)
            yield (
                f"{row['name']:14}{row['cluster']:16}{row['batch']:6}{row['layouts']:9,}{row['simulated']:11,}"
                f"{row['seconds']:9.1f}{row['cpu']:7.1f}{row['gib']:7.2f}{row['step_seconds']:9.2f}"
            )
    small = [compared(seed) for seed in range(3 if options.quick else SPACES)]
    worse = sum(row["ratio"] > 1 + 1e-9 for row in small)
    layouts, simulated = (sum(row[key] for row in small) for key in ("layouts", "simulated"))
    yield (
        f"small spaces: worse than an exhaustive search in {worse} of {len(small)}; {simulated:,} of {layouts:,} layouts "
        "simulated"
    )
    return {"large": large, "small": small}


if __name__ == "__main__":
    main(measure, __doc__)
