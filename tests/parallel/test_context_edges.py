"""What dividing samples over processes must take or refuse: padding, statistics, far tokens, decisions and tables."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import MeshShape, Pipeline, sequence_positions
from penstock.base.errors import PenstockError
from penstock.parallel.context.attention import Division, SequencePart
from penstock.parallel.context.divided_loss import DividedLoss
from penstock.parallel.context.samples import divide_samples
from penstock.parallel.context.tokens import cut_tokens
from penstock.runtime.batch.loss_weights import counted_by, ignore_index_of
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.rng.isolated_rng import isolated_rng
from tests.parallel.test_context import CLASSES, ROWS, TOKENS, WIDTH, Attention, Positions, batch
from tests.support.beside import SampleExchange, on_parts
from tests.support.groups import outcome, run_cases

PAD = 0


def padded(sequence: int = TOKENS) -> tuple[Tensor, Tensor]:
    """A batch whose rows end in padding, which other parts have more of."""
    x, y = batch(sequence=sequence)
    y = y.clamp(min=1)
    for row, length in enumerate((3, 20, 32, 7, 12, 29, 5, 17)):
        y[row, length:] = PAD
    return x, y


def model(*more: nn.Module, zero: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES)
    if zero:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), Positions(), *more, Attention(), head)


class Flat(nn.Module):
    """Cross entropy of tokens."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**options)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.inner(logits.flatten(0, 1), labels.flatten())
        return out


def flat(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


WEIGHTS = torch.linspace(0.1, 3, CLASSES)


def unseen_padding(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != PAD
    each = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    return (each * counts).sum() / counts.sum()


def unseen_weights(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels, weight=WEIGHTS)


def unseen_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest loss; of equal ones, gradients are those of their mean."""
    return F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none").amax()


KNOWN: dict[str, Callable[..., Tensor]] = {
    "module": Flat(ignore_index=PAD),
    "keyword": partial(flat, ignore_index=PAD),
    "weights": Flat(weight=WEIGHTS),
    "both": Flat(weight=WEIGHTS, ignore_index=PAD),
    "weights of a partial": partial(flat, weight=WEIGHTS),
}
UNSEEN: dict[str, Callable[..., Tensor]] = {
    "padding": unseen_padding,
    "weights": unseen_weights,
    "losses": unseen_losses,
}


def first_loss(
    net: nn.Module, loss: Callable[..., Tensor], sequence: int = TOKENS, seed: int = 0
) -> tuple[float, Tensor]:
    """Return loss and a gradient of a step."""
    with Pipeline(net, loss, microbatches=2, mesh=MeshShape(cp=2), timeout=60, seed=seed) as pipe:
        found = pipe.step(*padded(sequence)).loss
        gradient = next(p.grad.clone() for p in pipe.parameters() if p.grad is not None)
    assert found is not None
    return found.item(), gradient


def known(rank: int, name: str) -> tuple[float, Tensor]:
    return first_loss(model(), KNOWN[name])


@pytest.mark.slow
def test_parts_weigh_by_what_the_loss_counts_in_them(processes: LocalProcesses):
    for (name, loss), ranks in zip(
        KNOWN.items(), run_cases(processes, 2, known, [(n,) for n in KNOWN]), strict=True
    ):
        net, (x, y) = model(), padded()
        expected = sum(loss(net(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)) / 2
        expected.backward()
        for found, gradient in ranks:
            assert found == pytest.approx(expected.item(), rel=1e-6), name
            torch.testing.assert_close(gradient, net[0].weight.grad)


class Norms(nn.Module):
    """Batch statistics of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return out


class Centred(nn.Module):
    """Mixes tokens in training only, after dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x - x.mean(1, keepdim=True), 0.5) if self.training else x


class Reaching(nn.Module):
    """Adds the token some places before."""

    def __init__(self, back: int) -> None:
        super().__init__()
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * F.pad(x, (0, 0, self.back, 0))[:, : x.shape[1]]


class ByPython(nn.Module):
    """Leaves its inner layer out by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if not self.training or random.random() < 0.5 else x


class ByTokens(ByPython):
    """Leaves its inner layer out by what its tokens are."""

    def forward(self, x: Tensor) -> Tensor:
        # In the first step both do, and in the second one of them.
        return self.inner(x) if not bool((x == 7).any()) else x


class TokenShift(nn.Module):
    """Takes a share of the token before, which begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, F.pad(x, (0, 0, 1, 0))[:, :-1], self.share)


class Convolves(nn.Module):
    """Adds a convolution over tokens, which a tiny factor hides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.factor = nn.Parameter(torch.full((WIDTH,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.inner(x.mT).mT


REFUSED: list[tuple[str, Callable[[], nn.Module], int, str]] = [
    ("statistics", Norms, TOKENS, r"layer 2 \(Norms\) in training lets tokens change each other"),
    ("centred", Centred, TOKENS, r"layer 2 \(Centred\) in training lets tokens change each other"),
    ("8 back", partial(Reaching, 8), TOKENS, r"layer 2 \(Reaching\) gives other values"),
    ("40 back", partial(Reaching, 40), 256, r"layer 2 \(Reaching\) .*lets tokens change each other"),
    ("share of 0", TokenShift, TOKENS, r"layer 2 \(TokenShift\) gives other values"),
    ("factor of 1e-6", Convolves, TOKENS, r"layer 2 \(Convolves\) gives other values"),
]


def hidden(sequence: int = TOKENS) -> Tensor:
    """What a layer gets."""
    return torch.randn(ROWS, sequence, WIDTH, generator=torch.Generator().manual_seed(0))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize(
    ("make", "sequence", "message"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_layers_that_mix_tokens_are_refused_by_name(
    make: Callable[[], nn.Module], sequence: int, message: str
):
    """And keep their state."""

    def first_call(part: SequencePart, exchange: SampleExchange) -> None:
        layer = layers[part.index]
        divide_samples([("2", layer)], part, exchange)
        layer(part.cut(hidden(sequence)))

    layers = [seeded(make), seeded(make)]
    before = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in layers]
    for error in on_parts(2, first_call):
        assert isinstance(error, PenstockError), error
        assert re.search(message, str(error)), error
    for layer, state in zip(layers, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


class Rounds(nn.Module):
    """Lets tokens change each other by no more than another order of sums does."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * x.mean(1, keepdim=True)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_what_rounding_explains_is_taken(scale: float):
    x = hidden() * scale

    def first_call(part: SequencePart, exchange: SampleExchange) -> Tensor:
        layer = Rounds()
        divide_samples([("2", layer)], part, exchange)
        out: Tensor = layer(part.cut(x))
        return out

    out = torch.stack(on_parts(2, first_call))
    torch.testing.assert_close(SequencePart(0, 2).join(out, 1), x, rtol=0, atol=1e-5 * scale)


def mixing(rank: int, make: Callable[[], nn.Module]) -> str:
    return outcome(first_loss, model(make()), flat)


@pytest.mark.slow
def test_processes_refuse_layers_that_mix_tokens_or_decide_by_themselves(processes: LocalProcesses):
    """Threads of one process share the numbers of Python's generator."""
    cases = {
        Norms: r"layer 2 \(Norms\) in training lets tokens change each other",
        ByPython: r"layer 2 \(ByPython\) draws from random or numpy.random",
    }
    results = run_cases(processes, 2, mixing, [(make,) for make in cases])
    for message, ranks in zip(cases.values(), results, strict=True):
        assert all(re.search(message, told) for told in ranks), ranks


def mean_of_samples(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over samples of the mean over their tokens that count."""
    each = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    counts = labels != -100
    return ((each * counts).sum(1) / counts.sum(1)).mean()


def worst_sample(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none").mean(1).max()


def ratio_of_samples(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a policy in its first step: its value is the same whatever the logits are."""
    each = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    counts = labels != -100
    return (((each - each.detach()).exp() * counts).sum(1) / counts.sum(1)).mean()


MIXED: list[Callable[..., Tensor]] = [mean_of_samples, ratio_of_samples, worst_sample]
ODD = "the loss function gives another value"


def told_of(loss: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> list[str]:
    """Return what the parts say of a loss."""
    weight = counted_by(loss, ignore_index_of(loss, "mean"))

    def computed(part: SequencePart, exchange: SampleExchange) -> str:
        divided = DividedLoss(loss, part, exchange, weight)
        return outcome(divided, part.cut(logits), part.cut(labels))

    return on_parts(2, computed)


@pytest.mark.parametrize("loss", UNSEEN.values(), ids=[*UNSEEN])
@pytest.mark.parametrize("zero", [False, True])
def test_what_a_loss_counts_unseen_is_found_at_the_first_loss(loss: Callable[..., Tensor], zero: bool):
    """Also with a head of zeros, whose tokens all have the same loss."""
    x, y = padded()
    assert all(ODD in told for told in told_of(loss, model(zero=zero)(x), y))


def test_a_loss_is_compared_with_padding_that_the_first_batch_has_none_of():
    x, y = batch()
    assert all(ODD in told for told in told_of(unseen_padding, model()(x), y.clamp(min=1)))


def test_a_loss_of_one_sample_is_compared_again_with_several():
    x, y = batch()
    y[1::2, 12:] = -100
    logits = model()(x)

    def twice(part: SequencePart, exchange: SampleExchange) -> list[str]:
        divided = DividedLoss(mean_of_samples, part, exchange, counted_by(mean_of_samples, -100))
        given = ((part.cut(logits[:rows]), part.cut(y[:rows])) for rows in (1, ROWS))
        return [outcome(divided, *each) for each in given]

    for alone, several in on_parts(2, twice):
        assert alone == "ok"
        assert ODD in several


@pytest.mark.parametrize("loss", MIXED)
def test_losses_that_weigh_samples_by_themselves_are_refused(loss: Callable[..., Tensor]):
    x, y = batch()
    y[1::2, 12:] = -100  # the first sample counts whole
    assert all(ODD in told for told in told_of(loss, model()(x), y))


@pytest.mark.parametrize("loss", KNOWN.values(), ids=[*KNOWN])
def test_losses_of_which_all_is_known_are_taken(loss: Callable[..., Tensor]):
    x, y = padded()
    assert told_of(loss, model()(x), y) == ["ok", "ok"]


def odd(rank: int) -> str:
    return outcome(first_loss, model(), unseen_padding)


@pytest.mark.slow
def test_processes_refuse_a_loss_that_is_not_divided(processes: LocalProcesses):
    for told in processes.run(2, odd):
        assert ODD in told


class ByLength(nn.Module):
    """Divides by the share of a sample's tokens that a mask keeps."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x / keep.to(x.dtype).mean(1)[:, None, None]


class Starts(nn.Module):
    """Changes tokens at which another document starts than that of the token before."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x + F.pad(keep[:, 1:] != keep[:, :-1], (1, 0)).to(x.dtype)[..., None]


class Alike(nn.Module):
    """Leaves out samples of which a mask keeps a part."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x * (keep == keep[:, :1]).all(1).to(x.dtype)[:, None, None]


class Gated(nn.Module):
    """Changes tokens by their own value alone."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x * keep.to(x.dtype)[..., None]


class ByMask(nn.Module):
    """Attends by a mask that it is given."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = x[:, None]
        mask = keep if keep.dim() > 3 else keep[:, None]
        return x + F.scaled_dot_product_attention(y, y, y, attn_mask=mask)[:, 0]


def kept(sequence: int = TOKENS) -> Tensor:
    """A mask of padding, which the first samples of microbatches have none of."""
    lengths = torch.tensor([sequence, 20, 3, 8] * 2)
    return torch.arange(sequence) < lengths[:, None]


def near(sequence: int) -> Tensor:
    """A mask for attention to near tokens, with whole samples' queries and keys."""
    place = torch.arange(sequence)
    return ((place[:, None] - place).abs() < 9).expand(ROWS, -1, -1)


OTHERS, APART = r"\) gives other values", r"\) in training lets tokens change each other"
NAMED: dict[str, tuple[type[nn.Module], Tensor, str]] = {
    "a mask": (ByLength, kept(), OTHERS),
    "numbers": (ByLength, kept().float(), OTHERS),
    "documents": (Starts, kept().long(), OTHERS),
    "no padding": (Alike, torch.ones(ROWS, TOKENS, dtype=torch.bool), APART),
    "no padding, by numbers": (Alike, torch.ones(ROWS, TOKENS), APART),
    "no padding, by 0": (Alike, torch.zeros(ROWS, TOKENS), APART),
    "one document": (Alike, torch.ones(ROWS, TOKENS, dtype=torch.int64), APART),
    "whole queries": (ByMask, near(TOKENS)[:, None], "give it the 16 queries of this process and the 32 keys"),
    "more whole queries": (ByMask, near(128)[:, None], r"\(ByMask\) fails with RuntimeError"),
    "by token": (Gated, kept(), ""),
    "own queries": (ByMask, near(TOKENS), ""),
    "more own queries": (ByMask, near(128), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_layers_may_use_named_values_of_their_own_tokens_alone(name: str):
    """Also where the first sample's are plain, or those of all samples in the first step."""
    kind, keep, message = NAMED[name]
    x = hidden(keep.shape[-1])

    def first_call(part: SequencePart, exchange: SampleExchange) -> Tensor:
        layer = kind()
        divide_samples([("2", layer)], part, exchange)
        out: Tensor = layer(part.cut(x), keep=cut_tokens(keep, part, keep.shape[-1], "keep"))
        return out

    found = on_parts(2, first_call)
    if message:
        assert all(re.search(message, str(error)) for error in found), found
    else:
        torch.testing.assert_close(SequencePart(0, 2).join(torch.stack(found), 1), kind()(x, keep))


def by_name(rank: int, name: str, **options: object) -> float:
    kind, keep, _ = NAMED[name]
    net, (x, y) = model(kind()), batch()
    with Pipeline(net, flat, microbatches=2, timeout=60, **(options or {"mesh": MeshShape(cp=2)})) as pipe:
        return float(pipe.step(x, y, keep=keep).loss)


@pytest.mark.slow
def test_processes_cut_named_values_as_samples(processes: LocalProcesses):
    names = "by token", "own queries"
    for name, ranks in zip(names, run_cases(processes, 2, by_name, [(name,) for name in names]), strict=True):
        assert ranks == pytest.approx([by_name(0, name, ranks=1)] * 2, rel=1e-6), name


class DropPath(nn.Module):
    """Leaves samples out, and whole layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.left = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), 1, 1).bernoulli_(0.5).div_(0.5)
        x = x + self.inner(x) * kept
        return self.left(x) if bool(torch.rand([]) < 0.5) else x


def dropped(rank: int, seed: int) -> tuple[float, Tensor]:
    return first_loss(model(DropPath(), DropPath()), flat, seed=seed)


@pytest.mark.slow
def test_decisions_about_samples_are_those_of_one_process(processes: LocalProcesses):
    for seed, ranks in enumerate(run_cases(processes, 2, dropped, [(seed,) for seed in range(3)])):
        with Pipeline(model(DropPath(), DropPath()), flat, microbatches=2, ranks=1, seed=seed) as pipe:
            expected = pipe.step(*padded()).loss
            wanted = next(p.grad.clone() for p in pipe.parameters() if p.grad is not None)
        for found, gradient in ranks:
            assert found == pytest.approx(expected.item(), rel=1e-6)
            torch.testing.assert_close(gradient, wanted)


def test_a_sample_has_the_same_numbers_in_all_of_its_parts():
    """Of two samples' parts, in the last of three microbatches, those of the second sample."""
    x, seeds = hidden(), range(3)
    whole, *layers = (seeded(DropPath) for _ in range(3))

    def drawn(layer: nn.Module, own: Tensor, microbatch: int) -> Tensor:
        out = []
        for seed in seeds:
            with isolated_rng(seed, 1, microbatch, "2"):
                out.append(layer(own))
        return torch.stack(out)

    def computed(part: SequencePart, exchange: SampleExchange) -> Tensor:
        layer = layers[part.index]
        divide_samples([("2", layer)], part, exchange)
        return drawn(layer, part.cut(x), 3 * (2 + part.index) + 2)

    parts = torch.stack(on_parts(2, computed, microbatches=3))
    torch.testing.assert_close(SequencePart(0, 2).join(parts, 2), drawn(whole, x, 3 * 1 + 2))


def mismatched(rank: int) -> str:
    net = model(ByTokens())
    with Pipeline(net, flat, microbatches=2, mesh=MeshShape(cp=2), timeout=60) as pipe:
        x, y = batch()
        pipe.step(x, y)
        with torch.no_grad():
            net[1].table.weight[-1] = 7 - net[0].weight[x[0, -1]]  # a token of the first process alone
        try:
            pipe.step(x, y)
        except PenstockError as error:
            return str(error)
    return "no error"


@pytest.mark.slow
def test_parts_that_leave_out_different_layers_are_told_so(processes: LocalProcesses):
    for told in processes.run(2, mismatched):
        assert "are at different places: layer 2, " in told, told


class Rotary(nn.Module):
    """A block that takes tables of all tokens, without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, table: Tensor, turned: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turned
        out: Tensor = self.inner(torch.view_as_real(pairs).flatten(2) + table)
        return out


class Tables(nn.Module):
    """A model that makes its tables once, and gives them to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Rotary() for _ in range(2))
        angles = torch.outer(torch.arange(TOKENS), 0.1 ** torch.linspace(0, 2, WIDTH // 2))
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.angles[sequence_positions(x.shape[1])]
        table = torch.cat([turned.real, turned.imag], -1)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, table, turned)
        out: Tensor = self.head(x)
        return out


LENGTHS = WIDTH * 2, ROWS * 2  # a part has as many tokens as a table is wide, or as there are rows


@pytest.mark.parametrize("length", LENGTHS)
def test_tables_of_tokens_without_rows_are_taken(length: int):
    whole, *layers = (seeded(Rotary) for _ in range(3))
    x, turned = torch.randn(ROWS, length, WIDTH), Tables().angles[:length]
    table = torch.cat([turned.real, turned.imag], -1)

    def computed(part: SequencePart, exchange: SampleExchange) -> Tensor:
        layer = layers[part.index]
        divide_samples([("2", layer)], part, exchange)
        out: Tensor = layer(part.cut(x), part.cut(table, 0), part.cut(turned, 0))
        return out

    out = torch.stack(on_parts(2, computed))
    torch.testing.assert_close(SequencePart(0, 2).join(out, 1), whole(x, table, turned))


class Adds(nn.Module):
    """Adds numbers of all tokens to each sample."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + (table[:, None] if table.dim() == 1 else table.reshape(-1, WIDTH))


@pytest.mark.parametrize("shape", [(TOKENS,), (TOKENS, WIDTH), (1, TOKENS, WIDTH), (1, 1, TOKENS, WIDTH)])
def test_tables_of_any_shape_are_of_their_tokens(shape: tuple[int, ...]):
    x, table = hidden(), torch.randn(shape)

    def computed(part: SequencePart, exchange: SampleExchange) -> Tensor:
        layer = Adds()
        divide_samples([("2", layer)], part, exchange)
        out: Tensor = layer(part.cut(x), part.cut(table, shape.index(TOKENS)))
        return out

    out = torch.stack(on_parts(2, computed))
    assert torch.equal(SequencePart(0, 2).join(out, 1), Adds()(x, table))


def with_tables(rank: int, length: int) -> float:
    torch.manual_seed(0)
    with Pipeline(Tables(), flat, microbatches=1, mesh=MeshShape(cp=2), timeout=60) as pipe:
        return float(pipe.step(*batch(sequence=length)).loss)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the first step did not check")
def test_a_model_may_make_tables_of_its_tokens(processes: LocalProcesses):
    for length, ranks in zip(
        LENGTHS, run_cases(processes, 2, with_tables, [(n,) for n in LENGTHS]), strict=True
    ):
        torch.manual_seed(0)
        net, (x, y) = Tables(), batch(sequence=length)
        assert ranks == pytest.approx([flat(net(x), y).item()] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "alike"),
    [
        ((), True), ((1,), True), ((4,), True), ((4, 1, 1), True), ((4, 1, 6), True), ((3, 5), True),
        ((4, 8, 6), False), ((4, 8), False), ((32, 6), False), ((4, 2, 8, 16), False), ((8,), False), ((64, 3), False),
    ],
)  # fmt: skip
def test_numbers_of_samples_are_told_from_those_of_tokens_by_their_shape(shape: tuple[int, ...], alike: bool):
    """Of 4 rows of 8 tokens, which are half of the samples'."""
    assert Division(SequencePart(0, 2), None, "0", 4, 8).draws_alike(shape) == alike
