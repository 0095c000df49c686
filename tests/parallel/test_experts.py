"""Experts divided over processes: losses, gradients and weights are those of one process, to the order of sums."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Checkpoints, ExpertLoad, MeshShape, Pipeline, PipelineOptimizer
from penstock.base.errors import ConfigError, PeerError, PenstockError
from penstock.parallel.dtensor import full_tensor
from penstock.parallel.experts.axis import require_same_stacks
from penstock.parallel.experts.exchange import ExpertExchange
from penstock.parallel.experts.layers import (
    DividedExperts,
    TensorRanks,
    _Joined,
    _Part,
    _require_separable,
    divide_experts,
)
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.ops import Kind
from tests.parallel.trained import MICROBATCHES, Result, plain, require_same, trained
from tests.support.beside import Line
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.mixtures import CLASSES, LoopedExperts, MixtureBlock, batch, loss_of, mixture


class Case(NamedTuple):
    sizes: dict[str, int]
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero: bool = False
    lone: bool = False
    recompute: str = "none"


def divided(rank: int, case: Case) -> Result:
    with Pipeline(
        mixture(lone=case.lone), loss_of, microbatches=MICROBATCHES, mesh=MeshShape(**case.sizes), timeout=120,
        schedule=case.schedule, virtual_stages=case.virtual_stages, recompute=case.recompute,
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=1.0, zero=case.zero)
        return trained(pipe, optimizer, batch())


FEW = [Case({"dp": 2, "ep": 2}), Case({"tp": 2, "ep": 2})]
TWO = [
    Case({"dp": 2, "ep": 2}, zero=True),
    Case({"dp": 2, "ep": 2}, lone=True),
    Case({"dp": 2, "ep": 2}, schedule="zb-h1", recompute="full"),
]
FOUR = [
    Case({"pp": 2, "dp": 2, "ep": 2}),
    Case({"pp": 2, "dp": 2, "ep": 2}, schedule="zb-h1"),
    Case({"pp": 2, "dp": 2, "ep": 2}, schedule="interleaved-1f1b", virtual_stages=2, zero=True),
    Case({"pp": 2, "dp": 2, "ep": 2}, schedule="zb-v"),
    Case({"dp": 4, "ep": 4}),
    Case({"dp": 4, "ep": 2}),
    Case({"dp": 4, "ep": 2}, zero=True),
]


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, FEW), *slow((2, TWO), (4, FOUR[:2])), *exhaustive((4, FOUR[2:]))]
)
def test_processes_give_what_one_gives(processes: LocalProcesses, ranks: int, cases: list[Case]):
    results = run_cases(processes, ranks, divided, [(case,) for case in cases])
    for case, by_rank in zip(cases, results, strict=True):
        parts = MICROBATCHES * case.sizes.get("dp", 1)
        require_same(case, by_rank, plain(mixture(lone=case.lone), loss_of, batch(), parts, clip=1.0))
        assert all(case.zero or result.gradients for result in by_rank), case


class Beside(ExpertExchange):
    """The exchange of a thread with those that have the other experts.

    Attributes:
        counted: tokens that came to each expert of this thread.
    """

    def __init__(self, line: Line, rank: int) -> None:
        self._line, self._rank = line, rank
        self.step = SimpleNamespace(op=lambda: SimpleNamespace(kind=Kind.F, microbatch=0))
        self.counted: list[int] = []

    @property
    def size(self) -> int:
        return self._line.size

    def count(self, name: str, tokens: Tensor) -> None:
        self.counted = tokens.tolist()

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        got = [parts[self._rank] for parts in self._line.swap(self._rank, values.detach().split(sent))]
        assert [len(rows) for rows in got] == received
        return torch.cat(got)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lone", [False, True], ids=["all experts", "two experts alone"])
def test_each_token_is_computed_by_its_experts_wherever_they_are(size: int, lone: bool):
    """Outputs and gradients are those of whole stacks, also where some processes' experts get no tokens."""
    torch.manual_seed(0)
    whole, line, each = LoopedExperts(), Line(size), 4 // size
    scores = torch.randn(13, 4) + 100.0 * lone * torch.arange(4)
    (weights, index), rows = scores.softmax(-1).topk(2), torch.randn(13, 8)
    given = rows.requires_grad_(), index, weights.detach().requires_grad_()
    expected = whole(*given)
    wanted = torch.autograd.grad(expected.sin().sum(), (given[0], given[2], *whole.parameters()))

    def computed(rank: int) -> tuple[Tensor, tuple[Tensor, ...], list[int]]:
        exchange, own = Beside(line, rank), LoopedExperts(each)
        own.num_experts = 4
        for share, stack in zip(own.parameters(), whole.parameters(), strict=True):
            share.data = stack.detach()[rank * each :][:each]
        exchange.prepare(["the forward of a", "the backward of a"], each)
        experts = DividedExperts("a", own, exchange, None, lambda share: share, None)
        mine = [x.detach().tensor_split(size)[rank] for x in given]
        mine = [x.requires_grad_(x.is_floating_point()) for x in mine]
        out = experts(*mine)
        grads = torch.autograd.grad(out.sin().sum(), (mine[0], mine[2], *own.parameters()))
        return out, grads, exchange.counted

    outs, grads, counted = zip(*line.run(computed), strict=True)
    torch.testing.assert_close(torch.cat(outs), expected)
    for parts, gradient in zip(zip(*grads, strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(parts), gradient)
    assert [n for each in counted for n in each] == torch.bincount(index.flatten(), minlength=4).tolist()


COUNTED = [
    Case({"dp": 2, "ep": 2}, schedule="zb-h1", recompute="full"),
    Case({"dp": 2, "ep": 2}, lone=True),
    Case({"tp": 2, "ep": 2}),
]


def counted(rank: int, case: Case) -> tuple[ExpertLoad | None, ExpertLoad | None, float]:
    """Return the load before all steps and of the last of two, and the seconds of both."""
    with Pipeline(
        mixture(lone=case.lone), loss_of, microbatches=MICROBATCHES, mesh=MeshShape(**case.sizes), timeout=120,
        schedule=case.schedule, recompute=case.recompute,
    ) as pipe:  # fmt: skip
        before, began = pipe.gather_expert_load(), perf_counter()
        for _ in range(2):
            pipe.step(*batch())
        return before, pipe.gather_expert_load(), perf_counter() - began


def chosen(lone: bool) -> dict[str, list[int]]:
    """Return the tokens of each expert in one forward of the whole batch in one process."""
    net, found = mixture(lone=lone), dict[str, list[int]]()
    for name, module in net.named_modules():
        if name.endswith("experts"):

            def count(_: nn.Module, args: Any, name: str = name) -> None:
                found[name] = torch.bincount(args[1].flatten(), minlength=4).tolist()

            module.register_forward_pre_hook(count)
    net(batch()[0])
    return found


@pytest.mark.parametrize("cases", [COUNTED[:2], *slow(COUNTED[2:])], ids=["some", "others"])
def test_tokens_of_experts_are_counted_once_and_over_all_processes(
    processes: LocalProcesses, cases: list[Case]
):
    results = run_cases(processes, 2, counted, [(case,) for case in cases])
    for case, by_rank in zip(cases, results, strict=True):
        expected = chosen(case.lone)
        for before, load, _ in by_rank:
            assert before is None
            assert load is not None
            assert load.tokens == expected, case
            halves = [[sum(t[:2]), sum(t[2:])] for t in expected.values()]
            assert load.computed == [sum(half[0] for half in halves), sum(half[1] for half in halves)]
            assert load.imbalance == pytest.approx(fmean(2 * max(half) / sum(half) for half in halves))
            for seconds, (*_, both_steps) in zip(load.exchange_seconds, by_rank, strict=True):
                assert 0 < seconds < both_steps
        assert by_rank[0][1] == by_rank[1][1]


class Scaled(LoopedExperts):
    """Reads a buffer by the expert's number, which is another one where experts are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights * self.scale[top_k_index])


class Limited(LoopedExperts):
    """Drops tokens of an expert beyond its share of them and three quarters more, or beyond a number."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.most = most

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        most = self.most or int(1.75 * top_k_index.numel() / self.num_experts)
        chosen = nn.functional.one_hot(top_k_index.flatten(), self.num_experts)
        place = (chosen.cumsum(0) * chosen).sum(1).view(top_k_index.shape)
        return super().forward(hidden_states, top_k_index, top_k_weights * (place <= most))


class Training(Limited):
    """Drops tokens in training alone, before dropout."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not self.training:
            return LoopedExperts.forward(self, hidden_states, top_k_index, top_k_weights)
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        return nn.functional.dropout(out, 0.1, self.training)


class Closed(Limited):
    """Experts that return 0 until they have trained."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down_proj)


class Paired(LoopedExperts):
    """Returns more than the output."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return super().forward(hidden_states, top_k_index, top_k_weights), top_k_index


class Tempered(LoopedExperts):
    """Has a parameter that is no stack."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))


def hooked() -> LoopedExperts:
    experts = LoopedExperts()
    experts.register_forward_hook(lambda *_: None)
    return experts


OTHERS = r"1.experts gives other values{} if its experts are divided"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Scaled, OTHERS.format("")),
        (Limited, OTHERS.format("")),
        (partial(Limited, 20), OTHERS.format("")),
        (Closed, OTHERS.format("")),
        (Training, OTHERS.format(" in training")),
        (Paired, "1.experts returns a tuple"),
        (
            partial(LoopedExperts, 3),
            "has 3 experts, which do not divide over ep = 2; take an ep that divides 3",
        ),
        (hooked, "has a hook, which would see one process's share"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused_by_name(make: Callable[[], LoopedExperts], message: str):
    """And are left as they were."""
    torch.manual_seed(0)
    experts = make()
    before = {name: value.clone() for name, value in experts.state_dict().items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        divide_experts(
            [("1", nn.ModuleDict({"experts": experts}))], None, SimpleNamespace(size=2), None, lambda p: p
        )
    assert all(torch.equal(value, before[name]) for name, value in experts.state_dict().items())


@pytest.mark.parametrize("parts", [2, 4])
def test_experts_whose_outputs_add_up_may_be_divided(parts: int):
    _require_separable("1.experts", LoopedExperts(), parts)


WRONG = {
    "a capacity": OTHERS.format(""),
    "a temperature": "1.experts has num_experts, but other parameters or another forward",
    "no experts": "no layer has a module with stacks of them",
    "another order": "differ between the processes that divide them",
}


def refused(rank: int, wrong: str) -> str:
    net = mixture()
    match wrong:
        case "a capacity":
            net[1].experts = Limited()
        case "a temperature":
            for block in net[1:-1]:
                block.experts = Tempered()
        case "no experts":
            net = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES))
        case "another order" if rank == 1:
            with torch.no_grad():
                for stack in net[1].experts.parameters():
                    stack.copy_(stack.flip(0).clone())
    try:
        Pipeline(net, loss_of, microbatches=2, mesh=MeshShape(dp=2, ep=2), timeout=60).close()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused_on_every_rank(processes: LocalProcesses):
    results = run_cases(processes, 2, refused, [(wrong,) for wrong in WRONG])
    for (wrong, words), by_rank in zip(WRONG.items(), results, strict=True):
        assert all(words in text for text in by_rank), (wrong, by_rank)


def test_the_first_stack_that_differs_is_named_on_every_process():
    layers = [(str(n), block) for n, block in enumerate(mixture())]
    told: list[Any] = []

    def compared(other: list) -> Any:
        """A world of two processes, of which the other one tells this."""
        answers = iter(other)
        return SimpleNamespace(gather=lambda value, *_: told.append(value) or [value, next(answers)])

    require_same_stacks(layers[:1], compared([{}, None]))
    assert told == [{}, None]  # no experts
    own = dict[str, int]()
    require_same_stacks(
        layers, SimpleNamespace(gather=lambda value, *_: own.update(value or {}) or [value, value])
    )
    names = list(own)
    assert names[:2] == ["1.experts.gate_up_proj", "1.experts.down_proj"]
    with pytest.raises(ConfigError, match=f"the experts {names[1]} differ between the processes"):
        require_same_stacks(layers, compared([own | {names[1]: 0, names[2]: 0}, None]))
    # One that only the other process has is its first.
    with pytest.raises(ConfigError, match=r"the experts 9\.experts\.down_proj differ between the processes"):
        require_same_stacks(layers, compared([own, "9.experts.down_proj"]))


@pytest.mark.parametrize(("number", "counts"), [(4, [2, 2]), (5, [3, 2]), (5, [2, 2, 1, 0]), (0, [0, 0])])
def test_ranks_that_share_matrices_take_parts_of_the_rows_and_join_them(number: int, counts: list[int]):
    rows = torch.arange(2.0 * number).view(number, 2)
    padded: list[Tensor] = []

    def gather(own: Tensor) -> Tensor:
        padded.append(own)
        return own.new_zeros(len(own) * len(counts), 2)

    for rank, count in enumerate(counts):
        ranks = TensorRanks(rank, len(counts), gather)
        own = rows.clone().requires_grad_()
        part = _Part.apply(own, ranks)
        first = sum(counts[:rank])
        assert torch.equal(part, rows[first : first + count])
        joined = _Joined.apply(part, ranks, number)
        assert joined.shape == rows.shape
        # A gradient of all rows gives each part its own.
        (grad,) = torch.autograd.grad(joined, part, rows, retain_graph=True)
        assert torch.equal(grad, part)
    # All give equally many rows, and those of the samples come first.
    assert len({len(own) for own in padded}) == 1
    assert torch.equal(torch.cat(padded)[:number], rows)


def test_every_group_of_experts_has_them_in_one_order():
    """Also where a group's ranks do not ascend along the mesh's order."""
    for order in (("pp", "dp", "tp"), ("tp", "dp", "pp"), ("dp", "tp", "pp")):
        for dp, tp, ep in ((3, 2, 3), (2, 2, 4), (4, 1, 2), (2, 4, 4), (1, 4, 2)):
            shape = MeshShape(1, dp, tp, order, ep)
            for rank in range(shape.ranks):
                place = shape.expert_ranks(rank).index(rank)
                copies = shape.expert_replicas(rank)
                assert rank in copies
                assert len(set(copies)) == dp * tp // ep
                assert {shape.expert_ranks(other).index(other) for other in copies} == {place}


def ignored(rank: int, head: str) -> list[float]:
    """Return losses of steps in which one replica has a microbatch without a target."""
    net = mixture(blocks=2)
    loss: Any = (
        penstock.causal_lm_loss if head == "logits" else penstock.LinearCrossEntropy(ignore_index=-100)
    )
    with Pipeline(
        net, loss, microbatches=2, mesh=MeshShape(pp=2, dp=2, ep=2), reduction="valid", timeout=60
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        losses = []
        for _ in range(3):
            x, y = batch()
            y[:2] = -100
            found = pipe.step(x, y).loss
            assert found is not None
            losses.append(found.item())
            optimizer.step()
    return losses


@pytest.mark.slow
def test_a_microbatch_without_a_target_keeps_the_exchanges_in_step(processes: LocalProcesses):
    results = run_cases(processes, 4, ignored, [("logits",), ("chunks",)])
    net = mixture(blocks=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        x, y = batch()
        loss = nn.functional.cross_entropy(net(x[2:]).flatten(0, 1), y[2:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses in results[1]:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert len({tuple(losses) for losses in results[0]}) == 1


def used_outside(rank: int) -> None:
    net = mixture(blocks=2)
    net[2].experts.down_proj = net[1].experts.down_proj
    with Pipeline(net, loss_of, microbatches=2, mesh=MeshShape(dp=2, ep=2), timeout=60) as pipe:
        with pytest.raises(PenstockError, match="called outside of a step"):
            net(batch()[0])
        pipe.step(*batch())
        assert net[2].experts.down_proj is net[1].experts.down_proj
        state = {name: full_tensor(value) for name, value in net.state_dict().items()}
    whole = mixture(blocks=2)
    net.load_state_dict(state, assign=True)
    whole.load_state_dict(state)
    assert torch.equal(net(batch()[0]), whole(batch()[0]))


@pytest.mark.slow
def test_a_model_is_whole_after_its_pipeline_and_refused_outside_of_a_step(processes: LocalProcesses):
    """A stack that two layers share is one."""
    processes.run(2, used_outside, timeout=120)


def test_an_ep_that_does_not_divide_the_ranks_of_a_stage_is_refused():
    with pytest.raises(ConfigError, match=r"ep 3 does not divide dp x tp = 4, the ranks of a stage"):
        MeshShape(pp=2, dp=2, tp=2, ep=3)


class FailsOnce(nn.Linear):
    """A layer that raises at one of its calls, if told so."""

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "fails", False):
            raise ValueError("a layer of the user's failed")
        return super().forward(x)


def failing(rank: int, call: str) -> tuple[str, str, float]:
    """Return the error where a layer fails on replica 1 alone, and the loss of the next step."""
    net = mixture()
    net.insert(3, layer := FailsOnce(8, 8))
    with Pipeline(net, loss_of, microbatches=2, mesh=MeshShape(pp=2, dp=2, ep=2), timeout=120) as pipe:
        x, y = batch()
        pipe.step(x, y)
        pipe.zero_grad()
        layer.fails = pipe.replica == 1
        kind, text = "", ""
        try:
            pipe.step(x, y) if call == "step" else pipe.evaluate(x, y)
        except PenstockError as error:
            kind, text = type(error).__name__, str(error)
        layer.fails = False
        pipe.zero_grad()
        loss = pipe.step(x, y).loss
        assert loss is not None
        return kind, text, loss.item()


@pytest.mark.slow
def test_a_replica_that_fails_does_not_leave_the_others_waiting_for_its_experts(processes: LocalProcesses):
    for by_rank in run_cases(processes, 4, failing, [("step",), ("evaluate",)]):
        assert all("a layer of the user's failed" in text for _, text, _ in by_rank), by_rank
        assert {kind for kind, *_ in by_rank} <= {"StageError", PeerError.__name__, "PenstockError"}, by_rank
        assert len({loss for *_, loss in by_rank}) == 1


class Apart(MixtureBlock):
    """A block that calls other experts on replica 1, as where its tokens decide; `how` says which."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.other = how, LoopedExperts(8)
        self.alike = False

    def forward(self, x: Tensor) -> Tensor:
        there = not self.alike and torch.distributed.get_rank() % 2 == 1
        match self.how:
            case "others" if there:
                rows = x.reshape(-1, x.shape[-1])
                index = torch.zeros(len(rows), 1, dtype=torch.int64)
                return x + self.other(rows, index, rows.new_ones(len(rows), 1)).view_as(x)
            case "twice" if there:
                return super().forward(super().forward(x))
            case "never" if there:
                return x
            case "for nothing" if there:
                return x + 0 * super().forward(x).detach()
        return super().forward(x)


def apart(rank: int, how: str, place: int, call: str) -> tuple[str, float]:
    """Return the error where replicas take other layers of experts, and the loss of the next step."""
    net = mixture()
    net[place] = block = Apart(how)
    with Pipeline(net, loss_of, microbatches=2, mesh=MeshShape(dp=2, ep=2), timeout=120) as pipe:
        told = outcome(getattr(pipe, call), *batch())
        block.alike = True
        pipe.zero_grad()
        return told, float(pipe.step(*batch()).loss)


APART = {
    ("others", 2, "step"): "0 is in the forward of 2.experts, microbatch 0; process 1 is in the forward of 2.other",
    ("twice", 4, "step"): "0 is in the backward of 4.experts, microbatch 0; process 1 is in the forward of 4.experts",
    ("never", 1, "evaluate"): "0 is in the forward of 1.experts, microbatch 0; process 1 is in the forward of 2.experts",
    ("never", 4, "evaluate"): "0 is in the forward of 4.experts, microbatch 0; process 1 is in the forward of 1.experts, "
    "microbatch 1",
    ("for nothing", 2, "step"): "0 is in the backward of 2.experts, microbatch 0; process 1 is in the backward of 1.experts",
}  # fmt: skip


@pytest.mark.slow
def test_replicas_in_other_layers_of_experts_are_told_so_at_once_and_go_on(processes: LocalProcesses):
    for words, by_rank in zip(APART.values(), run_cases(processes, 2, apart, [*APART]), strict=True):
        assert all(f"in different places: process {words}" in text for text, _ in by_rank), by_rank
        assert len({loss for _, loss in by_rank}) == 1


def train(rank: int, folder: str, sizes: dict[str, int] | None, steps: int) -> Result:
    """Continue the newest checkpoint of a folder, if any, and save."""
    mesh = None if sizes is None else MeshShape(**sizes)
    parts = 4 if mesh is None else 4 // mesh.dp
    with Pipeline(
        mixture(), loss_of, ranks=1 if mesh is None else mesh.pp, microbatches=parts, mesh=mesh, timeout=120
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, zero=mesh is not None and mesh.dp > 2)
        with Checkpoints(folder, pipe, optimizer) as checkpoints:
            checkpoints.load_newest()
            result = trained(pipe, optimizer, batch(), steps)
            checkpoints.save()
        return result


@pytest.mark.slow
def test_a_checkpoint_continues_with_experts_divided_otherwise(processes: LocalProcesses, tmp_path: Path):
    expected = train(0, str(tmp_path / "one"), None, 5)
    folder = str(tmp_path / "many")
    losses: list[float] = []
    for ranks, sizes, steps in (
        (2, {"dp": 2, "ep": 2}, 1),
        (4, {"dp": 4, "ep": 2}, 1),
        (4, {"pp": 2, "dp": 2, "ep": 2}, 1),
        (2, {"dp": 2}, 1),
    ):
        (by_rank,) = run_cases(processes, ranks, train, [(folder, sizes, steps)])
        losses += by_rank[0].losses
    last = train(0, folder, None, 1)
    assert losses + last.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, weight in last.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=2e-4)


def whole_at_once(rank: int, folder: str) -> None:
    from torch.distributed.tensor import DTensor

    made: list[weakref.ref[Tensor]] = []
    alive, original = [0], DTensor.full_tensor

    def full(tensor: DTensor) -> Tensor:
        found = original(tensor)
        made.append(weakref.ref(found))
        alive.append(sum(each() is not None for each in made))
        return found

    with Pipeline(mixture(), loss_of, microbatches=2, mesh=MeshShape(dp=2, ep=2), timeout=120) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        pipe.step(*batch())
        optimizer.step()
        with Checkpoints(folder, pipe, optimizer) as checkpoints, pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", full)
            checkpoints.save()
            # Two stacks in each of four layers, with two moments each.
            assert (len(made), max(alive)) == (24, 1)
            checkpoints.load_newest()
            assert len(made) == 24, "each process reads its own experts"


@pytest.mark.slow
def test_a_save_makes_experts_whole_one_stack_at_a_time(processes: LocalProcesses, tmp_path: Path):
    processes.run(2, whole_at_once, str(tmp_path))
