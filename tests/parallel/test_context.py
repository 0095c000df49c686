"""Samples divided over processes: losses, gradients and weights are those of one process, to the order of sums."""

from __future__ import annotations

import re
import warnings
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock import (
    ExecutionOptions,
    LinearCrossEntropy,
    MeshShape,
    Pipeline,
    PipelineOptimizer,
    sequence_positions,
)
from penstock.base.errors import BatchError, ConfigError, PenstockError
from penstock.parallel.context import attention as context
from penstock.parallel.context.attention import SequencePart
from penstock.parallel.context.samples import divide_samples
from penstock.runtime.workers.pool import LocalProcesses
from tests.parallel.trained import MICROBATCHES, Result, built_in, plain, require_same, tokens, trained
from tests.support.beside import SampleExchange, on_parts
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow

CLASSES, WIDTH, HEADS, ROWS, TOKENS = 17, 16, 4, 8, 32


class Positions(nn.Module):
    """Adds a learned vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.table(sequence_positions(x.shape[1]))
        return out


class Attention(nn.Module):
    """Attention with half as many key and value heads as query heads, and a feed-forward."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.causal = nn.LayerNorm(WIDTH), causal
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def by_head(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        y = self.norm(x)
        key, value = by_head(self.both(y)).chunk(2, 1)
        mixed = F.scaled_dot_product_attention(
            by_head(self.query(y)), key, value, is_causal=self.causal, enable_gqa=True
        )
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Counting(nn.Module):
    """Counts the positions of its tokens itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1])[None, :, None] / TOKENS


class Masked(nn.Module):
    """Attends by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = x[:, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)[:, 0]


def model(causal: bool = True, *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Attention(causal) for _ in range(4)]
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), Positions(), *more, *blocks, nn.Linear(WIDTH, CLASSES))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(ignored: bool = False, sequence: int = TOKENS) -> tuple[Tensor, Tensor]:
    x, y = tokens(ROWS, sequence, CLASSES)
    if ignored:  # other numbers in each part, and in each microbatch
        draw = torch.rand(y.shape, generator=torch.Generator().manual_seed(2))
        y[draw < torch.linspace(0, 0.9, sequence)] = -100
        y[0] = -100
    return x, y


class Case(NamedTuple):
    sizes: dict[str, int]
    schedule: str = "1f1b"
    recompute: str = "none"
    zero: bool = False
    causal: bool = True
    ignored: bool = False
    chunked: bool = False
    least: int = context._LEAST  # bytes of a group of heads


def divided(rank: int, case: Case) -> tuple[Result, Tensor, float]:
    """Train; and return the probabilities of the targets and the loss of an evaluation after it."""
    context._LEAST = case.least
    with Pipeline(
        model(case.causal), LinearCrossEntropy() if case.chunked else loss_of, timeout=120,
        microbatches=MICROBATCHES, mesh=MeshShape(**case.sizes),
        schedule=case.schedule, recompute=case.recompute, reduction="valid" if case.ignored else "mean",
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, zero=case.zero)
        result = trained(pipe, optimizer, batch(case.ignored))
        x, y = batch(case.ignored)
        probabilities, evaluated = pipe.log_probs(x, y.clamp(min=0)), pipe.evaluate(x, y).loss
        assert evaluated is not None
    return result, probabilities, evaluated.item()


TWO = [
    Case({"cp": 2}),
    Case({"cp": 2}, schedule="zb-h1", recompute="full", zero=True),
    Case({"cp": 2}, causal=False, least=0),
    Case({"cp": 2}, least=0),
    Case({"cp": 2}, ignored=True, chunked=True),
]
FOUR = [
    Case({"pp": 2, "cp": 2}),
    Case({"pp": 2, "cp": 2}, schedule="zb-v", ignored=True, least=0),
    Case({"cp": 4}, zero=True),
    Case({"dp": 2, "cp": 2}, recompute="full", ignored=True, least=0),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, TWO[:1]), *slow((2, TWO[1:]), (4, FOUR[:2])), *exhaustive((4, FOUR[2:]))],
    ids=["one", "two", "four, pp", "four"],
)
def test_losses_gradients_and_weights_are_those_of_one_process(
    processes: LocalProcesses, size: int, cases: list[Case]
):
    results = run_cases(processes, size, divided, [(case,) for case in cases])
    for case, ranks in zip(cases, results, strict=True):
        net, (x, y) = model(case.causal), batch(case.ignored)
        expected = plain(net, loss_of, (x, y), MICROBATCHES * case.sizes.get("dp", 1))
        require_same(case, [result for result, _, _ in ranks], expected)
        with torch.no_grad():
            logits = net(x)
        wanted = logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
        for result, probabilities, evaluated in ranks:
            torch.testing.assert_close(result.each, expected.each, rtol=1e-4, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(probabilities, wanted, rtol=1e-3, atol=2e-4)
            assert evaluated == pytest.approx(loss_of(logits, y).item(), rel=1e-4), case


@pytest.mark.parametrize(
    ("parts", "causal", "least"), [(2, True, context._LEAST), (2, False, 0), (4, True, 0)]
)
def test_layers_with_parts_of_samples_give_what_they_give_for_whole_ones(
    monkeypatch: pytest.MonkeyPatch, parts: int, causal: bool, least: int
):
    """And gradients of each part, which add up to those of whole samples; `least` is the bytes of a group of heads."""
    monkeypatch.setattr(context, "_LEAST", least)
    (x, _), whole, *nets = batch(), *(model(causal) for _ in range(parts + 1))

    def computed(part: SequencePart, exchange: SampleExchange) -> Tensor:
        net = nets[part.index]
        divide_samples([(str(n), layer) for n, layer in enumerate(net)], part, exchange)
        out: Tensor = net(part.cut(x))
        out.sin().sum().backward()
        return out

    out = torch.stack(on_parts(parts, computed))
    expected = whole(x)
    expected.sin().sum().backward()
    torch.testing.assert_close(SequencePart(0, parts).join(out, 1), expected)
    for parameter, *others in zip(whole.parameters(), *(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(sum(p.grad for p in others), parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_built_in_model_has_the_positions_of_whole_samples(processes: LocalProcesses):
    expected = built_in(0, None)
    cases = [({"cp": 2, "tp": 2}, "1f1b"), ({"pp": 2, "cp": 2}, "zb-h1")]
    for case, ranks in zip(cases, run_cases(processes, 4, built_in, cases), strict=True):
        require_same(case, ranks, expected)


class Whole(nn.Module):
    """A model with a forward of its own, which the pipeline makes layers from."""

    def __init__(self) -> None:
        super().__init__()
        net = model()
        self.table, self.positions, self.head = net[0], net[1], net[-1]
        self.blocks = nn.ModuleList(net[2:-1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.positions(self.table(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def own_forward(rank: int) -> tuple[float, list[str]]:
    with (
        warnings.catch_warnings(record=True) as told,
        Pipeline(Whole(), loss_of, microbatches=2, mesh=MeshShape(cp=2), timeout=60) as pipe,
    ):
        warnings.simplefilter("always")
        loss = pipe.step(*batch()).loss
        assert loss is not None
        return loss.item(), [str(each.message) for each in told]


@pytest.mark.slow
def test_a_model_with_a_forward_of_its_own_is_divided_and_compared_on_its_part(processes: LocalProcesses):
    x, y = batch()
    expected = loss_of(model()(x), y).item()
    for loss, told in processes.run(2, own_forward):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert not told


class Checkpointed(nn.Module):
    """Runs attention again in the backward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Counting, r"layer 2 \(Counting\) gives other values if the tokens of its samples are divided"),
        (Masked, r"a mask of shape \(\d+, \d+\) is not divided"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused_by_name(layer: type[nn.Module], message: str):
    x = torch.randn(ROWS, TOKENS, WIDTH)

    def first_call(part: SequencePart, exchange: SampleExchange) -> None:
        made = layer()
        divide_samples([("2", made)], part, exchange)
        made(part.cut(x))

    for error in on_parts(2, first_call):
        assert isinstance(error, PenstockError), error
        assert re.search(message, str(error)), error


def wrong(rank: int, what: str) -> str:
    layers = {each.__name__: each for each in (Counting, Checkpointed, Reentrant)}
    net = model(True, *([layers[what]()] if what in layers else []))
    execution = ExecutionOptions(compile="block" if what == "compile" else "none")
    try:
        with Pipeline(
            net, loss_of, microbatches=2, mesh=MeshShape(cp=2), timeout=60, execution=execution
        ) as pipe:
            pipe.step(*batch(sequence=30 if what == "length" else TOKENS))
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


WRONG = {
    "Counting": r"layer 2 \(Counting\) gives other values",
    "Checkpointed": "attention runs within torch.utils.checkpoint.*recompute='full'",
    "Reentrant": "attention runs within torch.utils.checkpoint.*recompute='full'",
    "length": "^BatchError: a sequence of 30 tokens does not divide into 2 x cp = 4 chunks; pad it to 32",
    "compile": "^ConfigError: compile='block' cannot be used with cp = 2",
}


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused_by_name_on_every_rank(processes: LocalProcesses):
    results = run_cases(processes, 2, wrong, [(what,) for what in WRONG])
    for message, ranks in zip(WRONG.values(), results, strict=True):
        for told in ranks:
            assert re.search(message, told), told


class Recorded:
    """Exchange of equal parts in one process, which records what it is asked to do."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.masks: context.Masks = {}

    def start_gather(self, part: Tensor) -> context.Finish:
        self.told.append("gather")
        return lambda: self._end("gathered", torch.stack([part, part]))

    def start_sum(self, whole: Tensor) -> tuple[Tensor, context.Finish]:
        self.told.append("sum")
        total = torch.full_like(whole[0], float("nan"))  # until it is waited for
        return total, lambda: self._end("summed", total.copy_(whole.sum(0)))

    def _end(self, what: str, value: Tensor) -> Tensor:
        self.told.append(what)
        return value


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, told):
        ctx.told = told
        told.append("attention")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.told.append("backward")
        return grad, None


@pytest.mark.parametrize("mask", ["none", "shared", "of each head"])
def test_the_next_heads_keys_come_while_attention_is_computed(monkeypatch: pytest.MonkeyPatch, mask: str):
    """And the bits are those of all heads at once."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 4, requires_grad=True) for heads in (8, 4, 4))
    masks = {"none": None, "shared": torch.randn(2, 1, 6, 12), "of each head": torch.randn(2, 8, 6, 12)}
    exchange, found = Recorded(), []

    def attention(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None):
        return _Noted.apply(
            F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True), exchange.told
        )

    division = context.Division(SequencePart(0, 2), exchange)
    for least in (1 << 20, 0):
        monkeypatch.setattr(context, "_LEAST", least)
        exchange.told.clear()
        out = division.attend(query, key, value, masks[mask], attention, -3)
        found.append((out, *torch.autograd.grad(out.sin().sum(), (query, key, value))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # First where the processes are.
    assert exchange.told == [
        *["gather", "gathered"] * 2, *["gather", "attention", "gathered"] * 3, "attention",
        *["backward", "sum"] * 4, *["summed"] * 4,
    ]  # fmt: skip


@pytest.mark.parametrize(("least", "groups"), [(768, 4), (769, 2), (1536, 2), (1537, 1)])
def test_heads_are_divided_as_far_as_each_group_is_worth_a_message(
    monkeypatch: pytest.MonkeyPatch, least: int, groups: int
):
    """Keys and values of both parts are 2 x 4 heads x 12 tokens x 8 numbers of 4 bytes: 3072."""
    monkeypatch.setattr(context, "_LEAST", least)
    exchange = Recorded()
    query, key, value = torch.zeros(2, 8, 6, 4), torch.zeros(2, 4, 6, 4), torch.zeros(2, 4, 6, 4)
    attention = partial(F.scaled_dot_product_attention, enable_gqa=True)
    context.Division(SequencePart(0, 2), exchange).attend(query, key, value, None, attention, -3)
    assert exchange.told.count("gather") == 1 + groups  # the first one is of the place


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_a_layer_may_ask_for_all_tokens_and_their_gradients_add_up(dim: int):
    whole = torch.randn(8, 8, 8)

    def asked(part: SequencePart, exchange: SampleExchange) -> Tensor:
        own = part.cut(whole, dim).requires_grad_()
        out = context.Division(part, exchange).whole(own, dim)
        (gradient,) = torch.autograd.grad((out * whole * (part.index + 1)).sum(), own)
        torch.testing.assert_close(gradient, part.cut(3 * whole, dim))  # of both parts
        return out

    for out in on_parts(2, asked):
        assert torch.equal(out, whole)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_causal_attention_of_a_part_is_that_part_of_the_whole_attention(parts):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, HEADS, 4 * parts, 3, generator=generator) for _ in range(3))
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    for index in range(parts):
        part = SequencePart(index, parts)
        division = SimpleNamespace(part=part, exchange=SimpleNamespace(masks={}))
        own = context._causal_attention(division, {}, part.cut(query, -2), key, value, None)
        torch.testing.assert_close(own, part.cut(whole, -2))
        # One mask for the chunk in the first half of the sample and one for the other.
        assert sorted(keys for _, keys, _ in division.exchange.masks) == [
            2 * index + 2,
            4 * parts - 2 * index,
        ]


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_sequence_join_to_the_whole(parts: int):
    whole = torch.arange(2 * 16 * 3).view(2, 16, 3)
    every = [SequencePart(index, parts) for index in range(parts)]
    cut = torch.stack([part.cut(whole) for part in every])
    assert torch.equal(every[0].join(cut, 1), whole)
    assert torch.equal(every[0].divide(whole, 1), cut)
    with pytest.raises(
        BatchError, match=rf"a sequence of 15 tokens .* 2 x cp = {2 * parts} chunks; pad it to 16 with"
    ):
        every[0].cut(whole[:, 1:])
    positions = torch.stack([part.positions(16 // parts) for part in every])
    assert torch.equal(positions, torch.stack([part.cut(torch.arange(16)[None])[0] for part in every]))


def test_a_mesh_counts_parts_of_samples_as_replicas_and_keeps_its_order():
    shape = MeshShape(pp=2, dp=2, tp=2, cp=2)
    assert (shape.ranks, shape.replicas, str(shape)) == (16, 4, "pp 2 x dp 2 x cp 2 x tp 2")
    assert shape.order == ("pp", "dp", "cp", "tp")
    assert MeshShape(order=("tp", "dp", "pp")).order == ("tp", "dp", "cp", "pp")
    assert shape.line(1, "cp") == [1, 3]
    assert shape.replica_ranks(1) == [1, 3, 5, 7]
    with pytest.raises(ConfigError, match="ep 3 does not divide dp x cp x tp = 8"):
        MeshShape(dp=2, tp=2, cp=2, ep=3)


def test_positions_count_up_where_samples_are_whole():
    assert torch.equal(sequence_positions(5), torch.arange(5))
