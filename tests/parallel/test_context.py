"""Samples divided over processes: losses, gradients and weights are those of one process, to the order of sums."""

from __future__ import annotations

import re
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock import (
    ExecutionOptions,
    LinearCrossEntropy,
    MeshShape,
    Pipeline,
    PipelineOptimizer,
    add_loss,
    sequence_positions,
)
from penstock.base.errors import BatchError, ConfigError, PenstockError
from penstock.huggingface.loss import causal_lm_loss
from penstock.parallel import context
from penstock.parallel.context import SequencePart
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.groups import run_cases

CLASSES, WIDTH, HEADS, ROWS, TOKENS = 17, 16, 4, 8, 32
MICROBATCHES, STEPS = 2, 5
Tensors = dict[str, Tensor]


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


class Shift(nn.Module):
    """Mixes each token with the one before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)


class Masked(nn.Module):
    """Attends by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = x[:, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)[:, 0]


class Adding(nn.Module):
    """Adds a loss."""

    def forward(self, x: Tensor) -> Tensor:
        add_loss(x.square().mean(), "size")
        return x


class Failing(nn.Module):
    """Fails on rank 1 in training."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and dist.get_rank() == 1:
            raise ValueError("out of luck")
        return x


def model(causal: bool = True, *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Attention(causal) for _ in range(4)]
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), Positions(), *more, *blocks, nn.Linear(WIDTH, CLASSES))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(ignored: bool = False, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(CLASSES, (2, ROWS, tokens), generator=generator)
    if ignored:  # other numbers in each part, and in each microbatch
        y[torch.rand(y.shape, generator=generator) < torch.linspace(0, 0.9, tokens)] = -100
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


class Result(NamedTuple):
    losses: list[float]
    each: Tensor
    gradients: Tensors
    weights: Tensors
    probabilities: Tensor
    evaluated: float


def plain(case: Case) -> Result:
    net, losses, first = model(case.causal), [], Tensors()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    count = MICROBATCHES * case.sizes.get("dp", 1)
    for _ in range(STEPS):
        x, y = batch(case.ignored)
        every = [loss_of(net(a), b) for a, b in zip(x.chunk(count), y.chunk(count), strict=True)]
        weigh = [(b != -100).sum() / (y != -100).sum() for b in y.chunk(count)]
        total = sum(a * w for a, w in zip(every, weigh, strict=True))
        total.backward()
        first = first or {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    with torch.no_grad():
        logits = net(x)
        probabilities = logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    return Result(
        losses, torch.stack(every).detach(), first, weights, probabilities, loss_of(logits, y).item()
    )


def divided(rank: int, case: Case) -> Result:
    context._LEAST = case.least
    with Pipeline(
        model(case.causal), LinearCrossEntropy() if case.chunked else loss_of, timeout=120,
        microbatches=MICROBATCHES, mesh=MeshShape(**case.sizes),
        schedule=case.schedule, recompute=case.recompute, reduction="valid" if case.ignored else "mean",
    ) as pipe:  # fmt: skip
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, zero=case.zero)
        losses, first = [], Tensors()
        for _ in range(STEPS):
            result = pipe.step(*batch(case.ignored))
            assert result.loss is not None
            assert result.losses is not None
            losses.append(result.loss.item())
            first = first or {
                n: full_tensor(p.grad).clone() for n, p in pipe.named_parameters() if p.grad is not None
            }
            optimizer.step()
        weights = {n: full_tensor(p.detach()).clone() for n, p in pipe.named_parameters()}
        x, y = batch(case.ignored)
        probabilities = pipe.log_probs(x, y.clamp(min=0))
        evaluated = pipe.evaluate(x, y).loss
        assert evaluated is not None
    return Result(losses, result.losses, first, weights, probabilities, evaluated.item())


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


@pytest.mark.slow
@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["two", "four"])
def test_losses_gradients_and_weights_are_those_of_one_process(
    processes: LocalProcesses, size: int, cases: list[Case]
):
    results = run_cases(processes, size, divided, [(case,) for case in cases])
    for case, ranks in zip(cases, results, strict=True):
        expected = plain(case)
        seen: dict[str, list[Tensor]] = {}
        for got in ranks:
            assert got.losses == pytest.approx(expected.losses, rel=1e-5), case
            torch.testing.assert_close(got.each, expected.each, rtol=1e-4, atol=1e-5, equal_nan=True)
            torch.testing.assert_close(got.probabilities, expected.probabilities, rtol=1e-3, atol=1e-4)
            assert got.evaluated == pytest.approx(expected.evaluated, rel=1e-4), case
            for name, gradient in got.gradients.items():
                torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6)
            for name, weight in got.weights.items():
                seen.setdefault(name, []).append(weight)
                torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=1e-4)
        assert seen.keys() == expected.weights.keys()
        for name, copies in seen.items():
            assert all(torch.equal(copies[0], other) for other in copies), (case, name)


CONFIG = ModelConfig(vocabulary=CLASSES + 1, width=16, layers=4, heads=4, kv_heads=2, hidden=32)
BUILT_IN = [{"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}]


def built_in(rank: int, sizes: dict[str, int], schedule: str) -> tuple[list[float], Tensors]:
    mesh = {"mesh": MeshShape(**sizes)} if sizes else {"ranks": 1}
    with Pipeline(
        layers(CONFIG), next_token_loss, microbatches=MICROBATCHES, timeout=120, schedule=schedule, **mesh
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        losses = []
        for _ in range(STEPS):
            loss = pipe.step(*batch()).loss
            assert loss is not None
            losses.append(loss.item())
            optimizer.step()
        return losses, {n: full_tensor(p.detach()).clone() for n, p in pipe.named_parameters()}


@pytest.mark.slow
def test_the_built_in_model_has_the_positions_of_whole_samples(processes: LocalProcesses):
    losses, weights = built_in(0, {}, "1f1b")
    cases = [(BUILT_IN[0], "1f1b"), (BUILT_IN[1], "zb-h1")]
    for case, ranks in zip(cases, run_cases(processes, 4, built_in, cases), strict=True):
        for got in ranks:
            assert got[0] == pytest.approx(losses, rel=1e-5), case
            for name, weight in got[1].items():
                torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-4)


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
def test_a_model_with_a_forward_of_its_own_is_divided_and_not_compared_as_a_whole(processes: LocalProcesses):
    x, y = batch()
    expected = loss_of(model()(x), y).item()
    for rank, (loss, told) in enumerate(processes.run(2, own_forward)):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert any("processes divide its matrices, experts or samples" in text for text in told) == (
            rank == 0
        )


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


class Wrong(NamedTuple):
    what: str
    message: str
    kind: type[Exception]


WRONG = [
    Wrong(
        "counting",
        r"layer 2 \(Counting\) gives other values if the tokens of its samples are divided",
        PenstockError,
    ),
    Wrong(
        "shift",
        r"layer 2 \(Shift\) gives other values if the tokens of its samples are divided",
        PenstockError,
    ),
    Wrong("masked", r"a mask of shape \(\d+, \d+\) is not divided", PenstockError),
    Wrong(
        "length", r"a sequence of 30 tokens does not divide into 2 x cp = 4 chunks; pad it to 32", BatchError
    ),
    Wrong("checkpointed", "attention runs within torch.utils.checkpoint.*recompute='full'", PenstockError),
    Wrong("reentrant", "attention runs within torch.utils.checkpoint.*recompute='full'", PenstockError),
    Wrong("ignored", "a target has -100, .* give reduction='valid'", PenstockError),
    Wrong("compile", r"compile='block' cannot be used with cp = 2", ConfigError),
]
LAYERS: dict[str, type[nn.Module]] = {
    "counting": Counting, "shift": Shift, "masked": Masked, "adding": Adding, "failing": Failing,
    "checkpointed": Checkpointed, "reentrant": Reentrant,
}  # fmt: skip


def wrong(rank: int, case: Wrong) -> str:
    net = model(True, *([LAYERS[case.what]()] if case.what in LAYERS else []))
    if case.what.startswith("no positions"):
        del net[1]
    if case.what.endswith("some"):
        with Pipeline(model(), loss_of, microbatches=2, mesh=MeshShape(cp=2), timeout=60) as pipe:
            for _ in range(2):
                pipe.step(*batch())
    try:
        with Pipeline(
            net, causal_lm_loss if case.what == "shifted loss" else loss_of,
            microbatches=2, mesh=MeshShape(cp=2), timeout=60,
            execution=ExecutionOptions(compile="block") if case.what == "compile" else ExecutionOptions(),
        ) as pipe:  # fmt: skip
            x, y = batch(tokens=30 if case.what == "length" else TOKENS)
            if case.what == "ignored":  # all that the first step compares, so it finds nothing
                y[:, : TOKENS // 2] = -100
            pipe.step(x, y)
    except case.kind as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused_by_name_on_every_rank(processes: LocalProcesses):
    for case, ranks in zip(WRONG, run_cases(processes, 2, wrong, [(case,) for case in WRONG]), strict=True):
        for message in ranks:
            assert re.search(case.message, message), (case, message)


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
    assert exchange.told == [
        *["gather", "gathered"], *["gather", "attention", "gathered"] * 3, "attention",
        *["backward", "sum"] * 4, *["summed"] * 4,
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_sequence_join_to_the_whole(parts: int):
    whole = torch.arange(2 * 16 * 3).view(2, 16, 3)
    every = [SequencePart(index, parts) for index in range(parts)]
    cut = torch.stack([part.cut(whole) for part in every])
    assert torch.equal(every[0].join(cut, 1), whole)
    assert torch.equal(every[0].divide(whole, 1), cut)
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
