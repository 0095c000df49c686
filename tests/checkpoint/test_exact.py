"""State beside weights and moments continues exactly, too: the loss scale, and a library model's dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from tests.support import hf_models
from tests.support.checkpoint_runs import equal, state_of


def in_half_precision(scale: float) -> tuple[Pipeline, PipelineOptimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).half()
    pipe = Pipeline(model, nn.functional.mse_loss, microbatches=2, ranks=2)
    scaler = GradScaler(init_scale=scale, growth_interval=3)
    return pipe, PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3, main_weights=True, scaler=scaler)


def half_steps(pipe: Pipeline, optimizer: PipelineOptimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(pipe.steps)
        x = torch.randn(4, 8, generator=generator).half()
        losses.append(float(pipe.step(x, x).loss))
        optimizer.step()
    return losses


def test_a_loss_scale_and_its_counter_continue(tmp_path: Path):
    pipe, optimizer = in_half_precision(2.0**20)  # too large: the first steps are skipped
    with pipe:
        straight = half_steps(pipe, optimizer, 12)
        expected = state_of(pipe, optimizer)
    pipe, optimizer = in_half_precision(2.0**20)
    with pipe, Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
        first = half_steps(pipe, optimizer, 7)
        checkpoints.save()
        kept = optimizer.scaler.state_dict()
        assert optimizer.state_dict()["skipped"] > 0
    pipe, optimizer = in_half_precision(1.0)
    with pipe, Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
        assert checkpoints.load_newest().step == 7
        assert optimizer.scaler.state_dict() == kept
        assert first + half_steps(pipe, optimizer, 5) == straight
        assert equal(state_of(pipe, optimizer), expected)


def of_the_library(tmp_path: Path, before: int, after: int, saves: bool) -> tuple[list[float], Any]:
    net = hf_models.model("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    layers = penstock.from_transformers(net)
    with Pipeline(layers, penstock.causal_lm_loss, microbatches=2, ranks=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        with Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
            checkpoints.load_newest()
            losses = []
            for n in range(before + after):
                if n == before and saves:
                    checkpoints.save()
                tokens, labels, mask = hf_models.batch(step=pipe.steps)
                losses.append(float(pipe.step(tokens, labels, attention_mask=mask).loss))
                optimizer.step()
            if saves and not after:
                checkpoints.save()
        return losses, state_of(pipe, optimizer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gpt2_with_dropout_continues_bit_for_bit(tmp_path: Path):
    straight, expected = of_the_library(tmp_path / "none", 6, 0, saves=False)
    first, _ = of_the_library(tmp_path / "c", 3, 0, saves=True)
    torch.manual_seed(99)  # another process has other default generators
    second, state = of_the_library(tmp_path / "c", 0, 3, saves=False)
    assert first + second == straight
    assert equal(state, expected)
    assert len(set(straight)) == 6
