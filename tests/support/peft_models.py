"""Tiny models with LoRA adapters, as peft makes them, and the numbers that peft alone gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from tests.support import hf_models

TARGETS = {"gpt2": ["c_attn", "c_fc", "c_proj"], "gpt_neox": ["query_key_value", "dense"]}
"""Modules with adapters, where "all-linear" would not do."""


def config(family: str = "llama", **changes: Any) -> Any:
    from peft import LoraConfig

    given = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS.get(family, "all-linear"), **changes}
    return LoraConfig(fan_in_fan_out=family == "gpt2", **given)  # GPT-2's matrices have their inputs first


def base_folder(root: Path, family: str = "llama", **changes: Any) -> Path:
    """Save a base model."""
    folder = root / f"base-{family}"
    hf_models.model(family, **changes).save_pretrained(folder)
    return folder


def adapted(base: Path, family: str = "llama", **changes: Any) -> Any:
    """Give a base model new adapters, the same ones every time."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(3)
    return get_peft_model(model, config(family, **changes)).train()


def move(pipe: penstock.Pipeline) -> None:
    """Change every trained weight by numbers that depend on its name alone: a new adapter's second matrix is zero."""
    with torch.no_grad():
        for name, parameter in pipe.named_parameters():
            if parameter.requires_grad:
                draws = torch.Generator().manual_seed(sum(name.encode()))
                parameter.add_(torch.randn(parameter.shape, generator=draws).to(parameter.dtype), alpha=0.2)


def with_peft(base: Path, adapters: Path) -> Any:
    """Load adapters as users of peft do."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, adapters)


def accumulated(model: Any, step: int = 0) -> tuple[float, dict[str, Tensor]]:
    """Return peft's loss and gradients: those of the microbatches in order, each weighted by its valid tokens."""
    tokens, labels, mask = hf_models.batch(step=step)
    total, loss_sum = penstock.valid_tokens(labels), 0.0
    for t, y, m in zip(tokens.chunk(4), labels.chunk(4), mask.chunk(4), strict=True):
        loss = penstock.causal_lm_loss(model(input_ids=t, attention_mask=m).logits, y)
        loss = loss * (penstock.valid_tokens(y) / total)
        loss.backward()
        loss_sum += loss.item()
    grads = {
        name.removeprefix("base_model.model."): p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad()
    return loss_sum, grads


def step(pipe: penstock.Pipeline, number: int = 0) -> tuple[float, dict[str, Tensor]]:
    """Return the pipeline's loss and gradients; frozen weights must have none."""
    tokens, labels, mask = hf_models.batch(step=number)
    pipe.zero_grad()
    loss = pipe.step(tokens, labels, attention_mask=mask).loss.item()
    named = list(pipe.named_parameters())
    assert all((p.grad is None) != p.requires_grad for _, p in named)
    return loss, {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_same_step(seen: tuple[float, dict[str, Tensor]], model: Any) -> None:
    """Compare a step of a pipeline with that of peft's model: the loss closely, the gradients bit for bit."""
    loss, gradients = accumulated(model)
    assert seen[0] == pytest.approx(loss, abs=1e-6)
    assert same(seen[1], gradients)


def logits(model: Any) -> Tensor:
    tokens, _, mask = hf_models.batch()
    return model.eval()(input_ids=tokens, attention_mask=mask).logits.detach()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
