from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.find import steps_in
from penstock.cli import group
from penstock.runtime.pipeline import Pipeline
from tests.support import own_models
from tests.support.checkpoint_runs import adamw, equal, pipeline, state_of, steps
from tests.support.lanes import exhaustive, slow
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import quietly


def call(*words: object) -> Result:
    return CliRunner().invoke(group, ["checkpoint", *map(str, words)])


def saved(folder: Path) -> Path:
    with pipeline(ranks=2) as pipe, Checkpoints(folder / "checkpoints", pipe, adamw(pipe)) as checkpoints:
        for _ in range(2):
            steps(pipe, checkpoints.optimizer, 1)
            checkpoints.save()
    return steps_in(folder / "checkpoints")[0][1]


def test_list_and_verify_name_what_is_damaged(tmp_path: Path):
    newest = saved(tmp_path)
    rows = json.loads(call("list", tmp_path, "--json").output)
    assert [(row["step"], row["complete"], row["stages"]) for row in rows] == [(2, True, 2), (1, True, 2)]
    assert call("verify", tmp_path).exit_code == 0
    damaged = sorted(newest.glob("stage-*"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 4
    damaged.write_bytes(data)
    result = call("verify", tmp_path)
    assert result.exit_code == 1
    assert f"{damaged} is damaged" in result.output
    assert call("verify", newest.with_name("step-00000001")).exit_code == 0


def test_convert_to_other_files_loads_as_the_same(tmp_path: Path):
    newest = saved(tmp_path)
    target = tmp_path / "other" / newest.name
    result = call("convert", newest, target, "--stages", 5)
    assert result.exit_code == 0, result.output
    assert len(list(target.glob("stage-*-of-00005.safetensors"))) == 5
    states = []
    for folder in (newest.parent, target.parent):
        with pipeline(ranks=4) as pipe:
            optimizer = adamw(pipe)
            with Checkpoints(folder, pipe, optimizer) as checkpoints:
                assert checkpoints.load_newest().step == 2
            states.append(state_of(pipe, optimizer))
    assert equal(*states)


def test_export_writes_all_names_of_the_model_given(tmp_path: Path):
    net = own_models.made(own_models.NanoGPT)
    with Pipeline(net, ranks=2, microbatches=2) as pipe, Checkpoints(tmp_path / "run", pipe) as checkpoints:
        pipe.step(*own_models.batch())
        checkpoints.save()
        path = checkpoints.wait()
        expected = pipe.full_state_dict()
    for name, load in (("model.safetensors", load_file), ("model.pt", torch.load)):
        result = call("export", path, tmp_path / name)
        assert result.exit_code == 0, result.output
        state = load(tmp_path / name)
        assert state.keys() == expected.keys()
        own_models.NanoGPT().load_state_dict(state, strict=True)
        assert all(torch.equal(state[key], value) for key, value in expected.items())
    for name, said in (("model.pt", "already exists"), ("model.bin", ".safetensors or .pt")):
        refused = call("export", path, tmp_path / name)
        assert said in f"{refused.output}{refused.exception}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_convert_to_dcp_is_what_torch_loads_and_comes_back(tmp_path: Path):
    from torch.distributed.checkpoint.state_dict_loader import load

    newest = saved(tmp_path)
    result = call("convert", newest, tmp_path / "dcp", "--to-dcp")
    assert result.exit_code == 0, result.output
    stored = {}
    for path in newest.glob("stage-*"):
        stored |= load_file(path)
    model = {
        n.removeprefix("model/"): torch.zeros_like(t) for n, t in stored.items() if n.startswith("model/")
    }
    load({"model": model}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(stored[f"model/{name}"], tensor) for name, tensor in model.items())
    back = tmp_path / "back" / newest.name
    result = call("convert", tmp_path / "dcp", back, "--from-dcp", "--like", newest)
    assert result.exit_code == 0, result.output
    again = {name: t for path in back.glob("stage-*") for name, t in load_file(path).items()}
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    assert call("verify", back).exit_code == 0


def test_what_cannot_be_done_is_one_clear_line(tmp_path: Path):
    newest = saved(tmp_path)
    for words, said in [
        (("convert", newest, newest, "--stages", 2), "already exists"),
        (("convert", newest, tmp_path / "step-00000002", "--stages", 99), "layers; they make 1 to"),
        (("export-hf", newest, tmp_path / "hf"), "not of a Hugging Face model"),
        (("export", newest, tmp_path / "none" / "model.pt"), "cannot write"),
        (("export", newest, tmp_path / "none" / "model.safetensors"), "cannot write"),
        (
            ("export", newest.parents[1], tmp_path / "model.pt"),
            f"give one of its checkpoints, such as {newest}",
        ),
        (
            ("convert", newest, newest, "--stages", 2, "--to-dcp"),
            "give exactly one of --stages, --to-dcp and --from-dcp",
        ),
        (("convert", newest, newest, "--from-dcp"), "--from-dcp needs --like, and --like needs --from-dcp"),
        (("convert", newest, tmp_path / "step-00000002", "--from-dcp", "--like", newest), "no .metadata"),
        (("list", tmp_path / "none"), "holds no checkpoints"),
    ]:
        result = call(*words)
        assert result.exit_code != 0
        assert said in f"{result.output}{result.exception}"


@pytest.mark.parametrize("family", [*slow("llama"), *exhaustive("gpt2")])
def test_what_is_exported_is_what_the_library_loads_with_the_runs_logits(tmp_path: Path, family: str):
    from transformers import AutoModelForCausalLM

    from tests.support import hf_folders

    source = hf_folders.folder(tmp_path, family, tied=family == "gpt2")
    told = {"steps": 2, "checkpoint_every": 2, "name": "run"}
    config = tiny(tmp_path, text_folder(tmp_path), model={"path": str(source)}, train=told)
    quietly(config)
    run, target = tmp_path / "runs" / "run", tmp_path / "exported"
    result = call("export-hf", run / "checkpoints" / "step-00000002", target)
    assert result.exit_code == 0, result.output
    tokens = torch.arange(12).reshape(2, 6)
    logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (target, run, source)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])  # it has learnt something
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
