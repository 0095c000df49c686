"""The state saved at one split continues bit for bit at another."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from penstock.base.errors import ConfigError
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.lanes import exhaustive
from tests.support.states import assert_equal, joined

NORMS = r"\.1\.(weight|bias)$"


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, 10)


def pipe_of(ranks: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Pipeline:
    return Pipeline(plain.model(4, seed).to(dtype), loss_fn, microbatches=4, schedule="1f1b", ranks=ranks)


def optimizer_of(pipe: Pipeline, make=torch.optim.AdamW, **given) -> PipelineOptimizer:
    settings = {"lr": 0.01, "groups": [{"match": NORMS, "lr": 0.1}], "clip": 0.5, "lr_scheduler": cosine}
    return PipelineOptimizer(pipe, make, **{**settings, **given})


def steps(pipe: Pipeline, optimizer: PipelineOptimizer, numbers: range, dtype: torch.dtype) -> list:
    found = []
    for n in numbers:
        x, y = plain.batch(n, 8)
        pipe.step(x.to(dtype), y.to(dtype))
        found.append(optimizer.step())
    return found


def first_half(rank: int, ranks: int, dtype: torch.dtype, make, given: dict) -> tuple[dict, dict]:
    torch.set_num_threads(1)
    with pipe_of(ranks, dtype) as pipe:
        optimizer = optimizer_of(pipe, make, **given)
        steps(pipe, optimizer, range(3), dtype)
        return copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))


def second_half(
    rank: int, ranks: int, dtype: torch.dtype, make, given: dict, saved: tuple[dict, dict]
) -> tuple:
    torch.set_num_threads(1)
    with pipe_of(ranks, dtype, seed=1) as pipe:
        optimizer = optimizer_of(pipe, make, **given)
        pipe.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        done = steps(pipe, optimizer, range(3, 6), dtype)
        return done, copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CASES = {
    "adamw": (torch.float32, torch.optim.AdamW, {}),
    "adamw, fused": (torch.float32, torch.optim.AdamW, {"fused": True}),
    "sgd, no schedule": (torch.float32, torch.optim.SGD, {"momentum": 0.9, "lr_scheduler": None}),
    "lr factor": (torch.float32, torch.optim.RMSprop, {"lr_scheduler": None, "lr_factor": lambda n: 0.9**n}),
    "adafactor in bfloat16": (torch.bfloat16, torch.optim.Adafactor, {}),
    "main weights": (torch.bfloat16, torch.optim.AdamW, {"main_weights": True}),
}


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("main weights", 2, 4),
        ("lr factor", 4, 1),
        ("adafactor in bfloat16", 2, 4),
        ("adamw, fused", 4, 1),
        *exhaustive(("adamw", 2, 4), ("sgd, no schedule", 4, 1)),
    ],
)
def test_threads_continue_at_another_split(case, before, after):
    dtype, make, given = CASES[case]
    saved = through_a_file(first_half(0, before, dtype, make, given))
    done, found = second_half(0, after, dtype, make, given, saved)
    with pipe_of(1, dtype) as pipe:
        optimizer = optimizer_of(pipe, make, **given)
        expected = steps(pipe, optimizer, range(6), dtype)[3:]
        assert done == expected
        assert_equal(found[0], pipe.state_dict())
        assert_equal(found[1], optimizer.state_dict())


@pytest.mark.slow
def test_processes_continue_at_another_split(processes: LocalProcesses):
    case = (torch.float32, torch.optim.AdamW, {})
    later = processes.run(2, second_half, 2, *case, through_a_file(first_half(0, 4, *case)))
    weights, state = joined([found for _, found in later])
    with pipe_of(1) as pipe:
        optimizer = optimizer_of(pipe)
        expected = steps(pipe, optimizer, range(6), torch.float32)[3:]
        assert all(done == expected for done, _ in later)
        assert_equal(weights, dict(pipe.state_dict()))
        assert_equal(state, optimizer.state_dict())


def test_a_main_weight_is_loaded_whichever_comes_first_the_weights_or_the_optimizers_state():
    weights, state = first_half(0, 2, torch.bfloat16, torch.optim.AdamW, {"main_weights": True})
    with pipe_of(2, torch.bfloat16, seed=1) as pipe:
        optimizer = optimizer_of(pipe, main_weights=True)
        optimizer.load_state_dict(state)
        assert_equal(dict(pipe.state_dict()), dict(weights))
        pipe.load_state_dict(weights)
        for rank in (0, 1):
            optimizer.main_weights[rank].lend_gradients()
        assert_equal(optimizer.state_dict()["main_weights"], state["main_weights"])


def test_everything_wrong_is_listed_and_nothing_is_loaded():
    _, good = first_half(0, 2, torch.float32, torch.optim.AdamW, {})
    bad = copy.deepcopy(good)
    bad["optimizer"] = "SGD"
    bad["groups"].append({})
    bad["lr_scheduler"] = None
    bad["scaler"] = {"scale": 2.0}
    bad["parameters"].pop("0.0.bias")
    bad["parameters"]["0.0.weight"]["shape"] = [3, 12]
    bad["parameters"]["3.1.weight"]["group"] = 1
    bad["parameters"]["9.weight"] = {"group": 0, "shape": [1]}
    bad["parameters"]["3.0.other"] = {"group": 0, "shape": [1]}
    bad["main_weights"]["3.0.bias"] = torch.ones(12)
    with pipe_of(2) as pipe:
        optimizer = optimizer_of(pipe)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ConfigError) as caught:
            optimizer.load_state_dict(bad)
        assert_equal(optimizer.state_dict(), before)
        assert str(caught.value).removeprefix("the state does not fit the optimizer: ").split("; ") == [
            "it is of SGD, not AdamW",
            "it has 3 groups, not 2",
            "it has no lr_scheduler, and this optimizer has one",
            "it has a scaler, and this optimizer has none",
            "0.0.weight has shape (3, 12), not (12, 12)",
            "0.0.bias is missing",
            "3.1.weight is in group 1, not 0",
            "3.0.bias has a main weight, and has none here",
            "9.weight is unknown",
            "3.0.other is unknown",
        ]
        with pytest.raises(ConfigError, match="'steps' is missing; 'groups' is a dict"):
            optimizer.load_state_dict({**{k: v for k, v in good.items() if k != "steps"}, "groups": {}})


def loads_its_part(rank: int, state: dict) -> list[str]:
    with pipe_of(2) as pipe:
        optimizer = optimizer_of(pipe)
        optimizer.load_state_dict(state)
        return sorted(optimizer.state_dict()["state"])


def test_entries_of_parameters_held_elsewhere_are_left_alone(processes: LocalProcesses):
    _, state = first_half(0, 2, torch.float32, torch.optim.AdamW, {})
    first, second = processes.run(2, loads_its_part, state)
    assert not set(first) & set(second)
    assert set(first) | set(second) == set(state["state"])


def test_a_state_with_gradients_waiting_is_refused():
    with pipe_of(2) as pipe:
        optimizer = optimizer_of(pipe, accumulate=3)
        state = optimizer.state_dict()
        steps(pipe, optimizer, range(2), torch.float32)
        with pytest.raises(ConfigError, match="2 of 3 pipeline steps have accumulated"):
            optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert all(p.grad is None for p in pipe.parameters())
        applied = [done.applied for done in steps(pipe, optimizer, range(3), torch.float32)]
        assert applied == [False, False, True]


def test_the_scale_is_part_of_the_state():
    with pipe_of(2) as pipe:
        optimizer = optimizer_of(pipe, scaler=GradScaler(init_scale=4.0, growth_interval=1))
        steps(pipe, optimizer, range(2), torch.float32)
        state = optimizer.state_dict()
    with pipe_of(4) as pipe:
        optimizer = optimizer_of(pipe, scaler=GradScaler())
        optimizer.load_state_dict(state)
        assert pipe.scaler.scale == 16.0
        with pytest.raises(ConfigError, match="scaler: scale must be a positive float32 number, got 0"):
            optimizer.load_state_dict({**state, "scaler": {**state["scaler"], "scale": 0}})
