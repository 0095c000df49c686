"""Groups with optimizers of their own: the weights of two torch optimizers over the unsplit model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain

LAYERS, MICROBATCHES, STEPS = 8, 4, 4
MATRICES = r"\.0\.weight$"
MUON = {"match": MATRICES, "optimizer": torch.optim.Muon, "lr": 0.05, "weight_decay": 0.2}
GROUPS = [MUON, {"match": r"\.1\.weight$", "weight_decay": 0.0}]
ADAM = {"lr": 0.01, "weight_decay": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "bare": {},
    "clip": {"clip": 0.2},
    "accumulate": {"accumulate": 3, "clip": 0.2},
    "warm-up": {"lr_factor": lambda step: min(1.0, (step + 1) / 3)},
    "cosine": {"lr_scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 5)},
}


def unsplit(case: str, steps: int = STEPS) -> dict[str, Tensor]:
    given, net = CASES[case], plain.model(LAYERS)
    named = dict(net.named_parameters())
    matrices = [name for name in named if name.endswith(".0.weight")]
    scales = [name for name in named if name.endswith(".1.weight")]
    muon = torch.optim.Muon([named[name] for name in matrices], lr=0.05, weight_decay=0.2)
    rest = [p for name, p in named.items() if name not in matrices + scales]
    adam = torch.optim.AdamW(
        [{"params": [named[name] for name in scales], "weight_decay": 0.0}, {"params": rest}], **ADAM
    )
    schedulers = []
    if "lr_factor" in given:
        schedulers = [torch.optim.lr_scheduler.LambdaLR(one, given["lr_factor"]) for one in (muon, adam)]
    elif "lr_scheduler" in given:
        schedulers = [given["lr_scheduler"](one) for one in (muon, adam)]
    count = given.get("accumulate", 1)
    for n in range(steps * count):
        plain.step(net, nn.functional.mse_loss, *plain.batch(n, 2 * MICROBATCHES), MICROBATCHES)
        if (n + 1) % count:
            continue
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(count)
        if "clip" in given:
            nn.utils.clip_grad_norm_(net.parameters(), given["clip"])
        for one in (muon, adam, *schedulers):
            one.step()
        net.zero_grad()
    return {name: p.detach() for name, p in named.items()}


def pipelined(
    rank: int, ranks: int, schedule: str, case: str, steps: int = STEPS, folder: Path | None = None
) -> dict[str, Tensor]:
    """Train; with a folder, after what is saved there, and save."""
    given = CASES[case]
    with penstock.Pipeline(
        plain.model(LAYERS), nn.functional.mse_loss, microbatches=MICROBATCHES, schedule=schedule, ranks=ranks
    ) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, groups=GROUPS, **given, **ADAM)
        if folder is not None:
            saved = penstock.Checkpoints(folder, pipe, optimizer)
            saved.load_newest()
        for _ in range(steps):
            for _ in range(given.get("accumulate", 1)):
                pipe.step(*plain.batch(pipe.steps, 2 * MICROBATCHES))
                optimizer.step()
        if folder is not None:
            saved.save()
            saved.close()
        return {name: p.detach() for name, p in pipe.named_parameters()}


def assert_equal(parts: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    seen = {name: value for part in parts for name, value in part.items()}
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(seen[name], value), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("ranks", "schedule"), [(2, "zb-v"), (4, "1f1b")])
def test_threads_give_the_weights_of_two_torch_optimizers(ranks: int, schedule: str, case: str):
    assert_equal([pipelined(0, ranks, schedule, case)], unsplit(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bare", "accumulate"])
def test_processes_give_them_too(processes: LocalProcesses, case: str):
    assert_equal(processes.run(2, pipelined, 2, "zb-h1", case), unsplit(case))


@pytest.mark.parametrize("case", ["bare", "cosine"])
def test_a_checkpoint_goes_on_at_another_layout(tmp_path: Path, case: str):
    pipelined(0, 2, "zb-v", case, 2, tmp_path)
    assert_equal([pipelined(0, 4, "1f1b", case, 2, tmp_path)], unsplit(case))


def test_main_weights_and_learning_rates_are_of_all_groups():
    net = plain.model(2).to(torch.bfloat16)
    with penstock.Pipeline(net, nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        optimizer = penstock.PipelineOptimizer(
            pipe, torch.optim.AdamW, groups=GROUPS, main_weights=True, **ADAM
        )
        pipe.step(*(one.to(torch.bfloat16) for one in plain.batch(0, 4)))
        assert optimizer.step().lr == (0.05, 0.01, 0.01)
        assert set(optimizer.state_dict()["main_weights"]) == {name for name, _ in net.named_parameters()}


def vectors(rank: int) -> str:
    with (
        penstock.Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, ranks=2) as pipe,
        pytest.raises(penstock.ConfigError) as caught,
    ):
        # Only the second rank has these vectors.
        penstock.PipelineOptimizer(
            pipe, torch.optim.AdamW, groups=[{"match": r"^1\.", "optimizer": torch.optim.Muon}]
        )
    return str(caught.value)


@pytest.mark.slow
def test_vectors_are_refused_on_every_rank(processes: LocalProcesses):
    for said in processes.run(2, vectors):
        assert said.startswith("Muon cannot be made with these options and groups: ")


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"optimizer": torch.optim.Muon, "betas": (0.9, 0.95)}, r"groups\[0\] has 'betas', which is not an option of Muon"),
        ({"optimizer": "muon"}, "must be a class of torch.optim or a function that makes one, got 'muon'"),
    ],
)  # fmt: skip
def test_what_is_no_option_or_optimizer_is_refused(group: dict[str, Any], said: str):
    with (
        penstock.Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, ranks=2) as pipe,
        pytest.raises(penstock.ConfigError, match=said),
    ):
        penstock.PipelineOptimizer(pipe, torch.optim.AdamW, groups=[{"match": MATRICES, **group}])


def sharded(rank: int) -> str:
    mesh = penstock.MeshShape(pp=1, dp=2)
    with (
        penstock.Pipeline(plain.model(2), nn.functional.mse_loss, microbatches=2, mesh=mesh) as pipe,
        pytest.raises(penstock.ConfigError) as caught,
    ):
        penstock.PipelineOptimizer(pipe, torch.optim.AdamW, groups=GROUPS, zero=True, **ADAM)
    return str(caught.value)


@pytest.mark.slow
def test_shards_of_matrices_are_refused(processes: LocalProcesses):
    for said in processes.run(2, sharded):
        assert said.startswith(
            "Muon does not update every element by itself, and ZeRO gives it parts of matrices"
        )
