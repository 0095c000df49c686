"""`Pipeline.log_probs` beside ``log_softmax`` of plain PyTorch's logits."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import BatchError, LinearCrossEntropy, MeshShape, Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers
from tests.support import hf_models
from tests.support.groups import outcome, run_cases
from tests.support.heads import CLASSES, HEADS, WIDTH
from tests.support.lanes import exhaustive

ROWS, TOKENS = 7, 10


def model(head: str = "linear") -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(CLASSES, WIDTH), *blocks, HEADS[head]())


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(1, CLASSES, (rows, TOKENS), generator=generator) for _ in range(2))
    y[0, :4] = y[3] = -100
    return x, y


@torch.no_grad()
def gathered(logits: Tensor, y: Tensor) -> Tensor:
    """Return log p of y by plain PyTorch."""
    found = F.log_softmax(logits.float(), -1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(y == -100, 0, found)


def plain(net: nn.Module, x: Tensor, y: Tensor, **named: Tensor) -> Tensor:
    with torch.no_grad():
        output: Any = copy.deepcopy(net).eval()(x, **named)
    return gathered(getattr(output, "logits", output), y)


def ppo_loss(output: Tensor, target: Any) -> Tensor:
    """A loss of log p, advantages and a mask; log_probs does not call it."""
    log_p = F.log_softmax(output.float(), -1).gather(-1, target["tokens"].unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(log_p - target["old"])
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * target["gain"], clipped * target["gain"]).mean()


def close(ours: Tensor, theirs: Tensor) -> bool:
    same_form = ours.dtype is torch.float32 and ours.shape == theirs.shape and not ours.requires_grad
    return same_form and torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


# Each head, and the head on the last rank, on the first and on both.
CASES = [("linear", "1f1b"), ("chosen", "zb-v"), ("capped", "dualpipe"), ("chosen", "interleaved-1f1b")]
REST = [(h, s) for h in HEADS for _, s in CASES if (h, s) not in CASES]


@pytest.mark.parametrize(("head", "schedule"), [*CASES, *exhaustive(*REST)])
def test_it_is_the_gathered_log_softmax_and_leaves_nothing(head: str, schedule: str):
    net = model(head)
    x, y = batch(16)
    stages = 2 if schedule == "interleaved-1f1b" else None
    with Pipeline(net, ppo_loss, ranks=2, microbatches=4, schedule=schedule, virtual_stages=stages) as pipe:
        found = pipe.log_probs(x, y)
        again = pipe.log_probs(x, y)
        assert pipe.steps == 0
    assert close(found, plain(net, x, y))
    assert torch.equal(found, again)
    assert (found[y == -100] == 0).all()
    assert all(p.grad is None for p in net.parameters())
    assert net.training
    assert net[1][1].training


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (ppo_loss, "mean"),
        (ppo_loss, "valid"),
        (LinearCrossEntropy(3), "valid"),
        (nn.CrossEntropyLoss(), "valid"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_uneven_microbatches_and_any_loss(loss_fn: Any, reduction: str):
    net = model()
    x, y = batch()
    y[:] = torch.where(torch.arange(ROWS).unsqueeze(-1) < 2, -100, y)  # a microbatch without a class
    with Pipeline(net, loss_fn, ranks=2, microbatches=3, reduction=reduction) as pipe:
        assert close(pipe.log_probs(x, y), plain(net, x, y))


def test_logits_never_exist(monkeypatch: pytest.MonkeyPatch):
    largest = hf_models.watch_logits(monkeypatch, CLASSES)
    x, y = batch(8)
    for loss_fn, chunks in ((ppo_loss, 8), (LinearCrossEntropy(5), 5)):
        largest.clear()
        with Pipeline(model("capped"), loss_fn, ranks=1, microbatches=1) as pipe:
            pipe.log_probs(x, y)
        assert max(largest) == 8 * TOKENS // chunks * CLASSES


def time_first(rank: int) -> Tensor:
    x, y = (value.T.contiguous() for value in batch())
    with Pipeline(model(), ppo_loss, ranks=2, microbatches=3, dims={"x": 1, "y": 1}) as pipe:
        return pipe.log_probs(x, y)


def test_time_that_comes_first_has_the_shape_of_y():
    assert close(time_first(0), plain(model(), *batch()).T)


@pytest.mark.slow
def test_every_process_has_it_where_time_comes_first(processes: LocalProcesses):
    assert all(close(found, plain(model(), *batch()).T) for found in processes.run(2, time_first))


def test_it_follows_the_weights_between_steps():
    net = model()
    x, y = batch(8)
    with Pipeline(net, ppo_loss, ranks=2, microbatches=4) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        old = pipe.log_probs(x, y)
        target = {"tokens": y.clamp(min=0), "old": old, "gain": torch.randn(y.shape)}
        for _ in range(2):
            pipe.step(x, target)
            gradients = [p.grad.clone() for p in net.parameters()]
            new = pipe.log_probs(x, y)
            assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))
            assert close(new, plain(net, x, y))
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(old, new)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_causal_model_of_transformers(family: str):
    net = hf_models.model(family, tied=family == "gpt2")
    ids, _, mask = hf_models.batch()
    expected = plain(net, ids[:, :-1], ids[:, 1:], attention_mask=mask[:, :-1])
    with Pipeline(net, ranks=2, microbatches=2) as pipe:
        found = pipe.log_probs(ids[:, :-1], ids[:, 1:], attention_mask=mask[:, :-1])
        whole = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}
        assert torch.equal(pipe.log_probs(whole, ids[:, 1:]), found)
        with pytest.raises(BatchError, match="in place of the loss function's target"):
            pipe.log_probs({**whole, "labels": ids[:, :-1]}, ids[:, 1:])
    assert close(found, expected)


@pytest.mark.parametrize("loss_fn", [None, LinearCrossEntropy(shift=True)])
def test_labels_of_a_causal_model_are_shifted_as_by_a_step(loss_fn: Any):
    net = hf_models.model("llama")
    ids, labels, mask = hf_models.batch()
    given = {"input_ids": ids, "attention_mask": mask}
    expected = F.pad(plain(net, ids[:, :-1], labels[:, 1:], attention_mask=mask[:, :-1]), (0, 1))
    with Pipeline(net, loss_fn, ranks=2, microbatches=2) as pipe:
        found = pipe.log_probs({**given, "labels": labels})
        loss = pipe.evaluate({**given, "labels": labels}).loss
    assert close(found, expected)
    torch.testing.assert_close(-found.sum() / (labels[:, 1:] != -100).sum(), loss)


@pytest.mark.parametrize("loss_fn", [None, ppo_loss])
def test_tokens_judged_at_their_own_positions_are_refused(loss_fn: Any):
    net = hf_models.model("llama")
    ids, _, mask = hf_models.batch()
    with Pipeline(net, loss_fn, ranks=2, microbatches=2) as pipe:
        for y in (ids, ids.masked_fill(mask == 0, -100)):
            with pytest.raises(BatchError, match="y equals the tokens x"):
                pipe.log_probs(ids, y, attention_mask=mask)
        if loss_fn is not None:  # which may shift or not
            with pytest.raises(BatchError, match="in place of the loss function's target"):
                pipe.log_probs({"input_ids": ids, "labels": ids})


def test_autocast_is_that_of_the_steps():
    net = model()
    x, y = batch(8)
    with Pipeline(net, ppo_loss, ranks=2, microbatches=2, autocast=torch.bfloat16) as pipe:
        found = pipe.log_probs(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(net, x, y)
    assert close(found, expected)


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "beyond the vocabulary": (
        lambda y: torch.where(y == -100, y, CLASSES),
        rf"class {CLASSES} at \[0, 4\] of the microbatch, and the vocabulary is 0 to {CLASSES - 1}; only -100",
    ),
    "too short": (lambda y: y[:, 1:], r"needs logits of shape .* must have a class for each position"),
    "floats": (lambda y: y.float(), "must be an int64 tensor .* got torch.float32"),
    "one number a row": (lambda y: y[:, 0], r"must be an int64 tensor of shape \(batch, tokens\)"),
    "a mapping": (lambda y: {"labels": y}, "got a dict"),
    "other rows": (lambda y: y[1:], "rows|needs logits of shape"),
    "missing": (lambda y: None, "needs the target y"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_y_that_does_not_fit_is_refused(wrong: str):
    change, said = WRONG[wrong]
    x, y = batch(8)
    with Pipeline(model(), ppo_loss, ranks=2, microbatches=4) as pipe:
        with pytest.raises(penstock.PenstockError, match=said):
            pipe.log_probs(x, change(y))
        assert pipe.log_probs(x, y).shape == y.shape


def test_a_last_layer_without_a_head_is_refused():
    net = nn.Sequential(nn.Embedding(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES), nn.GELU())
    with Pipeline(net, ppo_loss, ranks=2, microbatches=2) as pipe:
        assert re.search("log_probs, needs a head, .* and GELU has none", outcome(pipe.log_probs, *batch()))


def test_a_call_within_a_step_is_refused():
    net, x, y = model(), *batch(8)
    called: list[str] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        called.append(outcome(pipe.log_probs, x, y))
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    with Pipeline(net, loss_fn, ranks=2, microbatches=2, reduction="valid") as pipe:
        pipe.step(x, y)
    assert len(called) == 2
    assert "Pipeline.log_probs was called while a step of the same pipeline is under way" in called[0]


BUILT_IN = ModelConfig(vocabulary=62, width=16, layers=2, heads=4, kv_heads=2, hidden=32)
MESHES = {
    "two ranks": ("llama", {"pp": 2}, False),
    "replicas": ("llama", {"pp": 2, "dp": 2}, False),
    "shards": ("llama", {"pp": 1, "tp": 2}, False),
    "shards and ranks": ("llama", {"pp": 2, "tp": 2}, False),
    "sequence parallel": ("penstock", {"pp": 1, "tp": 2}, True),
}


def given(family: str) -> Any:
    return layers(BUILT_IN) if family == "penstock" else hf_models.model(family, vocab_size=62)


def shifted() -> tuple[Tensor, Tensor]:
    ids, _, _ = hf_models.batch()
    y = ids.roll(-1, 1)
    y[:, -1] = y[0, :3] = -100
    return ids, y


def before_and_after_a_step(pipe: Pipeline) -> tuple[Tensor, Tensor]:
    x, y = shifted()
    before = pipe.log_probs(x if pipe.holds_first else None, y if pipe.holds_last else None)
    optimizer = penstock.PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
    pipe.step(x, y)
    optimizer.step()
    return before, pipe.log_probs(x, y)


def in_processes(rank: int, case: str) -> tuple[Tensor, Tensor]:
    family, axes, sequence = MESHES[case]
    parallel = penstock.ParallelOptions(family=family, sequence_parallel=sequence)
    options: dict[str, Any] = {"mesh": MeshShape(**axes), "parallel": parallel}
    with Pipeline(given(family), penstock.causal_lm_loss, microbatches=2, **options) as pipe:
        return before_and_after_a_step(pipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["replicas", "sequence parallel", *exhaustive("two ranks", "shards", "shards and ranks")]
)
def test_every_process_has_the_whole_batch(processes: LocalProcesses, case: str):
    family, axes, _ = MESHES[case]
    results = processes.run(MeshShape(**axes).ranks, in_processes, case)
    microbatches = 2 * axes.get("dp", 1)
    with Pipeline(given(family), penstock.causal_lm_loss, ranks=1, microbatches=microbatches) as pipe:
        expected = before_and_after_a_step(pipe)
    if family == "llama":
        assert close(expected[0], plain(given(family), *shifted()))
    for found in results:
        for one, first, plainly in zip(found, results[0], expected, strict=True):
            assert torch.equal(one, first)
            assert torch.allclose(one, plainly, rtol=1e-5, atol=1e-5)


def refused(rank: int, wrong: str) -> str:
    change, _ = WRONG[wrong]
    x, y = batch(8)
    with Pipeline(model(), ppo_loss, microbatches=4, timeout=30) as pipe:
        return outcome(pipe.log_probs, x, change(y) if pipe.holds_last else y)


@pytest.mark.slow
def test_every_process_is_told_why(processes: LocalProcesses):
    cases = ["beyond the vocabulary", "too short", "floats", "missing", "other rows"]
    for wrong, told in zip(cases, run_cases(processes, 2, refused, [(c,) for c in cases]), strict=True):
        assert all(re.search(WRONG[wrong][1], text) for text in told), told


def mixed_calls(rank: int) -> str:
    x, y = batch(8)
    with Pipeline(model(), nn.CrossEntropyLoss(), microbatches=4, timeout=30) as pipe:
        return outcome(pipe.evaluate, x) if rank else outcome(pipe.log_probs, x, y)


@pytest.mark.slow
def test_ranks_in_other_calls_are_named(processes: LocalProcesses):
    texts = processes.run(2, mixed_calls)
    assert all("pipe.log_probs()" in text and "pipe.evaluate()" in text for text in texts), texts
