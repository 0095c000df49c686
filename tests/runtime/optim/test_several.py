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
from tests.support import plain, states, tied
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow

LAYERS, MICROBATCHES, STEPS = 4, 4, 4
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


def accumulated(net: nn.Module, steps: range, replicas: int) -> None:
    """Gradients of some steps, which each replica adds up by itself."""
    sums: dict[str, list[Tensor]] = {}
    for replica in range(replicas):
        for n in steps:
            x, y = (part.chunk(replicas)[replica] for part in plain.batch(n, 2 * MICROBATCHES))
            for a, b in zip(x.split(2), y.split(2), strict=True):
                (nn.functional.mse_loss(net(a), b) / MICROBATCHES).backward()
        for name, parameter in net.named_parameters():
            sums.setdefault(name, []).append(parameter.grad)
            parameter.grad = None
    for name, parameter in net.named_parameters():
        parameter.grad = sum(sums[name][1:], sums[name][0])


def unsplit(case: str, steps: int = STEPS, replicas: int = 1, skipped: int = -1) -> dict[str, Tensor]:
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
    for n in range(steps):
        accumulated(net, range(n * count, (n + 1) * count), replicas)
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(count)
        if "clip" in given:
            nn.utils.clip_grad_norm_(net.parameters(), given["clip"])
        for one in (muon, adam, *schedulers) if n != skipped else ():
            one.step()
        net.zero_grad()
    return {name: p.detach() for name, p in named.items()}


def trained(
    rank: int,
    layout: dict[str, Any],
    case: str,
    zero: Any = False,
    steps: int = STEPS,
    folder: Path | None = None,
) -> tuple[dict[str, Tensor], list[Tensor | None], int]:
    """Train; with a folder, after what is saved there, and save."""
    given = CASES.get(case, {})
    overflows = case == "overflow in the second step"
    scaler = penstock.GradScaler(init_scale=8.0, growth_interval=2) if overflows else None
    microbatches = MICROBATCHES // (layout["mesh"].dp if "mesh" in layout else 1)
    parallel = penstock.ParallelOptions(bucket_bytes=1500)
    with penstock.Pipeline(
        plain.model(LAYERS), nn.functional.mse_loss, microbatches=microbatches, timeout=120, parallel=parallel, **layout
    ) as pipe:  # fmt: skip
        optimizer = penstock.PipelineOptimizer(
            pipe, torch.optim.AdamW, groups=GROUPS, zero=zero, scaler=scaler, **given, **ADAM
        )
        if folder is not None:
            saved = penstock.Checkpoints(folder, pipe, optimizer)
            saved.load_newest()
        norms = []
        for _ in range(steps):
            for _ in range(given.get("accumulate", 1)):
                pipe.step(*plain.batch(pipe.steps, 2 * MICROBATCHES))
                if overflows and pipe.steps == 2 and rank == 3:
                    matrix = next(p for p in pipe.updated(pipe.rank) if p.dim() == 2)
                    matrix.grad[1, 2] = torch.inf
                told = optimizer.step()
            norms.append(told.grad_norm)
            assert told.skipped == (overflows and pipe.steps == 2)
        if folder is not None:
            saved.save()
            saved.close()
        return {name: p.detach() for name, p in pipe.named_parameters()}, norms, optimizer.state_bytes()


def assert_equal(parts: list[tuple], expected: dict[str, Tensor]) -> None:
    seen = {name: value for part, *_ in parts for name, value in part.items()}
    states.assert_equal(seen, expected)


@pytest.mark.parametrize(
    ("ranks", "schedule", "case"),
    [
        (2, "zb-v", "accumulate"),
        (2, "zb-v", "cosine"),
        (4, "1f1b", "warm-up"),
        *exhaustive((4, "1f1b", "bare"), (4, "1f1b", "clip")),
    ],
)
def test_threads_give_the_weights_of_two_torch_optimizers(ranks: int, schedule: str, case: str):
    layout = {"ranks": ranks, "schedule": schedule}
    assert_equal([trained(0, layout, case)], unsplit(case))


@pytest.mark.slow
def test_processes_give_them_too(processes: LocalProcesses):
    layout = {"ranks": 2, "schedule": "zb-h1"}
    assert_equal(processes.run(2, trained, layout, "accumulate"), unsplit("accumulate"))


def test_a_checkpoint_goes_on_at_another_layout(tmp_path: Path):
    trained(0, {"ranks": 2, "schedule": "zb-v"}, "cosine", False, 2, tmp_path)
    assert_equal([trained(0, {"ranks": 4}, "cosine", False, 2, tmp_path)], unsplit("cosine"))


def test_main_weights_and_learning_rates_are_of_all_groups():
    net = plain.model(2).to(torch.bfloat16)
    with penstock.Pipeline(net, nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        optimizer = penstock.PipelineOptimizer(
            pipe, torch.optim.AdamW, groups=GROUPS, main_weights=True, **ADAM
        )
        pipe.step(*(one.to(torch.bfloat16) for one in plain.batch(0, 4)))
        assert optimizer.step().lr == (0.05, 0.01, 0.01)
        assert set(optimizer.state_dict()["main_weights"]) == {name for name, _ in net.named_parameters()}


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


MESH = penstock.MeshShape(pp=2, dp=2)
REPLICAS = {"mesh": MESH}


@pytest.mark.slow
def test_replicas_that_own_whole_matrices_give_the_weights_of_two_torch_optimizers(processes: LocalProcesses):
    exact = [(REPLICAS, case, zero) for case in ("bare", "cosine") for zero in (True, "overlap")]
    told = run_cases(processes, 4, trained, exact)
    for (_, case, _), parts in zip(exact, told, strict=True):
        for replica in range(2):
            own = [parts[MESH.rank(pp=place, dp=replica)] for place in range(2)]
            assert_equal(own, unsplit(case, replicas=2))
    whole, overflowed = run_cases(
        processes, 4, trained, [(REPLICAS, "bare", False), (REPLICAS, "overflow in the second step", True)]
    )
    assert_equal(overflowed, unsplit("bare", replicas=2, skipped=1))
    for place in range(2):
        pair = [MESH.rank(pp=place, dp=replica) for replica in range(2)]
        assert sum(told[0][rank][2] for rank in pair) == pytest.approx(whole[pair[0]][2], rel=0.01)
        assert max(told[0][rank][2] for rank in pair) < 0.55 * whole[pair[0]][2]


@pytest.mark.slow
def test_the_norm_over_owned_matrices_and_shards_counts_each_once(processes: LocalProcesses):
    cases = [(REPLICAS, case, zero) for case in ("clip", "accumulate") for zero in (True, False)]
    told = dict(zip([case[1:] for case in cases], run_cases(processes, 4, trained, cases), strict=True))
    for case in ("clip", "accumulate"):
        expected = unsplit(case, replicas=2)
        assert_equal(told[case, False], expected)
        for (ours, norms, _), (_, wanted, _) in zip(told[case, True], told[case, False], strict=True):
            torch.testing.assert_close(norms, wanted, rtol=1e-6, atol=0)
            # Norms of halves may differ in their last bits, which Muon's products in bf16 make larger.
            for name, value in ours.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("first", "second"), [*slow((True, False), (False, "overlap")), *exhaustive((True, True))]
)
def test_a_checkpoint_goes_on_with_whole_matrices_owned_or_not(
    processes: LocalProcesses, tmp_path: Path, first: Any, second: Any
):
    processes.run(4, trained, REPLICAS, "cosine", first, 2, tmp_path)
    layout = {"mesh": penstock.MeshShape(pp=1, dp=2)}
    for told in processes.run(2, trained, layout, "cosine", second, 2, tmp_path):
        assert_equal([told], unsplit("cosine", replicas=2))


def in_bf16(rank: int, zero: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Main weights of tied matrices, and of stages that two ranks hold."""
    net = tied.model().to(torch.bfloat16)
    with penstock.Pipeline(
        net, tied.loss_fn, microbatches=2, mesh=MESH, schedule="chimera", timeout=120,
        parallel=penstock.ParallelOptions(bucket_bytes=512),
    ) as pipe:  # fmt: skip
        optimizer = penstock.PipelineOptimizer(
            pipe, torch.optim.AdamW, zero=zero, main_weights=True, lr=0.01,
            groups=[{"match": lambda name, p: p.dim() == 2, "optimizer": torch.optim.Muon, "lr": 0.05}],
        )  # fmt: skip
        for n in range(3):
            pipe.step(*tied.batch(n))
            optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        return {name: p.detach() for name, p in pipe.state_dict().items()}, state


@pytest.mark.slow
def test_main_weights_of_shared_matrices_have_one_owner(processes: LocalProcesses):
    owned, whole = run_cases(processes, 4, in_bf16, [(True,), (False,)])
    for (weights, state), (wanted, wanted_state) in zip(owned, whole, strict=True):
        states.assert_equal(weights, wanted)
        states.assert_equal(state, wanted_state)


def refused(rank: int, optimizer: Any, groups: list[dict[str, Any]]) -> str:
    with (
        penstock.Pipeline(
            plain.model(2), nn.functional.mse_loss, microbatches=2, mesh=penstock.MeshShape(pp=1, dp=2)
        ) as pipe,
        pytest.raises(penstock.ConfigError) as caught,
    ):
        penstock.PipelineOptimizer(pipe, optimizer, groups=groups, zero=True, lr=0.01)
    return str(caught.value)


@pytest.mark.slow
def test_vectors_are_refused_by_every_replica(processes: LocalProcesses):
    for said in processes.run(2, refused, torch.optim.AdamW, [{"match": "", "optimizer": torch.optim.Muon}]):
        assert said.startswith("Muon cannot be made with these options and groups: ")
