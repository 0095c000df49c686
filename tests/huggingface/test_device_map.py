"""Models that a device map has dispatched: taken without its hooks, or refused by name."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.base.errors import ConfigError


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def places(model: LlamaForCausalLM, second: str) -> dict[str, str]:
    """All on the CPU, but the second block."""
    names = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    return {**dict.fromkeys(names, "cpu"), "model.layers.1": second}


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with penstock.Pipeline(penstock.from_transformers(model), ranks=2, microbatches=2) as pipe:
        return pipe.step(ids, ids).loss


def test_hooks_on_one_device_are_taken_off():
    ids = torch.randint(0, 32, (4, 8))
    plain, model = llama(), llama()
    dispatched = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[0], "_hf_hook")
    assert torch.equal(loss_of(dispatched, ids), loss_of(plain, ids))
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_is_on_the_disk_or_on_several_devices_is_refused(tmp_path: Path):
    model = llama()
    accelerate.dispatch_model(model, places(model, "disk"), main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"leaves 'model.layers.1' \(1 of 6 entries\) on the disk"):
        penstock.from_transformers(model)
    model = llama()
    model.hf_device_map = places(model, "cuda:1")  # as transformers sets it
    with pytest.raises(ConfigError, match=r"spread the model over 2 devices \(cpu, cuda:1\)"):
        penstock.from_transformers(model)
