"""Your own training loop around a Pipeline: a small network learns to tell two interleaved spirals apart.

python examples/own_loop.py                                 two ranks as threads of this process
torchrun --nproc-per-node 2 examples/own_loop.py            the same with one process per rank
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import penstock

WIDTH, BLOCKS = 64, 6
STEPS, BATCH, MICROBATCHES = 400, 64, 8


def spirals(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points on two spirals, float32 (BATCH, 2), and the spiral of each, int64 (BATCH,)."""
    which = torch.randint(2, (BATCH,), generator=generator)
    along = torch.rand(BATCH, generator=generator)
    angle = 3 * math.pi * along + math.pi * which
    points = torch.stack((along * angle.cos(), along * angle.sin()), dim=1)
    return points + 0.01 * torch.randn(BATCH, 2, generator=generator), which


def model() -> nn.Sequential:
    """Return the model; every element is a layer, and the pipeline splits between layers."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(2, WIDTH), *blocks, nn.Linear(WIDTH, 2))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    with penstock.Pipeline(
        model(), nn.functional.cross_entropy, ranks=2, schedule="1f1b", microbatches=MICROBATCHES
    ) as pipe:
        # Each rank updates its parameters on its own thread; a torch optimizer over pipe.parameters() works as well.
        optimizer = penstock.PipelineOptimizer(
            pipe,
            torch.optim.AdamW,
            lr=3e-3,
            groups=[{"match": r"bias$", "weight_decay": 0.0}],
            clip=1.0,
            lr_factor=lambda step: min(1.0, (step + 1) / 20),
        )
        for step in range(STEPS):
            points, which = spirals(generator)
            result = pipe.step(points, which)  # forward and backward of every microbatch
            update = optimizer.step()
            if pipe.is_main and (step + 1) % 50 == 0:
                print(f"step {step + 1}  loss {result.loss:.4f}  gradient norm {update.grad_norm:.3f}")
        points, which = spirals(generator)
        result = pipe.evaluate(points, outputs=True)
        if pipe.holds_last:  # on other ranks there are no outputs
            right = (torch.cat(result.outputs).argmax(1) == which).float().mean()
            print(f"accuracy on new points: {right:.0%}")


if __name__ == "__main__":
    main()
