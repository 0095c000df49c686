from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from penstock.huggingface.heads import SEQUENCE
from penstock.huggingface.loss import ModelLoss


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification", "regression"])
def test_losses_of_rows_with_one_divisor_sum_to_the_whole_batchs_mean(kind: str):
    rows, labels = 6, 3 if kind != "regression" else 1
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, labels, generator=generator)
    target = {
        "single_label_classification": torch.arange(rows) % labels,
        "multi_label_classification": (logits.roll(1, 0) > 0).float(),
        "regression": logits.roll(1, 0).flatten(),
    }[kind]
    config = SimpleNamespace(problem_type=kind, num_labels=labels)
    model = SimpleNamespace(
        loss_function=ForSequenceClassificationLoss, config=config, main_input_name="input_ids"
    )
    loss = ModelLoss(model, SEQUENCE)
    whole = loss(logits, target)
    parts = [loss(x, y, divisor=rows) for x, y in ((logits[:2], target[:2]), (logits[2:], target[2:]))]
    torch.testing.assert_close(sum(parts), whole)
    assert loss.count(target).item() == rows
