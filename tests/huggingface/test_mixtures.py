"""Mixtures of experts and other families: numbers of plain transformers, and folders in both of the layouts of experts."""

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
from tests.support import hf_models
from tests.support.lanes import exhaustive, slow

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def model(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(CONFIG_MAPPING[family](), dropout=0.0)).train()


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 60, (rows, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return ids, mask


FAST = [("deepseek_v3", "zb-h1", "none"), ("mixtral", "zb-v", "full"), ("gpt_oss", "zb-h1", "none")]
OTHERS = [(family, "1f1b", "full") for family in ("bloom", "cohere", "granite", "opt")]
REST = [(family, *options) for family in MIXTURES for options in (("zb-h1", "none"), ("zb-v", "full"))]


# Dense blocks before those with experts, experts with biases; blocks that take other arguments, and a head that scales.
@pytest.mark.parametrize(
    ("family", "schedule", "recompute"),
    [
        *FAST,
        *OTHERS[:2],
        *slow(OTHERS[2]),
        *exhaustive(OTHERS[3], *(case for case in REST if case not in FAST)),
    ],
)
def test_split_backward_and_recompute_have_the_bits_of_plain_transformers(
    family: str, schedule: str, recompute: str
):
    ids, mask = batch()
    whole = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
    hf_models.assert_same_step(model(family), whole, 2, schedule=schedule, recompute=recompute)


def train_in_a_process(rank: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    ids, mask = batch()
    options = {"microbatches": 2, "schedule": "zb-h1", "recompute": "full", "reduction": "mean"}
    with hf_models.pipeline(folder, None, **options) as pipe:
        losses = pipe.step(ids, ids, attention_mask=mask).losses.tolist()
        penstock.save_transformers(pipe, f"{folder}-saved", folder)
        return losses, {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("family", [*slow("mixtral"), *exhaustive(*MIXTURES[1:])])
def test_processes_read_a_folder_train_and_save_it(processes: LocalProcesses, family: str, tmp_path: Path):
    net = model(family)
    net.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    ids, mask = batch()
    expected = hf_models.plainly(net, {"input_ids": ids, "attention_mask": mask, "labels": ids}, 2)
    parts = processes.run(2, train_in_a_process, str(tmp_path / "model"), timeout=300)
    gradients = {name: p for _, part in parts for name, p in part.items()}
    for losses, _ in parts:
        hf_models.assert_same(expected._replace(losses=losses, gradients=gradients), expected)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model-saved", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    net.eval()
    assert torch.equal(again(ids, attention_mask=mask).logits, net(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("family", ["deepseek_v3", *exhaustive("mixtral", "qwen3_moe")])
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
    for matrix, said in (
        ("w2", r"layers\.1\.mlp\.experts\.down_proj has shape \(3,"),
        ("w1", r"cannot make model\.layers\.1\.mlp\.experts\.gate_up_proj of"),
    ):
        (name,) = [name for name in tensors if ".layers.1." in name and f".experts.2.{matrix}" in name]
        del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(DataError, match=said):
            penstock.from_transformers(tmp_path)
