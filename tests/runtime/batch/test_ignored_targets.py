"""Targets with ignored entries: weights by what counts give the whole batch's gradient; other weights are named."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import BatchError, ConfigError, NonFiniteError, Pipeline
from penstock.runtime.batch.loss_weights import ignore_index_of
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive
from tests.support.plain import require_equal_gradients

ROWS, LENGTH, CLASSES, MICROBATCHES = 8, 5, 7, 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class PadIsZero(nn.CrossEntropyLoss):
    """A loss of another ignored index, which is in its attribute as torch's own losses have it."""

    def __init__(self) -> None:
        super().__init__(ignore_index=0)

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(logits.flatten(0, 1), target.flatten())


def batch(ignored: dict[int, int], index: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; `ignored` has the number of ignored positions by row."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=generator)
    target = tokens.clone()
    for row, count in ignored.items():
        target[row, LENGTH - count :] = index
    return tokens, target


UNEVEN = {0: 3, 1: 2, 6: 4}
ONE_EMPTY = {2: LENGTH, 3: LENGTH, 5: 1}


def whole(loss_fn: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    other = net()
    loss = loss_fn(other(x), y)
    loss.backward()
    return loss.detach(), [p.grad for p in other.parameters()]


@pytest.mark.parametrize(
    ("schedule", "ignored", "loss_fn", "index"),
    [
        ("1f1b", UNEVEN, token_loss, -100),
        ("zb-h1", ONE_EMPTY, PadIsZero(), 0),
        ("dualpipe", ONE_EMPTY, token_loss, -100),
        *exhaustive(("zb-h1", UNEVEN, token_loss, -100), ("dualpipe", UNEVEN, PadIsZero(), 0)),
    ],
)
def test_valid_gives_the_gradient_of_the_whole_batch(schedule: str, ignored: dict, loss_fn: Any, index: int):
    """Also where a microbatch's own mean is 0/0: it weighs nothing, and its NaN reaches no gradient."""
    x, y = batch(ignored, index)
    loss, grads = whole(loss_fn, x, y)
    ours = net()
    with Pipeline(
        ours, loss_fn, microbatches=MICROBATCHES, ranks=2, schedule=schedule, reduction="valid"
    ) as pipe:
        result = pipe.step(x, y)
        evaluated = pipe.evaluate(x, y)
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(evaluated.loss, loss, rtol=1e-12, atol=1e-12)
    for p, grad in zip(ours.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-12)


def test_a_microbatch_without_targets_adds_exact_zeros():
    x, y = batch(ONE_EMPTY)
    ours, other = net(), net()
    with Pipeline(ours, token_loss, microbatches=MICROBATCHES, ranks=2, reduction="valid") as pipe:
        pipe.step(x, y)
    counts = [int((part != -100).sum()) for part in y.chunk(MICROBATCHES)]
    for a, b, count in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), counts, strict=True):
        if count:
            (token_loss(other(a), b) * (count / sum(counts))).backward()
    require_equal_gradients(ours, other)


def test_means_that_are_not_the_batchs_are_said_once_with_the_counts():
    with Pipeline(net(), token_loss, microbatches=MICROBATCHES, ranks=2) as pipe:
        pipe.step(*batch({}))
        pipe.step(*batch(dict.fromkeys(range(ROWS), 2)))  # the same share in each
        with pytest.warns(RuntimeWarning) as told:
            pipe.step(*batch(UNEVEN))
        pipe.step(*batch(UNEVEN))  # a second warning would be an error
        pipe.evaluate(*batch(UNEVEN))
    (warning,) = told
    facts = ("[5, 10, 10, 6]", "-100", "reduction='valid'", "penstock.valid_tokens")
    assert all(fact in str(warning.message) for fact in facts), warning.message


def test_the_ignored_index_of_the_loss_is_the_one_that_is_counted():
    with (
        Pipeline(net(), PadIsZero(), microbatches=MICROBATCHES, ranks=2) as pipe,
        pytest.warns(RuntimeWarning, match=r"\[5, 10, 10, 6\] targets that are not 0"),
    ):
        pipe.step(*batch(UNEVEN, 0))


@pytest.mark.parametrize("reduction", ["sum", "valid", lambda y: 1.0])
def test_a_reduction_that_was_chosen_is_not_questioned(reduction: Any):
    with Pipeline(net(), token_loss, microbatches=MICROBATCHES, ranks=2, reduction=reduction) as pipe:
        pipe.step(*batch(UNEVEN))


def told_by_rank(rank: int, mesh: Any) -> str:
    count = MICROBATCHES // (mesh.dp if mesh is not None else 1)
    with (
        Pipeline(net(), token_loss, microbatches=count, mesh=mesh, timeout=60) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            pipe.step(*batch(ONE_EMPTY))
        except NonFiniteError as error:
            return f"{error.microbatch} {error}"
    return "no error"


def test_a_microbatch_of_ignored_targets_is_named_on_every_rank(processes: LocalProcesses):
    ranks, replicas = run_cases(processes, 2, told_by_rank, [(None,), (penstock.MeshShape(1, 2, 1),)])
    for text in (*ranks, *replicas, told_by_rank(0, None)):
        facts = ("1 ", "microbatch 1 is NaN", "-100", "0/0", "reduction='valid'", "No weight was changed")
        assert all(fact in text for fact in facts), text
        assert "learning rate" not in text


def test_a_batch_without_any_target_is_refused():
    with (
        Pipeline(net(), token_loss, microbatches=MICROBATCHES, ranks=2, reduction="valid") as pipe,
        pytest.raises(BatchError, match=r"\[0.0, 0.0, 0.0, 0.0\].* leave it out"),
    ):
        pipe.step(*batch(dict.fromkeys(range(ROWS), LENGTH)))


def test_valid_needs_one_tensor_of_integers():
    x, y = batch(UNEVEN)
    with Pipeline(
        net(), lambda out, t: token_loss(out, t[0]), microbatches=2, ranks=2, reduction="valid"
    ) as pipe:
        with pytest.raises(BatchError, match="has 2 such tensors; give reduction a function"):
            pipe.step(x, (y, y))
        pipe.step(x, (y, torch.ones(ROWS)))


@pytest.mark.parametrize("given", ["layers", *exhaustive("model")])
def test_a_language_model_of_transformers_weighs_by_valid_tokens(given: str):
    """By default, as transformers: the loss of the padded batch; also with rows that have no label at all."""
    model = hf_models.model("llama")
    tokens, labels, mask = hf_models.batch()
    for empty in (0, len(labels) // 4):
        labels[:empty] = -100
        loss = model(tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        arguments = (
            (model,) if given == "model" else (penstock.from_transformers(model), penstock.causal_lm_loss)
        )
        with Pipeline(*arguments, ranks=2, microbatches=4) as pipe:
            result = pipe.step(tokens, labels, attention_mask=mask)
            ours = {name: p.grad.clone() for name, p in pipe.named_parameters()}
            pipe.zero_grad()
        torch.testing.assert_close(result.loss, loss.detach())
        for name, grad in grads.items():
            torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6, msg=name)


PAD = 0


class Holding(nn.Module):
    """A loss that holds its criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(ignore_index=PAD)

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.criterion(out.flatten(0, -2), y.flatten())


CRITERION = nn.CrossEntropyLoss(ignore_index=PAD)


@pytest.mark.parametrize(
    "loss_fn",
    [
        Holding(),
        partial(nn.functional.cross_entropy, ignore_index=PAD),
        lambda out, y: CRITERION(out, y),
        CRITERION,
    ],
    ids=["module within", "partial", "global", "criterion"],
)
def test_the_ignored_index_of_what_a_loss_calls_is_found(loss_fn):
    assert ignore_index_of(loss_fn, "valid") == PAD


def test_an_ignored_index_in_the_source_is_found_or_refused():
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y, ignore_index=PAD)

    def unseen(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y, ignore_index=int(y[0]))

    own = lambda out, y: F.cross_entropy(out, y, ignore_index=-1)  # noqa: E731 - as people write them
    assert ignore_index_of(loss, "valid") == PAD
    assert ignore_index_of(own, "mean") == -1
    with pytest.raises(ConfigError, match="ignore_index"):
        ignore_index_of(unseen, "valid")
    with pytest.warns(RuntimeWarning, match="ignore_index"):
        assert ignore_index_of(unseen, "mean") == -100
    assert ignore_index_of(lambda out, y: F.cross_entropy(out, y), "valid") == -100


def test_classes_that_weigh_differently_are_not_counted():
    with pytest.raises(ConfigError, match="weighs classes"):
        ignore_index_of(nn.CrossEntropyLoss(weight=torch.ones(3)), "valid")


def test_a_loss_may_use_variables_that_are_assigned_later():
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert pipe is not None
        return token_loss(out, y)

    assert ignore_index_of(loss, "valid") == -100
    pipe = Pipeline(net(), loss, microbatches=2)
    with pipe:
        assert (
            pipe.step(torch.zeros(4, LENGTH, dtype=torch.long), torch.zeros(4, LENGTH, dtype=torch.long)).loss
            is not None
        )
