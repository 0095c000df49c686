"""`Pipeline.named_weights`: the whole model's tensors, one at a time, on every rank or on the first."""

from __future__ import annotations

import weakref
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import MeshShape, Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models, own_models
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive

Found = dict[str, Tensor]


class Odd(nn.Module):
    """A layer with tensors of dtypes and shapes that a transport may treat in a special way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[-0.0, float("nan")], [float("inf"), 1e-45]]))
        self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("wave", torch.tensor([1 + 2j]).conj())

    def forward(self, x: Tensor) -> Tensor:
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def odd() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Odd(), nn.Linear(4, 4), Odd(), nn.Linear(4, 4))


def same(one: Found, other: Found) -> bool:
    """Return whether names, dtypes and bits are the same."""
    return one.keys() == other.keys() and all(
        a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        for a, b in ((one[name], other[name]) for name in one)
    )


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", *exhaustive("interleaved-1f1b", "zb-v")])
def test_threads_give_the_tensors_that_train_and_tied_ones_once(schedule: str):
    net = own_models.made(own_models.NanoGPT)
    stages = 2 if schedule == "interleaved-1f1b" else None
    with Pipeline(net, ranks=2, microbatches=4, schedule=schedule, virtual_stages=stages) as pipe:
        found = dict(pipe.named_weights())
        whole = pipe.full_state_dict()
        assert len(list(pipe.named_weights())) == len(found)
        assert list(pipe.named_weights(rank0_only=True)) != []
    assert "lm_head.weight" in whole
    assert same(found, {name: value for name, value in whole.items() if name != "lm_head.weight"})
    own = {p.data_ptr() for p in net.parameters()}
    assert {found[name].data_ptr() for name, _ in net.named_parameters()} <= own
    assert not any(value.requires_grad for value in found.values())


def in_process(
    rank: int, axes: dict[str, int], zero: bool, only: bool
) -> tuple[list[str], Found, Found, int]:
    """Return the names, the tensors, those of full_state_dict, and the most tensors of other ranks at a time."""
    parallel = penstock.ParallelOptions(family="llama")
    net = hf_models.model("llama", tied=True, vocab_size=62)
    ids, labels, _ = hf_models.batch()
    with Pipeline(net, microbatches=2, mesh=MeshShape(**axes), parallel=parallel) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, zero=zero)
        pipe.step(ids, labels)
        optimizer.step()
        own = {p.data_ptr() for p in pipe.parameters()}
        names, found, alive, most = [], {}, [], 0
        for name, value in pipe.named_weights(rank0_only=only):
            alive = [ref for ref in alive if ref() is not None]
            if value.data_ptr() not in own:
                alive.append(weakref.ref(value))
            most = max(most, len(alive))
            names.append(name)
            found[name] = value.clone()
        return names, found, pipe.full_state_dict(), most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "cases"),
    [
        ({"pp": 2}, [(False, False), (False, True)]),
        ({"pp": 2, "dp": 2}, [(True, False), ("overlap", True)]),
        ({"pp": 2, "tp": 2}, [(False, False), (False, True)]),
    ],
)
def test_processes_give_whole_matrices_one_at_a_time(
    processes: LocalProcesses, axes: dict[str, int], cases: list[tuple[bool, bool]]
):
    results = run_cases(processes, MeshShape(**axes).ranks, in_process, [(axes, *case) for case in cases])
    expected = {
        name: p.shape for name, p in hf_models.model("llama", tied=True, vocab_size=62).named_parameters()
    }
    for (_, only), by_rank in zip(cases, results, strict=True):
        for rank, (names, found, whole, most) in enumerate(by_rank):
            if only and rank:
                assert names == []
                continue
            assert sorted(names) == sorted(set(names) & expected.keys()) == sorted(expected)
            assert {name: value.shape for name, value in found.items()} == expected
            assert same(found, {name: whole[name] for name in expected})
            assert same(found, by_rank[0][1])
            assert most <= 2  # that of the loop's body, and the next


def odd_in_process(rank: int) -> tuple[Found, Found]:
    with Pipeline(odd(), lambda output, _: output.sum(), microbatches=2) as pipe:
        return {name: value.clone() for name, value in pipe.named_weights()}, pipe.full_state_dict()


@pytest.mark.slow
def test_every_dtype_travels_with_its_bits(processes: LocalProcesses):
    expected = {name: value for name, value in odd().state_dict().items() if isinstance(value, Tensor)}
    for found, whole in processes.run(2, odd_in_process):
        assert whole.pop("0._extra_state") == whole.pop("2._extra_state") == {"version": 3}
        assert same(found, expected)
        assert same(whole, expected)


def broken_off(rank: int) -> tuple[str, int]:
    with Pipeline(odd(), lambda output, _: output.sum(), microbatches=2, timeout=120) as pipe:
        found = [name for name, _ in islice(pipe.named_weights(), 1 if rank else None)]
        return found[0], len(pipe.full_state_dict())


@pytest.mark.slow
def test_a_rank_that_breaks_off_does_not_hold_up_the_others(processes: LocalProcesses):
    (first, count), other = processes.run(2, broken_off)
    assert (first, count) == other == ("0.weight", len(odd().state_dict()))
