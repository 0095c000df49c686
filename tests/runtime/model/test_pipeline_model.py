"""The model back: full state and module, in threads and processes, under every layout, with the model's own names."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.base.errors import ConfigError
from penstock.forward.loss_piece import loss_in
from penstock.runtime.model.pipeline_model import _described, each_value
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import own_models
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal

STEPS, MICROBATCHES = 2, 2


def trained(make, schedule: str = "1f1b", dp: int = 1, zero: bool = False, **options) -> penstock.Pipeline:
    """A pipeline after some steps."""
    net = own_models.made(make)
    mesh = penstock.MeshShape(pp=2, dp=dp) if dp > 1 else None
    pipe = penstock.Pipeline(
        net, ranks=None if mesh else 2, mesh=mesh, microbatches=MICROBATCHES, schedule=schedule, **options
    )
    optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, zero=zero)
    for step in range(STEPS):
        pipe.step(*own_models.batch(8, step))
        optimizer.step()
    return pipe


def plain(make, microbatches: int) -> dict[str, Tensor]:
    net = own_models.made(make)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(v.chunk(microbatches) for v in own_models.batch(8, step)), strict=True):
            (loss_in(net(x, y)) / microbatches).backward()
        optimizer.step()
    return net.state_dict()


def assert_close(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", *exhaustive("interleaved-1f1b", "zb-v")])
def test_threads_give_the_state_under_all_names_of_tied_weights(schedule: str):
    options = {"virtual_stages": 2} if schedule == "interleaved-1f1b" else {}
    with trained(own_models.NanoGPT, schedule, **options) as pipe:
        assert pipe.is_main
        state = pipe.full_state_dict()
        first = next(pipe.parameters())
    assert_close(state, plain(own_models.NanoGPT, MICROBATCHES))
    assert state["lm_head.weight"] is state["transformer.wte.weight"]
    assert state["transformer.wte.weight"].data_ptr() != first.data_ptr()
    net = own_models.NanoGPT()
    net.load_state_dict(state, strict=True)
    assert torch.equal(net.lm_head.weight, state["lm_head.weight"])


def in_process(
    rank: int, schedule: str, dp: int, zero: bool, only: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with trained(own_models.NanoGPT, schedule, dp, zero) as pipe:
        state = pipe.full_state_dict(rank0_only=only)
        assert pipe.is_main == (rank == 0)  # and not the first rank of another replica
        pipe.load_state_dict(pipe.full_state_dict())
        net = own_models.NanoGPT()
        net.load_state_dict(pipe.full_state_dict())
        with pytest.raises(ConfigError, match=r"model\.load_state_dict\(state, assign=True\)"):
            pipe.unsplit()
        return state, dict(net.state_dict())


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [("1f1b", 1, False, True)]),
        *slow((2, [("zb-v", 1, False, False)]), (4, [("1f1b", 2, False, False), ("1f1b", 2, True, True)])),
    ],
)
def test_processes_give_every_rank_the_same_state(processes: LocalProcesses, ranks: int, cases: list):
    for case, by_rank in zip(cases, run_cases(processes, ranks, in_process, cases), strict=True):
        expected = plain(own_models.NanoGPT, case[1] * MICROBATCHES)
        for rank, (state, loaded) in enumerate(by_rank):
            assert_close(loaded, expected)
            assert_close(state, {} if case[3] and rank else expected)


def with_shared_buffer(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the state, after a state was loaded whose shared buffer has other values."""
    net = own_models.made(own_models.SharedRotary)
    x, y = own_models.batch()
    with penstock.Pipeline(net, lambda output, target: output.square().mean(), microbatches=2) as pipe:
        state = pipe.full_state_dict()
        pipe.load_state_dict({name: value * 1.5 for name, value in state.items()})
        return pipe.step(x, y).loss, pipe.full_state_dict()


def test_a_buffer_that_several_ranks_have_is_one_in_the_state(processes: LocalProcesses):
    net = own_models.made(own_models.SharedRotary)
    net.load_state_dict({name: value * 1.5 for name, value in net.state_dict().items()})
    x, _ = own_models.batch()
    loss = torch.stack([net(part).square().mean() for part in x.chunk(2)]).mean()
    for found, state in processes.run(2, with_shared_buffer):
        assert torch.allclose(found, loss, rtol=1e-6)
        assert list(state) == list(net.state_dict())
        assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())


def sharded(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from tests.support import hf_models

    net = hf_models.model("llama", tied=True)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    mesh = penstock.MeshShape(pp=2, tp=2)
    with penstock.Pipeline(net, microbatches=2, mesh=mesh) as pipe:
        tokens, labels, mask = hf_models.batch(sequence=8, side="right")
        pipe.step(tokens, labels, attention_mask=mask)
        return pipe.full_state_dict(), expected


@pytest.mark.slow
def test_sharded_matrices_are_given_in_full(processes: LocalProcesses):
    for state, expected in processes.run(4, sharded):
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_states_of_all_ranks_come_rank_by_rank_each_from_the_one_that_has_it():
    states: list[dict[str, object]] = [
        {"a": torch.ones(2), "step": 3},
        {"b": torch.tensor([[5.0], [6.0]], dtype=torch.float64).t(), "c": True},
    ]
    for rank, own in enumerate(states):
        sent: list[tuple[int, list[int]]] = []

        def gather(told: tuple, own: dict = own) -> list:
            described = [[_described(name, value) for name, value in state.items()] for state in states]
            assert told == ("cpu", described[states.index(own)])
            return [("cpu", each) for each in described]

        def broadcast(data: Tensor, source: int, rank: int = rank, sent: list = sent) -> None:
            if source == rank:
                sent.append((source, data.tolist()))
            else:
                name = "ab"[source]
                data.copy_(states[source][name].contiguous().reshape(-1).view(torch.uint8))

        world = SimpleNamespace(rank=rank, gather=gather, broadcast=broadcast)
        found = list(each_value(own, world))
        assert [name for name, _ in found] == ["a", "step", "b", "c"]
        assert (found[1][1], found[3][1]) == (3, True)
        assert torch.equal(found[0][1], states[0]["a"])
        assert torch.equal(found[2][1], states[1]["b"])
        assert [source for source, _ in sent] == [rank]


def test_unsplit_returns_the_module_that_was_given():
    net = own_models.made(own_models.NanoGPT)
    with penstock.Pipeline(net, ranks=2, microbatches=2) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(*own_models.batch())
        optimizer.step()
        state = pipe.full_state_dict()
        assert pipe.unsplit() is net
    assert net.lm_head.weight is net.transformer.wte.weight
    assert_equal(net.state_dict(), state)
    x, y = own_models.batch()
    net(x, y)[1].backward()  # an ordinary module again
    assert all(p.grad is not None for p in net.parameters())


def test_buffers_that_were_converted_come_back():
    net = own_models.made(own_models.Masked)
    with penstock.Pipeline(net, lambda output, target: output.mean(), ranks=2, microbatches=2) as pipe:
        for stage in pipe.stage_modules():
            stage.double()
        x, y = own_models.batch()
        pipe.step(x, y)
    net = pipe.unsplit()
    assert {b.dtype for b in net.buffers()} == {p.dtype for p in net.parameters()} == {torch.float64}
    net(x)


def test_a_list_of_layers_has_no_module():
    layers = [("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4))]
    with penstock.Pipeline(layers, nn.functional.mse_loss, ranks=2, microbatches=2) as pipe:
        assert list(pipe.full_state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
        with pytest.raises(ConfigError, match="the model was a list of layers"):
            pipe.unsplit()


@pytest.mark.parametrize(
    "make", [own_models.NanoGPT, *exhaustive(own_models.SharedRotary, own_models.WithUnused)]
)
def test_checkpoints_have_the_models_names_and_load_at_another_split(make, tmp_path: Path):
    def loss(output, target):
        logits = output[0] if isinstance(output, tuple) else output
        return logits.square().mean()

    x, y = own_models.batch()
    net = own_models.made(make)
    with penstock.Pipeline(net, loss, ranks=3, microbatches=2) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        with penstock.Checkpoints(tmp_path / "run", pipe, optimizer) as checkpoints:
            pipe.step(x, y)
            optimizer.step()
            checkpoints.save()
            path = checkpoints.wait()
        pipe.step(x, y)
        optimizer.step()
        expected = pipe.full_state_dict()
    assert path is not None
    from penstock.checkpoint.convert import model_weights, open_sound, resplit

    resplit(path, tmp_path / "other" / path.name, 2)
    names = model_weights(tmp_path / "other" / path.name, open_sound(tmp_path / "other" / path.name))
    assert names.keys() <= expected.keys()
    assert len(names) == len({id(v) for v in expected.values()})
    fresh = make()
    with penstock.Pipeline(fresh, loss, ranks=2, microbatches=2) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        with penstock.Checkpoints(tmp_path / "other", pipe, optimizer) as checkpoints:
            checkpoints.load(tmp_path / "other" / path.name)
        pipe.step(x, y)
        optimizer.step()
        state = pipe.full_state_dict()
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-6, atol=1e-8), name


def test_copies_and_pickles_are_refused_by_name():
    with trained(own_models.NanoGPT) as pipe:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"a Pipeline cannot be copied .*full_state_dict"):
                copied(pipe)
