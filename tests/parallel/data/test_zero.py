"""An optimizer divided among replicas takes the same steps as a plain one, with a fraction of its memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PeerError, PenstockError
from penstock.parallel.data.reducer import GroupReducer
from penstock.parallel.data.zero import ShardedOptimizer, join_state_dicts
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.replicas import each, gradients, loss_of, model, share, together

ROWS = 12
SMALL = {"bucket_bytes": 400, "first_bucket_bytes": 100}
KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "SGD": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
}


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def plain(kind: str, steps: int, size: int, start: int = 0, net=None, optimizer=None):
    """Train one process with a plain optimizer, on sums in the order of the replicas."""
    if net is None:
        net = model()
        optimizer = KINDS[kind][0](net.parameters(), **KINDS[kind][1])
    for n in range(start, start + steps):
        optimizer.zero_grad()
        for rank in range(size):
            loss_of(net, *share(n, ROWS, rank, size)).backward()
        for p in net.parameters():
            p.grad /= size
        optimizer.step()
    return net, optimizer


def train(optimizer: ShardedOptimizer, net: nn.Module, steps: int, start: int = 0) -> None:
    rank, size = optimizer.reducer.rank, optimizer.reducer.size
    for n in range(start, start + steps):
        with optimizer.reducing():
            loss_of(net, *share(n, ROWS, rank, size)).backward()
        optimizer.step()
    optimizer.wait_all()


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "overlap"), [(1, False), (2, True), (3, True)])
def test_threads_take_the_steps_of_the_whole_optimizer_bit_for_bit(kind, size, overlap):
    def body(reducer):
        net = model()
        optimizer = ShardedOptimizer(
            net, KINDS[kind][0], reducer, layers=net if overlap else (), **SMALL, **KINDS[kind][1]
        )
        train(optimizer, net, 20)
        return weights(net)

    expected = weights(plain(kind, 20, size)[0])
    for actual in together(size, body):
        assert_equal(actual, expected)


def train_in_a_group(rank: int, size: int):
    net = model()
    optimizer = ShardedOptimizer(
        net, torch.optim.AdamW, GroupReducer(timeout=300), layers=list(net), **SMALL, **KINDS["AdamW"][1]
    )
    train(optimizer, net, 20)
    return weights(net), optimizer.state_dict()


def test_processes_take_the_steps_of_the_whole_optimizer_bit_for_bit(processes: LocalProcesses):
    net, optimizer = plain("AdamW", 20, 2)
    for actual, state in processes.run(2, train_in_a_group, 2):
        assert_equal(actual, weights(net))
        for name, p in net.named_parameters():
            assert_equal(state["state"][name], optimizer.state[p])


def test_four_processes_stay_bit_identical_and_near_the_whole_optimizer(processes: LocalProcesses):
    results = processes.run(4, train_in_a_group, 4)
    net, _ = plain("AdamW", 20, 4)
    for actual, _ in results:
        assert_equal(actual, results[0][0])
        for name, value in weights(net).items():
            assert torch.allclose(actual[name], value, rtol=0, atol=2e-4), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_replica_holds_its_share_of_the_state(size):
    def body(reducer):
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(0.01)
        optimizer = ShardedOptimizer(net, torch.optim.AdamW, reducer, lr=1e-3)
        with optimizer.reducing():
            net(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.wait_all()
        return optimizer.state_bytes(), len(optimizer.shards.owned())

    total = 2 * 4 * 2 * (64 * 64 + 64)  # two moments, four bytes, two layers
    for actual, shards in together(size, body):
        assert actual - 4 * shards == total // size


def test_groups_keep_their_options_and_schedules_reach_them():
    def groups_of(net):
        decayed = [(n, p) for n, p in net.named_parameters() if p.ndim > 1]
        rest = [(n, p) for n, p in net.named_parameters() if p.ndim < 2]
        return decayed, rest

    def body(reducer):
        net = model()
        decayed, rest = groups_of(net)
        optimizer = ShardedOptimizer(
            [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
            torch.optim.AdamW, reducer, lr=1e-2, **SMALL,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
        for n in range(4):
            train(optimizer, net, 1, n)
            schedule.step()
        return weights(net)

    net = model()
    decayed, rest = groups_of(net)
    plain_optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in decayed], "weight_decay": 0.3},
            {"params": [p for _, p in rest], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain_optimizer, 0.5)
    for n in range(4):
        plain("", 1, 2, n, net, plain_optimizer)
        schedule.step()
    for actual in together(2, body):
        assert_equal(actual, weights(net))


def test_clipping_uses_the_norm_over_all_parts():
    def body(reducer):
        net = model()
        optimizer = ShardedOptimizer(net, torch.optim.SGD, reducer, lr=1.0, **SMALL)
        before = weights(net)
        with optimizer.reducing():
            loss_of(net, *share(0, ROWS, reducer.rank, 2)).backward()
        norm = optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        return norm, {name: before[name] - p.detach() for name, p in net.named_parameters()}

    net = model()
    for rank in range(2):
        (loss_of(net, *share(0, ROWS, rank, 2)) / 2).backward()
    expected = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    (norm, actual), (other, _) = together(2, body)
    assert norm == other == pytest.approx(expected.item(), rel=1e-6)
    for name, grad in gradients(net).items():
        assert torch.allclose(actual[name], grad, rtol=1e-3, atol=1e-7), name


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("gathered", [True, False])
def test_a_state_goes_on_with_another_number_of_replicas(before, after, gathered):
    rows_of = 2  # the data is split in two whatever the number of replicas, so that sums are the same

    def run(optimizer, net, reducer, start):
        for n in range(start, start + 5):
            with optimizer.reducing():
                for rank in range(rows_of):
                    with optimizer.buckets.accumulating():
                        (loss_of(net, *share(n, ROWS, rank, rows_of)) / rows_of).backward()
                for p in net.parameters():
                    optimizer.buckets.ready(p)
            optimizer.step()
        optimizer.wait_all()

    def first(reducer):
        net = model()
        optimizer = ShardedOptimizer(net, torch.optim.AdamW, reducer, lr=1e-2, **SMALL)
        run(optimizer, net, reducer, 0)
        optimizer.param_groups[0]["lr"] = 5e-3
        state = optimizer.state_dict() if gathered else optimizer.local_state_dict()
        return weights(net), state

    results = together(before, first)
    state = results[0][1] if gathered else join_state_dicts([part for _, part in results])

    def second(reducer):
        net = model()
        net.load_state_dict(results[0][0])
        optimizer = ShardedOptimizer(net, torch.optim.AdamW, reducer, lr=1.0, bucket_bytes=600)
        optimizer.load_state_dict(copy.deepcopy(state))
        run(optimizer, net, reducer, 5)
        return weights(net)

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for n in range(10):
        if n == 5:
            optimizer.param_groups[0]["lr"] = 5e-3
        optimizer.zero_grad()
        for rank in range(rows_of):
            (loss_of(net, *share(n, ROWS, rank, rows_of)) / rows_of).backward()
        optimizer.step()
    for actual in together(after, second):
        for name, value in weights(net).items():
            assert torch.allclose(actual[name], value, rtol=0, atol=1e-6), name


def test_layers_wait_for_their_own_parameters_only_and_others_are_there_at_once():
    def body(reducer):
        net = model()
        optimizer = ShardedOptimizer(
            net, torch.optim.SGD, reducer, layers=net[1:], lr=0.1, bucket_bytes=1, first_bucket_bytes=1
        )
        with optimizer.reducing():
            loss_of(net, *share(0, ROWS, reducer.rank, 2)).backward()
        optimizer.step()
        coming = set(optimizer.shards._coming)

        def number(p):
            return optimizer.shards.find(p).entry.bucket

        numbers = [{number(p) for p in layer.parameters()} for layer in net]
        assert coming == numbers[1] | numbers[2] | numbers[3]
        net[:2](share(0, ROWS, 0, 2)[0])
        assert set(optimizer.shards._coming) == numbers[2] | numbers[3]
        optimizer.wait(net[2][0].weight)
        assert set(optimizer.shards._coming) == (numbers[2] | numbers[3]) - {number(net[2][0].weight)}
        optimizer.wait_all()
        return not optimizer.shards._coming

    assert together(2, body) == [True, True]


def test_misuse_is_an_error():
    (reducer,) = together(1, lambda r: r)
    net = model()
    optimizer = ShardedOptimizer(net, torch.optim.SGD, reducer, lr=0.1)
    with pytest.raises(PenstockError, match="no reduced gradients"):
        optimizer.step()
    loss_of(net, *share(0, ROWS, 0, 1)).backward()
    optimizer.finish()
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(PenstockError, match="wait for the optimizer's step"):
        optimizer.finish()
    optimizer.zero_grad()
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ConfigError, match="does not update every element by itself"):
            ShardedOptimizer(model(), kind, reducer)
    with pytest.raises(ConfigError, match="no options for parameter"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ConfigError, match="nothing for parameter"):
        optimizer.load_state_dict({"state": {"x": {}}, "param_groups": []})
    wrong = {name: {"momentum_buffer": torch.zeros(3, 3)} for name, _ in net.named_parameters()}
    with pytest.raises(ConfigError, match="has shape"):
        optimizer.load_state_dict({"state": wrong, "param_groups": []})


def test_parts_that_do_not_make_a_whole_are_refused():
    def body(reducer):
        net = model()
        optimizer = ShardedOptimizer(net, torch.optim.AdamW, reducer, lr=0.1)
        train(optimizer, net, 1)
        return optimizer.local_state_dict()

    first, _ = together(2, body)
    with pytest.raises(ConfigError, match="the part of every replica"):
        join_state_dicts([first])


def test_a_replica_that_fails_tells_the_others():
    def body(reducer):
        net = model()
        optimizer = ShardedOptimizer(net, torch.optim.AdamW, reducer)
        with optimizer.reducing():
            if reducer.rank:
                raise ArithmeticError("a bad batch")
            loss_of(net, *share(0, ROWS, 0, 1)).backward()

    good, bad = each(2, body)
    assert type(bad) is ArithmeticError
    assert type(good) is PeerError
    assert "a bad batch" in str(good)
