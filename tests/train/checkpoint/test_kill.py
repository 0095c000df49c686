"""A process killed at any moment of a save leaves the checkpoint before, or the new one, and never half of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from penstock.train.checkpoint.find import damage, read_manifest, steps_in

PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from penstock.train.checkpoint.snapshot import Snapshot
from penstock.train.checkpoint.together import Together
from penstock.train.checkpoint.write import Facts, prune, write_checkpoint

torch.set_num_threads(1)
folder = Path(sys.argv[1])
facts = Facts(2, 0, {}, {})

def save(where, step):
    tensors = {s: {f"model/{s}.{n}": torch.full((1 << 16,), float(step)) for n in range(4)} for s in (0, 1)}
    values = {"model": {}, "optimizer": None, "extra": {}}
    write_checkpoint(where, Snapshot(step, tensors, {0: ("0",), 1: ("1",)}, values), facts, Together(False, 1.0))
    prune(where, 2, 0)

began = time.perf_counter()
for step in range(1, 4):
    save(folder / "measured", step)
each = (time.perf_counter() - began) / 3
chance = random.Random(5)
for trial in range(20):
    where = folder / str(trial)
    save(where, 1)
    child = os.fork()
    if child == 0:
        step = 1
        while True:
            step += 1
            save(where, step)
    time.sleep(chance.random() * 3 * each)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_killed_at_twenty_random_points_of_a_save_the_newest_loads_twenty_times(tmp_path: Path):
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=300)
    for trial in range(20):
        found = steps_in(tmp_path / str(trial))
        assert found
        for step, path in found:
            manifest = read_manifest(path)
            assert manifest.step == step
            assert not damage(path, manifest)
