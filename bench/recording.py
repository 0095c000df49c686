"""Cost of `penstock.record`: two steps recorded over the same steps that are not, in plain PyTorch and a pipeline.

A decoder's blocks at two widths; ratios of processor seconds, which other processes on the machine disturb less than those
of the clock, and the size of a process's file for a step.

    python -m bench.recording [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch

import penstock
from bench.compare import Figures, alternate, main, ratio
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

MICROBATCHES, TOKENS, STEPS = 4, 512, 2
WIDTHS = (512, 1024)


def config(width: int) -> ModelConfig:
    """Return two blocks of a decoder."""
    return ModelConfig(vocabulary=512, width=width, layers=2, heads=8, kv_heads=8, hidden=3 * width)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and the tokens after them, (microbatches, tokens)."""
    ids = torch.randint(0, 512, (MICROBATCHES, TOKENS + 1))
    return ids[:, :-1], ids[:, 1:]


def timed(run: Callable[[], object], model: Any, folder: Path | None) -> float:
    """Return processor seconds of some steps, recorded into a new folder if there is one."""
    with nullcontext() if folder is None else penstock.record(folder, model, steps=STEPS):
        begin = process_time()
        for _ in range(STEPS):
            run()
        return process_time() - begin


def cost(run: Callable[[], object], model: Any, folder: Path, rounds: int) -> tuple[float, float]:
    """Return the time of recorded steps over that of others, and megabytes of a file for a step."""
    count = iter(range(10_000))
    runs = {
        "off": lambda: timed(run, model, None),
        "on": lambda: timed(run, model, folder / f"{next(count)}"),
    }
    times = alternate(runs, rounds)
    sizes = [file.stat().st_size for file in folder.rglob("*.jsonl")]
    return ratio(times["on"], times["off"]), sum(sizes) / len(sizes) / STEPS / 1e6


def measure(options: argparse.Namespace) -> Figures:
    """Measure both loops at each width."""
    torch.set_num_threads(1)
    x, y = batch()
    result: dict[str, Any] = {}
    yield "width  loop             on/off  MB a step"
    for width in WIDTHS[:1] if options.quick else WIDTHS:
        model = torch.nn.Sequential(*(layer.build() for layer in layers(config(width))))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def plain(model: Any = model, optimizer: Any = optimizer) -> None:
            for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                (next_token_loss(model(part), target) / MICROBATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()

        with (
            TemporaryDirectory() as folder,
            penstock.Pipeline(
                layers(config(width)), next_token_loss, ranks=2, microbatches=MICROBATCHES
            ) as pipe,
        ):
            of_pipe = torch.optim.SGD(pipe.parameters(), lr=1e-3)

            def piped(pipe: Any = pipe, of_pipe: Any = of_pipe) -> None:
                pipe.step(x, y)
                of_pipe.step()
                of_pipe.zero_grad()

            for name, run, recorded in (("plain", plain, model), ("1f1b, 2 threads", piped, pipe)):
                on, size = cost(run, recorded, Path(folder, name), options.rounds)
                result[f"{width} {name}"] = {"on/off": on, "megabytes": size}
                yield f"{width:5}  {name:15}  {on:6.2f}  {size:9.2f}"
    return result


if __name__ == "__main__":
    main(measure, __doc__, rounds=5)
