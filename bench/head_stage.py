"""A head that costs as much as all blocks: a step with equal blocks on both stages, and with a measured split.

The model is the built-in decoder, with four blocks of width 128 and a vocabulary whose head takes about their time. The
even split leaves head and half of the blocks on the second rank; the measured one may leave the head alone there. Ranks
are threads with one thread of torch each, in alternating runs. A plan of a published size comes first: Gemma 2 2B on
eight H100s, whose head weighs as much as seven blocks.

    python -m bench.head_stage [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch

from bench.compare import Figures, alternate, main, ratio
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import of_shape
from penstock.profile.model_shape import ModelShape
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

GEMMA_2_2B = ModelShape(
    name="gemma-2-2b",
    layers=26,
    hidden=2304,
    heads=8,
    kv_heads=4,
    head_size=256,
    ffn=9216,
    vocabulary=256_000,
)
SPLITS = {"even": "even", "a block with the head": (4, 4, 4, 4, 3, 3, 3, 1), "cost": "cost"}
FULL, QUICK = 24_576, 512
MICROBATCHES, ROWS, TOKENS = 8, 1, 128


class Contestant:
    """A pipeline of two ranks with one of the splits, ready to step."""

    def __init__(self, vocabulary: int, *, measured: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randint(vocabulary, (MICROBATCHES * ROWS, TOKENS), generator=generator)
        config = ModelConfig(vocabulary=vocabulary, width=128, layers=4, heads=4, kv_heads=4, hidden=512)
        example = (self.x[:ROWS], self.x[:ROWS])
        self.pipe = Pipeline(
            layers(config),
            next_token_loss,
            ranks=2,
            microbatches=MICROBATCHES,
            split={"measured": example} if measured else "even",
        )
        self.step()

    def step(self) -> float:
        """Return the seconds of a step."""
        begin = perf_counter()
        self.pipe.step(self.x, self.x)
        return perf_counter() - begin

    def sizes(self) -> list[int]:
        """Return the number of layers of each stage."""
        return [len(self.pipe.stages[stage].module.layers) for stage in range(2)]


def measure(options: argparse.Namespace) -> Figures:
    """Predict both splits of a published model, and measure both of a small one."""
    torch.set_num_threads(1)
    predicted = {}
    yield "Gemma 2 2B, pp=8, 1f1b, 64 samples of 4,096 tokens on h100*8, predicted:"
    for name, split in SPLITS.items():
        layout = Layout(pp=8, microbatch=1, schedule="1f1b", split=split)
        plan = predict(of_shape(GEMMA_2_2B), read_cluster("h100*8"), layout, sequence=4096, batch=64)
        counts = [] if plan.costs is None else list(plan.costs.counts)
        predicted[name] = {"seconds": plan.step_seconds, "blocks": counts}
        yield f"{name:24}{plan.step_seconds:8.3f} s  blocks {'+'.join(map(str, counts))}"
    vocabulary = QUICK if options.quick else FULL
    even, measured = (Contestant(vocabulary, measured=m) for m in (False, True))
    times = alternate({"measured": measured.step, "even": even.step}, options.rounds)
    over = ratio(times["measured"], times["even"])
    yield (
        f"measured here: layers {even.sizes()} even, {measured.sizes()} by time; step over even {over:.2f} "
        f"({options.rounds} rounds)"
    )
    for one in (even, measured):
        one.pipe.close()
    return {
        "ours": statistics.median(times["measured"]), "peer": statistics.median(times["even"]), "ratio": over,
        "rows": predicted, "rounds": options.rounds,
    }  # fmt: skip


if __name__ == "__main__":
    main(measure, __doc__, rounds=9)
