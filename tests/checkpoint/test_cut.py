"""A matrix with query, key and value side by side, sharded by heads, is saved in full and loads at any sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.checkpoint.checkpoints import Checkpoints, TorchOptimizer
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models
from tests.support.checkpoint_runs import equal, state_of
from tests.support.lanes import exhaustive, slow


def go_on(rank: int, folder: Path, mesh: MeshShape | None, own: bool = False):
    """Train two steps from the newest checkpoint; return losses, and the states loaded and saved."""
    torch.set_num_threads(1)
    net = hf_models.model("gpt2", vocab_size=64)
    with Pipeline(
        penstock.from_transformers(net), penstock.causal_lm_loss, microbatches=2, mesh=mesh,
        parallel=ParallelOptions(family="gpt2"),
        ranks=1 if mesh is None else None,
    ) as pipe:  # fmt: skip
        plain = torch.optim.AdamW(pipe.parameters(), lr=1e-2) if own else None
        optimizer = plain or PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        state = optimizer if plain is None else TorchOptimizer(pipe, plain)
        with Checkpoints(folder, pipe, optimizer) as checkpoints:
            checkpoints.load_newest()
            loaded, losses = state_of(pipe, state), []
            for _ in range(2):
                words, labels, mask = hf_models.batch(step=pipe.steps)
                losses.append(float(pipe.step(words, labels, attention_mask=mask).loss))
                optimizer.step()
                pipe.zero_grad()
            checkpoints.save()
        return losses, loaded, state_of(pipe, state)


@pytest.mark.parametrize("sizes", [*slow([2, 1, 2]), *exhaustive([2, 1, 4])], ids=["to 2", "to 4"])
@pytest.mark.parametrize("own", [False, *exhaustive(True)], ids=["PipelineOptimizer", "torch.optim"])
def test_sharded_gpt2_is_saved_in_full_and_continues_sharded_or_not(
    tmp_path: Path, processes: LocalProcesses, own: bool, sizes: list[int]
):
    losses, before = [], None
    for size in sizes:
        mesh = None if size == 1 else MeshShape(1, 1, size)
        told = processes.run(size, go_on, tmp_path / "cut", mesh, own)
        assert all(equal(part, told[0]) for part in told)
        found, loaded, after = told[0]
        assert before is None or equal(loaded, before)
        losses, before = losses + found, after
    plain = []
    for _ in range(3):
        plain += go_on(0, tmp_path / "plain", None)[0]
    assert losses == pytest.approx(plain, abs=1e-5)
