from __future__ import annotations

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

import penstock
from tests.support import hf_models


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
