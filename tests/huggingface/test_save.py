from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

import penstock
from penstock.base.errors import ConfigError
from penstock.huggingface.save import COPIED_FILES
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models

FAMILIES = sorted(hf_models.FAMILIES)


def pipeline(like: object, ranks: int = 1) -> penstock.Pipeline:
    return penstock.Pipeline(
        penstock.from_transformers(like), penstock.causal_lm_loss, microbatches=2, ranks=ranks
    )


def logits_of(folder: Path) -> torch.Tensor:
    tokens, _, mask = hf_models.batch()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model(tokens, attention_mask=mask).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_a_saved_folder_and_gives_the_same_logits(family: str, tied: bool, tmp_path: Path):
    net = hf_models.model(family, tied=tied).eval()
    tokens, _, mask = hf_models.batch()
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path, net)
    expected = net(tokens, attention_mask=mask).logits
    assert torch.equal(logits_of(tmp_path), expected)
    again = penstock.from_transformers(tmp_path)
    assert torch.equal(hf_models.in_sequence(again, tokens, attention_mask=mask), expected)
    assert len(load_file(tmp_path / "model.safetensors")) == len(net.state_dict()) - tied


def save_from_processes(rank: int, source: str, folder: str) -> list[str]:
    torch.set_num_threads(1)
    with pipeline(source, ranks=4) as pipe:
        penstock.save_transformers(pipe, folder, source)
        return list(pipe.state_dict())


def test_processes_write_a_part_each_and_an_index(processes: LocalProcesses, tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "saved"
    net = hf_models.model("gpt_neox").eval()
    net.save_pretrained(source)
    folder.mkdir()
    save_file({"old": torch.zeros(1)}, folder / "model.safetensors")  # a reader would take it for the weights
    held = processes.run(4, save_from_processes, str(source), str(folder), timeout=300)
    assert sum(map(len, held)) == len(net.state_dict())
    assert len(list(folder.glob("*.safetensors"))) == 4
    tokens, _, mask = hf_models.batch()
    assert torch.equal(logits_of(folder), net(tokens, attention_mask=mask).logits)


def test_files_beside_the_weights_are_copied(tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "saved"
    net = hf_models.model("llama")
    net.generation_config = GenerationConfig(max_new_tokens=7)
    net.save_pretrained(source)
    for name in set(COPIED_FILES) - {"generation_config.json"}:
        (source / name).write_text(f"content of {name}")
    with pipeline(source) as pipe:
        penstock.save_transformers(pipe, folder, source)
    for name in COPIED_FILES:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path / "third", net)
    assert GenerationConfig.from_pretrained(tmp_path / "third").max_new_tokens == 7


def test_a_save_over_an_earlier_one_leaves_none_of_its_weights(tmp_path: Path):
    net = hf_models.model("llama")
    net.save_pretrained(tmp_path, max_shard_size="8KB")
    with torch.no_grad():
        net.lm_head.weight.mul_(2)
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path, net)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    tokens, _, mask = hf_models.batch()
    assert torch.equal(logits_of(tmp_path), net.eval()(tokens, attention_mask=mask).logits)


def test_a_like_that_is_not_the_layers_origin_is_refused(tmp_path: Path):
    with pipeline(hf_models.model("llama")) as pipe:
        with pytest.raises(ConfigError, match="like must be the model, the config or the folder"):
            penstock.save_transformers(pipe, tmp_path, 3)
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot make the folder"):
            penstock.save_transformers(pipe, tmp_path / "file" / "x", hf_models.config("llama"))


class LoRA(nn.Module):
    """A linear layer with a low-rank addition beside it (2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted() -> tuple[object, dict[str, nn.Linear]]:
    net = hf_models.model("llama")
    changed = {}
    for n, block in enumerate(net.model.layers):
        changed[f"model.layers.{n}.self_attn.q_proj"] = block.self_attn.q_proj
        block.self_attn.q_proj = LoRA(block.self_attn.q_proj)
    return net, changed


def test_adapters_are_refused_by_name_until_the_modules_are_back(tmp_path: Path):
    net, changed = adapted()
    with pipeline(net) as pipe:
        for like in (net, net.config):
            with pytest.raises(ConfigError) as told:
                penstock.save_transformers(pipe, tmp_path / "new", like)
            for name in changed:
                assert f"{name}.weight is missing" in str(told.value)
            assert "model.layers.0.self_attn.q_proj.base.weight is unknown" in str(told.value)
            assert "merge_and_unload" in str(told.value)
        assert not (tmp_path / "new").exists()
    for name, linear in changed.items():
        parent, _, last = name.rpartition(".")
        setattr(net.get_submodule(parent), last, linear)
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path / "new", net)
    logits_of(tmp_path / "new")


def save_adapted(rank: int, folder: str) -> str:
    torch.set_num_threads(1)
    net, _ = adapted()
    with pipeline(net, ranks=4) as pipe:
        try:
            penstock.save_transformers(pipe, folder, net)
        except ConfigError as error:
            return str(error)
    return "saved"


def test_every_process_refuses_adapters_and_none_writes(processes: LocalProcesses, tmp_path: Path):
    texts = processes.run(4, save_adapted, str(tmp_path / "new"), timeout=300)
    assert len(set(texts)) == 1
    assert "model.layers.0.self_attn.q_proj.weight is missing" in texts[0]
    assert not (tmp_path / "new").exists()


def test_a_shape_that_is_not_the_configs_is_refused(tmp_path: Path):
    net = hf_models.model("llama")
    config = copy.deepcopy(net.config)
    config.vocab_size += 1
    with (
        pipeline(net) as pipe,
        pytest.raises(ConfigError, match=r"model.embed_tokens.weight has shape \(\d+, \d+\), not"),
    ):
        penstock.save_transformers(pipe, tmp_path / "new", config)


def test_a_separate_head_is_refused_if_the_config_ties_it(tmp_path: Path):
    net = hf_models.model("llama", tied=False)
    config = copy.deepcopy(net.config)
    config.tie_word_embeddings = True
    with (
        pipeline(net) as pipe,
        pytest.raises(ConfigError, match=r"lm_head.weight is a separate weight, which the config ties"),
    ):
        penstock.save_transformers(pipe, tmp_path / "new", config)
