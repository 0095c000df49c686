"""Hugging Face models through the pipeline, against transformers' own loss and gradients on the whole padded batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

import penstock
from tests.support import hf_models
from tests.support.hf_models import pipeline
from tests.support.lanes import exhaustive, slow

Tensors = dict[str, torch.Tensor]


def gradients(net) -> Tensors:
    found = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    return found


def whole_batch(net, side: str = "right") -> tuple[float, Tensors]:
    """Return transformers' loss and gradients of the whole batch."""
    tokens, labels, mask = hf_models.batch(side=side)
    loss = net(tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    return loss.item(), gradients(net)


def accumulated(net, side: str) -> Tensors:
    """Return the gradients of the microbatches in order, each weighted by its valid tokens."""
    tokens, labels, mask = hf_models.batch(side=side)
    total = penstock.valid_tokens(labels)
    for t, y, m in zip(tokens.chunk(4), labels.chunk(4), mask.chunk(4), strict=True):
        loss = penstock.causal_lm_loss(net(t, attention_mask=m).logits, y)
        (loss * (penstock.valid_tokens(y) / total)).backward()
    return gradients(net)


def assert_close(seen: Tensors, expected: Tensors) -> None:
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(seen[name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    ("family", "tied", "schedule", "side"),
    [
        # Layers with a copy on another rank, stages that share a rank with tied weights, and a split backward.
        ("gpt2", True, "dualpipe", "right"),
        ("gpt2", True, "interleaved-1f1b", "right"),
        ("llama", False, "zb-v", "left"),
        *slow(("mistral", False, "zb-h1", "left")),
        *exhaustive(*product(hf_models.FAMILIES, (False, True), ("1f1b",), ("left",))),
    ],
)
def test_a_step_has_transformers_own_loss_and_gradients(family: str, tied: bool, schedule: str, side: str):
    net = hf_models.model(family, tied=tied)
    loss, expected = whole_batch(net, side)
    pieces = accumulated(net, side)
    tokens, labels, mask = hf_models.batch(side=side)
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    ranks = 4 if schedule == "1f1b" else 2
    with pipeline(net, ranks, schedule=schedule, virtual_stages=chunks) as pipe:
        result = pipe.step(tokens, labels, attention_mask=mask)
        seen = {name: p.grad for name, p in pipe.named_parameters()}
    assert abs(result.loss.item() - loss) < 1e-6
    assert_close(seen, expected)
    if not tied:  # a tied weight's gradient is summed stage by stage
        assert all(torch.equal(seen[name], gradient) for name, gradient in pieces.items())


@pytest.mark.parametrize("given", ["a model", "a config"])
def test_the_loss_of_a_large_vocabulary_makes_no_logits(given: str, monkeypatch: pytest.MonkeyPatch):
    net = hf_models.model("llama", vocab_size=32_000)
    layers = penstock.from_transformers(net if given == "a model" else net.config)
    x, y, mask = hf_models.batch()
    with penstock.Pipeline(layers, ranks=2, microbatches=2) as pipe:
        net.load_state_dict(pipe.state_dict())
        largest = hf_models.watch_logits(monkeypatch, 32_000)
        loss = pipe.step(x, y, attention_mask=mask).loss
        # The first step also runs both microbatches as one, and each makes its logits in 8 chunks.
        assert max(largest) == x.numel() // 8 * 32_000
        outputs = pipe.evaluate(x, y, attention_mask=mask, outputs=True).outputs
        assert outputs is not None
    logits = net(x, attention_mask=mask).logits
    assert float(loss) == pytest.approx(penstock.causal_lm_loss(logits, y).item(), rel=1e-6)
    assert torch.allclose(torch.cat(list(outputs)), logits, atol=1e-5)


def test_weights_that_a_user_has_tied_stay_tied():
    net = hf_models.model("llama", tied=True)
    net.model.layers[3].mlp.up_proj.weight = net.model.layers[0].mlp.up_proj.weight
    loss, expected = whole_batch(net)
    with pipeline(net, 4) as pipe:
        tokens, labels, mask = hf_models.batch()
        result = pipe.step(tokens, labels, attention_mask=mask)
        assert_close({name: p.grad for name, p in pipe.named_parameters()}, expected)
    assert abs(result.loss.item() - loss) < 1e-6
    assert net.model.layers[3].mlp.up_proj.weight is net.model.layers[0].mlp.up_proj.weight
    assert net.lm_head.weight is net.model.embed_tokens.weight


DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gemma2": {"attention_dropout": 0.1},
}


@pytest.mark.parametrize("family", [*slow("gpt2"), *exhaustive("gpt_neox", "gemma2")])
def test_dropout_of_attention_too_depends_on_no_split_and_no_recompute(family: str):
    tokens, labels, mask = hf_models.batch()

    def run(ranks: int, recompute: str, dropout: dict[str, float]) -> tuple[list[float], list[torch.Tensor]]:
        with pipeline(hf_models.model(family, **dropout), ranks, recompute=recompute) as pipe:
            losses = [pipe.step(tokens, labels, attention_mask=mask).loss.item() for _ in range(2)]
            return losses, [p.grad for p in pipe.parameters()]

    losses, expected = run(1, "none", DROPOUT[family])
    assert losses[0] != losses[1]  # each step draws new numbers
    assert run(1, "none", {})[0] != losses
    for ranks, recompute in ((4, "none"), (2, "full")):
        seen, found = run(ranks, recompute, DROPOUT[family])
        assert seen == losses
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", ["gpt2", *exhaustive("llama")])
def test_the_mode_of_the_model_counts_after_the_pipeline_was_built(family: str):
    net = hf_models.model(family)
    tokens, labels, _ = hf_models.batch()
    with penstock.Pipeline(net, ranks=2, microbatches=4) as pipe:
        pipe.step(tokens, labels)
        net.eval()
        seen = pipe.step(tokens, labels).losses
        assert not any(
            m.training for s in pipe.stage_modules() for m in s.layers.modules() if m is not s.layers
        )
        pipe.train()
        assert all(m.training for m in net.modules())
    net.eval()
    pairs = zip(tokens.chunk(4), labels.chunk(4), strict=True)
    expected = [penstock.causal_lm_loss(net(t).logits, y) for t, y in pairs]
    assert torch.allclose(seen, torch.stack(expected), rtol=1e-5)


def logits_for(labels: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*labels.shape, hf_models.VOCABULARY, generator=generator, requires_grad=True)


def test_the_loss_and_its_gradient_are_those_of_transformers():
    _, labels, _ = hf_models.batch()
    ours, theirs = logits_for(labels), logits_for(labels)
    loss = penstock.causal_lm_loss(ours, labels)
    expected = ForCausalLMLoss(theirs, labels, hf_models.VOCABULARY)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(ours.grad, theirs.grad)


def test_microbatches_weighed_by_valid_tokens_make_the_whole_batchs_loss():
    _, labels, _ = hf_models.batch(sequence=11)
    logits = logits_for(labels)
    parts = zip(logits.chunk(4), labels.chunk(4), strict=True)
    counts = [penstock.valid_tokens(part) for part in labels.chunk(4)]
    assert len(set(counts)) > 1
    weighed = sum(
        n * penstock.causal_lm_loss(a, b).double() for n, (a, b) in zip(counts, parts, strict=True)
    ) / sum(counts)
    whole = ForCausalLMLoss(logits, labels, hf_models.VOCABULARY)
    assert abs(weighed - whole).item() < 1e-6
    items = ForCausalLMLoss(
        logits, labels, hf_models.VOCABULARY, num_items_in_batch=torch.tensor(sum(counts))
    )
    assert torch.equal(whole, items)


def test_a_microbatch_of_padding_alone_weighs_nothing_and_is_not_nan():
    labels = torch.full((2, 5), -100)
    logits = logits_for(labels)
    loss = penstock.causal_lm_loss(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert penstock.valid_tokens(labels) == 0
    assert not logits.grad.any()
    one = torch.full((1, 5), -100)
    one[0, 0] = 3  # nothing predicts the first token
    assert penstock.valid_tokens(one) == 0
