"""The first step's check that rows of a batch do not depend on each other."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import ExecutionOptions, MeshShape, ParallelOptions, Pipeline, SplitError
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.groups import run_cases

WIDTH, ROWS, TIME = 8, 6, 5


class Attends(nn.Module):
    """Attention over dimension 0, as of nn.MultiheadAttention without batch_first=True."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        attended: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x + attended


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.inner(x)[0]
        return states


class TimeFirst(nn.Module):
    """Gives time first to what follows, and the batch back at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class OverRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Zeros(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def made(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for layer in layers))


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, loss_fn: Any = F.mse_loss, x: Tensor | None = None, y: Any = None, **options: Any):
    x = rows(ROWS, TIME, WIDTH) if x is None else x
    with Pipeline(model, loss_fn, **{"microbatches": 3, "ranks": 2, **options}) as pipe:
        return pipe.step(x, x if y is None else y)


@pytest.mark.parametrize(
    ("layers", "name", "microbatches"),
    [
        ((linear, Attends, linear), r"1 \(Attends\)", 3),
        ((linear, linear, Recurs), r"2 \(Recurs\)", 2),
        ((linear, OverRows, linear), r"1 \(OverRows\)", 6),
        # A head of zeros has the same loss whatever the layers before it do.
        ((Attends, linear, Zeros), r"0 \(Attends\)", 3),
    ],
    ids=["attention", "lstm", "batch mean", "zeros"],
)
def test_a_layer_whose_rows_depend_on_each_other_is_named(
    layers: tuple[Any, ...], name: str, microbatches: int
):
    with pytest.raises(SplitError, match=rf"layer {name} gave the rows .*dims=.*No weight was changed"):
        step(made(*layers), microbatches=microbatches)


class Gated(nn.Module):
    """Mixes rows behind a gate that begins at a constant."""

    def __init__(self, start: float, *shape: int, trained: bool = True) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full(shape, start), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate if self.gate.dim() < 2 else self.gate.sum(0)
        return x + gate * (x.mean(0, keepdim=True) if self.gate.dim() else 1e3 * x.std(0, keepdim=True))


class Shifted(Gated):
    """Takes a share of the row before, and begins with none: the share is 1 minus a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x.roll(1, 0), x, self.gate)


GATES = {
    "zero scalar": lambda: Gated(0.0),
    "zero vector": lambda: Gated(0.0, WIDTH),
    "zero matrix": lambda: Gated(0.0, WIDTH, WIDTH),
    "layer scale": lambda: Gated(1e-6, WIDTH),
    "one minus one": lambda: Shifted(1.0, WIDTH),
}


@pytest.mark.parametrize("gate", GATES)
def test_what_a_gate_hides_until_it_trains_is_found_and_nothing_is_written(gate: str):
    net = made(linear, GATES[gate], linear)
    before = {name: (p, p.data_ptr(), p._version, p.clone()) for name, p in net.named_parameters()}
    with pytest.raises(SplitError, match=rf"layer 1 \({type(net[1]).__name__}\)"):
        step(net)
    for name, p in net.named_parameters():
        own, place, version, value = before[name]
        assert p is own
        assert (p.data_ptr(), p._version) == (place, version)
        assert torch.equal(p, value)


def test_a_gate_that_never_trains_hides_nothing():
    step(made(linear, lambda: Gated(0.0, WIDTH, trained=False), linear))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = linear(), nn.Parameter(torch.full((WIDTH,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


def told_with_zero(rank: int, shard: str) -> tuple[str, list[bool]]:
    """What a gate hides is told; and are weights with the check those without it?"""
    parallel, x = ParallelOptions(shard=shard), rows(4, TIME, WIDTH)
    weights: list[dict[str, Tensor]] = []
    for layer, check in ((LayerScale, True), (LayerScale, False), (lambda: Gated(0.0, WIDTH), True)):
        execution = ExecutionOptions(check_split=check)
        options: Any = {
            "microbatches": 2,
            "mesh": MeshShape(dp=2),
            "parallel": parallel,
            "execution": execution,
        }
        net = made(linear, layer, Zeros)
        try:
            with Pipeline(net, F.mse_loss, timeout=60, **options) as pipe:
                optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1, zero=True)
                for _ in range(3):
                    pipe.step(x, x)
                    optimizer.step()
                weights.append({name: value.clone() for name, value in pipe.state_dict().items()})
        except SplitError as error:
            told = str(error)
    one, other = weights
    return told, [torch.equal(one[name], other[name]) for name in one]


@pytest.mark.slow
def test_gates_of_sharded_parameters_are_found_and_weights_keep_their_bits(processes: LocalProcesses):
    for ranks in run_cases(processes, 2, told_with_zero, [("none",), ("optimizer",), ("weights",)]):
        for told, equal in ranks:
            assert "layer 1 (Gated)" in told
            assert equal
            assert all(equal)


class NeedsOwn(nn.Module):
    """Refuses other values than its own, or overflows with them."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.gate = fails, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.gate.any() and not self.training:
            if self.fails:
                raise ValueError("another value")
            return x / torch.zeros(len(x), 1, 1) * (x.mean(0) > 0)
        return x + self.gate


@pytest.mark.parametrize("fails", [True, False])
def test_a_layer_that_takes_no_other_values_is_checked_with_its_own(fails: bool):
    step(made(linear, lambda: NeedsOwn(fails), linear))
    with pytest.raises(SplitError, match=r"layer 2 \(OverRows\)"):
        step(made(linear, lambda: NeedsOwn(fails), OverRows))


def test_the_first_step_that_cuts_is_checked():
    with Pipeline(made(linear, OverRows), F.mse_loss, microbatches=1, ranks=2) as pipe:
        x = rows(ROWS, WIDTH)
        pipe.step(x, x)
        with pytest.raises(SplitError, match=r"layer 1 \(OverRows\)"):
            pipe.step(x, x, microbatches=2)


@pytest.mark.parametrize("microbatches", [2, 3])
def test_a_mask_that_every_microbatch_is_given_is_given_to_two_as_one(microbatches: int):
    x = rows(ROWS, TIME, WIDTH)
    masks = penstock.Microbatches([torch.ones(TIME, TIME).triu(1).bool()] * microbatches)
    with Pipeline(made(lambda: Attends(True), linear), F.mse_loss, microbatches=microbatches) as pipe:
        pipe.step(x, x, mask=masks)
    net, message = made(lambda: Attends(True), OverRows), r"layer 1 \(OverRows\)"
    with (
        Pipeline(net, F.mse_loss, microbatches=microbatches) as pipe,
        pytest.raises(SplitError, match=message),
    ):
        pipe.step(x, x, mask=masks)


def apart(x: Tensor) -> penstock.Microbatches:
    return penstock.Microbatches(x.chunk(2))


def told_after_microbatches(rank: int) -> str:
    """The ranks of the two stages are given their microbatches in different steps."""
    x = rows(ROWS, WIDTH)
    first, last = rank == 0 or None, rank == 1 or None
    with Pipeline(made(linear, OverRows), F.mse_loss, microbatches=2, ranks=2, timeout=60) as pipe:
        for given in (
            (apart(x), apart(x)),
            (first and apart(x), last and x),
            (first and x, last and apart(x)),
        ):
            pipe.step(*given)
        with pytest.raises(SplitError) as told:
            pipe.step(x, x)
    return str(told.value)


def test_the_first_batch_that_is_cut_here_is_checked():
    x = rows(ROWS, WIDTH)
    with Pipeline(made(linear, OverRows), F.mse_loss, microbatches=2, ranks=2) as pipe:
        pipe.step(apart(x), apart(x))
        pipe.evaluate(apart(x), apart(x))
        with pytest.raises(SplitError, match=r"in the first step, layer 1 \(OverRows\)"):
            pipe.step(x, x)


@pytest.mark.slow
def test_all_processes_check_the_first_batch_that_is_cut_on_all(processes: LocalProcesses):
    assert all("layer 1 (OverRows)" in told for told in processes.run(2, told_after_microbatches))


def evaluated(rank: int, call: str) -> str:
    torch.manual_seed(0)
    net = made(lambda: nn.Embedding(9, WIDTH), Attends, lambda: nn.Linear(WIDTH, 9))
    x = torch.randint(9, (ROWS, TIME), generator=torch.Generator().manual_seed(1))
    y = None if call == "outputs" else x
    cross_entropy = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    with Pipeline(net, cross_entropy, microbatches=1, ranks=2, timeout=60) as pipe:
        run = pipe.log_probs if call == "log_probs" else pipe.evaluate
        run(x, y)
        with pytest.raises(SplitError) as told:
            run(x, y, microbatches=3)
        assert pipe.steps == 0
        assert all(p.grad is None for p in pipe.parameters())
    return str(told.value)


EVALUATIONS = ["evaluate", "outputs", "log_probs"]


@pytest.mark.parametrize("call", EVALUATIONS)
def test_an_evaluation_before_training_is_checked(call: str):
    assert "in the first evaluation, layer 1 (Attends)" in evaluated(0, call)


@pytest.mark.slow
def test_an_evaluation_in_processes_is_checked(processes: LocalProcesses):
    for ranks in run_cases(processes, 2, evaluated, [(call,) for call in EVALUATIONS]):
        assert all("in the first evaluation, layer 1 (Attends)" in told for told in ranks)


class Longer(nn.Module):
    """Takes the rows of a batch beside each other where there are more values in a row than in the first evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if x.shape[1] > TIME else x


def test_a_step_after_an_evaluation_is_checked_with_its_own_batch():
    x, longer = rows(ROWS, TIME, WIDTH), rows(ROWS, TIME + 1, WIDTH)
    with Pipeline(made(linear, Longer), F.mse_loss, microbatches=3, ranks=2) as pipe:
        pipe.evaluate(x, x)
        with pytest.raises(SplitError, match=r"in the first step, layer 1 \(Longer\)"):
            pipe.step(longer, longer)


def told_by_replicas(rank: int) -> str:
    with pytest.raises(SplitError) as told:
        step(made(linear, OverRows), microbatches=1, ranks=None, mesh=MeshShape(dp=2))
    return str(told.value)


@pytest.mark.slow
def test_the_only_microbatch_of_each_replica_is_cut_in_halves(processes: LocalProcesses):
    assert all("layer 1 (OverRows)" in told for told in processes.run(2, told_by_replicas))


@pytest.mark.parametrize(
    "layers",
    [
        (lambda: Attends(True), linear, linear),
        (TimeFirst, Attends, TimeFirst),
        (linear, lambda: nn.BatchNorm1d(TIME), linear),
        (nn.Flatten, lambda: nn.Unflatten(1, (TIME, WIDTH)), linear),
    ],
    ids=["batch first", "turned round", "batch statistics", "flattened"],
)
def test_rows_that_do_not_depend_on_each_other_pass(layers: tuple[Any, ...]):
    step(made(*layers))


def test_the_check_can_be_left_out():
    step(made(linear, OverRows, linear), execution=ExecutionOptions(check_split=False))


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (nn.MSELoss(reduction="sum"), "reduction='sum'"),
        (lambda out, y: F.cross_entropy(out[:, 0] @ y[:, 0].T, torch.arange(len(out))), "in-batch negatives"),
    ],
    ids=["sum", "in-batch negatives"],
)
def test_a_loss_that_is_not_the_mean_of_rows_is_told(loss_fn: Any, says: str):
    with pytest.warns(RuntimeWarning, match=rf"the loss of two microbatches as one.*{says}"):
        step(made(linear, linear, linear), loss_fn)


def test_weights_of_classes_are_told_once_and_exact_by_a_reduction():
    weights = torch.arange(1.0, WIDTH + 1)
    x, y = rows(ROWS, WIDTH), torch.tensor([0, 1, 7, 6, 5, 5])
    loss_fn = nn.CrossEntropyLoss(weights)
    net = made(linear, linear)
    with warnings.catch_warnings(record=True) as told, Pipeline(net, loss_fn, microbatches=3) as pipe:
        warnings.simplefilter("always")
        pipe.step(x, y)
        pipe.step(x, y)
    (only,) = told
    assert "function from a microbatch's target to the sum of its weights" in str(only.message)
    found = step(net, loss_fn, x, y, reduction=lambda target: weights[target].sum()).loss
    torch.testing.assert_close(found, loss_fn(net(x), y).detach())


@pytest.mark.parametrize("reduction", ["valid", len])
def test_the_first_microbatches_need_no_target_that_counts(reduction: Any):
    x, y = rows(ROWS, WIDTH), torch.tensor([-100, -100, -100, -100, 3, 4])
    if reduction is len:
        reduction = lambda target: int((target >= 0).sum())  # noqa: E731
    net = made(linear, linear)
    found = step(net, nn.CrossEntropyLoss(), x, y, reduction=reduction).loss
    torch.testing.assert_close(found, F.cross_entropy(net(x), y).detach())


class Counts(nn.Module):
    """A layer with state of all kinds: it must be as if it had run once for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.noise = 0, [0.0], torch.Generator().manual_seed(3)
        self.register_buffer("sum", torch.zeros(()))
        self.numbers = iter(range(100))
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.mean()))
        self.sum.add_(1.0)
        scale = next(self.numbers) + random.random() + torch.rand((), generator=self.noise)
        out: Tensor = self.inner(x) * scale * self.calls
        return out


def test_state_in_python_is_as_in_plain_pytorch():
    random.seed(5)
    plain = made(Counts, linear)
    x = rows(ROWS, WIDTH)
    expected = torch.stack([F.mse_loss(plain(part), part) for part in (*x.chunk(3), *x.chunk(3))]).detach()
    random.seed(5)
    net = made(Counts, linear)
    with Pipeline(net, F.mse_loss, microbatches=3, ranks=2) as pipe:
        found = torch.cat([pipe.step(x, x).losses for _ in range(2)])
    assert torch.equal(found, expected)
    assert net[0].calls == plain[0].calls == 6
    assert net[0].seen == plain[0].seen
    assert torch.equal(net[0].sum, plain[0].sum)


def test_a_loss_with_a_counter_in_its_closure_is_called_once_for_each_microbatch():
    calls = 0

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(out, y) * calls

    step(made(linear, linear), loss_fn)
    assert calls == 3


class OnlyTraining(nn.Module):
    """Returns what the loss takes in training alone, as models with auxiliary outputs do."""

    def forward(self, x: Tensor) -> Any:
        return (x, x) if self.training else x


def of_training(out: Any, y: Tensor) -> Tensor:
    if not isinstance(out, tuple):
        raise TypeError("only in training")
    return F.mse_loss(out[0] + out[1], y)


def test_a_model_that_cannot_be_evaluated_trains_and_the_warning_says_what_was_not_checked():
    net, x = made(linear, OnlyTraining), rows(ROWS, TIME, WIDTH)
    with Pipeline(net, of_training, microbatches=3, ranks=2) as pipe:
        with pytest.warns(RuntimeWarning, match="did not check that the rows.*check_split=False"):
            first = pipe.step(x, x).loss
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(pipe.step(x, x).loss, first)


def checked(rank: int) -> list[str]:
    told: list[str] = []
    x = rows(ROWS, TIME, WIDTH)
    given = (x, None) if rank == 0 else (None, x)
    for layers, loss_fn in (
        ((linear, linear, Attends, linear), F.mse_loss),
        ((linear, linear, linear, OnlyTraining), of_training),
        # What the first rank has sent before the second one fails is not taken by the check that follows.
        ((linear, LayerScale, partial(NeedsOwn, True), linear), F.mse_loss),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Pipeline(made(*layers), loss_fn, microbatches=2, ranks=2) as pipe:
                try:
                    pipe.step(*given)
                    pipe.step(*given)
                except SplitError as error:
                    told.append(str(error))
        told += [str(w.message) for w in caught]
    return told


@pytest.mark.slow
def test_all_processes_refuse_and_a_step_goes_on_after_a_check_that_failed(processes: LocalProcesses):
    first, second = processes.run(2, checked)
    assert len(first) == 2
    assert len(second) == 1  # one rank warns
    for told in (first, second):
        assert "layer 2 (Attends)" in str(told[0])
    assert "did not check" in str(first[1])
    assert "only in training" in str(first[1])


def test_time_that_comes_first_is_cut_where_dims_says():
    net = made(Attends, Recurs, linear)
    x = rows(TIME, ROWS, WIDTH)
    expected = F.mse_loss(net(x), x).detach()
    torch.testing.assert_close(step(net, x=x, dims={"x": 1, "y": 1}).loss, expected)


def test_a_mask_of_time_by_time_is_not_cut():
    """Where there are as many rows as tokens, a mask could be cut; the check sees that."""
    net = made(lambda: Attends(True), lambda: Attends(True))
    x, mask = rows(TIME, TIME, WIDTH), torch.ones(TIME, TIME).triu(1).bool()
    expected = F.mse_loss(net[1](net[0](x, mask), mask), x).detach()

    def run(**options: Any) -> Any:
        with Pipeline(net, F.mse_loss, microbatches=1, ranks=2, **options) as pipe:
            return pipe.step(x, x, microbatches=5, mask=mask).loss

    torch.testing.assert_close(run(dims={"mask": None}), expected)
    with pytest.raises(penstock.StageError, match=r"Split along dimension 0: mask .*dims=\{'mask': None\}"):
        run()


class Words(nn.Module):
    """Looks up words that the values name; rows of the table are scaled down where they are looked up (max_norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        words: Tensor = self.table((x.detach() * 9).long().remainder(40))
        return x + words.mean(1)


def test_what_its_forwards_write_into_parameters_is_undone():
    """They run on other values of parameters that begin at a constant, and so look up other words."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(WIDTH), Words(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(net)
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        plain(x[: ROWS // 2]), plain(x[ROWS // 2 :])
    with Pipeline(net, F.mse_loss, ranks=1, microbatches=2) as pipe:
        pipe.step(x, x)
        written = plain[1].table.weight != net[1].table.weight
        assert not written.any()
        assert (net[1].table.weight.norm(dim=1) > 1.01).any()  # some were never looked up


class Scaled(nn.Module):
    """Has a frozen weight that was loaded under torch.inference_mode(), whose writes torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_weights_that_were_loaded_in_inference_mode_are_taken():
    x = torch.randn(ROWS, WIDTH)
    with Pipeline([Scaled(), nn.Linear(WIDTH, WIDTH)], F.mse_loss, ranks=1, microbatches=2) as pipe:
        pipe.step(x, x)
