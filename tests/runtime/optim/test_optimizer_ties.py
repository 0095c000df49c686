"""A tied weight is updated once, its copies stay equal, and its state goes by its first name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal
from tests.support.tied import Head, batch, loss_fn, model

MICROBATCHES = 4


def unsplit() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.3)
    norms = []
    for n in range(3):
        for x, y in zip(*(part.chunk(MICROBATCHES) for part in batch(n)), strict=True):
            (loss_fn(net(x), y) / MICROBATCHES).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in net.named_parameters()}, norms


def optimizer_of(pipe: Pipeline, **given) -> PipelineOptimizer:
    return PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01, weight_decay=0.3, clip=0.5, **given)


def pipe_of(ranks: int, family: str = "1f1b", dtype: torch.dtype = torch.float32) -> Pipeline:
    return Pipeline(model(dtype), loss_fn, microbatches=MICROBATCHES, ranks=ranks, schedule=family)


def pipelined(rank: int, ranks: int, family: str):
    """Weights by name, every module's own view of the tied one, the norms, and the names with state."""
    torch.set_num_threads(1)
    with pipe_of(ranks, family) as pipe:
        optimizer = optimizer_of(pipe)
        norms = []
        for n in range(3):
            pipe.step(*batch(n))
            norms.append(optimizer.step().grad_norm)
        tied = [
            layer.weight.detach().clone()
            for stage in pipe.stages.values()
            for layer in stage.module.layers
            if isinstance(layer, nn.Embedding | Head)
        ]
        weights = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        return weights, tied, norms, set(optimizer.state_dict()["state"])


def assert_close(parts: list) -> None:
    """To rounding: the tied gradient is the sum of two sums, plain PyTorch's is one over all uses."""
    weights, norms = unsplit()
    seen, tied, names = {}, [], set()
    for part, views, part_norms, part_names in parts:
        seen.update(part)
        tied += views
        names |= part_names
        assert part_norms == parts[0][2]
        for ours, theirs in zip(part_norms, norms, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5)
    assert seen.keys() == weights.keys() == names
    for name, expected in weights.items():
        assert torch.allclose(seen[name], expected, rtol=0, atol=1e-5), name
    assert len(tied) >= 2
    assert all(torch.equal(view, tied[0]) for view in tied)


@pytest.mark.parametrize(
    ("ranks", "family"),
    [(2, "zb-v"), (2, "chimera"), (4, "round-trip"), *exhaustive((2, "1f1b"), (4, "zb-h1"))],
)
def test_threads_update_a_tied_weight_once(ranks, family):
    assert_close([pipelined(0, ranks, family)])


@pytest.mark.parametrize(
    ("ranks", "family"), [*slow((2, "1f1b"), (2, "chimera"), (4, "round-trip")), *exhaustive((4, "zb-h1"))]
)
def test_processes_update_a_tied_weight_alike(processes: LocalProcesses, ranks, family):
    assert_close(processes.run(ranks, pipelined, ranks, family))


def test_a_tied_weights_state_goes_from_one_split_to_another():
    found = []
    for after in (2, 4):
        with pipe_of(2) as pipe:
            optimizer = optimizer_of(pipe)
            for n in range(2):
                pipe.step(*batch(n))
                optimizer.step()
            weights, state = copy.deepcopy((pipe.state_dict(), optimizer.state_dict()))
        with pipe_of(after) as pipe:
            optimizer = optimizer_of(pipe)
            pipe.load_state_dict(weights)
            optimizer.load_state_dict(state)
            for n in range(2, 4):
                pipe.step(*batch(n))
                optimizer.step()
            found.append(copy.deepcopy(dict(pipe.state_dict())))
    assert_equal(*found)


def test_main_weights_keep_a_tied_weights_gradient_in_float32_on_every_stage():
    net = model(torch.bfloat16)
    with Pipeline(net, loss_fn, microbatches=MICROBATCHES, ranks=2) as pipe:
        optimizer = optimizer_of(pipe, main_weights=True)
        pipe.step(*batch(0))
        assert {p.grad.dtype for p in pipe.parameters()} == {torch.float32}
        optimizer.step()
        assert torch.equal(pipe.stages[0].module.layers[0].weight, pipe.stages[1].module.layers[-1].weight)
        main = optimizer.state_dict()["main_weights"]["0.weight"]
        assert torch.equal(main.bfloat16(), net[0].weight)
