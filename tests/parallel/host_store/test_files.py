"""What is in files, and whose: weights, gradients and moments of each optimizer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from tests.support import plain
from tests.support.states import assert_equal

DISK = ParallelOptions(store="disk", window=1)


def pipe_of(net: nn.Module, options: ParallelOptions) -> Pipeline:
    settings = {"microbatches": 2, "schedule": "breadth-first", "virtual_stages": 4}
    return Pipeline(net, nn.functional.mse_loss, parallel=options, **settings)


def is_in_a_file(tensor: Tensor, folder: Path) -> bool:
    """Whether a tensor's memory is a part of a mapped file of a folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            if first <= tensor.data_ptr() < last:
                return True
    return False


def test_weights_gradients_and_moments_are_in_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    net = plain.model(4)
    with pipe_of(net, DISK) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        pipe.step(*plain.batch(0, 4))
        assert all(is_in_a_file(t, tmp_path) for p in net.parameters() for t in (p, p.grad))
        optimizer.step()
        for loads in (False, True):
            if loads:
                optimizer.load_state_dict(optimizer.state_dict())
                pipe.step(*plain.batch(1, 4))
                optimizer.step()
            kept = [optimizer.optimizers[0].state[p] for p in net.parameters()]
            assert all(
                is_in_a_file(each[key], tmp_path) for each in kept for key in ("exp_avg", "exp_avg_sq")
            )
        own = torch.zeros(4)
        assert not is_in_a_file(own, tmp_path)


def test_two_optimizers_of_a_pipeline_have_moments_of_their_own():
    def trained(options: ParallelOptions) -> dict[str, Tensor]:
        net = plain.model(4)
        with pipe_of(net, options) as pipe:
            made = [PipelineOptimizer(pipe, torch.optim.AdamW, lr=lr) for lr in (0.1, 0.01)]
            for n in range(6):
                pipe.step(*plain.batch(n, 4))
                made[n % 2].step()
        return dict(net.state_dict())

    assert_equal(trained(DISK), trained(ParallelOptions()))


@pytest.mark.slow
def test_a_recording_of_a_pipeline_with_a_store_agrees_with_one_without(tmp_path):
    for name, options in (("resident", ParallelOptions()), ("stored", DISK)):
        with pipe_of(plain.model(4), options) as pipe:
            optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01)
            with penstock.record(tmp_path / name, pipe):
                for n in range(2):
                    pipe.step(*plain.batch(n, 4))
                    optimizer.step()
    compared = penstock.compare(tmp_path / "resident", tmp_path / "stored")
    assert str(compared).endswith("tensors agree: all with the same bits")
