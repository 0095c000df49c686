"""One optimizer over all stages gives bit for bit what one torch optimizer over the unsplit model gives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from penstock.base.errors import ConfigError, NonFiniteError
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain, states
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow

LAYERS, MICROBATCHES, STEPS = 4, 4, 4
NORMS = r"\.1\.(weight|bias)$"

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
}


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, 5)


CASES = {
    "bare": {},
    "groups": {"groups": [{"match": NORMS, "weight_decay": 0.0, "lr": 0.02}, {"names": ["3.0.weight"], "lr": 0.5}]},
    "clip": {"clip": 0.2},
    "accumulate": {"accumulate": 3, "clip": 0.2},
    "warm-up": {"lr_factor": warm_up},
    "cosine": {"lr_scheduler": cosine, "groups": [{"match": NORMS, "lr": 0.5}], "clip": 0.2},
}  # fmt: skip


def unsplit(name: str, given: dict) -> tuple[dict, list, list]:
    """The same with torch alone: final weights, the norms and the learning rates of every update."""
    net = plain.model(LAYERS)
    make, defaults = OPTIMIZERS[name]
    named = dict(net.named_parameters())
    groups, taken = [], set()
    for group in given.get("groups", []):
        if "names" in group:
            chosen = [n for n in named if n in group["names"]]
        else:
            chosen = [n for n in named if n.endswith((".1.weight", ".1.bias"))]
        taken |= set(chosen)
        options = {k: v for k, v in group.items() if k not in ("match", "names")}
        groups.append({"params": [named[n] for n in chosen], **options})
    groups.append({"params": [p for n, p in named.items() if n not in taken]})
    optimizer = make(groups, **defaults)
    scheduler = None
    if "lr_factor" in given:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, given["lr_factor"])
    elif "lr_scheduler" in given:
        scheduler = given["lr_scheduler"](optimizer)
    norms, rates = [], []
    count = given.get("accumulate", 1)
    for n in range(STEPS * count):
        plain.step(net, nn.functional.mse_loss, *plain.batch(n, 2 * MICROBATCHES), MICROBATCHES)
        if (n + 1) % count:
            continue
        for parameter in net.parameters():
            parameter.grad.div_(count)
        if "clip" in given:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), given["clip"]))
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return {n: p.detach() for n, p in named.items()}, norms, rates


def pipe_of(ranks: int, family: str = "1f1b", net: nn.Module | None = None) -> Pipeline:
    net = plain.model(LAYERS) if net is None else net
    return Pipeline(net, nn.functional.mse_loss, microbatches=MICROBATCHES, schedule=family, ranks=ranks)


def pipelined(rank: int, ranks: int, family: str, name: str, case: str) -> tuple[dict, list, list]:
    given = CASES[case]
    make, defaults = OPTIMIZERS[name]
    with pipe_of(ranks, family) as pipe:
        optimizer = PipelineOptimizer(pipe, make, **given, **defaults)
        norms, rates = [], []
        for n in range(STEPS * given.get("accumulate", 1)):
            pipe.step(*plain.batch(n, 2 * MICROBATCHES))
            done = optimizer.step()
            if done.applied:
                norms.append(done.grad_norm)
                rates.append(done.lr)
                assert all(p.grad is None for p in pipe.parameters())
            else:
                assert done.grad_norm is None
                assert all(p.grad is not None for p in pipe.parameters())
            assert not done.skipped
        assert optimizer.steps == STEPS
        return {n: p.detach() for n, p in pipe.named_parameters()}, norms, rates


def assert_as_expected(parts: list, expected: tuple[dict, list, list], given: dict) -> None:
    weights, norms, rates = expected
    seen = {}
    for part, part_norms, part_rates in parts:
        seen.update(part)
        assert part_rates == rates
        assert part_norms == (norms if "clip" in given else [None] * STEPS)
    states.assert_equal(seen, weights)


ALL = [("adamw", case) for case in CASES] + [(name, "groups") for name in OPTIMIZERS if name != "adamw"]


@pytest.mark.parametrize(
    ("ranks", "family", "name", "case"),
    # Every case at one layout, and at each layout one that accumulates or has groups.
    [
        (1, "gpipe", "adamw", "accumulate"),
        (2, "zb-v", "adamw", "cosine"),
        *((2, "zb-v", name, "groups") for name in ("adamw", "sgd")),
        *((4, "1f1b", "adamw", case) for case in ("bare", "clip", "warm-up")),
        (4, "1f1b", "adafactor", "groups"),
        *exhaustive(*((ranks, "1f1b", *case) for ranks in (1, 4) for case in ALL)),
    ],
)
def test_threads_give_the_weights_of_one_torch_optimizer(ranks, family, name, case):
    assert_as_expected([pipelined(0, ranks, family, name, case)], unsplit(name, CASES[case]), CASES[case])


@pytest.mark.parametrize(("ranks", "family"), [*slow((2, "zb-v")), *exhaustive((4, "1f1b"))])
def test_processes_give_the_weights_of_one_torch_optimizer(processes: LocalProcesses, ranks, family):
    told = run_cases(processes, ranks, pipelined, [(ranks, family, *case) for case in ALL])
    for (name, case), parts in zip(ALL, told, strict=True):
        assert_as_expected(parts, unsplit(name, CASES[case]), CASES[case])


@pytest.mark.slow
def test_copies_of_a_stage_stay_bit_identical_in_processes(processes: LocalProcesses):
    (first, *_), (second, *_) = processes.run(2, pipelined, 2, "chimera", "adamw", "cosine")
    states.assert_equal(first, second)


def test_each_rank_steps_on_its_own_thread():
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(threading.current_thread().name)
            return super().step(closure)

    with pipe_of(4) as pipe:
        optimizer = PipelineOptimizer(pipe, Watched, lr=0.1)
        seen.clear()  # of trials
        pipe.step(*plain.batch(0, 8))
        optimizer.step()
    assert sorted(seen) == [f"penstock-rank-{r}" for r in range(4)]


def test_a_group_may_be_empty_on_a_rank_and_the_schedule_still_moves_it():
    with pipe_of(4) as pipe:
        options = {"groups": [{"names": ["0.0.weight"], "lr": 1.0}], "lr": 0.1, "lr_factor": lambda n: 0.5**n}
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, **options)
        for n in range(3):
            pipe.step(*plain.batch(n, 8))
            assert optimizer.step().lr == (0.5**n, 0.1 * 0.5**n)
        assert [len(o.param_groups[0]["params"]) for o in optimizer.optimizers.values()] == [1, 0, 0, 0]


def test_a_function_may_choose_the_parameters_of_a_group():
    with pipe_of(2) as pipe:
        optimizer = PipelineOptimizer(
            pipe, torch.optim.SGD, groups=[{"match": lambda name, p: p.ndim < 2, "weight_decay": 0.0}], lr=0.1
        )
        assert {n for n, _ in optimizer.parts(0)[0] + optimizer.parts(1)[0]} == {
            n for n, p in pipe.named_parameters() if p.ndim < 2
        }


def test_dropping_the_gradients_starts_the_accumulation_anew():
    with pipe_of(2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, accumulate=2)
        pipe.step(*plain.batch(0, 8))
        assert not optimizer.step().applied
        optimizer.zero_grad()
        for applied in (False, True):
            pipe.step(*plain.batch(0, 8))
            assert optimizer.step().applied is applied


def test_a_norm_that_overflows_is_refused_before_any_weight_changes():
    net = plain.model(LAYERS)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with pipe_of(2, net=net) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, clip=1.0)
        pipe.step(*plain.batch(0, 8))
        for parameter in pipe.parameters():
            parameter.grad.fill_(1e30)
        with pytest.raises(
            NonFiniteError, match="norm of the gradients of update 0 is inf, so no weight was changed"
        ):
            optimizer.step()
        pipe.step(*plain.batch(0, 8))
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, before[name])
        assert optimizer.step().applied


BAD = {
    "clip must be a positive number": {"clip": 0.0},
    "accumulate must be a whole number": {"accumulate": 0},
    "give lr_factor or lr_scheduler, not both": {"lr_factor": warm_up, "lr_scheduler": cosine},
    r"groups\[1\] names 'x', which is not a parameter.*groups\[0\] \(match 'nothing'\) takes no parameter": {
        "groups": [{"match": "nothing"}, {"names": ["0.0.weight", "x"]}]
    },
    r"groups\[1\] \(match '\^0'\) takes no parameter of the model: none matches that an earlier": {
        "groups": [{"match": "."}, {"match": "^0"}]
    },
    r"groups\[0\]: '\(' is not a regular expression: missing \)": {"groups": [{"match": "("}]},
    r"groups\[0\] must be a dictionary with either 'match'": {"groups": [{"lr": 0.1}]},
    r"groups\[0\]: 'names' must be a list": {"groups": [{"names": "0.0.weight"}]},
    r"groups\[0\]: 'match' must be a regular expression or a function": {"groups": [{"match": 3}]},
    r"groups\[0\]: 'match' must be a function of name and parameter: too many": {"groups": [{"match": lambda name: True}]},
    r"groups\[0\]: 'lr' must be at least 0, got -1": {
        "groups": [{"match": "weight", "optimizer": torch.optim.Muon, "lr": -1}]
    },
    "maximize=True holds for the groups without an optimizer of their own alone": {
        "groups": [{"match": "weight", "optimizer": torch.optim.SGD, "lr": 0.1}],
        "maximize": True,
    },
    r"groups\[0\] has 'params'": {"groups": [{"match": ".", "params": []}]},
    "groups must be a list": {"groups": {"match": "."}},
    r"groups\[0\] has 'weight_decy', which is not an option of AdamW \(did you mean 'weight_decay'": {
        "groups": [{"match": "weight", "weight_decy": 0.0}]
    },
    "AdamW cannot be made with these options and groups: Invalid learning rate: -1": {"lr": -1},
    "AdamW cannot be made with these options and groups: .*'momentum'": {"momentum": 0.9},
    "LBFGS runs the model itself": {"optimizer": torch.optim.LBFGS},
    "lr_scheduler must make a torch.optim.lr_scheduler.LRScheduler; it made a float": {"lr_scheduler": lambda o: 0.5},
    "lr_scheduler must make a scheduler of the optimizer it is given": {
        "lr_scheduler": lambda o: cosine(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    },
    "ReduceLROnPlateau needs a measurement": {"lr_scheduler": ReduceLROnPlateau},
    "made a list, not a torch.optim.Optimizer": {"optimizer": lambda groups, **_: []},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_used_is_refused(message: str):
    given = {"optimizer": torch.optim.AdamW, **BAD[message]}
    with pipe_of(2) as pipe, pytest.raises(ConfigError, match=message):
        PipelineOptimizer(pipe, given.pop("optimizer"), **given)


def bad_group(rank: int) -> str:
    with pipe_of(2) as pipe, pytest.raises(ConfigError) as caught:
        PipelineOptimizer(pipe, torch.optim.SGD, groups=[{"match": r"^3\."}, {"match": "nowhere"}])
    return str(caught.value)


def test_a_pattern_that_matches_on_another_rank_only_is_sound_and_one_that_matches_nowhere_is_not(
    processes: LocalProcesses,
):
    first, second = processes.run(2, bad_group)
    assert first == second
    assert "groups[1] (match 'nowhere') takes no parameter" in first
    assert "groups[0]" not in first
