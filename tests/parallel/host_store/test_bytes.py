"""Bytes of weights and gradients on the device, read within ops, beside those that the schedule's memory code predicts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.families import build_schedule
from penstock.schedule.memory import Budget, WeightBytes
from penstock.schedule.residency import make_residency
from tests.support.lanes import exhaustive, slow


@pytest.mark.parametrize("store", ["disk", *slow("host")])
@pytest.mark.parametrize(
    ("schedule", "ranks", "choices"),
    [
        ("breadth-first", 1, {"window": 1}),
        *slow(("interleaved-1f1b", 2, {"window": 1, "reduce_every": 2}), ("zb-v", 2, {"window": 1})),
        *exhaustive(("breadth-first", 1, {"window": 2}), ("breadth-first", 2, {}), ("zb-v", 2, {})),
    ],
)
def test_the_most_bytes_on_the_device_are_those_of_the_formula(schedule, ranks, choices, store):
    options = ParallelOptions(store=store, **choices)
    virtual = {} if schedule == "zb-v" else {"virtual_stages": 4 // ranks}
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    settings = {"microbatches": 4, "schedule": schedule, "ranks": ranks, **virtual}
    with Pipeline(net, nn.functional.mse_loss, parallel=options, **settings) as pipe:
        found = dict.fromkeys(range(ranks), 0)

        def look(rank: int, *_: object) -> None:
            found[rank] = max(found[rank], pipe.store.participants[rank].device_bytes)

        for rank, stages in enumerate(pipe.schedule.placement.stages_of):
            for stage in stages:
                for layer in pipe.stages[stage].module.layers:
                    layer.register_forward_hook(partial(look, rank))
                    for parameter in layer.parameters():
                        parameter.register_post_accumulate_grad_hook(partial(look, rank))
        x = torch.randn(8, 64)
        for _ in range(2):
            pipe.step(x, x)
            pipe.zero_grad()
        sizes = [sum(p.nbytes for p in pipe.stages[s].module.parameters()) for s in range(4)]
        residency = make_residency(pipe.schedule, options.sharding)
        predicted = Budget(limit=0, saved=0, weights=WeightBytes(sizes, sizes)).peak(pipe.schedule, residency)
        assert list(found.values()) == pytest.approx(predicted.tolist(), rel=0.03)


def test_a_smaller_window_holds_no_more_and_the_smallest_a_stage_and_two_gradients():
    schedule = build_schedule("breadth-first", 1, 4, 4)
    budget, peaks = Budget(limit=0, saved=0, weights=WeightBytes(100, 100)), []
    for window in (1, 2, 3, 4):
        residency = make_residency(schedule, ParallelOptions(store="disk", window=window).sharding)
        peaks.append(int(budget.peak(schedule, residency)[0]))
    assert peaks == sorted(peaks)
    assert peaks[0] == 300
