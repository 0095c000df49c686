"""Cross entropy of a linear head without its logits, beside plain cross entropy of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import LinearCrossEntropy
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.compute.postponed_logits import PostponedLogits, postponing
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers
from tests.support import hf_models
from tests.support.heads import CLASSES, HEADS, WIDTH
from tests.support.lanes import exhaustive, slow

ROWS, TOKENS = 6, 10


def model(head: str = "linear", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), HEADS[head]()).to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(1, CLASSES, (ROWS, TOKENS), generator=generator) for _ in range(2))
    y[0, :4] = y[3] = -100
    return x, y


def plain(logits: Tensor, target: Tensor, smoothing: float, z_loss: float) -> Tensor:
    logits = logits.float().flatten(0, 1)
    counts = target.flatten() != -100
    loss = F.cross_entropy(logits, target.flatten(), label_smoothing=smoothing)
    return loss + z_loss * logits.logsumexp(-1)[counts].square().mean()


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of gradients over their norms."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs)


# chunks of unequal sizes, and more than there are classes
@pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.01), *exhaustive((0.1, 0.0), (0.0, 0.01))]
)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunks", [4, 1000, *exhaustive(1)])
def test_loss_and_gradients_are_those_of_the_whole_batch(
    head: str, chunks: int, smoothing: float, z_loss: float
):
    ours, theirs = model(head), model(head)
    x, y = batch()
    loss_fn = LinearCrossEntropy(chunks, label_smoothing=smoothing, z_loss=z_loss)
    with penstock.Pipeline(ours, loss_fn, ranks=2, microbatches=3) as pipe:
        loss = pipe.step(x, y).loss
    expected = plain(theirs(x), y, smoothing, z_loss)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    assert difference(ours, theirs) < 1e-6
    assert loss_fn(theirs(x), y).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        *slow(("zb-v", "full"), ("dualpipe-v", "none")),
        *exhaustive(
            ("gpipe", "none"), ("interleaved-1f1b", "full"), ("zb-v", "none"), ("dualpipe-v", "full")
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", *exhaustive("gpt2")])
def test_models_of_transformers_train_by_it(family: str, schedule: str, recompute: str):
    ours = hf_models.model(family)
    theirs = copy.deepcopy(ours)
    ids, labels, mask = hf_models.batch()
    loss_fn = LinearCrossEntropy(3, shift=True)
    with penstock.Pipeline(
        ours, loss_fn, ranks=2, microbatches=4, schedule=schedule, recompute=recompute
    ) as pipe:
        loss = pipe.step(ids, labels, attention_mask=mask).loss
    expected = penstock.causal_lm_loss(theirs(ids, attention_mask=mask).logits, labels)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    theirs_grads = {name: p.grad for name, p in theirs.named_parameters()}
    whole = torch.cat([g.flatten() for g in theirs_grads.values()])
    seen = torch.cat([p.grad.flatten() for p in ours.parameters()])
    assert (seen - whole).norm() / whole.norm() < 2e-6


def test_logits_never_exist(monkeypatch: pytest.MonkeyPatch):
    largest = hf_models.watch_logits(monkeypatch, CLASSES)
    x, y = batch()
    with penstock.Pipeline(model("capped"), LinearCrossEntropy(5), ranks=1, microbatches=1) as pipe:
        pipe.step(x, y)
        pipe.evaluate(x, y)
    assert max(largest) == ROWS * TOKENS * CLASSES // 5


def test_outputs_are_logits():
    net = model("capped")
    x, y = batch()
    with penstock.Pipeline(net, LinearCrossEntropy(), ranks=2, microbatches=2) as pipe:
        result = pipe.step(x, y, outputs=True)
    with torch.no_grad():
        assert torch.allclose(torch.cat(result.outputs), net(x), atol=1e-6)


def test_bf16_weights_have_gradients_near_those_of_fp32():
    ours, theirs = model(dtype=torch.bfloat16), model(dtype=torch.bfloat16)
    x, y = batch()
    with penstock.Pipeline(ours, LinearCrossEntropy(4), ranks=2, microbatches=2) as pipe:
        loss = pipe.step(x, y).loss
    exact = theirs.float()
    expected = plain(exact(x), y, 0.0, 0.0)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-2)
    assert difference(ours.float(), exact) < 2e-2


def test_a_frozen_head_gets_no_gradient_and_passes_one_on():
    ours, theirs = model(), model()
    for net in (ours, theirs):
        net[2].requires_grad_(False)
    x, y = batch()
    with penstock.Pipeline(ours, LinearCrossEntropy(4), ranks=1, microbatches=1) as pipe:
        pipe.step(x, y)
    plain(theirs(x), y, 0.0, 0.0).backward()
    assert ours[2].weight.grad is None
    assert difference(ours[:2], theirs[:2]) < 1e-6


def test_postponed_logits_tell_their_shape_and_keep_maps():
    head = nn.Linear(WIDTH, CLASSES)
    x = torch.randn(2, 3, WIDTH)
    with postponing(head):
        logits = head(x)
    assert isinstance(logits, PostponedLogits)
    assert isinstance(head(x), Tensor)
    assert not isinstance(head(x), PostponedLogits)
    assert (logits.shape, logits.ndim, logits.size(-1)) == ((2, 3, CLASSES), 3, CLASSES)
    assert logits.computed is None
    assert logits.float() is logits
    mapped: Any = (logits.to(torch.float64) * 2).float()
    assert mapped.computed is None
    assert mapped.dtype is torch.float32
    assert torch.allclose(mapped + 0, head(x) * 2, atol=1e-6)  # a sum needs the logits
    assert torch.equal(mapped.argmax(-1), head(x).argmax(-1))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)


class Measured(Headed):
    """A head that counts its hits without gradients, and calls itself in the precision that it needs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            logits: Tensor = self.head(x.float())
        with torch.no_grad():
            self.hits = (logits.argmax(-1) == 1).sum()
        return logits


class Exact(Headed):
    """A head without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            logits: Tensor = self.head(x.float())
        return logits


@pytest.mark.parametrize("head", [Measured, Exact])
def test_a_head_keeps_its_graph_and_its_own_autocast(head: Callable[[], nn.Module]):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), head())
    theirs = copy.deepcopy(ours)
    x, y = batch()
    with penstock.Pipeline(
        ours, LinearCrossEntropy(3), ranks=2, microbatches=1, autocast=torch.bfloat16
    ) as pipe:
        loss = pipe.step(x, y).loss
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(theirs(x), y, 0.0, 0.0)
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    assert difference(ours[2], theirs[2]) < 1e-6


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Past(Headed):
    """A head whose logits go to a function that torch does not announce."""

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubling.apply(self.head(x))
        return doubled


class Written(Headed):
    """A head whose input is modified after its call."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        logits: Tensor = self.head(x)
        x.zero_()
        return logits


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chunks": 0}, "chunks must be a whole number of at least 1, got 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and less than 1"),
        ({"z_loss": -1.0}, "z_loss must be a finite number"),
        ({"z_loss": "a"}, "z_loss must be a finite number of at least 0, got 'a'"),
        ({"label_smoothing": None}, "label_smoothing must be at least 0 and less than 1, got None"),
        ({"ignore_index": 1.5}, r"ignore_index must be a whole number, got 1\.5"),
        ({"shift": 1}, "shift must be True or False, got 1"),
    ],
)
def test_arguments_out_of_range_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(penstock.ConfigError, match=said):
        LinearCrossEntropy(**given)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda y: torch.where(y == -100, y, CLASSES),
            rf"class {CLASSES} at \[0, 4\] of the microbatch, and the vocabulary is 0 to {CLASSES - 1}",
        ),
        (lambda y: y[:, 1:].contiguous(), "int64 of the output's shape without the vocabulary"),
        (lambda y: y.float(), "got float32"),
        (
            lambda y: (y, y),
            r"int64 tensor .* got a tuple\. A loss that weighs tokens is a loss function of your own",
        ),
        (lambda y: {"y": y, "weight": y}, "got a dict"),
    ],
)
def test_targets_that_do_not_fit_are_refused(change: Callable[[Tensor], Tensor], said: str):
    x, y = batch()
    with (
        penstock.Pipeline(model(), LinearCrossEntropy(), ranks=2, microbatches=2) as pipe,
        pytest.raises(penstock.PenstockError, match=said),
    ):
        pipe.step(x, change(y))


class Named(Headed):
    """A head whose output has a name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x)}


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (Past, r"torch\.autograd\.Function"),
        (Written, "was modified in place after the head"),
        (Named, r"takes logits, a tensor .* the last layer returned a dict"),
        (nn.GELU, r"needs a head, .* in the last layer, and GELU has none"),
    ],
)
def test_heads_whose_loss_would_be_wrong_are_refused(head: Callable[[], nn.Module], said: str):
    x, y = batch()
    net = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), head())
    with (
        penstock.Pipeline(net, LinearCrossEntropy(), ranks=2, microbatches=2) as pipe,
        pytest.raises(penstock.PenstockError, match=said),
    ):
        pipe.step(x, y)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_float64_stays(z_loss: float):
    ours, theirs = model(dtype=torch.float64), model(dtype=torch.float64)
    x, y = batch()
    with penstock.Pipeline(ours, LinearCrossEntropy(3, z_loss=z_loss), ranks=2, microbatches=1) as pipe:
        loss = pipe.step(x, y).loss
    logits, target = theirs(x).flatten(0, 1), y.flatten()
    expected = F.cross_entropy(logits, target) + z_loss * logits.logsumexp(-1)[target != -100].square().mean()
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-14)
    assert difference(ours, theirs) < 1e-13


@pytest.mark.parametrize("loss_fn", [LinearCrossEntropy(shift=True), penstock.causal_lm_loss])
def test_valid_counts_the_targets_of_a_loss_that_shifts_them(loss_fn: Any):
    results = []
    for reduction in (None, "valid"):
        net = model()
        x, y = batch()
        y[:3, 3:] = -100
        with penstock.Pipeline(net, loss_fn, ranks=2, microbatches=3, reduction=reduction) as pipe:
            results.append((pipe.step(x, y).loss, [p.grad for p in net.parameters()]))
    (one, grads), (other, same) = results
    assert torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))


@pytest.mark.slow
def test_a_split_is_measured_and_a_profile_traced_with_it():
    x, y = batch()
    loss_fn = LinearCrossEntropy()
    with penstock.Pipeline(
        model(), loss_fn, ranks=2, microbatches=2, split={"measured": (x[:3], y[:3])}
    ) as pipe:
        assert pipe.step(x, y).loss > 0
    profile = penstock.profile_layers(model(), x, target=y, loss_fn=loss_fn, measure=False)
    assert len(profile.layers) == 3


BUILT_IN = ModelConfig(vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, hidden=32)
SHARDED = {
    "the shards alone": ("penstock", {"pp": 1}, {}),
    "a pipeline": ("penstock", {"pp": 2}, {"schedule": "zb-h1"}),
    "sequence parallelism": (
        "penstock",
        {"pp": 1},
        {"parallel": penstock.ParallelOptions(sequence_parallel=True)},
    ),
    "a tied head": ("gpt2", {"pp": 1}, {"parallel": penstock.ParallelOptions(family="gpt2")}),
    "a capped head": ("gemma2", {"pp": 1}, {"parallel": penstock.ParallelOptions(family="gemma2")}),
}


def sharded_model(family: str) -> Any:
    return (
        layers(BUILT_IN)
        if family == "penstock"
        else hf_models.model(family, vocab_size=62, tied=family == "gpt2")
    )


def sharded_batch(family: str) -> tuple[Tensor, Tensor]:
    ids, labels, _ = hf_models.batch()
    if family != "penstock":
        return ids, labels
    ids = ids % BUILT_IN.vocabulary
    return ids, torch.where(labels == -100, labels, ids.roll(-1, 1))


def sharded_loss(family: str, smoothing: float) -> LinearCrossEntropy:
    return LinearCrossEntropy(3, label_smoothing=smoothing, z_loss=0.01, shift=family != "penstock")


def train_shards(rank: int, case: str, smoothing: float) -> tuple[float, float, dict[str, Tensor], int]:
    family, axes, options = SHARDED[case]
    largest: list[int] = []
    log_softmax = F.log_softmax

    def seen(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        largest.append(x.shape[-1])
        return log_softmax(x, *args, **kwargs)

    F.log_softmax = seen
    mesh = penstock.MeshShape(**axes, tp=2)
    with penstock.Pipeline(
        sharded_model(family), sharded_loss(family, smoothing), microbatches=4, mesh=mesh, **options
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        first = pipe.step(*sharded_batch(family)).loss
        optimizer.step()
        with torch.no_grad():
            second = pipe.evaluate(*sharded_batch(family)).loss
        F.log_softmax = log_softmax
        return float(first), float(second), pipe.state_dict(), max(largest, default=0)


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.1, *exhaustive(0.0)])
@pytest.mark.parametrize("case", SHARDED)
def test_ranks_with_shards_of_the_vocabulary(processes: LocalProcesses, case: str, smoothing: float):
    family, axes, _ = SHARDED[case]
    results = processes.run(2 * axes["pp"], train_shards, case, smoothing)
    loss_fn = sharded_loss(family, smoothing)
    with penstock.Pipeline(sharded_model(family), loss_fn, ranks=1, microbatches=4) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        first = pipe.step(*sharded_batch(family)).loss
        optimizer.step()
        second = pipe.evaluate(*sharded_batch(family)).loss
        expected = pipe.state_dict()
    weights: dict[str, Tensor] = {}
    for ours, later, state, _ in results:
        assert ours == pytest.approx(float(first), rel=1e-6)
        assert later == pytest.approx(float(second), rel=1e-5)
        weights |= state
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, rtol=0, atol=2e-6), name
    vocabulary = expected[next(name for name in expected if name.endswith("weight"))].shape[0]
    assert {classes for *_, classes in results} <= {0, vocabulary // 2}
