from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

import penstock
from penstock.errors import ConfigError
from penstock.runtime.local import LocalProcesses
from penstock.train.models.transformers.save import CARRIED
from tests.train.models.transformers import tiny

FAMILIES = sorted(tiny.FAMILIES)


def pipeline(like: object, ranks: int = 1) -> penstock.Pipeline:
    return penstock.Pipeline(
        penstock.from_transformers(like), penstock.causal_lm_loss, microbatches=2, ranks=ranks
    )


def logits_of(folder: Path) -> torch.Tensor:
    tokens, _, mask = tiny.batch()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model(tokens, attention_mask=mask).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_was_saved_and_gives_the_same_logits(family: str, tied: bool, tmp_path: Path):
    net = tiny.model(family, tied=tied).eval()
    tokens, _, mask = tiny.batch()
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path, net)
    expected = net(tokens, attention_mask=mask).logits
    assert torch.equal(logits_of(tmp_path), expected)
    again = penstock.from_transformers(tmp_path)
    assert torch.equal(tiny.in_sequence(again, tokens, attention_mask=mask), expected)
    assert len(load_file(tmp_path / "model.safetensors")) == len(net.state_dict()) - tied


def save_from_processes(rank: int, source: str, folder: str) -> list[str]:
    torch.set_num_threads(1)
    with pipeline(source, ranks=4) as pipe:
        penstock.save_transformers(pipe, folder, source)
        return list(pipe.state_dict())


def test_processes_write_a_part_each_and_an_index(processes: LocalProcesses, tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "saved"
    net = tiny.model("gpt_neox").eval()
    net.save_pretrained(source)
    folder.mkdir()
    save_file({"old": torch.zeros(1)}, folder / "model.safetensors")  # a reader would take it for the weights
    held = processes.run(4, save_from_processes, str(source), str(folder), timeout=300)
    assert sum(map(len, held)) == len(net.state_dict())
    assert len(list(folder.glob("*.safetensors"))) == 4
    tokens, _, mask = tiny.batch()
    assert torch.equal(logits_of(folder), net(tokens, attention_mask=mask).logits)


def test_what_lies_beside_the_weights_is_carried_along(tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "saved"
    net = tiny.model("llama")
    net.generation_config = GenerationConfig(max_new_tokens=7)
    net.save_pretrained(source)
    for name in set(CARRIED) - {"generation_config.json"}:
        (source / name).write_text(f"content of {name}")
    with pipeline(source) as pipe:
        penstock.save_transformers(pipe, folder, source)
    for name in CARRIED:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path / "third", net)
    assert GenerationConfig.from_pretrained(tmp_path / "third").max_new_tokens == 7


def test_a_save_over_an_earlier_one_leaves_none_of_its_weights(tmp_path: Path):
    net = tiny.model("llama")
    net.save_pretrained(tmp_path, max_shard_size="8KB")
    with torch.no_grad():
        net.lm_head.weight.mul_(2)
    with pipeline(net) as pipe:
        penstock.save_transformers(pipe, tmp_path, net)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    tokens, _, mask = tiny.batch()
    assert torch.equal(logits_of(tmp_path), net.eval()(tokens, attention_mask=mask).logits)


def test_what_the_layers_cannot_have_come_from_is_refused(tmp_path: Path):
    with pipeline(tiny.model("llama")) as pipe:
        with pytest.raises(ConfigError, match="like must be the model, the config or the folder"):
            penstock.save_transformers(pipe, tmp_path, 3)
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot make the folder"):
            penstock.save_transformers(pipe, tmp_path / "file" / "x", tiny.config("llama"))
