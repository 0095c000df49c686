"""Peak bytes of activations of each rank: measured, and predicted by the schedule alone.

The measurement is the allocator's: a dispatch mode sees every tensor that the rank's ops make, and when its memory is
freed. Between ops, all memory in use other than parameter gradients is activations. The prediction is
`penstock.schedule.memory` from the bytes that one microbatch keeps on each stage (I leaves less for W than F saved),
measured in the same way with nothing else running. Four ranks in threads.

    python -m bench.memory [--quick] [--json]
"""

from __future__ import annotations

import argparse
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.compare import Figures, main
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.memory import peak
from penstock.stage.compute.runner import LossInputs
from penstock.stage.compute.stage import Stage
from penstock.stage.values import Message
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers
from penstock.train.model.verify_target import next_token_loss

RANKS, SEQUENCE, ROWS = 4, 64, 2
NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min")
QUICK = ("1f1b", "zb-v")
CONFIG = ModelConfig(vocabulary=256, width=64, layers=16, heads=4, kv_heads=4, hidden=256)


class Live(TorchDispatchMode):
    """Bytes allocated within the mode and not yet freed, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in before and key not in self._storages:
                    self.bytes += storage.nbytes()
                    size = storage.nbytes()
                    self._storages[key] = weakref.ref(storage, lambda _, k=key, n=size: self._gone(k, n))
        self.most = max(self.most, self.bytes)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.bytes -= size
        self._storages.pop(key, None)


def microbatches(count: int) -> tuple[Tensor, Tensor]:
    """Return random tokens for a step."""
    tokens = torch.randint(0, 256, (count * ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def pipeline(name: str, count: int) -> Pipeline:
    """Return a pipeline of the built-in model on four ranks."""
    virtual = 2 if FAMILIES[name].chooses_virtual_stages and name != "zb-h1" else 1
    return Pipeline(
        layers(CONFIG),
        next_token_loss,
        microbatches=count,
        schedule=name,
        ranks=RANKS,
        virtual_stages=virtual,
    )


def measured(name: str, count: int) -> list[int]:
    """Return peak bytes per rank, between the ops of a step; gradients exist before it, so it allocates none."""
    with pipeline(name, count) as pipe:
        pipe.step(*microbatches(count))
        peaks = [0] * RANKS
        pipe.wrap_ops(watch(peaks))
        pipe.step(*microbatches(count))
    return peaks


def watch(
    peaks: list[int], within: list[int] | None = None
) -> Callable[[int, Callable[[], None]], Callable[[], None]]:
    """Return a wrapper of ops that records the peak bytes between each rank's ops, and within them."""
    live = defaultdict[int, Live](Live)

    def wrap(rank: int, op: Callable[[], None]) -> Callable[[], None]:
        watched = live[rank]

        def run() -> None:
            with watched:
                op()
            peaks[rank] = max(peaks[rank], watched.bytes)
            if within is not None:
                within[rank] = watched.most

        return run

    return wrap


def one_microbatch(stage: Stage, x: Message, target: Tensor | None, split: bool) -> tuple[Message, int, int]:
    """Return the output, the bytes in use after the forward (without the output), and those in use after I."""
    live = Live()
    with live:
        if target is None:
            (out,) = stage.forward(0, (x,), split)
            grads: Message | None = Message(tuple(torch.ones_like(leaf) for leaf in out.leaves))
        else:
            stage.forward_with_loss(0, (x,), LossInputs(target), split)
            out, grads = Message((None,)), None
        ends = sum(
            leaf.nbytes for p in (out, grads) if p is not None for leaf in p.leaves if leaf is not None
        )
        saved = live.bytes - ends
        handed = None if grads is None else (grads,)
        waiting = 0
        if split:
            stage.backward_input(0, handed)
            waiting = live.bytes - ends
            stage.backward_weight(0)
        else:
            stage.backward(0, handed)
    return out, saved, waiting


def predicted(name: str, count: int) -> list[int]:
    """Return peak bytes per rank by the schedule."""
    schedule = build_schedule(name, RANKS, count)
    split = bool((schedule.kind == 2).any())
    saved, waiting = [], []
    with pipeline(name, count) as pipe:
        pipe.step(*microbatches(count))  # so that gradients exist and nothing is measured for the first time
        x, y = microbatches(1)
        message = Message((x,))
        for s in range(schedule.stages):
            last = s == schedule.stages - 1
            stage = pipe.stages[s]
            out, after_forward, after_input = one_microbatch(stage, message, y if last else None, split)
            saved.append(
                after_forward + (0 if last else out.leaves[0].nbytes)
            )  # its output is the next one's input
            waiting.append(after_input)
            if not last:
                message = Message((out.leaves[0].detach(),), None, (True,))
    return peak(schedule, saved, waiting, freed_at="B").tolist()


def measure(options: argparse.Namespace) -> Figures:
    """Measure every schedule with two numbers of microbatches."""
    torch.set_num_threads(1 if options.quick else RANKS)  # more than one each do badly beside other work
    rows = []
    yield f"{'schedule':18}{'m':>4}  {'measured / predicted, by rank':40}{'largest peak MB':>16}"
    for name in QUICK if options.quick else NAMES:
        for count in (2 * RANKS,) if options.quick else (2 * RANKS, 4 * RANKS):
            ours, expected = measured(name, count), predicted(name, count)
            ratios = [a / b for a, b in zip(ours, expected, strict=True)]
            rows.append({"schedule": name, "microbatches": count, "measured": ours, "predicted": expected})
            shown = " ".join(f"{r:.3f}" for r in ratios)
            yield f"{name:18}{count:4}  {shown:40}{max(ours) / 2**20:16.1f}"
    worst = max(abs(a / b - 1) for r in rows for a, b in zip(r["measured"], r["predicted"], strict=True))
    yield f"largest deviation {worst:.1%}"
    total = [sum(sum(r[k]) for r in rows) for k in ("measured", "predicted")]
    return {"ours": total[0], "peer": total[1], "ratio": total[0] / total[1], "rows": rows}


if __name__ == "__main__":
    main(measure, __doc__)
