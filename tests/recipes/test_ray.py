"""The recipe for Ray Train runs on a local Ray with two workers, and continues after one of them was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.find import steps_in

ROOT = Path(__file__).parents[2]

NOT_STARTED = 77

# Imported by the workers as it is, but for a step in which one of them is killed, once.
KILLED = """
import os, pathlib, runpy, signal, sys
recipe = runpy.run_path(sys.argv[1])
batch = recipe["batch"]
marker = pathlib.Path(sys.argv[2])

def batch_or_end(step):
    if step == 5 and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(step)

recipe["train_on_worker"].__globals__["batch"] = batch_or_end
import ray
try:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
except Exception as error:
    sys.exit(NOT_STARTED if "timed out during startup" in str(error) else str(error))
print(recipe["main"](sys.argv[3:]))
""".replace("NOT_STARTED", str(NOT_STARTED))


def run(script: list[str], root: Path) -> str:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_", "MASTER_"))},
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
        # By default Ray starts workers at niceness 15: beside other tests on the same cores they would barely run.
        "RAY_worker_niceness": "0",
    }  # fmt: skip
    for _ in range(3):
        command = [sys.executable, *script]
        ended = subprocess.run(
            command, cwd=root, env=environment, text=True, capture_output=True, timeout=600
        )
        if ended.returncode != NOT_STARTED:
            break
    else:
        pytest.skip("Ray itself did not start within its 30 s, three times: the machine is too busy")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.exhaustive
def test_two_workers_train_and_a_killed_one_is_replaced(tmp_path: Path):
    pytest.importorskip("ray")
    recipe = ROOT / "recipes" / "ray" / "train.py"
    (tmp_path / "killed.py").write_text(KILLED)
    options = ["--workers", "2", "--steps", "8", "--checkpoint-every", "2"]
    runs = tmp_path / "runs"
    out = run(["killed.py", str(recipe), str(tmp_path / "marker"), *options, "--runs", str(runs)], tmp_path)
    assert (tmp_path / "marker").exists()
    assert "'resumed': True" in out
    assert max(steps_in(runs / "checkpoints"))[0] == 8
    assert f"loss {plain_loss(recipe, 8):.4f}" in out


def plain_loss(recipe: Path, steps: int) -> float:
    """The last loss of plain PyTorch on the recipe's model and batches."""
    text = recipe.read_text().partition("def train_on_worker")[0]
    names: dict[str, object] = {}
    exec(compile("\n".join(line for line in text.splitlines() if "ray" not in line), "recipe", "exec"), names)
    net, batch = names["model"](), names["batch"]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())
