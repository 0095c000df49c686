"""Mixtures of experts: numbers of plain PyTorch under every kind of backward, and folders in both of their layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import penstock
from penstock.base.errors import DataError
from penstock.huggingface.small_config import small_config
from penstock.runtime.workers.pool import LocalProcesses

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
ONE_BY_ONE = ("mixtral", "qwen3_moe", "deepseek_v3")
"""Families whose files have a tensor for each expert."""


def model(family: str, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(CONFIG_MAPPING[family](), dropout=dropout)).train()


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 60, (rows, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return ids, mask


def plain(net: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and gradients of two microbatches, accumulated by plain PyTorch."""
    ids, mask = batch()
    losses = []
    for x, m in zip(ids.chunk(2), mask.chunk(2), strict=True):
        loss = penstock.causal_lm_loss(net(x, attention_mask=m, use_cache=False).logits, x)
        (loss * 0.5).backward()
        losses.append(loss.item())
    return losses, taken(net)


def taken(net: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    return found


def stepped(like: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and gradients of a pipeline's step of two microbatches."""
    ids, mask = batch()
    with penstock.Pipeline(
        penstock.from_transformers(like), penstock.causal_lm_loss, microbatches=2, **options
    ) as pipe:
        losses = pipe.step(ids, ids, attention_mask=mask).losses
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        for parameter in pipe.parameters():
            parameter.grad = None
    return [float(x) for x in losses], gradients


def require_same(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(seen[name], gradient), name


@pytest.mark.parametrize(("schedule", "recompute"), [("zb-h1", "none"), ("zb-v", "full")])
@pytest.mark.parametrize("family", MIXTURES)
def test_split_backward_and_recompute_have_the_bits_of_plain_pytorch(
    family: str, schedule: str, recompute: str
):
    net = model(family)
    losses, gradients = plain(net)
    seen, found = stepped(net, ranks=2, schedule=schedule, recompute=recompute, reduction="mean")
    assert seen == losses
    require_same(found, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_dropout_depends_on_no_split_and_no_recompute(family: str):
    net = model(family, dropout=0.1)
    losses, gradients = stepped(net, ranks=1)
    assert losses != stepped(model(family), ranks=1)[0]
    for options in ({"schedule": "zb-v"}, {"recompute": "full"}):
        seen, found = stepped(net, ranks=2, **options)
        assert seen == losses
        require_same(found, gradients)


def train_in_a_process(rank: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    ids, mask = batch()
    with penstock.Pipeline(
        penstock.from_transformers(folder),
        penstock.causal_lm_loss,
        microbatches=2,
        schedule="zb-h1",
        recompute="full",
        reduction="mean",
    ) as pipe:
        losses = [float(x) for x in pipe.step(ids, ids, attention_mask=mask).losses]
        penstock.save_transformers(pipe, f"{folder}-saved", folder)
        return losses, {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_processes_read_a_folder_train_and_save_it(processes: LocalProcesses, family: str, tmp_path: Path):
    net = model(family)
    net.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    losses, gradients = plain(net)
    parts = processes.run(2, train_in_a_process, str(tmp_path / "model"), timeout=300)
    assert [seen for seen, _ in parts if seen] == [losses] * len([seen for seen, _ in parts if seen])
    require_same({name: p for _, part in parts for name, p in part.items()}, gradients)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model-saved", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids, mask = batch()
    net.eval()
    assert torch.equal(again(ids, attention_mask=mask).logits, net(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_a_layer_of_a_folder_with_single_experts_has_the_weights_that_transformers_loads(
    family: str, tmp_path: Path
):
    model(family).save_pretrained(tmp_path)
    assert any(".experts.3." in name for name in load_file(tmp_path / "model.safetensors"))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    seen = 0
    for layer in penstock.from_transformers(tmp_path):
        for name, value in layer.build().state_dict().items():
            full = next(n for n in (f"{layer.name}.{name}", name) if n in expected)
            assert torch.equal(value, expected[full]), full
            seen += 1
    assert seen == len(expected)


def test_a_missing_expert_is_named(tmp_path: Path):
    model("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".layers.1." in name and ".experts.2.w2" in name]:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.experts\.down_proj has shape \(3,"):
        penstock.from_transformers(tmp_path)
    for name in [name for name in tensors if ".layers.1." in name and ".experts.2.w1" in name]:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"cannot make model\.layers\.1\.mlp\.experts\.gate_up_proj of"):
        penstock.from_transformers(tmp_path)
