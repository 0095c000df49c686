"""Gradients of replicas equal those of one process on the whole batch, even if a replica is late, missing or broken."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError, PeerError, PenstockError, WaitTimeoutError
from penstock.parallel.data.buckets import GradientBuckets
from penstock.parallel.data.gradient_order import parameter_order
from penstock.parallel.data.reducer import GroupReducer
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.runner import LossInputs, LossWeight
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.values import Message
from tests.support.replicas import WIDTH, batch, each, gradients, loss_of, model, plain, share, together

ROWS = 12
SMALL = {"bucket_bytes": 400, "first_bucket_bytes": 100}  # many buckets of a small model


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_close(one: dict, other: dict, scale: float = 64.0) -> None:
    assert one.keys() == other.keys()
    for name in one:
        bound = scale * 2.0**-24 * float(other[name].abs().max())
        assert float((one[name] - other[name]).abs().max()) <= bound, name


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_threads_get_the_sum_in_the_order_of_replicas_bit_for_bit(size):
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer, **SMALL)
        buckets.attach()
        seen = []
        for n in range(3):
            with buckets.step():
                loss_of(net, *share(n, ROWS, reducer.rank, size)).backward()
            seen.append(gradients(net))
            net.zero_grad(set_to_none=n % 2 == 0)
        return seen

    for seen in together(size, body):
        for n in range(3):
            assert_equal(seen[n], plain(n, ROWS, size))


def train_in_a_group(rank: int, size: int, blocking: bool) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    buckets = GradientBuckets(net, GroupReducer(blocking=blocking, timeout=300), **SMALL)
    buckets.attach()
    for n in range(20):
        loss_of(net, *share(n, ROWS, rank, size)).backward()
        buckets.finish()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize(("size", "blocking"), [(2, False), (4, False), (2, True)])
def test_processes_train_as_one_process_does_and_stay_bit_identical(
    processes: LocalProcesses, size, blocking
):
    results = processes.run(size, train_in_a_group, size, blocking)
    for other in results[1:]:
        assert_equal(results[0], other)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for n in range(20):
        loss_of(net, *batch(n, ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in net.named_parameters():
        assert torch.allclose(results[0][name], parameter, rtol=0, atol=2e-4), name


def test_gradients_live_in_the_buffer_and_stay_there():
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer, **SMALL)
        buckets.attach()
        for n, to_none in enumerate([True, False, False, True]):
            loss_of(net, *share(n, ROWS, reducer.rank, 2)).backward()
            buckets.finish()
            storages = {b.flat.untyped_storage().data_ptr() for b in buckets.buckets}
            if n:  # the first step's buckets are still the ones before the order was seen
                assert all(p.grad.untyped_storage().data_ptr() in storages for p in net.parameters())
            actual = gradients(net)
            net.zero_grad(set_to_none=to_none)
            if not to_none:
                assert not any(b.flat.any() for b in buckets.buckets)
        return actual

    for actual in together(2, body):
        assert_equal(actual, plain(3, ROWS, 2))


def test_zero_clears_the_buffers_and_keeps_the_views():
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer, **SMALL)
        buckets.attach()
        for n in range(2):
            loss_of(net, *share(n, ROWS, reducer.rank, 2)).backward()
            buckets.finish()
        buckets.zero()
        assert not any(p.grad.any() for p in net.parameters())
        loss_of(net, *share(2, ROWS, reducer.rank, 2)).backward()
        buckets.finish()
        return gradients(net)

    for actual in together(2, body):
        assert_equal(actual, plain(2, ROWS, 2))


@pytest.mark.parametrize("divisor", [None, 1.0])
def test_gradients_accumulate_over_steps_that_are_not_zeroed(divisor):
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer, divisor=divisor, **SMALL)
        buckets.attach()
        for n in range(3):
            with buckets.step():
                loss_of(net, *share(n, ROWS, reducer.rank, 2)).backward()
        return gradients(net)

    expected = {}
    for n in range(3):
        for name, grad in plain(n, ROWS, 2).items():
            expected[name] = expected.get(name, 0) + grad * (1 if divisor is None else 2)
    for actual in together(2, body):
        assert_close(actual, expected)


@pytest.mark.parametrize("divisor", [None, 1.0])
def test_nothing_starts_while_accumulating(divisor):
    microbatches = 3

    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer, divisor=divisor, **SMALL)
        buckets.attach()
        for n in range(2):
            x, y = share(n, ROWS, reducer.rank, 2)
            parts = list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
            calls = reducer._count
            with buckets.accumulating():
                for a, b in parts[:-1]:
                    (loss_of(net, a, b) / microbatches).backward()
            assert reducer._count == calls
            with buckets.step():
                (loss_of(net, *parts[-1]) / microbatches).backward()
            actual = gradients(net)
            net.zero_grad()
        return actual

    for actual in together(2, body):
        times = 1 if divisor is None else 2
        assert_close(actual, {name: grad * times for name, grad in plain(1, ROWS, 2).items()})


def test_a_parameter_is_ready_after_the_contributions_announced_for_it():
    def body(reducer):
        net = model()
        first = list(net[0].parameters())
        buckets = GradientBuckets(net, reducer, bucket_bytes=1, first_bucket_bytes=1, rebuild=False)
        buckets.attach()
        x, y = share(0, ROWS, reducer.rank, 2)
        counts = {p: 2 if any(p is q for q in first) else 1 for p in net.parameters()}
        with buckets.step(counts):
            hidden = net[0](x[:3])
            rest = hidden.detach().requires_grad_()
            loss = nn.functional.mse_loss(net[1:](rest), y[:3])
            loss.backward()
            started = buckets._started
            hidden.backward(rest.grad)
            assert buckets._started == started  # one contribution of two
            net[0](x[3:]).sum().backward()
            assert buckets._started == len(buckets.buckets)
        return started, len(list(net.parameters())) - len(first)

    for started, expected in together(2, body):
        assert started == expected


def split_backwards(reducer, spread: bool):
    """Run two stages on a replica, with three microbatches; the weight halves come last, in another order."""
    net = model()
    stages = [Stage(0, StageModule([Layer("0", lambda: net[:2])]))]
    stages.append(Stage(1, StageModule([Layer("1", lambda: net[2:])]), nn.functional.mse_loss))
    x, y = share(0, ROWS, reducer.rank, 2)  # a first microbatch, which checks that the backwards can be split
    middle = stages[0].forward(0, (Message((x,)),), split=True)
    stages[1].forward_with_loss(0, middle, LossInputs(y, LossWeight()), split=True)
    stages[0].backward(0, stages[1].backward(0, None))
    buckets = GradientBuckets(net, reducer, **SMALL)
    buckets.attach()
    for n in range(2):
        net.zero_grad()
        x, y = share(n, ROWS, reducer.rank, 2)
        with buckets.step(contributions=3):
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


@pytest.mark.parametrize("spread", [False, True])
def test_a_split_backward_reduces_after_the_last_w_wherever_it_is(spread):
    first, second = together(2, lambda r: split_backwards(r, spread))
    assert_equal(first, second)
    expected: dict[str, torch.Tensor] = {}
    for rank in range(2):
        net = model()
        x, y = share(1, ROWS, rank, 2)
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
            (loss_of(net, a, b) / 3).backward()
        for name, grad in gradients(net).items():
            expected[name] = expected[name] + grad if name in expected else grad
    assert_equal(first, {name: grad / 2 for name, grad in expected.items()})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        with torch.no_grad():
            for n, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (n + 1))

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_a_tied_weight_counts_once():
    def body(reducer):
        net = Tied()
        buckets = GradientBuckets(net, reducer)
        buckets.attach()
        loss_of(net, *share(0, ROWS, reducer.rank, 2)).backward()
        buckets.finish()
        return len(buckets.entries), gradients(net)

    net = Tied()
    loss_of(net, *batch(0, ROWS)).backward()
    for count, actual in together(2, body):
        assert count == 3
        assert_close(actual, gradients(net))


def test_buckets_start_in_their_order_whatever_the_order_of_readiness():
    def body(reducer):
        net = model()
        parameters = list(net.parameters())
        buckets = GradientBuckets(net, reducer, bucket_bytes=1, order=parameters, rebuild=False)
        for p in parameters:
            p.grad = torch.full_like(p, reducer.rank + 1.0)
        turn = parameters if reducer.rank else parameters[::-1]
        buckets.begin()
        started = []
        for p in turn:
            buckets.ready(p)
            started.append(buckets._started)
        buckets.finish()
        assert all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in parameters)
        return started

    backwards, forwards = together(2, body)
    count = len(forwards)
    assert forwards == list(range(1, count + 1))
    assert backwards == [0] * (count - 1) + [count]


def test_the_order_seen_by_replica_0_makes_the_buckets_of_all_once():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(model(layers=3))

        def forward(self, x, turn):
            return sum(self.parts[n](x) for n in turn)

    def body(reducer):
        net = Branches()
        buckets = GradientBuckets(net, reducer, bucket_bytes=1)
        buckets.attach()
        orders = []
        for turn in ([[1, 0, 2], [0, 1, 2]][reducer.rank], [2, 1, 0], [0, 1, 2]):
            loss = net(share(0, ROWS, reducer.rank, 2)[0], turn).square().sum()
            seen = [id(p) for p in parameter_order(loss)]
            with buckets.step():
                orders.append([e.name for b in buckets.buckets for e in [buckets.entries[b.plan.members[0]]]])
                loss.backward()
            if len(orders) == 1:
                first = [e.name for p in seen for e in buckets.entries if id(e.parameter) == p]
        return first, orders, gradients(net)

    (first, orders, one), (other_first, other_orders, two) = together(2, body)
    assert first != other_first
    assert orders == other_orders
    assert orders[1] == orders[2] == first != orders[0]
    assert_equal(one, two)


def test_dtypes_never_share_a_bucket_and_bfloat16_can_be_added_in_float32():
    def body(reducer, reduce_dtype):
        net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(WIDTH, WIDTH)
        )
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(0.5)
        buckets = GradientBuckets(net, reducer, reduce_dtype=reduce_dtype)
        generator = torch.Generator().manual_seed(reducer.rank)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        before = gradients(net)
        buckets.begin()
        for p in net.parameters():
            buckets.ready(p)
        assert {
            len({buckets.entries[m].parameter.dtype for m in b.plan.members}) for b in buckets.buckets
        } == {1}
        buckets.finish()
        return before, gradients(net)

    for dtype in (None, torch.float32):
        (first, actual), (second, _), (third, _) = together(3, lambda r, dtype=dtype: body(r, dtype))
        for name, grad in actual.items():
            wide = dtype if dtype and grad.dtype == torch.bfloat16 else grad.dtype
            total = (first[name].to(wide) + second[name].to(wide)) + third[name].to(wide)
            assert torch.equal(grad, (total / 3).to(grad.dtype)), (dtype, name)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="grad_dtype came with torch 2.10")
def test_gradients_of_another_dtype_than_their_parameter():
    def body(reducer):
        net = model().bfloat16()
        for p in net.parameters():
            p.grad_dtype = torch.float32
        buckets = GradientBuckets(net, reducer, **SMALL)
        buckets.attach()
        x, y = share(0, ROWS, reducer.rank, 2)
        for _ in range(2):
            net.zero_grad()
            loss_of(net, x.bfloat16(), y.bfloat16()).backward()
            local = gradients(net)
            buckets.finish()
        return local, gradients(net)

    (_, actual), (_, other) = together(2, body)
    for name, grad in actual.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, other[name])


def half_used(reducer, missing: str, uses: tuple[bool, bool]):
    net = model()
    extra = nn.Linear(WIDTH, WIDTH)
    never = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        for p in (*extra.parameters(), *never.parameters()):
            p.fill_(0.25)
    whole = nn.ModuleList([net, extra, never])
    buckets = GradientBuckets(whole, reducer, missing=missing, **SMALL)
    buckets.attach()
    for n in range(3):
        whole.zero_grad()
        x, y = share(n, ROWS, reducer.rank, 2)
        out = net(x)
        if uses[reducer.rank]:
            out = extra(out)
        with buckets.step():
            nn.functional.mse_loss(out, y).backward()
    return gradients(whole)


def test_zeros_stand_for_a_gradient_that_one_replica_has_not_and_nothing_for_one_that_none_has():
    first, second = together(2, lambda r: half_used(r, "zeros", (True, False)))
    for actual in (first, second):
        assert actual.pop("2.weight") is None
    assert_equal(first, second)
    x, y = share(2, ROWS, 0, 2)
    net, extra = model(), nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for p in extra.parameters():
            p.fill_(0.25)
    (nn.functional.mse_loss(extra(net(x)), y) / 2).backward()
    assert_close({n: first[f"1.{n}"] for n in ("weight", "bias")}, gradients(extra))


def test_a_missing_gradient_is_an_error_on_every_replica_that_names_it_and_the_replica():
    actual = each(2, lambda r: half_used(r, "error", (True, False)))
    for error in actual:
        assert type(error) is PenstockError
        assert "'1.weight'" in str(error)
        assert "replica(s) [1]" in str(error)
        assert "'2.weight'" in str(error)


def one_fails(reducer, how: str):
    net = model()
    buckets = GradientBuckets(net, reducer, **SMALL)
    buckets.attach()
    with buckets.step():
        loss = loss_of(net, *share(0, ROWS, reducer.rank, 2))
        if reducer.rank == 1 and how == "raises":
            raise ArithmeticError("a bad batch")
        loss.backward()
        if reducer.rank == 1 and how == "twice":
            net[0](torch.ones(1, WIDTH)).sum().backward()
        if reducer.rank == 1 and how == "twice by hand":
            buckets.ready(net[0][0].weight)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raises", ArithmeticError, ["a bad batch"]),
        ("twice", PenstockError, ["'0.0.bias'", "(bucket ", "after it was ready"]),
        ("twice by hand", PenstockError, ["'0.0.weight'", "(bucket ", "after it was ready"]),
    ],
)
def test_a_replica_that_fails_tells_the_others_and_nobody_waits(how, kind, words):
    good, bad = each(2, lambda r: one_fails(r, how))
    assert type(bad) is kind
    assert type(good) is PeerError
    assert "replica 1 failed" in str(good)
    for word in words[1:] if how == "twice" else words:
        assert word in str(bad)
        assert word in str(good)


def step_after_failure(rank: int) -> tuple[str, dict[str, torch.Tensor]]:
    net = model()
    buckets = GradientBuckets(net, GroupReducer(timeout=300), **SMALL)
    buckets.attach()
    try:
        with buckets.step():
            if rank == 1:
                raise ArithmeticError("a bad batch")
            loss_of(net, *share(0, ROWS, rank, 2)).backward()
    except (ArithmeticError, PeerError) as error:
        said = str(error)
    net.zero_grad()
    with buckets.step():
        loss_of(net, *share(1, ROWS, rank, 2)).backward()
    return said, gradients(net)


def test_after_a_failed_step_processes_take_the_next_one(processes: LocalProcesses):
    (message, first), (_, second) = processes.run(2, step_after_failure)
    assert "replica 1 failed: ArithmeticError: a bad batch" in message
    assert_equal(first, second)
    assert_close(first, plain(1, ROWS, 2))


def changed(reducer, how: str):
    net = model()
    buckets = GradientBuckets(net, reducer, **SMALL)
    buckets.attach()
    if reducer.rank == 1:
        if how == "dtype":
            net.double()
        elif how == "sparse":
            weight = net[1][0].weight
            weight.grad = torch.zeros(weight.shape).to_sparse()
            with buckets.step():
                buckets.ready(weight)
        else:
            net[1][0].weight.data = torch.ones(2 * WIDTH, WIDTH)
            net[1][0].bias.data = torch.ones(2 * WIDTH)
            net[1][1] = nn.Identity()
    x, _ = share(0, ROWS, reducer.rank, 2)
    dtype = net[0][0].weight.dtype
    with buckets.step():
        net[:2](x.to(dtype)).sum().backward()


@pytest.mark.parametrize(("how", "word"), [("dtype", "float64"), ("shape", "(12"), ("sparse", "sparse")])
def test_a_gradient_of_another_kind_than_laid_out_is_an_error_that_names_parameter_and_bucket(how, word):
    good, bad = each(2, lambda r: changed(r, how))
    assert type(bad) is PenstockError
    assert "parameter '1." in str(bad)
    assert "(bucket " in str(bad)
    assert word in str(bad)
    assert type(good) is PeerError


def test_a_model_moved_between_steps_gets_its_gradients_back_into_the_buffer():
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer, **SMALL)
        buckets.attach()
        for n in range(2):
            loss_of(net, *share(n, ROWS, reducer.rank, 2)).backward()
            buckets.finish()
        net.zero_grad(set_to_none=False)
        for p in net.parameters():
            p.grad.data = p.grad.data.clone()  # what nn.Module.to does
        loss_of(net, *share(2, ROWS, reducer.rank, 2)).backward()
        buckets.finish()
        return gradients(net)

    for actual in together(2, body):
        assert_equal(actual, plain(2, ROWS, 2))


@pytest.mark.parametrize(
    ("different", "words"),
    [
        (lambda: model(layers=3), ["number of parameters", "replica 0 has 16, replica 1 has 12"]),
        (lambda: model(seed=1), ["initial values", "replica 1 from replica 0", "'0.0.weight'"]),
        (lambda: nn.ModuleDict({"x": model()}), ["name, shape or dtype", "parameter 0"]),
        (lambda: model().double(), ["name, shape or dtype", "'0.0.weight'"]),
    ],
)
def test_replicas_whose_models_differ_are_told_so_everywhere(different, words):
    errors = each(2, lambda r: GradientBuckets(different() if r.rank else model(), r))
    for error in errors:
        assert type(error) is ConfigError
        for word in words:
            if word not in str(error):
                assert word.startswith("'"), error  # the name is each replica's own


def test_steps_with_different_numbers_are_an_error_on_every_replica():
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer)
        buckets.attach()
        with buckets.step(step=7 - reducer.rank):
            loss_of(net, *share(0, ROWS, 0, 1)).backward()

    for error in each(2, body):
        assert type(error) is PenstockError
        assert "replica 0 is at step 7, replica 1 is at step 6" in str(error)


def test_a_replica_that_leaves_out_a_step_leaves_nobody_waiting():
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer)
        buckets.attach()
        for n in range(2 - reducer.rank):
            with buckets.step():
                loss_of(net, *share(n, ROWS, 0, 1)).backward()

    late, done = each(2, body, timeout=3.0)
    assert type(late) is WaitTimeoutError
    assert "left out a step" in str(late)
    assert done is None


def leaves_out_a_step(rank: int) -> str:
    net = model()
    reducer = GroupReducer(timeout=60.0)
    buckets = GradientBuckets(net, reducer)
    buckets.attach()
    try:
        for n in range(2 - rank):
            with buckets.step():
                loss_of(net, *share(n, ROWS, 0, 1)).backward()
            reducer.set_timeout(1.0)
    except (WaitTimeoutError, PeerError) as error:
        return str(error)
    return ""


def test_a_process_that_leaves_out_a_step_leaves_nobody_waiting(processes: LocalProcesses):
    said, nothing = processes.run(2, leaves_out_a_step, timeout=300)
    assert "left out a step" in said or "connection to another replica broke" in said
    assert nothing == ""


def test_a_replica_that_runs_no_backward_is_named_by_all():
    def body(reducer):
        net = model()
        buckets = GradientBuckets(net, reducer)
        buckets.attach()
        if reducer.rank == 0:
            loss_of(net, *share(0, ROWS, 0, 1)).backward()
        buckets.finish()

    for error in each(2, body):
        assert "no gradient in step 1 for parameter '0.0.weight'" in str(error)
        assert "on replica(s) [1]" in str(error)


def test_options_that_cannot_be_used_are_refused():
    (reducer,) = together(1, lambda r: r)
    frozen = model().requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to reduce"):
        GradientBuckets(frozen, reducer)
    for options, words in (
        ({"missing": "ignore"}, 'must be "error" or "zeros"'),
        ({"divisor": 0}, "positive"),
        ({"reduce_dtype": torch.int64}, "floating-point"),
        ({"bucket_bytes": 0}, "positive number of bytes"),
    ):
        with pytest.raises(ConfigError, match=words):
            GradientBuckets(model(), reducer, **options)


def test_misuse_of_a_step_is_an_error():
    (reducer,) = together(1, lambda r: r)
    net = model()
    buckets = GradientBuckets(net, reducer)
    buckets.begin()
    with pytest.raises(PenstockError, match="has not been finished"):
        buckets.begin()
    buckets.reset()
    with pytest.raises(PenstockError, match="no gradient"):
        buckets.ready(net[0][0].weight)
    buckets.reset()
    buckets.ready(nn.Parameter(torch.zeros(1)))  # not ours: ignored
    sums = GradientBuckets(net, reducer, divisor=2.0)
    sums.attach()
    with pytest.raises(PenstockError, match="need begin"):
        loss_of(net, *batch(0, ROWS)).backward()


def test_detached_buckets_leave_gradients_alone():
    (reducer,) = together(1, lambda r: r)
    net = model()
    buckets = GradientBuckets(net, reducer)
    buckets.attach()
    buckets.attach()
    buckets.detach()
    loss_of(net, *batch(0, ROWS)).backward()
    assert not any(b.flat.any() for b in buckets.buckets)
    assert not buckets._active


def test_channels_last_gradients_keep_their_strides():
    (reducer,) = together(1, lambda r: r)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    buckets = GradientBuckets(net, reducer)
    buckets.attach()
    net(torch.ones(1, 3, 5, 5)).sum().backward()
    buckets.finish()
    assert net.weight.grad.stride() == net.weight.stride()
    reference = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    reference.load_state_dict(net.state_dict())
    reference(torch.ones(1, 3, 5, 5)).sum().backward()
    assert torch.equal(net.weight.grad, reference.weight.grad)


def test_every_combination_of_sizes_and_dtypes_reduces_alike():
    expected = plain(0, ROWS, 2)
    for bucket, first in itertools.product((1, 200, 1 << 20), (1, 300, 1 << 20)):

        def body(reducer, bucket=bucket, first=first):
            net = model()
            buckets = GradientBuckets(net, reducer, bucket_bytes=bucket, first_bucket_bytes=first)
            buckets.attach()
            loss_of(net, *share(0, ROWS, reducer.rank, 2)).backward()
            buckets.finish()
            return gradients(net)

        for actual in together(2, body):
            assert_equal(actual, expected)
