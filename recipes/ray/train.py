"""Train with Ray Train: every worker of a TorchTrainer is a rank of one pipeline.

python recipes/ray/train.py --workers 2 --runs runs                    a Ray on this machine
python recipes/ray/train.py --workers 16 --gpu --runs /shared/runs     from the head node of a Ray cluster

Ray makes the process group before it calls `train_on_worker`; the Pipeline takes it as it is. When a worker fails, Ray ends
all of them, starts them again and calls the function again, which continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

import penstock

WIDTH, BLOCKS = 64, 6
BATCH, MICROBATCHES = 64, 8


def model() -> nn.Sequential:
    """Return the model; put yours here."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(2, WIDTH), *blocks, nn.Linear(WIDTH, 2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step: points, float32 (BATCH, 2), and their classes, int64 (BATCH,); the same everywhere."""
    points = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(step))
    return points, (points.prod(dim=1) > 0).long()


def train_on_worker(options: dict[str, Any]) -> None:
    """Train as one rank; Ray calls this on every worker."""
    device, runs = "cuda" if options["gpu"] else None, Path(options["runs"])
    with penstock.Pipeline(
        model(), nn.functional.cross_entropy, microbatches=MICROBATCHES, device=device
    ) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=3e-3, clip=1.0)
        with penstock.Checkpoints(runs / "checkpoints", pipe, optimizer) as checkpoints:
            newest = checkpoints.load_newest()
            for step in range(newest.step if newest else 0, options["steps"]):
                result = pipe.step(*batch(step))
                optimizer.step()
                if (step + 1) % options["checkpoint_every"] == 0:
                    checkpoints.save()
                if pipe.is_main:
                    line = {"step": step + 1, "loss": float(result.loss), "resumed": newest is not None}
                    with (runs / "metrics.jsonl").open("a") as file:
                        print(json.dumps(line), file=file)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Start the workers, wait for them, and return the last metrics."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="ranks of the pipeline (default 2)")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--runs", default="runs/ray", help="folder that all workers share (default runs/ray)")
    parser.add_argument("--restarts", type=int, default=3, help="restarts after a failure (default 3)")
    options = parser.parse_args(arguments)
    runs = Path(options.runs).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={**vars(options), "runs": str(runs)},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="ray", storage_path=str(runs), failure_config=FailureConfig(max_failures=options.restarts)
        ),
    )
    trainer.fit()
    metrics: dict[str, Any] = json.loads((runs / "metrics.jsonl").read_text().splitlines()[-1])
    print(f"step {metrics['step']}  loss {metrics['loss']:.4f}")
    return metrics


if __name__ == "__main__":
    main()
