"""The two halves of the backward give bit for bit the gradients of the full one."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from unittest.mock import ANY

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.base.errors import PenstockError
from penstock.stage.compute.stage import Stage
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.split_backward.deferring import defer_weight_grads
from penstock.stage.split_backward.weight_grad import WeightGradQueue
from penstock.stage.values import Message

FLOATS = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=FLOATS)


class Tied(nn.Module):
    """One table as embedding and head, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(10, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.inner(self.inner(self.table(x))), self.table.weight)


class Mixed(nn.Module):
    """A weight used by a linear layer and by an operator that is not intercepted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,io->bo", self.inner(x), self.inner.weight)


class Product(nn.Module):
    """Products with a weight, and with the transpose of another, which a linear layer uses, too."""

    def __init__(self, deep: bool = False) -> None:
        super().__init__()
        self.inner, self.weight, self.deep = nn.Linear(16, 16), nn.Parameter(randn(16, 8)), deep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) @ self.inner.weight.t() if self.deep else x @ self.inner.weight.mT
        return torch.matmul(F.gelu(y), self.weight)


class ByKeywords(nn.Module):
    """A transpose whose arguments are keywords, which is a use like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.transpose(input=self.weight, dim0=0, dim1=1)


class Experts(nn.Module):
    """Four experts, their matrices in stacks: `how` says by which functions their products are made."""

    def __init__(self, how: str, transposed: bool = False) -> None:
        super().__init__()
        self.how, self.transposed = how, transposed
        shapes = ((4, 16, 32), (4, 32, 16)) if transposed else ((4, 32, 16), (4, 16, 32))
        self.up, self.down = (nn.Parameter(randn(*shape) / 4) for shape in shapes)
        self.bias = nn.Parameter(randn(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "bmm":
            y = F.gelu(torch.bmm(x.expand(4, *x.shape), self.up))
            return torch.bmm(y, self.down).sum(0)
        with torch.no_grad():
            expert = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 1.5).long()  # the last one may have no rows
        if self.how == "grouped":
            order = expert.argsort(stable=True)
            ends = torch.bincount(expert, minlength=4).cumsum(0).int()
            up, down = (w if self.transposed else w.transpose(-2, -1) for w in (self.up, self.down))
            y = F.grouped_mm(F.gelu(F.grouped_mm(x[order], up, offs=ends)), down, offs=ends)
            return y[order.argsort()]
        result = torch.zeros_like(x)
        for number in expert.unique():
            rows = (expert == number).nonzero().flatten()
            if self.transposed:
                y = F.gelu(x[rows] @ self.up[number]) @ self.down[number] + self.bias[number]
            else:
                y = F.linear(F.gelu(F.linear(x[rows], self.up[number])), self.down[number])
            result = result.index_add(0, rows, y.to(result.dtype))
        return result


class Turned(nn.Module):
    """Gives a linear layer an input that is not contiguous, as attention with batch_first does."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 96, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Conv1D(nn.Module):
    """GPT-2's layer: addmm with the weight stored as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(8, 4)), nn.Parameter(randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(*x.shape[:-1], 4)


class Inputs(nn.Module):
    """A layer that gives a product one of its weights as the input; `how` says which, and how."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(16, 16)
        self.weight = nn.Parameter(randn(4, 16) / 4, requires_grad=how != "frozen")
        self.other = nn.Parameter(randn(4, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "merged":  # as LoRA is
                return F.linear(x, self.inner.weight + self.weight.t() @ self.other, self.inner.bias)
            case "queries":
                return x + self.inner(self.weight[None]).mean(1)
        return x + torch.softmax(x @ self.other.t(), -1) @ self.inner(self.weight)


class Kernels(nn.Module):
    """A stack of kernels, and one that is stored in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.turned = nn.Parameter(randn(2, 4, 4, 3)), nn.Parameter(randn(4, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.conv1d(x, self.stack[1]).relu(), self.turned.transpose(0, 1))


def by_columns() -> nn.Module:
    layer = Conv1D()
    layer.weight = nn.Parameter(randn(4, 8).t())
    return layer


CASES = {
    "linear and norm": (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), (5, 8), 2),
    "no bias, 4-d": (nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4)), (2, 5, 7, 8), 2),
    "conv2d": (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, 2, bias=False)),
        (2, 3, 8, 8),
        2,
    ),
    "conv1d, in place": (nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv1d(8, 4, 3, 2)), (2, 3, 9), 2),
    "conv3d, padding by name": (nn.Sequential(nn.Conv3d(2, 3, 3, padding="same"), nn.Conv3d(3, 2, 2)), (2, 2, 4, 4, 4), 1),
    "conv1d in groups": (nn.Conv1d(4, 4, 3, groups=2), (2, 4, 9), 1),
    "attention": (nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True), (2, 6, 32), 2),
    "not contiguous": (Turned(True), (5, 6, 32), 0),
    "not contiguous, no bias": (Turned(False), (5, 6, 32), 0),
    "addmm": (Conv1D(), (2, 3, 8), 1),
    "mixed use": (Mixed(), (4, 16), 0),
    "product": (Product(), (2, 5, 16), 2),
    "transposed by keywords": (ByKeywords(), (5, 16), 0),
    "linear layer and product": (Product(deep=True), (5, 16), 3),
    "experts, bmm": (Experts("bmm", transposed=True), (12, 16), 2),
    "experts, grouped": (Experts("grouped"), (12, 16), 2),
    "experts, grouped, transposed": (Experts("grouped", transposed=True), (12, 16), 2),
    "addmm, by columns": (by_columns(), (2, 3, 8), 1),
    "stacked kernels": (Kernels(), (2, 4, 9), 2),
    "merged weights": (Inputs("merged"), (5, 16), 1),
    "queries": (Inputs("queries"), (5, 16), 1),
    "a table as input": (Inputs("table"), (5, 16), 2),
    "frozen input": (Inputs("frozen"), (5, 16), 2),
    "experts, one by one": (Experts("loop"), (12, 16), None),
    "experts, one by one, transposed": (Experts("loop", transposed=True), (12, 16), None),
}  # fmt: skip
VIEWS = [name for name in CASES if "product" in name or "experts" in name]


def both(net: nn.Module, inputs: list[torch.Tensor], context=contextlib.nullcontext) -> int:
    """Run plainly and in halves, by either way to intercept; return the number of uses that the last microbatch deferred."""
    deferred = halves(copied(net), inputs, context, ())
    assert halves(net, inputs, context, [*net.parameters()]) == deferred
    return deferred


class Gone:
    """A model's weights in one memory, as with sharded weights, which is released while W runs."""

    def __init__(self, net: nn.Module) -> None:
        self.parameters = [*net.parameters()]
        self.memory = torch.cat([p.detach().flatten() for p in self.parameters])
        self.places, start = [], 0
        for p in self.parameters:
            place = self.memory[start : start + p.numel()].as_strided(p.shape, p.stride(), start)
            self.places.append(place.copy_(p.detach()))
            start += p.numel()
        self.give()

    def released(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata == self.memory.untyped_storage()._cdata

    def give(self) -> None:
        for p, place in zip(self.parameters, self.places, strict=True):
            p.data = place

    def __enter__(self) -> None:
        self.values = self.memory.clone()
        for p in self.parameters:
            p.data = torch.full((), float("nan"), dtype=p.dtype).expand(p.shape)
        self.memory.untyped_storage().resize_(0)

    def __exit__(self, *error: object) -> None:
        self.memory.untyped_storage().resize_(self.values.nbytes)
        self.memory.copy_(self.values)
        self.give()


def copied(net: nn.Module) -> nn.Module:
    copy_ = copy.deepcopy(net)
    for mine, other in zip(net.parameters(), copy_.parameters(), strict=True):
        other.grad_dtype = mine.grad_dtype  # deepcopy leaves it out
    return copy_


def halves(net: nn.Module, inputs: list[torch.Tensor], context, parameters, gone: Gone | None = None) -> int:
    """Run plainly and in halves; assert equality; return the number of uses that the last microbatch deferred."""
    released = gone.released if gone is not None else None
    plain, shared, deferred = copied(net), set(), 0
    for x in inputs:
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        with context():
            plain(leaves[0]).float().square().mean().backward()
        queue = WeightGradQueue(shared, released=released)
        with context():
            with defer_weight_grads(queue, parameters):
                y = net(leaves[1])
            loss = y.float().square().mean()
        loss.backward()
        deferred = len(queue.pending)
        if x.is_floating_point():
            assert torch.equal(leaves[0].grad, leaves[1].grad)
        with gone or contextlib.nullcontext():
            queue.accumulate({})
        assert queue.pending == []
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad), name
    return deferred


@pytest.mark.parametrize("name", CASES)
def test_halves_equal_the_whole(name: str):
    net, shape, expected = CASES[name]
    deferred = both(copy.deepcopy(net), [randn(*shape) for _ in range(3)])
    assert deferred == expected if expected is not None else deferred >= 4


@pytest.mark.parametrize("name", ["linear and norm", "conv2d", "addmm", *VIEWS])
def test_halves_equal_the_whole_under_autocast(name: str):
    net, shape, _ = CASES[name]
    assert both(copy.deepcopy(net), [randn(*shape) for _ in range(3)], bfloat16_autocast) > 0


@pytest.mark.parametrize("context", [contextlib.nullcontext, "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_halves_equal_the_whole_if_w_runs_while_the_weights_are_gone(name: str, context):
    net, shape, expected = CASES[name]
    net = copy.deepcopy(net)
    context = bfloat16_autocast if context == "bfloat16" else context
    deferred = halves(net, [randn(*shape) for _ in range(3)], context, [*net.parameters()], Gone(net))
    if expected is not None and context is not bfloat16_autocast:
        assert deferred == expected - isinstance(net, Inputs)


def test_a_hook_sees_its_weight_if_w_runs_while_the_weights_are_gone():
    x, found = randn(5, 8), []
    for released in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        one, other = (layer.weight for layer in net)
        one.register_hook(lambda grad, w=one: grad * (w.detach() > 0) + 0.1 * w.detach())
        other.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad + p.detach()))
        gone = Gone(net)
        queue = WeightGradQueue(released=gone.released if released else None)
        with defer_weight_grads(queue, [*net.parameters()]):
            loss = net(x).square().mean()
        loss.backward()
        assert len(queue.pending) == (0 if released else 2)
        with gone if released else contextlib.nullcontext():
            queue.accumulate({})
        found.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *found))


def bfloat16_autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_halves_equal_the_whole_for_a_layer_used_three_times_under_autocast():
    """Autocast casts a weight once, so its uses' gradients are added in bfloat16; so do we."""

    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(self.inner(self.inner(x))))

    assert both(Thrice(), [randn(4, 16) for _ in range(3)], bfloat16_autocast) == 4


def test_parameters_have_their_own_class_again_and_threads_do_not_disturb_each_other():
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), randn(4, 16)
    parameters, inside, counts = [*net.parameters()], threading.Barrier(3), []

    def forward(defers: bool) -> None:
        queue = WeightGradQueue()
        with defer_weight_grads(queue, parameters) if defers else contextlib.nullcontext():
            inside.wait(60)
            y = net(x)
            inside.wait(60)
        y.sum().backward()
        counts.append((defers, len(queue.pending)))

    threads = [threading.Thread(target=forward, args=(defers,)) for defers in (True, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(counts) == [(False, 0), (True, 2), (True, 2)]
    with pytest.raises(ZeroDivisionError), defer_weight_grads(WeightGradQueue(), parameters):
        raise ZeroDivisionError
    assert {type(p) for p in parameters} == {nn.Parameter}


class Own(nn.Parameter):
    """A parameter of another class, as DTensors are."""


def test_a_weight_of_another_class_is_deferred_and_keeps_its_class():
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    net[0].weight = Own(randn(16, 16))
    assert halves(net, [randn(4, 16) for _ in range(3)], contextlib.nullcontext, [*net.parameters()]) == 2
    assert [type(p) for p in net.parameters()] == [Own, nn.Parameter, nn.Parameter, nn.Parameter]


def kept_in_float32(net: nn.Module) -> nn.Module:
    """Weights in bfloat16, gradients in float32."""
    for parameter in net.bfloat16().parameters():
        parameter.grad_dtype = torch.float32
    return net


@pytest.mark.parametrize("name", ["linear and norm", "conv2d", "addmm", "no bias, 4-d", *VIEWS])
def test_halves_equal_the_whole_for_gradients_kept_in_another_dtype(name: str):
    net, shape, deferred = CASES[name]
    net = kept_in_float32(copy.deepcopy(net))
    assert both(net, [randn(*shape).bfloat16() for _ in range(3)]) == (ANY if deferred is None else deferred)
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert any((grad.bfloat16().float() != grad).any() for grad in grads)


def test_uses_of_a_tied_weight_are_added_in_the_dtype_its_gradient_is_kept_in():
    net = kept_in_float32(Tied())
    assert both(net, [torch.randint(0, 10, (4, 5), generator=FLOATS) for _ in range(3)]) == 4


def test_halves_equal_the_whole_for_tied_weights_and_layers_used_twice():
    tokens = [torch.randint(0, 10, (4, 5), generator=FLOATS) for _ in range(3)]
    assert both(Tied(), tokens) == 4
    assert both(nn.Sequential(nn.Embedding(10, 8, padding_idx=2), nn.Linear(8, 4)), tokens) == 2
    assert both(nn.Embedding(10, 8, max_norm=1.0), tokens[:1]) == 0


def test_hooks_of_a_parameter_fire_once_a_microbatch_after_the_last_contribution():
    net, seen = Tied(), []
    net.table.weight.register_hook(lambda g: seen.append(("grad", g.clone())))
    net.table.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("done", p.grad.clone())))
    queue = WeightGradQueue()
    with defer_weight_grads(queue):
        loss = net(torch.arange(5)).square().mean()
    loss.backward()
    assert seen == []
    queue.accumulate({})
    assert [what for what, _ in seen] == ["grad", "done"]
    assert torch.equal(seen[0][1], net.table.weight.grad)


def test_an_input_that_is_written_to_after_its_use_is_refused():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            y = self.inner(x)
            x += 1
            return y

    net, queue = Overwrites(), WeightGradQueue()
    with defer_weight_grads(queue):
        loss = net(randn(2, 4)).sum()
    loss.backward()
    with pytest.raises(PenstockError, match=r"shape \(2, 4\) .* was modified in place"):
        queue.accumulate({})


def stage(*layers: nn.Module) -> Stage:
    return Stage(0, StageModule([Layer(str(n), lambda m=m: m) for n, m in enumerate(layers)]))


def checked(one: Stage) -> Stage:
    """Return a stage after its first microbatch, which checks the split and runs the full backward."""
    (out,) = one.forward(0, (Message((randn(2, 3),), None, (True,)),), split=True)
    one.backward(0, (Message((torch.ones_like(out.leaves[0]),)),))
    one.module.zero_grad()
    return one


def test_a_stage_holds_a_microbatch_until_its_weights_are_done():
    one = checked(stage(nn.Linear(3, 3)))
    (out,) = one.forward(0, (Message((randn(2, 3),), None, (True,)),), split=True)
    assert one.held == 1
    (grads,) = one.backward_input(0, (Message((torch.ones_like(out.leaves[0]),)),))
    assert one.held == 1
    assert one.module.layers[0].weight.grad is None
    assert grads.leaves[0].shape == (2, 3)
    one.backward_weight(0)
    assert one.held == 0
    assert one.module.layers[0].weight.grad is not None


def test_a_stage_refuses_a_microbatch_twice_a_missing_activation_and_w_before_i():
    one = stage(nn.Linear(3, 3))
    x = (Message((randn(2, 3),), None, (True,)),)
    one.forward(0, x, split=True)
    with pytest.raises(PenstockError, match="already holds microbatch 0"):
        one.forward(0, x)
    with pytest.raises(PenstockError, match="holds no activation of microbatch 1"):
        one.backward(1, (Message((torch.ones(2, 3),)),))
    with pytest.raises(PenstockError, match="W came before I"):
        one.backward_weight(0)
    with pytest.raises(PenstockError, match=r"2 gradient\(s\) came back for 1 output"):
        one.backward(0, (Message((None, None), None, (False, False)),))


def test_a_compiled_stage_says_loudly_that_its_backward_is_not_split():
    one = stage(torch.compile(nn.Linear(3, 3), backend="eager"))
    with pytest.warns(UserWarning, match="stage 0 holds compiled modules"):
        assert not one.split_checks.possible
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not one.split_checks.possible
