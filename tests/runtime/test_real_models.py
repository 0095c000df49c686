"""Models that do more than pass one tensor on: against plain PyTorch, bit for bit where the order allows."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.base.errors import BatchError, NonFiniteError, PenstockError, SplitError, StageError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import tied
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow

WIDTH, ROWS, M = 8, 2, 4
SCHEDULES = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipe"]
# Several stages a rank in order, split backwards on a V, copies of stages; the rest differs in the order of ops alone.
FEW = ["interleaved-1f1b", "zb-v", "dualpipe", *exhaustive("gpipe", "1f1b", "zb-h1")]


class Masked(nn.Module):
    """Takes a mask and a scale by name, and has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        y = torch.tanh(self.inner(x)) * scale
        return y if mask is None else y * mask[:, None] + x


class Giver(nn.Module):
    """Hands a part of its value on, past the layers between."""

    gives = ("detour",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        penstock.give("detour", {"half": y * 0.5, "ids": (x[:, 0] > 0).long(), "none": None})
        return torch.tanh(y)


class Taker(nn.Module):
    """Takes what was given, and raises an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, detour: dict) -> Tensor:
        y = self.inner(x + detour["half"] * (1 + detour["ids"][:, None]))
        penstock.add_loss(0.1 * y.square().mean(), "energy")
        return y


def plain(layers: nn.Sequential, xs, ys, loss_fn=F.mse_loss, shares=None, named=None):
    """Losses and gradients of the unsplit layers over given microbatches, with the values passed by hand."""
    losses = []
    for n, (x, y) in enumerate(zip(xs, ys, strict=True)):
        values = {k: v[n] for k, v in (named or {}).items()}
        extra = []
        for layer in layers:
            if isinstance(layer, Masked):
                x = layer(x, **{k: v for k, v in values.items() if k in ("mask", "scale")})
            elif isinstance(layer, Giver):
                h = layer.inner(x)
                values["detour"] = {"half": h * 0.5, "ids": (x[:, 0] > 0).long(), "none": None}
                x = torch.tanh(h)
            elif isinstance(layer, Taker):
                d = values["detour"]
                x = layer.inner(x + d["half"] * (1 + d["ids"][:, None]))
                extra.append(0.1 * x.square().mean())
            else:
                x = layer(x)
        loss = loss_fn(x, y)
        if extra:
            loss = loss + sum(extra)
        (loss / len(xs) if shares is None else loss * shares[n]).backward()
        losses.append(loss.detach())
    return losses, gradients(layers)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def data(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator)


def build(*kinds: type[nn.Module], seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[kind() if kind is not nn.Linear else nn.Linear(WIDTH, WIDTH) for kind in kinds])


def compare(net: nn.Module, expected, result, exact: bool) -> None:
    losses, grads = expected
    found = gradients(net)
    assert found.keys() == grads.keys()
    for name in grads:
        if exact:
            assert torch.equal(found[name], grads[name]), name
        else:
            torch.testing.assert_close(found[name], grads[name], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(result.losses, torch.stack(losses), rtol=0 if exact else 1e-6, atol=0)


@pytest.mark.parametrize(
    ("p", "name"),
    [
        (2, "interleaved-1f1b"),
        (4, "zb-v"),
        (4, "dualpipe"),
        *exhaustive(
            (2, "gpipe"), (4, "1f1b"), (2, "zb-h1"), (4, "interleaved-1f1b"), (2, "zb-v"), (2, "dualpipe")
        ),
    ],
)
def test_masks_reach_every_layer_that_names_them(p, name):
    net, other = build(*[Masked] * 8), build(*[Masked] * 8)
    x, y = data(ROWS * M)
    mask = (torch.arange(ROWS * M) % 3 > 0).float()
    named = {"mask": mask.chunk(M), "scale": [0.5] * M}
    expected = plain(other, x.chunk(M), y.chunk(M), named=named)
    with Pipeline(net, F.mse_loss, ranks=p, microbatches=M, schedule=name) as pipe:
        result = pipe.step(x, y, mask=mask, scale=0.5)
        evaluated = pipe.evaluate(x, y, mask=mask, scale=0.5)
    compare(net, expected, result, name != "dualpipe")
    assert torch.equal(evaluated.losses, result.losses)


def skipping(seed: int = 0) -> nn.Sequential:
    return build(Giver, nn.Linear, nn.Linear, Taker, nn.Linear, nn.Linear, Taker, nn.Linear, seed=seed)


# One rank, stages side by side, split backwards, several stages a rank, and copies of stages.
SKIPS = [(1, "1f1b"), (2, "interleaved-1f1b"), (4, "zb-h1"), (4, "zb-v"), (4, "dualpipe")]
REST = [(p, name) for p in (2, 4) for name in SCHEDULES if (p, name) not in SKIPS]


@pytest.mark.parametrize(("p", "name"), [*SKIPS, *exhaustive(*REST)])
def test_a_value_skips_stages_and_its_gradient_comes_back_and_added_losses_count(p, name):
    net, other = skipping(), skipping()
    x, y = data(ROWS * M)
    expected = plain(other, x.chunk(M), y.chunk(M))
    with Pipeline(net, F.mse_loss, ranks=p, microbatches=M, schedule=name) as pipe:
        result = pipe.step(x, y)
        evaluated = pipe.evaluate(x, y)
    # A value with several uses has its gradients added up in another order where stages lie between.
    compare(net, expected, result, exact=p == 1)
    assert set(result.parts) == {"loss", "energy"}
    torch.testing.assert_close(result.parts["loss"] + result.parts["energy"], result.loss)
    assert torch.equal(evaluated.parts["energy"], result.parts["energy"])


@pytest.mark.parametrize("name", FEW)
def test_an_uneven_batch_gives_the_whole_batchs_gradient(name):
    net, other = build(*[nn.Linear] * 8), build(*[nn.Linear] * 8)
    x, y = data(7)
    shares = [2 / 7, 2 / 7, 2 / 7, 1 / 7]
    expected = plain(other, torch.tensor_split(x, M), torch.tensor_split(y, M), shares=shares)
    with Pipeline(net, F.mse_loss, ranks=2, microbatches=M, schedule=name) as pipe:
        result = pipe.step(x, y)
    compare(net, expected, result, name != "dualpipe")
    whole = F.mse_loss(other(x), y)
    torch.testing.assert_close(result.loss, whole.detach())
    other.zero_grad()
    whole.backward()
    for found, want in zip(gradients(net).values(), gradients(other).values(), strict=True):
        torch.testing.assert_close(found, want)


def valid(y: Tensor) -> Tensor:
    return y[:, 0] > -0.5


def counted_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out[valid(y)], y[valid(y)])


def test_weighing_by_a_count_gives_the_whole_batchs_gradient_even_where_a_microbatch_counts_nothing():
    net, other = build(*[nn.Linear] * 4), build(*[nn.Linear] * 4)
    x, y = data(ROWS * M)
    y[:ROWS, 0] = -1.0  # the first microbatch has no valid row: its mean is 0/0
    with Pipeline(net, counted_loss, ranks=2, microbatches=M, reduction=lambda y: valid(y).sum()) as pipe:
        result = pipe.step(x, y)
        evaluated = pipe.evaluate(x, y)
    whole = counted_loss(other(x), y)
    whole.backward()
    torch.testing.assert_close(result.loss, whole.detach())
    assert torch.equal(evaluated.loss, result.loss)
    for found, want in zip(gradients(net).values(), gradients(other).values(), strict=True):
        torch.testing.assert_close(found, want)


def test_losses_are_summed_when_asked_and_several_are_reported_by_name():
    net, other = build(*[nn.Linear] * 4), build(*[nn.Linear] * 4)
    x, y = data(ROWS * M)

    def loss_fn(out: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"fit": F.mse_loss(out, y), "size": 0.01 * out.square().sum()}

    expected = plain(
        other, x.chunk(M), y.chunk(M), lambda out, y: sum(loss_fn(out, y).values()), shares=[1.0] * M
    )
    with Pipeline(net, loss_fn, ranks=2, microbatches=M, reduction="sum") as pipe:
        result = pipe.step(x, y)
    compare(net, expected, result, exact=True)
    assert set(result.parts) == {"fit", "size"}
    torch.testing.assert_close(result.loss, result.losses.sum())


def tied_factories() -> list[penstock.Layer]:
    return [  # each built anew: no identity to be found
        penstock.Layer(str(n), lambda n=n: tied.model()[n], tied={"weight": "0.weight"} if n == 5 else {})
        for n in range(6)
    ]


def train_tied(rank: int, name: str, p: int, declared: bool) -> tuple:
    model = tied_factories() if declared else tied.model()
    with Pipeline(model, tied.loss_fn, ranks=p, microbatches=M, schedule=name, timeout=300) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        norms = []
        for step in range(2):
            pipe.step(*tied.batch(step))
            norms.append(pipe.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
        weights = {n: q.detach().clone() for n, q in pipe.named_parameters()}
        return weights, torch.stack(norms), list(pipe.state_dict())


def require_plain_tied(weights: dict[str, Tensor], norms: Tensor) -> list[str]:
    """Weights and norms of the unsplit model; its names are returned."""
    net = tied.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(2):
        x, y = tied.batch(step)
        plain(net, x.chunk(M), y.chunk(M), tied.loss_fn)
        torch.testing.assert_close(norms[step], nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    for key, value in weights.items():
        torch.testing.assert_close(value, net.get_parameter(key), rtol=1e-4, atol=1e-5)
    return [n for n, _ in net.named_parameters()]


# Both ends on two ranks, on one, and on both with copies.
TIED = [(2, "1f1b", False), (2, "zb-v", True), (2, "dualpipe", False), (2, "interleaved-1f1b", True)]
FOUR = [(4, "dualpipe", True), *((2, name, how) for name in ("gpipe", "zb-h1") for how in (False, True))]


@pytest.mark.parametrize(("p", "name", "declared"), [*TIED, *exhaustive(*FOUR)])
def test_tied_weights_stay_one_in_threads(p, name, declared):
    weights, norms, state = train_tied(0, name, p, declared)
    assert require_plain_tied(weights, norms) == list(weights) == state


@pytest.mark.parametrize(
    "cases",
    [
        [("1f1b", 2, False), ("zb-v", 2, True)],
        *slow(
            [
                ("1f1b", 2, True),
                ("zb-h1", 2, False),
                ("zb-v", 2, False),
                ("dualpipe", 2, False),
                ("dualpipe", 2, True),
            ]
        ),
    ],
    ids=["few", "more"],
)
def test_tied_weights_stay_one_in_processes(processes: LocalProcesses, cases):
    for (name, *_), told in zip(cases, run_cases(processes, 2, train_tied, cases), strict=True):
        # Every process that holds it has it under its first name, so that each one's own state loads again.
        holders = 1 if name == "zb-v" else 2
        assert [n for _, _, state in told for n in state].count("0.weight") == holders
        for weights, norms, _ in told:
            require_plain_tied(weights, norms)
        if name in ("1f1b", "zb-h1"):
            assert torch.equal(told[0][0]["0.weight"], told[1][0]["0.weight"])


@pytest.mark.parametrize(
    ("words", "name", "text"),
    [
        (12, "0.weight", r"5\.weight cannot be tied: .*\(12, 12\).*\(11, 12\)"),
        (11, "nowhere.weight", r"tied to 'nowhere\.weight', which no layer before it has"),
    ],
)
def test_weights_that_cannot_be_tied_are_refused(words: int, name: str, text: str):
    layers = tied_factories()
    layers[5] = penstock.Layer("5", lambda: tied.Head(nn.Embedding(words, 12)), tied={"weight": name})
    with pytest.raises(SplitError, match=text):
        Pipeline(layers, tied.loss_fn, ranks=2, microbatches=M)


def test_values_that_do_not_fit_the_layers_are_refused_by_name():
    x, y = data(ROWS * M)
    with Pipeline(build(*[Masked] * 4), F.mse_loss, ranks=2, microbatches=M) as pipe:
        with pytest.raises(BatchError, match=r"no layer takes 'masks' \(did you mean 'mask'\?\)"):
            pipe.step(x, y, masks=torch.ones(ROWS * M))
        text = re.escape("keyword input mask has 6 rows ([2, 2, 1, 1] by microbatch)")
        with pytest.raises(BatchError, match=text):
            pipe.step(x, y, mask=torch.ones(6))
        pipe.step(x, y, mask=torch.ones(ROWS * M))
    with (
        Pipeline(build(nn.Linear, Taker), F.mse_loss, ranks=2, microbatches=M) as pipe,
        pytest.raises(BatchError, match="layer '1' needs 'detour'; pass it to the step as detour="),
    ):
        pipe.step(x, y)
    with pytest.raises(SplitError, match="layer '0' takes 'detour', which only the later layer '2' gives"):
        Pipeline(build(Taker, nn.Linear, Giver), F.mse_loss, ranks=3, microbatches=M)
    with pytest.raises(SplitError, match="both '0' and '1' give 'detour'"):
        Pipeline(build(Giver, Giver, Taker), F.mse_loss, ranks=3, microbatches=M)


class Forgets(nn.Module):
    gives = ("detour",)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Undeclared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        penstock.give("surprise", x)
        return x


def test_a_layer_that_gives_what_it_does_not_say_or_says_what_it_does_not_give_is_named():
    x, y = data(ROWS * M)
    with (
        Pipeline(build(Forgets, nn.Linear, Taker), F.mse_loss, ranks=3, microbatches=M) as pipe,
        pytest.raises(StageError, match="no layer of stage 0 gave 'detour', which a later layer takes"),
    ):
        pipe.step(x, y)
    with (
        Pipeline(build(nn.Linear, Undeclared), F.mse_loss, ranks=2, microbatches=M) as pipe,
        pytest.raises(StageError, match=r"give\('surprise', ...\) by a layer that does not say so"),
    ):
        pipe.step(x, y)
    for call, given in ((penstock.add_loss, (torch.ones(()),)), (penstock.give, ("mask", None))):
        with pytest.raises(
            PenstockError, match=rf"{call.__name__} was called outside the forward of a pipeline's layer"
        ):
            call(*given)


class Spoils(nn.Module):
    """Its gradient, or its output, is NaN for one row of the batch."""

    def __init__(self, forward: bool, marked: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.in_forward, self.marked = forward, marked

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if (x == self.marked).any():
            if self.in_forward:
                return y * float("nan")
            y.register_hook(lambda grad: grad * float("nan"))
        return y


def spoilt(forward: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), Spoils(forward, 7.0), *[nn.Linear(WIDTH, WIDTH) for _ in "ab"])


def step_spoilt(rank: int, forward: bool) -> list[tuple[str, int, int]]:
    x, y = data(ROWS * M)
    x[2 * ROWS, 0] = 7.0  # of microbatch 2
    found = []
    with Pipeline(spoilt(forward), F.mse_loss, ranks=2, microbatches=M, timeout=300) as pipe:
        for _ in range(2):
            try:
                pipe.step(x, y, input_grads=True)
            except NonFiniteError as error:
                found.append((str(error), error.stage, error.microbatch))
        for parameter in pipe.parameters():
            parameter.grad = None
        x[2 * ROWS, 0] = 0.0
        assert pipe.step(x, y).loss.isfinite()
    return found


def test_nan_is_refused_on_every_rank_with_stage_and_microbatch(processes: LocalProcesses):
    told = run_cases(processes, 2, step_spoilt, [(True,), (False,)])
    for forward, by_rank in zip((True, False), told, strict=True):
        for found in (step_spoilt(0, forward), *by_rank):
            for text, stage, microbatch in found:
                what = "the loss of" if forward else "the input gradient of stage 0 for"
                assert f"{what} microbatch 2 is NaN or infinite. No weight was changed" in text
                assert (stage, microbatch) == ((1, 2) if forward else (0, 2))
            assert len(found) == 2


def skip_in_process(rank: int, name: str) -> tuple:
    net = skipping()
    x, y = data(ROWS * M)
    with Pipeline(net, F.mse_loss, ranks=4, microbatches=M, schedule=name, timeout=300) as pipe:
        first, last = pipe.holds_first, pipe.holds_last
        for _ in range(2):
            result = pipe.step(x if first else None, y if last else None)
            evaluated = pipe.evaluate(x if first else None, y if last else None)
        return result.loss, result.parts, evaluated.parts, {n: p.grad for n, p in pipe.named_parameters()}


@pytest.mark.parametrize("names", [["1f1b"], *slow(["zb-h1", "zb-v", "dualpipe"])], ids=["few", "more"])
def test_skips_and_added_losses_in_processes(processes: LocalProcesses, names: list[str]):
    other = skipping()
    x, y = data(ROWS * M)
    for _ in range(2):
        losses, grads = plain(other, x.chunk(M), y.chunk(M))
    told = run_cases(processes, 4, skip_in_process, [(name,) for name in names])
    for loss, parts, evaluated, own in itertools.chain(*told):
        torch.testing.assert_close(loss, torch.stack(losses).mean())
        torch.testing.assert_close(parts["loss"] + parts["energy"], loss)
        torch.testing.assert_close(evaluated["energy"], parts["energy"])
        for key, grad in own.items():
            torch.testing.assert_close(grad, grads[key], rtol=1e-5, atol=1e-7)


def test_a_reduction_that_counts_nothing_is_refused():
    with (
        Pipeline(build(nn.Linear), F.mse_loss, microbatches=2, reduction=lambda y: 0) as pipe,
        pytest.raises(BatchError, match=r"reduction counted \[0.0, 0.0\]"),
    ):
        pipe.step(*data(4))
