"""Gradients of replicas equal those of one process on the whole batch, even if a replica is late, missing or broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from penstock.base.errors import ConfigError, PeerError, PenstockError, WaitTimeoutError
from penstock.parallel.replicas.buckets import GradientBuckets
from penstock.parallel.replicas.reducer import GroupReducer, Handle, part_of
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
from tests.support.states import assert_equal

Gradients = dict[str, Any]


def assert_close(one: Gradients, other: Gradients, scale: float = 64.0) -> None:
    assert one.keys() == other.keys()
    for name in one:
        bound = scale * 2.0**-24 * float(other[name].abs().max())
        assert float((one[name] - other[name]).abs().max()) <= bound, name


def of_all(value: Any) -> list[Any]:
    """The values of all replicas, on each of them."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def backward(net: nn.Module, buckets: GradientBuckets, n: int, rank: int) -> None:
    """Take one step with a replica's rows."""
    with step(buckets, n):
        loss_of(net, *share(n, rank)).backward()


def told(act: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of the error that a call raises."""
    try:
        act()
    except (ArithmeticError, PenstockError, WaitTimeoutError) as error:
        return type(error).__name__, str(error)
    return "", ""


# What each of two replicas runs and finds, by its name as that of a test


def every_size_of_buckets_gives_the_sum_in_the_order_of_replicas_bit_for_bit(rank: int) -> None:
    """Gradients are zeroed after one step, and dropped after the others."""
    for bucket, first in ((1, 1), (400, 100), (1 << 20, 1), (1 << 20, 1 << 20)):
        net = model()
        buckets = buckets_of(net, bucket_bytes=bucket, first_bucket_bytes=first)
        for n in range(3):
            backward(net, buckets, n, rank)
            storages = {b.flat.untyped_storage().data_ptr() for b in buckets.buckets}
            assert all(p.grad.untyped_storage().data_ptr() in storages for p in net.parameters())
            assert_equal(gradients(net), plain(n))
            net.zero_grad(set_to_none=n != 1)
            if n == 1:
                assert not any(b.flat.any() for b in buckets.buckets)


class Counting(GroupReducer):
    """Counts the collectives that it has begun."""

    begun = 0

    def all_reduce(self, flat: torch.Tensor) -> Handle:
        self.begun += 1
        return super().all_reduce(flat)


def gradients_accumulate_over_steps_and_nothing_starts_before_the_last_microbatch(rank: int) -> None:
    expected = {name: grad + plain(1)[name] for name, grad in plain(0).items()}
    for microbatches in (1, 3):
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
        assert_close(gradients(net), expected)


def a_parameter_is_ready_after_the_contributions_announced_for_it(rank: int) -> None:
    net = model()
    first = list(net[0].parameters())
    buckets = buckets_of(net, bucket_bytes=1, first_bucket_bytes=1)
    x, y = share(0, rank)
    counts = {p: 2 if any(p is q for q in first) else 1 for p in net.parameters()}
    with step(buckets, contributions=counts):
        hidden = net[0](x[:3])
        rest = hidden.detach().requires_grad_()
        nn.functional.mse_loss(net[1:](rest), y[:3]).backward()
        assert buckets._started == len(list(net.parameters())) - len(first)
        hidden.backward(rest.grad)
        assert buckets._started == len(list(net.parameters())) - len(first)  # one contribution of two
        net[0](x[3:]).sum().backward()
        assert buckets._started == len(buckets.buckets)


def a_split_backward_reduces_after_the_last_w_wherever_it_is(rank: int) -> None:
    """Two stages on a replica, with three microbatches; the weight halves come last, in another order."""
    expected: Gradients = {}
    for replica in range(2):
        net = model()
        for a, b in zip(*(part.chunk(3) for part in share(1, replica)), strict=True):
            (loss_of(net, a, b) / 3).backward()
        for name, grad in gradients(net).items():
            expected[name] = expected[name] + grad if name in expected else grad
    for spread in (False, True):
        assert_equal(split_backwards(rank, model(), spread), expected)


def split_backwards(rank: int, net: nn.Sequential, spread: bool) -> Gradients:
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


def buckets_start_in_their_order_whatever_the_order_of_readiness(rank: int) -> None:
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
    count = len(parameters)
    assert started == (list(range(1, count + 1)) if rank else [0] * (count - 1) + [count])


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(model(layers=3))

    def forward(self, x, turn):
        return sum(self.parts[n](x) for n in turn)


def buckets_are_rebuilt_in_the_order_that_replica_0_has_seen(rank: int) -> None:
    net = Branches()
    buckets = buckets_of(net, bucket_bytes=1)
    orders = []
    for n, turn in enumerate(([[1, 0, 2], [0, 1, 2]][rank], [2, 1, 0], [0, 1, 2])):
        net.zero_grad()
        with step(buckets, n):
            orders.append([buckets.entries[b.plan.members[0]].name for b in buckets.buckets])
            net(share(0, rank)[0], turn).square().sum().backward()
        if n == 0:
            seen, other = of_all([buckets.entries[number].name for number in buckets._seen_order])
            assert seen != other
            buckets.rebuild()
    assert of_all(orders) == [orders, orders]
    assert orders[1] == orders[2] == seen != orders[0]
    assert_equal(*of_all(gradients(net)))


def dtypes_never_share_a_bucket(rank: int) -> None:
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
    first, second = of_all(before)
    assert_equal(gradients(net), {name: grad + second[name] for name, grad in first.items()})


def gradients_may_have_another_dtype_than_their_parameter(rank: int) -> None:
    net = model().bfloat16()
    for p in net.parameters():
        p.grad_dtype = torch.float32
    buckets = buckets_of(net)
    x, y = share(0, rank)
    with step(buckets):
        loss_of(net, x.bfloat16(), y.bfloat16()).backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    assert_equal(*of_all(gradients(net)))


def extended() -> nn.ModuleList:
    """A model, a layer after it, and one that is never used."""
    whole = nn.ModuleList([model(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])
    with torch.no_grad():
        for p in (*whole[1].parameters(), *whole[2].parameters()):
            p.fill_(0.25)
    return whole


def zeros_stand_for_a_gradient_that_one_replica_has_not_and_nothing_for_one_that_none_has(rank: int) -> None:
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
    actual = gradients(whole)
    assert actual.pop("2.weight") is None
    assert_equal(*of_all(actual))
    expected = extended()
    x, y = share(2, 0)
    nn.functional.mse_loss(expected[1](expected[0](x)), y).backward()
    assert_close(gradients(whole[1]), gradients(expected[1]))


class Scales(torch.autograd.Function):
    """x times a weight, which gets its gradient in the backwards that `gives` says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gives = gives
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0) if ctx.gives else None, None


def a_backward_that_returns_none_gives_no_gradient(rank: int) -> None:
    """In no microbatch of a replica, in one of two, and in none of both replicas."""
    for first, second in (((0, 0), (0, 0)), ((1, 1), (0, 0)), ((1, 0), (0, 1)), ((0, 1), (1, 1))):
        net, expected = (
            nn.ModuleDict({"net": model(), "scale": nn.LayerNorm(WIDTH, bias=False)}) for _ in "ab"
        )
        buckets = buckets_of(net)

        def run(of: nn.ModuleDict, replica: int, microbatch: int, gives: int) -> None:
            x, y = (part.chunk(2)[microbatch] for part in share(0, replica))
            loss_of(of["net"], Scales.apply(x, of["scale"].weight, bool(gives)), y).backward()

        for n in range(2):
            net.zero_grad()
            with step(buckets, n, contributions=2):
                for microbatch, gives in enumerate((first, second)[rank]):
                    run(net, rank, microbatch, gives)
        for replica, given in enumerate((first, second)):
            for microbatch, gives in enumerate(given):
                run(expected, replica, microbatch, gives)
        found, wanted = gradients(net), gradients(expected)
        if not any((*first, *second)):
            assert found.pop("scale.weight") is wanted.pop("scale.weight") is None
        assert_close(found, wanted)
        buckets.detach()


def a_gradient_that_comes_after_its_bucket_has_started_is_added_to_the_sum(rank: int) -> None:
    net, expected = model(), model()
    buckets = buckets_of(net)
    x, y = share(0, rank)
    with step(buckets):
        loss_of(net, x, y).backward()
        assert buckets._started == len(buckets.buckets)
        if rank == 1:
            net[0](x).sum().backward()
    for replica in range(2):
        loss_of(expected, *share(0, replica)).backward()
    expected[0](share(0, 1)[0]).sum().backward()
    assert_close(gradients(net), gradients(expected))


def a_replica_that_fails_tells_the_others_and_the_next_step_is_sound(rank: int) -> None:
    net = model()
    buckets = buckets_of(net)

    def fails() -> None:
        with step(buckets):
            if rank == 1:
                raise ArithmeticError("a bad batch")
            loss_of(net, *share(0, rank)).backward()

    peer = (PeerError.__name__, "replica 1 failed: ArithmeticError: a bad batch")
    assert told(fails) == (peer if rank == 0 else (ArithmeticError.__name__, "a bad batch"))
    net.zero_grad()
    backward(net, buckets, 1, rank)
    assert_equal(gradients(net), plain(1))


def a_model_moved_between_steps_gets_its_gradients_back_into_the_buffer(rank: int) -> None:
    net = model()
    buckets = buckets_of(net)
    for n in range(3):
        if n == 2:
            net.zero_grad(set_to_none=False)
            for p in net.parameters():
                p.grad.data = p.grad.data.clone()  # what nn.Module.to does
        backward(net, buckets, n, rank)
    assert_equal(gradients(net), plain(2))


def steps_with_different_numbers_are_an_error_on_every_replica(rank: int) -> None:
    net = model()
    buckets = buckets_of(net)
    with pytest.raises(PenstockError, match="replica 0 is at step 7, replica 1 is at step 6"):
        backward(net, buckets, 7 - rank, rank)


def a_process_that_leaves_out_a_step_leaves_nobody_waiting(rank: int) -> None:
    net = model()
    reducer = reducer_of_all()
    buckets = buckets_of(net, reducer)

    def steps() -> None:
        for n in range(2 - rank):
            backward(net, buckets, n, rank)
            reducer.set_timeout(0.2)

    _, said = told(steps)
    assert not said if rank else "left out a step" in said or "connection to another replica broke" in said


def a_gradient_outside_of_a_step_is_refused_while_the_buckets_are_attached(rank: int) -> None:
    net = model()
    buckets = buckets_of(net)
    with pytest.raises(PenstockError, match=r"parameter '3\..*outside of Pipeline.step"):
        loss_of(net, *share(0, rank)).backward()
    net.zero_grad()
    backward(net, buckets, 0, rank)
    assert_equal(gradients(net), plain(0))
    buckets.attach()  # a second time changes nothing
    buckets.detach()
    net.zero_grad()
    loss_of(net, *share(0, rank)).backward()
    assert not buckets._active


def convolution() -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def channels_last_gradients_keep_their_strides(rank: int) -> None:
    net, expected = convolution(), convolution()
    with step(buckets_of(net)):
        net(torch.ones(1, 3, 5, 5) * (rank + 1)).sum().backward()
    assert net.weight.grad.stride() == net.weight.stride()
    for replica in range(2):
        expected(torch.ones(1, 3, 5, 5) * (replica + 1)).sum().backward()
    assert torch.equal(net.weight.grad, expected.weight.grad)


def a_model_of_another_seed_is_refused_on_both(rank: int) -> None:
    kind, text = told(lambda: buckets_of(model(seed=rank)))
    assert kind == ConfigError.__name__
    assert "initial values: replica 1 from replica 0 first at parameter 0" in text


def values(number: int) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(number))


def sums_and_parts_of_sums_are_bit_for_bit_those_of_both_and_values_are_exchanged(rank: int) -> None:
    reducer, total = reducer_of_all(), values(0) + values(1)
    sums = [values(rank + 10 * n) for n in range(5)]
    for handle in [reducer.all_reduce(flat) for flat in sums]:  # several under way at once
        handle.wait()
    for n, flat in enumerate(sums):
        assert torch.equal(flat, values(10 * n) + values(10 * n + 1))
    flat = values(rank)
    reducer.reduce_scatter(flat).wait()
    part = part_of(flat, rank, 2).clone()
    assert torch.equal(part, part_of(total, rank, 2))
    full = torch.zeros(12)
    part_of(full, rank, 2).copy_(part)
    reducer.all_gather(full).wait()
    assert torch.equal(full, total)
    owned = [values(rank), values(rank + 5)]
    for owner in range(2):
        reducer.reduce(owned[owner], owner).wait()
        reducer.broadcast(owned[owner], owner).wait()
    assert torch.equal(owned[0], total)
    assert torch.equal(owned[1], values(5) + values(6))
    assert reducer.exchange([rank, -7])() == [[0, -7], [1, -7]]
    assert reducer.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]


def a_connection_that_is_broken_when_a_reduction_begins_is_anothers_failure(rank: int) -> None:
    reducer = reducer_of_all()
    reducer.all_reduce(torch.ones(4)).wait()
    if rank == 1:
        dist.destroy_process_group()
        return
    # The first finds out, the others know.
    for act in (reducer.all_reduce, reducer.all_reduce, reducer.reduce_scatter, reducer.all_gather):
        with pytest.raises(PeerError, match=r"^the connection to another replica broke: "):
            act(torch.ones(4)).wait()


@pytest.mark.parametrize(
    "case",
    [
        every_size_of_buckets_gives_the_sum_in_the_order_of_replicas_bit_for_bit,
        gradients_accumulate_over_steps_and_nothing_starts_before_the_last_microbatch,
        a_parameter_is_ready_after_the_contributions_announced_for_it,
        a_split_backward_reduces_after_the_last_w_wherever_it_is,
        buckets_start_in_their_order_whatever_the_order_of_readiness,
        buckets_are_rebuilt_in_the_order_that_replica_0_has_seen,
        dtypes_never_share_a_bucket,
        gradients_may_have_another_dtype_than_their_parameter,
        zeros_stand_for_a_gradient_that_one_replica_has_not_and_nothing_for_one_that_none_has,
        a_backward_that_returns_none_gives_no_gradient,
        a_gradient_that_comes_after_its_bucket_has_started_is_added_to_the_sum,
        a_replica_that_fails_tells_the_others_and_the_next_step_is_sound,
        a_model_moved_between_steps_gets_its_gradients_back_into_the_buffer,
        steps_with_different_numbers_are_an_error_on_every_replica,
        a_process_that_leaves_out_a_step_leaves_nobody_waiting,
        a_gradient_outside_of_a_step_is_refused_while_the_buckets_are_attached,
        channels_last_gradients_keep_their_strides,
        a_model_of_another_seed_is_refused_on_both,
        sums_and_parts_of_sums_are_bit_for_bit_those_of_both_and_values_are_exchanged,
        a_connection_that_is_broken_when_a_reduction_begins_is_anothers_failure,
    ],
    ids=lambda case: case.__name__,
)
def test_in_two_processes(processes: LocalProcesses, case: Callable[[int], None]):
    processes.run(2, case)


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


def changed(rank: int, how: str) -> tuple[str, str]:
    net = model()
    buckets = buckets_of(net)
    if rank == 1 and how == "float64":
        net.double()
    elif rank == 1 and how == "(12":
        net[1][0].weight.data = torch.ones(2 * WIDTH, WIDTH)
        net[1][0].bias.data = torch.ones(2 * WIDTH)
        net[1][1] = nn.Identity()

    def run() -> None:
        with step(buckets):
            if rank == 1 and how == "sparse":
                weight = net[1][0].weight
                weight.grad = torch.zeros(weight.shape).to_sparse()
                buckets.ready(weight)
            net[:2](share(0, rank)[0].to(net[0][0].weight.dtype)).sum().backward()

    return told(run)


def test_a_gradient_of_another_kind_than_laid_out_is_an_error_that_names_parameter_and_bucket(
    processes: LocalProcesses,
):
    kinds = ["float64", "(12", "sparse"]
    answers = run_cases(processes, 2, changed, [(how,) for how in kinds])
    for (good, (kind, bad)), word in zip(answers, kinds, strict=True):
        assert kind == PenstockError.__name__
        assert all(part in bad for part in ("parameter '1.", "(bucket ", word)), bad
        assert good[0] == PeerError.__name__
