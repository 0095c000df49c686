"""Torch optimizers are saved by parameter name: a run continues at any layout as plain PyTorch that never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from penstock import (
    Checkpoints,
    ConfigError,
    DataError,
    GradScaler,
    MeshShape,
    Pipeline,
    PipelineOptimizer,
)
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import outcome
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal

LAYERS, MICROBATCHES, STEPS = 4, 4, 2
Named = Iterable[tuple[str, nn.Parameter]]


class Lion(torch.optim.Optimizer):
    """An optimizer as users write them: a list and a number in a parameter's state, beside its tensor."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"momentum": torch.zeros_like(p), "seen": 0, "largest": []}
                state["seen"] += 1
                state["largest"].append(float(p.grad.abs().max()))
                p.sub_(torch.sign(state["momentum"].lerp(p.grad, 0.1)), alpha=group["lr"] / state["seen"])
                state["momentum"].lerp_(p.grad, 0.01)


def one_group(make: Callable[..., torch.optim.Optimizer], named: Named) -> torch.optim.Optimizer:
    return make([p for _, p in named])


def by_name(make: Callable[..., torch.optim.Optimizer], named: Named) -> torch.optim.Optimizer:
    return make(list(named))


def decay_groups(make: Callable[..., torch.optim.Optimizer], named: Named) -> torch.optim.Optimizer:
    """The groups of many a configure_optimizers; another rate for one layer, which one rank alone holds."""
    named = list(named)
    first = [p for n, p in named if n.startswith("0.")]
    decay = [p for n, p in named if p.dim() >= 2 and not n.startswith("0.")]
    others = [p for n, p in named if p.dim() < 2 and not n.startswith("0.")]
    return make(
        [
            {"params": decay, "weight_decay": 0.1, "name": "decay"},
            {"params": others, "weight_decay": 0.0, "name": "others"},
            {"params": first, "lr": 3e-3},
        ]
    )


ADAMW = partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "AdamW": (one_group, ADAMW),
    "AdamW, groups": (decay_groups, ADAMW),
    "AdamW, names": (by_name, ADAMW),
    "AdamW, amsgrad, foreach": (one_group, partial(ADAMW, amsgrad=True, foreach=True)),
    "AdamW, fused": (one_group, partial(ADAMW, fused=True)),
    "AdamW, rate in a tensor": (one_group, partial(torch.optim.AdamW, lr=torch.tensor(1e-2))),
    "SGD": (one_group, partial(torch.optim.SGD, lr=0.1)),
    "SGD, momentum, groups": (decay_groups, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "Adafactor": (one_group, partial(torch.optim.Adafactor, lr=1e-2)),
    "Adagrad": (one_group, partial(torch.optim.Adagrad, lr=1e-2)),
    "Lion": (one_group, Lion),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 6)], [4]
    ),
    # Every loss is above the best by this threshold, so the rate falls every other step.
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.9, factor=0.5),
}


def advance(scheduler: Any, loss: torch.Tensor) -> None:
    if scheduler is not None:
        scheduler.step(*[loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])


def pipeline(net: nn.Sequential | None = None, microbatches: int = MICROBATCHES, **options: Any) -> Pipeline:
    net, options = net or plain.model(LAYERS), {"ranks": 2, "microbatches": microbatches, **options}
    return Pipeline(net, nn.functional.mse_loss, **options)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, without its parameters and their names."""
    return [
        {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in g.items() if not k.startswith("param")}
        for g in optimizer.param_groups
    ]


def make_both(optimizer: str, scheduler: str | None, named: Named) -> tuple[torch.optim.Optimizer, Any]:
    group, make = OPTIMIZERS[optimizer]
    made = group(make, named)
    return made, None if scheduler is None else SCHEDULERS[scheduler](made)


def run(
    rank: int, folder: Path, optimizer: str, scheduler: str | None, options: dict[str, Any]
) -> tuple[list[float], dict[str, Any], list[dict[str, Any]]]:
    """Continue from the newest checkpoint, train on, and save; return losses, weights and the groups' options."""
    torch.set_num_threads(1)
    losses, mesh = [], options.get("mesh")
    count = MICROBATCHES // (mesh.dp if mesh is not None else 1)
    with pipeline(microbatches=count, timeout=300, **({"ranks": None} | options)) as pipe:
        made, schedule = make_both(optimizer, scheduler, pipe.named_parameters())
        with Checkpoints(folder, pipe, made, scheduler=schedule) as checkpoints:
            checkpoints.load_newest()
            for _ in range(STEPS):
                result = pipe.step(*plain.batch(pipe.steps, 2 * MICROBATCHES))
                made.step()
                made.zero_grad()
                advance(schedule, result.loss)
                losses.append(float(result.loss))
            checkpoints.save()
        return losses, pipe.full_state_dict(), options_of(made)


def unsplit(
    optimizer: str, scheduler: str | None, steps: int
) -> tuple[list[float], dict[str, Any], list[Any]]:
    """The same in plain PyTorch, without a stop."""
    net, losses = plain.model(LAYERS), []
    made, schedule = make_both(optimizer, scheduler, net.named_parameters())
    for n in range(steps):
        parts, _ = plain.step(net, nn.functional.mse_loss, *plain.batch(n, 2 * MICROBATCHES), MICROBATCHES)
        made.step()
        made.zero_grad()
        advance(schedule, parts.mean())
        losses.append(float(parts.mean()))
    return losses, dict(net.state_dict()), options_of(made)


SPLIT, CHUNKS = {"ranks": 4, "schedule": "zb-h1"}, {"schedule": "interleaved-1f1b", "virtual_stages": 2}
THREADS = [(0, {"ranks": 2}), (0, SPLIT), (0, {"ranks": 2, **CHUNKS})]
PROCESSES = [(2, {}), (0, SPLIT), (2, CHUNKS)]
"""Processes, or 0 for threads, and options of a pipeline."""
CASES = [
    # Groups, schedulers in a scheduler, one with the losses of before, no state, state of other kinds than tensors.
    ("AdamW, groups", "SequentialLR", THREADS),
    ("AdamW, rate in a tensor", None, THREADS),
    ("SGD", None, THREADS),
    ("Lion", None, THREADS),
    ("AdamW, groups", "ReduceLROnPlateau", PROCESSES),
    # State of other shapes.
    *slow(("Adafactor", None, THREADS), ("Lion", "SequentialLR", PROCESSES)),
    *exhaustive(("AdamW, names", None, PROCESSES)),
    *exhaustive(*((name, None, THREADS) for name in ("AdamW, amsgrad, foreach", "AdamW, fused", "Adagrad"))),
    *exhaustive(*(("SGD, momentum, groups", name, THREADS) for name in SCHEDULERS)),
]


@pytest.mark.parametrize(("optimizer", "scheduler", "layouts"), CASES)
def test_a_run_continues_at_other_layouts_bit_for_bit(
    tmp_path: Path, request: pytest.FixtureRequest, optimizer: str, scheduler: str | None, layouts: list[Any]
):
    """In processes, with groups that are empty on all ranks but one."""
    parts = []
    for count, options in layouts:
        given = (tmp_path, optimizer, scheduler, options)
        processes = request.getfixturevalue("processes") if count else None
        ranks = processes.run(count, run, *given) if processes else [run(0, *given)]
        assert all(rank[0] == ranks[0][0] and rank[2] == ranks[0][2] for rank in ranks)
        parts.append(ranks[0])
    losses, weights, options = unsplit(optimizer, scheduler, STEPS * len(parts))
    assert [loss for part in parts for loss in part[0]] == losses
    assert_equal(parts[-1][1], weights)
    assert parts[-1][2] == options


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(2, 2, 1), MeshShape(2, 1, 2)], ids=["replicas", "shards"])
def test_replicas_and_shards_continue_what_others_saved(
    tmp_path: Path, processes: LocalProcesses, mesh: MeshShape
):
    names = ("AdamW, groups", "CosineAnnealingLR")
    parts = [run(0, tmp_path, *names, {"ranks": 2})]
    for _ in range(2):
        ranks = processes.run(4, run, tmp_path, *names, {"mesh": mesh})
        assert all(rank[0] == ranks[0][0] for rank in ranks)
        parts.append(ranks[0])
    parts.append(run(0, tmp_path, *names, {"ranks": 4}))
    losses, weights, options = unsplit(*names, STEPS * 4)
    assert [loss for part in parts for loss in part[0]] == pytest.approx(losses, abs=1e-5)
    for key, value in weights.items():
        assert torch.allclose(parts[-1][1][key], value, atol=1e-4), key
    assert parts[-1][2] == options


def test_a_pipeline_optimizer_continues_what_a_torch_optimizer_saved_and_the_reverse(tmp_path: Path):
    for n in range(3):
        with pipeline() as pipe:
            own = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2) if n == 1 else None
            optimizer: Any = own or ADAMW(pipe.parameters())
            with Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
                checkpoints.load_newest()
                for _ in range(STEPS):
                    pipe.step(*plain.batch(pipe.steps, 2 * MICROBATCHES))
                    optimizer.step()
                    pipe.zero_grad()
                checkpoints.save()
            weights = pipe.full_state_dict()
    assert_equal(weights, unsplit("AdamW", None, 3 * STEPS)[1])


def test_a_frozen_weight_needs_no_place_in_the_optimizer(tmp_path: Path):
    def partly_trained(ranks: int) -> tuple[Pipeline, torch.optim.Optimizer]:
        net = plain.model(LAYERS)
        net[1].requires_grad_(False)
        pipe = pipeline(net, ranks=ranks)
        return pipe, ADAMW([p for p in pipe.parameters() if p.requires_grad])

    pipe, optimizer = partly_trained(2)
    with pipe, Checkpoints(tmp_path, pipe, optimizer, keep_frozen=False) as checkpoints:
        pipe.step(*plain.batch(0, 2 * MICROBATCHES))
        optimizer.step()
        checkpoints.save()
        expected = [optimizer.state[p]["exp_avg"] for p in pipe.parameters() if p.requires_grad]
    pipe, optimizer = partly_trained(4)
    with pipe, Checkpoints(tmp_path, pipe, optimizer, keep_frozen=False) as checkpoints:
        assert checkpoints.load_newest().step == 1
        loaded = [optimizer.state[p]["exp_avg"] for p in pipe.parameters() if p.requires_grad]
    assert all(torch.equal(*pair) for pair in zip(loaded, expected, strict=True))


def test_the_pipelines_scaler_is_saved_too(tmp_path: Path):
    def scaled() -> tuple[Pipeline, torch.optim.Optimizer, GradScaler]:
        pipe = pipeline(microbatches=2)
        pipe.scaler = scaler = GradScaler(init_scale=1024.0, growth_interval=1)
        return pipe, ADAMW(pipe.parameters()), scaler

    pipe, optimizer, scaler = scaled()
    with pipe, Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
        pipe.step(*plain.batch(0, 4))
        scaler.update(scaler.unscale_(pipe))
        checkpoints.save()
    pipe, optimizer, scaler = scaled()
    with pipe, Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
        checkpoints.load_newest()
        assert scaler.scale == 2048.0


class Counting(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["calls"] = {"count": 1}


class Accelerated:
    """A wrapper that is no torch optimizer."""

    def step(self) -> None: ...


def strangers(pipe: Pipeline) -> torch.optim.Optimizer:
    return ADAMW(nn.Linear(2, 2).parameters())


def some(pipe: Pipeline) -> torch.optim.Optimizer:
    return ADAMW([p for n, p in pipe.named_parameters() if n != "2.0.bias"])


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda pipe: torch.optim.LBFGS(list(pipe.parameters())), ["LBFGS", "AdamW"]),
        (strangers, ["AdamW", "2 tensors", "(2, 2)", "pipe.parameters()"]),
        (some, ["AdamW", "2.0.bias", "requires_grad_(False)"]),
        (lambda pipe: Accelerated(), ["Accelerated", "torch.optim.Optimizer"]),
    ],
    ids=["LBFGS", "strangers", "some", "wrapper"],
)
def test_what_cannot_be_saved_by_name_is_refused_before_the_run(tmp_path: Path, make: Any, facts: list[str]):
    with pipeline(microbatches=2) as pipe:
        with pytest.raises(ConfigError) as refused:
            Checkpoints(tmp_path, pipe, make(pipe))
        assert all(fact in str(refused.value) for fact in facts), refused.value


def test_state_of_no_parameter_is_refused_by_the_save(tmp_path: Path):
    with pipeline(microbatches=2) as pipe:
        optimizer = Counting(pipe.parameters(), lr=0.1)
        with Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
            pipe.step(*plain.batch(0, 4))
            optimizer.step()
            with pytest.raises(ConfigError, match=r"Counting keeps state under 'calls'"):
                checkpoints.save()
    assert not tmp_path.joinpath("step-00000001").exists()


def test_the_scheduler_must_be_of_the_torch_optimizer(tmp_path: Path):
    with pipeline(microbatches=2) as pipe:
        optimizer, other = ADAMW(pipe.parameters()), ADAMW(pipe.parameters())
        scheduler = lr_scheduler.ConstantLR(other)
        for given in (optimizer, None, PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)):
            with pytest.raises(ConfigError, match="scheduler"):
                Checkpoints(tmp_path, pipe, given, scheduler=scheduler)


def test_another_optimizer_is_refused_by_a_load(tmp_path: Path):
    with pipeline(microbatches=2) as pipe:
        with Checkpoints(tmp_path, pipe, decay_groups(ADAMW, pipe.named_parameters())) as checkpoints:
            checkpoints.save()
            checkpoints.wait()
        for other in (
            ADAMW(pipe.parameters()),
            decay_groups(partial(torch.optim.SGD, lr=0.1), pipe.named_parameters()),
        ):
            with (
                Checkpoints(tmp_path, pipe, other) as checkpoints,
                pytest.raises((ConfigError, DataError), match=r"group|AdamW"),
            ):
                checkpoints.load_newest()


def groups_without_the_empty_one(rank: int, folder: Path) -> str:
    with pipeline(microbatches=2, ranks=None, timeout=60) as pipe:
        first = [p for n, p in pipe.named_parameters() if n.startswith("0.")]
        others = [p for n, p in pipe.named_parameters() if not n.startswith("0.")]
        groups = [{"params": ps, "lr": lr} for ps, lr in ((first, 0.1), (others, 0.2)) if ps]
        return outcome(Checkpoints, folder, pipe, torch.optim.SGD(groups))


def test_ranks_with_other_groups_are_refused_by_name_on_every_rank(tmp_path: Path, processes: LocalProcesses):
    texts = processes.run(2, groups_without_the_empty_one, tmp_path)
    for text in texts:
        assert all(fact in text for fact in ("ConfigError", "rank 0", "rank 1", "2 groups", "1 group")), text
