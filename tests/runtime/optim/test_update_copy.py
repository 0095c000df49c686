"""An optimizer's step is undone bit for bit, and its repetition gives the same weights and state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.runtime.optim.update_copy import UpdateCopy

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}, 12),
    "adamw amsgrad": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, 16),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}, 12),
    "adamw tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.1)}, 12),
    "sgd": (torch.optim.SGD, {"lr": 0.1}, 4),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 8),
    "rprop": (torch.optim.Rprop, {"lr": 0.1}, 12),
    "asgd": (torch.optim.ASGD, {"lr": 0.1}, 8),
}


def snapshot(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
    entries = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state.get(w, {}).items()}
        for w in weights
    ]
    return [[w.detach().clone() for w in weights], entries]


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("before", [0, 2], ids=["without state", "with state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_undone_and_can_be_repeated(name: str, before: int):
    make, options, size = OPTIMIZERS[name]
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, 3)), nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(2))]
    optimizer = make(weights, **options)
    copy = UpdateCopy(optimizer)

    def give_gradients() -> None:
        for weight in weights[:2]:  # the third one has none
            weight.grad = torch.randn_like(weight)

    for _ in range(before):
        give_gradients()
        optimizer.step()
    give_gradients()
    start = snapshot(weights, optimizer)
    copy.take()
    optimizer.step()
    end = snapshot(weights, optimizer)
    for _ in range(2):
        copy.restore()
        assert_same(snapshot(weights, optimizer), start)
        optimizer.step()
        assert_same(snapshot(weights, optimizer), end)
    numbers = sum(weight.numel() for weight in weights[:2])
    if before:
        assert numbers * size <= copy.bytes <= numbers * size + 64  # and some counters
    else:
        assert copy.bytes == 4 * numbers
