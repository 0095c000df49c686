"""Buckets of a stage's gradients: in the order in which they become complete, as fine as a measured step asks for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.weights.bucket_tuning import Speed, choose
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.simulated import built, timed


def test_a_stage_that_shows_is_cut_finely_and_one_that_hides_is_not():
    program = built("interleaved-1f1b", 2, 4, 2)
    trace = timed(program, 1.0, 1.0, 1.0)
    # 0.5 a stage; the deeper one of each rank hides behind the other's backwards.
    found = choose(program, trace, {0: 500, 2: 500}, Speed(0.0, 0.001))
    assert found[2] == 500
    assert found[0] < 500


def test_a_link_that_takes_long_to_start_gets_few_buckets():
    program = built("1f1b", 2, 2)
    trace = timed(program, 1.0, 1.0, 1.0)
    sizes = [choose(program, trace, {0: 1600}, Speed(start, 0.01))[0] for start in (0.0, 0.1, 1.0, 100.0)]
    assert sizes == [100, 100, 400, 1600]


def pipe_of(mesh: MeshShape, sizes: object) -> Pipeline:
    return Pipeline(
        plain.model(8), nn.functional.mse_loss, microbatches=4, mesh=mesh, schedule="interleaved-1f1b", virtual_stages=2,
        parallel=ParallelOptions(bucket_bytes=sizes), timeout=300,
    )  # fmt: skip


def steps(pipe: Pipeline) -> list[Tensor]:
    """Four steps of SGD: losses, and at the end the weights."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for n in range(4):
        losses.append(pipe.step(*plain.batch(n, 16)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses), *(p.detach().clone() for _, p in sorted(pipe.named_parameters()))]


def plan(pipe: Pipeline, rank: int) -> list[list[str]]:
    buckets = pipe._local.replica_reductions[rank].buckets
    return [[buckets.entries[m].name for m in bucket.plan.members] for bucket in buckets.buckets]


def in_process(rank: int, sizes: object) -> tuple[list[Tensor], list[list[str]]]:
    with pipe_of(MeshShape(2, 2, 1), sizes) as pipe:
        return steps(pipe), plan(pipe, pipe.rank)


def test_buckets_follow_the_backward_and_are_the_same_on_every_replica(processes: LocalProcesses):
    chosen = processes.run(4, in_process, "auto")
    fixed = processes.run(4, in_process, 1)
    for rank, (found, buckets) in enumerate(chosen):
        assert all(torch.equal(a, b) for a, b in zip(found, fixed[rank][0], strict=True))
        assert buckets == chosen[rank - rank % 2][1]
        # Never of two stages together: the first of a rank has the first or second pair of the 8 layers.
        stages = [{int(name.split(".")[0]) // 2 for name in members} for members in buckets]
        assert all(len(stage) == 1 for stage in stages)
        layers = [int(name.split(".")[0]) for members in fixed[rank][1] for name in members]
        assert layers == sorted(layers, reverse=True)
        assert len(fixed[rank][1]) == len(found[1:])


def test_replicas_that_are_threads_choose_together():
    with pipe_of(MeshShape(2, 2, 1), "auto") as pipe, pipe_of(MeshShape(2, 2, 1), 25 << 20) as other:
        assert all(torch.equal(a, b) for a, b in zip(steps(pipe), steps(other), strict=True))
        for part in pipe._engine.thread_replicas:
            for rank in range(2):
                here = part.replica_reductions[rank].buckets
                assert [b.plan for b in here.buckets] == [
                    b.plan for b in pipe._local.replica_reductions[rank].buckets.buckets
                ]


def refused(rank: int) -> str:
    with pipe_of(MeshShape(1, 2, 1), "auto") as pipe:
        try:
            PipelineOptimizer(pipe, torch.optim.AdamW, zero=True)
        except ConfigError as error:
            return str(error)
    return ""


def test_sizes_that_cannot_be_are_refused(processes: LocalProcesses):
    with pytest.raises(ConfigError, match="bucket_bytes must be a positive number of bytes or 'auto', got 0"):
        pipe_of(MeshShape(1, 2, 1), 0)
    for said in processes.run(2, refused):
        assert "zero=True keeps the buckets that it begins with" in said
