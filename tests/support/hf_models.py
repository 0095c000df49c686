"""Tiny random models of every family, and batches with padding."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.stage.layers import Layer, whole_name
from tests.support.lanes import exhaustive, slow

VOCABULARY = 61

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA = {**_COMMON, "intermediate_size": 24, "num_key_value_heads": 2}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 4},
    "qwen2": {**_LLAMA, **_WINDOWS, "use_sliding_window": True},
    "qwen3": {**_LLAMA, "head_dim": 8},
    "phi3": {**_LLAMA, "sliding_window": 4, "resid_pdrop": 0.0},
    "olmo2": _LLAMA,
    "smollm3": {**_LLAMA, **_WINDOWS, "use_sliding_window": True, "no_rope_layers": [1, 1, 0, 1]},
    "glm": {**_LLAMA, "head_dim": 8},
    "gemma": {**_LLAMA, "head_dim": 8},
    "gemma2": {**_LLAMA, **_WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_LLAMA, **_WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": {**_COMMON, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {**_COMMON, "intermediate_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}


def watch_logits(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> list[int]:
    """Return a list that gets the number of logits that each call of a head from now on computes."""
    seen: list[int] = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = linear(x, weight, bias)
        if weight.shape[0] == vocabulary:
            seen.append(output.numel())
        return output

    monkeypatch.setattr(F, "linear", watched)
    return seen


def by_lane(*fast: str) -> list[Any]:
    """Return all families for a parameter list: two beside the fast ones are slow, the rest exhaustive."""
    more = ("mistral", "smollm3")
    return [*fast, *slow(*more), *exhaustive(*sorted({*FAMILIES} - {*fast, *more}))]


def config(family: str, *, tied: bool = False, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[family](**{**FAMILIES[family], "tie_word_embeddings": tied, **changes})


def model(family: str, *, tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    """Return the library's model with every parameter moved from its initial value (zeros and ones hide mistakes)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_config(config(family, tied=tied, **changes))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return net.train()


def batch(
    size: int = 8, sequence: int = 12, side: str = "right", step: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, labels, mask) of rows of many lengths, padded on one side; padding has the label -100."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(3, VOCABULARY, (size, sequence), generator=generator)
    lengths = 3 + (torch.arange(size) * 5 + step) % (sequence - 2)
    places = torch.arange(sequence)[None]
    if side == "left":
        places = places.flip(1)
    mask = (places < lengths[:, None]).long()
    return tokens * mask, torch.where(mask == 1, tokens, -100), mask


def in_sequence(layers: list[Layer], x: Tensor, **named: Tensor | None) -> Tensor:
    """Apply the layers one after the other, each with the named inputs that its forward lists."""
    for layer in layers:
        module = layer.build()
        wanted = inspect.signature(module.forward).parameters
        x = module(x, **{name: value for name, value in named.items() if name in wanted})
    return x


def parameters(layers: list[Layer]) -> dict[str, Tensor]:
    """Return every parameter by its name in the whole model."""
    built = [(layer.name, layer.build()) for layer in layers]
    return {whole_name(name, inner): p for name, module in built for inner, p in module.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights, relative to their norm."""
    assert one.keys() == other.keys()
    ours, theirs = (torch.cat([state[name].flatten() for name in sorted(state)]) for state in (one, other))
    return float((ours - theirs).norm() / theirs.norm())
