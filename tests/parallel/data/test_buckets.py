"""Gradients of replicas equal those of one process on the whole batch, even if a replica is late, missing or broken."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import distributed as dist
from torch import nn

from penstock.base.errors import ConfigError, PeerError, PenstockError, WaitTimeoutError
from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.data.reducer import GroupReducer, Handle, part_of
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.runner import LossInputs, LossWeight
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.values import Message
from tests.support.groups import run_cases
from tests.support.replicas import (
    WIDTH,
    buckets_of,
    gradients,
    loss_of,
    model,
    plain,
    reducer_of_all,
    share,
    step,
)


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_close(one: dict, other: dict, scale: float = 64.0) -> None:
    assert one.keys() == other.keys()
    for name in one:
        bound = scale * 2.0**-24 * float(other[name].abs().max())
        assert float((one[name] - other[name]).abs().max()) <= bound, name


def backward(net: nn.Module, buckets: GradientBuckets, n: int, rank: int) -> None:
    """Take one step with a replica's rows."""
    with step(buckets, n):
        loss_of(net, *share(n, rank)).backward()


def three_steps(rank: int, bucket: int, first: int) -> list[dict]:
    """Gradients of three steps; they are zeroed after one, and dropped after the others."""
    net = model()
    buckets = buckets_of(net, bucket_bytes=bucket, first_bucket_bytes=first)
    seen = []
    for n in range(3):
        backward(net, buckets, n, rank)
        storages = {b.flat.untyped_storage().data_ptr() for b in buckets.buckets}
        assert all(p.grad.untyped_storage().data_ptr() in storages for p in net.parameters())
        seen.append(gradients(net))
        net.zero_grad(set_to_none=n != 1)
        if n == 1:
            assert not any(b.flat.any() for b in buckets.buckets)
    return seen


def test_every_size_of_buckets_gives_the_sum_in_the_order_of_replicas_bit_for_bit(processes: LocalProcesses):
    for told in run_cases(processes, 2, three_steps, [(1, 1), (400, 100), (1 << 20, 1), (1 << 20, 1 << 20)]):
        for seen in told:
            for n in range(3):
                assert_equal(seen[n], plain(n))


def train(rank: int, size: int) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    buckets = buckets_of(net) if size > 1 else None
    for n in range(5):
        loss = loss_of(net, *share(n, rank, size)) / size
        with step(buckets, n) if buckets else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def test_four_processes_train_as_one_process_does_and_stay_bit_identical(processes: LocalProcesses):
    first, *others = processes.run(4, train, 4)
    for other in others:
        assert_equal(first, other)
    for name, parameter in train(0, 1).items():
        assert torch.allclose(first[name], parameter, rtol=0, atol=2e-4), name


class Counting(GroupReducer):
    """Counts the collectives that it has begun."""

    begun = 0

    def all_reduce(self, flat: torch.Tensor) -> Handle:
        self.begun += 1
        return super().all_reduce(flat)


def accumulates(rank: int, microbatches: int) -> dict:
    """Two steps that are not zeroed, each with microbatches that are reduced with the last one."""
    net = model()
    reducer = Counting(reducer_of_all().group, 300.0)
    buckets = buckets_of(net, reducer)
    for n in range(2):
        x, y = share(n, rank)
        parts = list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
        begun = reducer.begun
        with buckets.accumulating():
            for a, b in parts[:-1]:
                (loss_of(net, a, b) / microbatches).backward()
        assert reducer.begun == begun
        with step(buckets, n):
            (loss_of(net, *parts[-1]) / microbatches).backward()
        assert reducer.begun > begun
    return gradients(net)


def test_gradients_accumulate_over_steps_and_nothing_starts_before_the_last_microbatch(
    processes: LocalProcesses,
):
    expected = {name: grad + plain(1)[name] for name, grad in plain(0).items()}
    for told in run_cases(processes, 2, accumulates, [(1,), (3,)]):
        for actual in told:
            assert_close(actual, expected)


def counts_contributions(rank: int) -> tuple[int, int]:
    net = model()
    first = list(net[0].parameters())
    buckets = buckets_of(net, bucket_bytes=1, first_bucket_bytes=1)
    x, y = share(0, rank)
    counts = {p: 2 if any(p is q for q in first) else 1 for p in net.parameters()}
    with step(buckets, contributions=counts):
        hidden = net[0](x[:3])
        rest = hidden.detach().requires_grad_()
        nn.functional.mse_loss(net[1:](rest), y[:3]).backward()
        started = buckets._started
        hidden.backward(rest.grad)
        assert buckets._started == started  # one contribution of two
        net[0](x[3:]).sum().backward()
        assert buckets._started == len(buckets.buckets)
    return started, len(list(net.parameters())) - len(first)


def test_a_parameter_is_ready_after_the_contributions_announced_for_it(processes: LocalProcesses):
    for started, expected in processes.run(2, counts_contributions):
        assert started == expected


def split_backwards(rank: int, spread: bool) -> dict:
    """Run two stages on a replica, with three microbatches; the weight halves come last, in another order."""
    net = model()
    stages = [Stage(0, StageModule([Layer("0", lambda: net[:2])]))]
    stages.append(Stage(1, StageModule([Layer("1", lambda: net[2:])]), nn.functional.mse_loss))
    x, y = share(0, rank)  # a first microbatch, which checks that the backwards can be split
    middle = stages[0].forward(0, (Message((x,)),), split=True)
    stages[1].forward_with_loss(0, middle, LossInputs(y, LossWeight()), split=True)
    stages[0].backward(0, stages[1].backward(0, None))
    buckets = buckets_of(net)
    for n in range(2):
        net.zero_grad()
        x, y = share(n, rank)
        with step(buckets, n, contributions=3):
            grads = {}
            for m, (a, b) in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
                middle = stages[0].forward(m, (Message((a,)),), split=True)
                stages[1].forward_with_loss(m, middle, LossInputs(b, LossWeight(divisor=3)), split=True)
                grads[m] = stages[1].backward_input(m, None)
            for m in range(3):
                stages[0].backward_input(m, grads[m])
                stages[spread].backward_weight(m)
            assert buckets._started < len(buckets.buckets)
            for m in range(3):
                stages[not spread].backward_weight(m)
            assert buckets._started == len(buckets.buckets)
    return gradients(net)


def test_a_split_backward_reduces_after_the_last_w_wherever_it_is(processes: LocalProcesses):
    expected: dict[str, torch.Tensor] = {}
    for rank in range(2):
        net = model()
        x, y = share(1, rank)
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
            (loss_of(net, a, b) / 3).backward()
        for name, grad in gradients(net).items():
            expected[name] = expected[name] + grad if name in expected else grad
    for told in run_cases(processes, 2, split_backwards, [(False,), (True,)]):
        for actual in told:
            assert_equal(actual, expected)


def in_two_orders(rank: int) -> list[int]:
    net = model()
    parameters = list(net.parameters())
    buckets = buckets_of(net, bucket_bytes=1)  # of one parameter each, in reverse
    started = []
    with step(buckets):
        for p in parameters[::-1] if rank else parameters:
            p.grad = torch.full_like(p, rank + 1.0)
            buckets.ready(p)
            started.append(buckets._started)
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in parameters)
    return started


def test_buckets_start_in_their_order_whatever_the_order_of_readiness(processes: LocalProcesses):
    backwards, forwards = processes.run(2, in_two_orders)
    count = len(forwards)
    assert forwards == list(range(1, count + 1))
    assert backwards == [0] * (count - 1) + [count]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(model(layers=3))

    def forward(self, x, turn):
        return sum(self.parts[n](x) for n in turn)


def rebuilt(rank: int) -> tuple[list[str], list[list[str]], dict]:
    """The layers in the order in which replica 0 has seen them complete, and the buckets' orders."""
    net = Branches()
    buckets = buckets_of(net, bucket_bytes=1)
    orders = []
    for n, turn in enumerate(([[1, 0, 2], [0, 1, 2]][rank], [2, 1, 0], [0, 1, 2])):
        net.zero_grad()
        with step(buckets, n):
            orders.append([buckets.entries[b.plan.members[0]].name for b in buckets.buckets])
            net(share(0, rank)[0], turn).square().sum().backward()
        if n == 0:
            seen = [buckets.entries[number].name for number in buckets._seen_order]
            buckets.rebuild()
    return seen, orders, gradients(net)


def test_buckets_are_rebuilt_in_the_order_that_replica_0_has_seen(processes: LocalProcesses):
    (first, orders, one), (other_first, other_orders, two) = processes.run(2, rebuilt)
    assert first != other_first
    assert orders == other_orders
    assert orders[1] == orders[2] == first != orders[0]
    assert_equal(one, two)


def of_several_dtypes(rank: int) -> tuple[dict, dict]:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(0.5)
    buckets = buckets_of(net, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)
    generator = torch.Generator().manual_seed(rank)
    before = {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in net.named_parameters()}
    kinds = [{buckets.entries[m].parameter.dtype for m in b.plan.members} for b in buckets.buckets]
    assert sorted(map(len, kinds)) == [1, 1]
    with step(buckets):
        for name, p in net.named_parameters():
            p.grad = before[name].clone()
            buckets.ready(p)
    return before, gradients(net)


def test_dtypes_never_share_a_bucket(processes: LocalProcesses):
    (first, actual), (second, other) = processes.run(2, of_several_dtypes)
    assert_equal(actual, other)
    assert_equal(actual, {name: grad + second[name] for name, grad in first.items()})


def in_float32(rank: int) -> dict:
    net = model().bfloat16()
    for p in net.parameters():
        p.grad_dtype = torch.float32
    buckets = buckets_of(net)
    x, y = share(0, rank)
    with step(buckets):
        loss_of(net, x.bfloat16(), y.bfloat16()).backward()
    return gradients(net)


def test_gradients_of_another_dtype_than_their_parameter(processes: LocalProcesses):
    one, other = processes.run(2, in_float32)
    assert {grad.dtype for grad in one.values()} == {torch.float32}
    assert_equal(one, other)


def extended() -> nn.ModuleList:
    """A model, a layer after it, and one that is never used."""
    whole = nn.ModuleList([model(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])
    with torch.no_grad():
        for p in (*whole[1].parameters(), *whole[2].parameters()):
            p.fill_(0.25)
    return whole


def half_used(rank: int) -> dict:
    whole = extended()
    buckets = buckets_of(whole)
    for n in range(3):
        whole.zero_grad()
        x, y = share(n, rank)
        out = whole[0](x)
        if rank == 0:
            out = whole[1](out)
        with step(buckets, n):
            nn.functional.mse_loss(out, y).backward()
    return gradients(whole)


def test_zeros_stand_for_a_gradient_that_one_replica_has_not_and_nothing_for_one_that_none_has(
    processes: LocalProcesses,
):
    first, second = processes.run(2, half_used)
    for actual in (first, second):
        assert actual.pop("2.weight") is None
    assert_equal(first, second)
    whole = extended()
    x, y = share(2, 0)
    nn.functional.mse_loss(whole[1](whole[0](x)), y).backward()
    assert_close({n: first[f"1.{n}"] for n in ("weight", "bias")}, gradients(whole[1]))


def gets_one_more(rank: int) -> dict:
    net = model()
    buckets = buckets_of(net)
    x, y = share(0, rank)
    with step(buckets):
        loss_of(net, x, y).backward()
        assert buckets._started == len(buckets.buckets)
        if rank == 1:
            net[0](x).sum().backward()
    return gradients(net)


def test_a_gradient_that_comes_after_its_bucket_has_started_is_added_to_the_sum(processes: LocalProcesses):
    net = model()
    for rank in range(2):
        loss_of(net, *share(0, rank)).backward()
    net[0](share(0, 1)[0]).sum().backward()
    for actual in processes.run(2, gets_one_more):
        assert_close(actual, gradients(net))


def told(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def fails_once(rank: int) -> tuple[tuple[str, str], dict]:
    net = model()
    buckets = buckets_of(net)
    try:
        with step(buckets):
            if rank == 1:
                raise ArithmeticError("a bad batch")
            loss_of(net, *share(0, rank)).backward()
    except (ArithmeticError, PeerError) as error:
        said = told(error)
    net.zero_grad()
    backward(net, buckets, 1, rank)
    return said, gradients(net)


def test_a_replica_that_fails_tells_the_others_and_the_next_step_is_sound(processes: LocalProcesses):
    (good, first), (bad, second) = processes.run(2, fails_once)
    assert bad == (ArithmeticError.__name__, "a bad batch")
    assert good == (PeerError.__name__, "replica 1 failed: ArithmeticError: a bad batch")
    assert_equal(first, second)
    assert_equal(first, plain(1))


def changed(rank: int, how: str) -> tuple[str, str]:
    net = model()
    buckets = buckets_of(net)
    if rank == 1 and how == "dtype":
        net.double()
    elif rank == 1 and how == "shape":
        net[1][0].weight.data = torch.ones(2 * WIDTH, WIDTH)
        net[1][0].bias.data = torch.ones(2 * WIDTH)
        net[1][1] = nn.Identity()
    x, _ = share(0, rank)
    try:
        with step(buckets):
            if rank == 1 and how == "sparse":
                weight = net[1][0].weight
                weight.grad = torch.zeros(weight.shape).to_sparse()
                buckets.ready(weight)
            net[:2](x.to(net[0][0].weight.dtype)).sum().backward()
    except PenstockError as error:
        return told(error)
    return "", ""


def test_a_gradient_of_another_kind_than_laid_out_is_an_error_that_names_parameter_and_bucket(
    processes: LocalProcesses,
):
    words = {"dtype": "float64", "shape": "(12", "sparse": "sparse"}
    answers = run_cases(processes, 2, changed, [(how,) for how in words])
    for (good, (kind, bad)), word in zip(answers, words.values(), strict=True):
        assert kind == PenstockError.__name__
        assert "parameter '1." in bad
        assert "(bucket " in bad
        assert word in bad
        assert good[0] == PeerError.__name__


def moved(rank: int) -> dict:
    net = model()
    buckets = buckets_of(net)
    for n in range(3):
        if n == 2:
            net.zero_grad(set_to_none=False)
            for p in net.parameters():
                p.grad.data = p.grad.data.clone()  # what nn.Module.to does
        backward(net, buckets, n, rank)
    return gradients(net)


def test_a_model_moved_between_steps_gets_its_gradients_back_into_the_buffer(processes: LocalProcesses):
    for actual in processes.run(2, moved):
        assert_equal(actual, plain(2))


DIFFERENT = {
    "count": (lambda: model(layers=3), ["number of parameters", "replica 0 has 16, replica 1 has 12"]),
    "values": (lambda: model(seed=1), ["initial values", "replica 1 from replica 0", "'0.0.weight'"]),
    "names": (lambda: nn.ModuleDict({"x": model()}), ["name, shape or dtype", "parameter 0"]),
    "dtypes": (lambda: model().double(), ["name, shape or dtype", "'0.0.weight'"]),
}


def differs(rank: int, how: str) -> tuple[str, str]:
    try:
        buckets_of(DIFFERENT[how][0]() if rank else model())
    except PenstockError as error:
        return told(error)
    return "", ""


def test_replicas_whose_models_differ_are_told_so_everywhere(processes: LocalProcesses):
    answers = run_cases(processes, 2, differs, [(how,) for how in DIFFERENT])
    for errors, (_, words) in zip(answers, DIFFERENT.values(), strict=True):
        for kind, text in errors:
            assert kind == ConfigError.__name__
            for word in words:
                assert word in text or word.startswith("'"), text  # the name is each replica's own


def at_another_step(rank: int) -> str:
    net = model()
    buckets = buckets_of(net)
    with pytest.raises(PenstockError) as caught, step(buckets, 7 - rank):
        loss_of(net, *share(0, rank)).backward()
    return str(caught.value)


def test_steps_with_different_numbers_are_an_error_on_every_replica(processes: LocalProcesses):
    for error in processes.run(2, at_another_step):
        assert "replica 0 is at step 7, replica 1 is at step 6" in error


def leaves_out_a_step(rank: int) -> str:
    net = model()
    reducer = reducer_of_all()
    buckets = buckets_of(net, reducer)
    try:
        for n in range(2 - rank):
            backward(net, buckets, n, rank)
            reducer.set_timeout(0.2)
    except (WaitTimeoutError, PeerError) as error:
        return str(error)
    return ""


def test_a_process_that_leaves_out_a_step_leaves_nobody_waiting(processes: LocalProcesses):
    said, nothing = processes.run(2, leaves_out_a_step)
    assert "left out a step" in said or "connection to another replica broke" in said
    assert nothing == ""


def backward_of_their_own(rank: int) -> tuple[str, bool, dict]:
    net = model()
    buckets = buckets_of(net)
    with pytest.raises(PenstockError) as caught:
        loss_of(net, *share(0, rank)).backward()
    net.zero_grad()
    backward(net, buckets, 0, rank)
    actual = gradients(net)
    buckets.attach()  # a second time changes nothing
    buckets.detach()
    net.zero_grad()
    loss_of(net, *share(0, rank)).backward()
    return str(caught.value), buckets._active, actual


def test_a_gradient_outside_of_a_step_is_refused_while_the_buckets_are_attached(processes: LocalProcesses):
    for text, active, actual in processes.run(2, backward_of_their_own):
        assert "parameter '3." in text
        assert "outside of Pipeline.step" in text
        assert not active
        assert_equal(actual, plain(0))


def convolution() -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def channels_last(rank: int) -> torch.Tensor:
    net = convolution()
    with step(buckets_of(net)):
        net(torch.ones(1, 3, 5, 5) * (rank + 1)).sum().backward()
    assert net.weight.grad.stride() == net.weight.stride()
    return net.weight.grad


def test_channels_last_gradients_keep_their_strides(processes: LocalProcesses):
    net = convolution()
    for rank in range(2):
        net(torch.ones(1, 3, 5, 5) * (rank + 1)).sum().backward()
    for grad in processes.run(2, channels_last):
        assert torch.equal(grad, net.weight.grad)


def values(number: int) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(number))


def collectives(rank: int) -> tuple:
    reducer = reducer_of_all()
    sums = [values(rank + 10 * n) for n in range(5)]
    for handle in [reducer.all_reduce(flat) for flat in sums]:  # several under way at once
        handle.wait()
    flat = values(rank)
    reducer.reduce_scatter(flat).wait()
    part = part_of(flat, rank, 2).clone()
    full = torch.zeros(12)
    part_of(full, rank, 2).copy_(part)
    reducer.all_gather(full).wait()
    owned = [values(rank), values(rank + 5)]
    for owner in range(2):
        reducer.reduce(owned[owner], owner).wait()
        reducer.broadcast(owned[owner], owner).wait()
    return sums, part, full, owned, reducer.exchange([rank, -7])(), reducer.gather({"rank": rank})


def test_sums_and_parts_of_sums_are_bit_for_bit_those_of_both_and_values_are_exchanged(
    processes: LocalProcesses,
):
    total = values(0) + values(1)
    for rank, (sums, part, full, owned, numbers, objects) in enumerate(processes.run(2, collectives)):
        for n, flat in enumerate(sums):
            assert torch.equal(flat, values(10 * n) + values(10 * n + 1))
        assert torch.equal(part, part_of(total, rank, 2))
        assert torch.equal(full, total)
        assert torch.equal(owned[0], total)
        assert torch.equal(owned[1], values(5) + values(6))
        assert numbers == [[0, -7], [1, -7]]
        assert objects == [{"rank": 0}, {"rank": 1}]


def broken(rank: int) -> list[str]:
    reducer = reducer_of_all()
    reducer.all_reduce(torch.ones(4)).wait()
    if rank == 1:
        dist.destroy_process_group()
        return []
    messages = []
    # The first finds out, the others know.
    for act in (reducer.all_reduce, reducer.all_reduce, reducer.reduce_scatter, reducer.all_gather):
        with pytest.raises(PeerError) as info:
            act(torch.ones(4)).wait()
        messages.append(str(info.value))
    return messages


def test_a_connection_that_is_broken_when_a_reduction_begins_is_anothers_failure(processes: LocalProcesses):
    messages, _ = processes.run(2, broken)
    assert all(text.startswith("the connection to another replica broke: ") for text in messages), messages
