"""``penstock train`` with ``[lora]`` against a plain loop with transformers and peft; saving, resuming, refusing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.base.errors import ConfigError
from penstock.checkpoint.convert import export_transformers, resplit
from penstock.checkpoint.dcp import export_dcp
from penstock.huggingface.adapters.supported import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.config import Config
from penstock.train.evaluate import evaluate
from penstock.train.loop import train
from penstock.train.model.sampling import sample_run
from penstock.train.report.progress import Reporter
from tests.support import hf_folders, peft_curve, peft_models
from tests.support.tiny_run import WORDS, text_folder, tiny
from tests.support.trainer import lines, metrics, run, stopped_at

MODELS = {"gpt2": True, "llama": False}
"""Family, and whether embedding and head are one."""


def config_of(root: Path, family: str = "llama", name: str = "tiny", steps: int = 50, **sections) -> Config:
    base = root / family
    if not base.exists():
        hf_folders.folder(root, family, tied=MODELS[family])
    text = root / "text"
    tables = {
        "model": {"path": str(base)},
        "lora": {"rank": 4, "target_modules": peft_models.TARGETS.get(family, "all-linear")},
        "optim": {"lr": 4e-3},
        "train": {"steps": steps, "name": name},
        "runtime": {"threads": 1},
    }
    for section, table in sections.items():
        tables[section] = {**tables.get(section, {}), **table}
    return tiny(root, text if text.exists() else text_folder(root), **tables)


def assert_same_curve(config: Config, root: Path) -> None:
    folder = Path(config.train.folder) / config.train.name
    plain = peft_curve.train_with_peft(config, peft_curve.initial_adapters(config, root / "initial"))
    seen = [line["loss"] for line in lines(folder, "train")]
    worst = peft_curve.largest_difference(seen, plain.losses)
    print(f"loss {seen[0]:.4f} to {seen[-1]:.4f}; largest difference {worst:.1e}")
    assert seen[-1] < 0.9 * seen[0]
    assert worst < 1e-6
    again = peft_models.with_peft(Path(config.model.path), folder, trainable=False)
    assert torch.allclose(peft_models.logits(again), peft_models.logits(plain.model), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("gpt2", 4)])
def test_fifty_steps_are_those_of_peft_alone(family: str, ranks: int, tmp_path: Path):
    config = config_of(tmp_path, family, parallel={"pp": ranks})
    outcome = train(config, lambda steps, leads: Reporter())
    assert_same_curve(config, tmp_path)
    assert outcome is not None
    assert set(outcome.sample.split()) <= {*WORDS, "<unknown>"}
    folder = Path(outcome.folder)
    assert sample_run(folder) == outcome.sample
    names = {path.name for path in folder.iterdir()}
    assert {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json"} <= names
    assert not [name for name in names if name.startswith("model")]


def in_processes(rank: int, config: Config) -> None:
    train(config, lambda steps, leads: Reporter())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_processes_take_the_steps_of_peft_alone(schedule: str, tmp_path: Path, processes: LocalProcesses):
    config = config_of(tmp_path, schedule={"name": schedule}, runtime={"recompute": "full"})
    processes.run(2, in_processes, config)
    assert_same_curve(config, tmp_path)


@pytest.mark.slow
def test_a_merged_run_is_a_whole_model(tmp_path: Path):
    config = config_of(tmp_path, steps=4, lora={"save": "merged", "dropout": 0.1})
    text = run(config)
    assert "LoRA of rank 4 on 28 matrices: 3,712 of 13,488 weights are trained (27.52%)" in text
    folder = Path(config.train.folder) / "tiny"
    assert not (folder / ADAPTER_CONFIG).exists()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    assert not torch.equal(peft_models.logits(model), peft_models.logits(base))
    assert (folder / "sample.txt").read_text().strip() == sample_run(folder).strip()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with dropout, in one go, with a checkpoint every 2."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("straight")
    run(checkpointed(root, "straight"))
    return root


def checkpointed(root: Path, name: str, **sections) -> Config:
    train = {"checkpoint_every": 2, "eval_every": 2, "keep_last": 0, **sections.pop("train", {})}
    return config_of(root, name=name, steps=6, lora={"dropout": 0.2}, train=train, **sections)


def unfinished(root: Path, straight: Path) -> Path:
    """Copy the run as one leaves it that is killed after step 4."""
    shutil.copytree(straight, root, dirs_exist_ok=True)
    folder = root / "runs" / "straight"
    (folder / ADAPTER_WEIGHTS).unlink()
    stopped_at(root, folder, 4)
    return folder


@pytest.mark.parametrize("moved", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_resumed_run_ends_with_the_same_bits_also_where_the_base_has_moved(
    moved: bool, straight: Path, tmp_path: Path
):
    folder = unfinished(tmp_path, straight)
    if moved:
        (tmp_path / "llama").rename(tmp_path / "elsewhere")
    model = {"path": str(tmp_path / ("elsewhere" if moved else "llama"))}
    run(checkpointed(tmp_path, "straight", model=model, train={"resume": str(folder)}))
    whole = straight / "runs" / "straight"
    assert peft_models.same(load_file(folder / ADAPTER_WEIGHTS), load_file(whole / ADAPTER_WEIGHTS))
    assert metrics(folder) == metrics(whole)


@pytest.mark.slow
def test_another_layout_continues_with_the_same_losses(straight: Path, tmp_path: Path):
    folder = unfinished(tmp_path, straight)
    other = {"parallel": {"pp": 4}, "schedule": {"name": "zb-h1"}}
    run(checkpointed(tmp_path, "straight", train={"resume": str(folder)}, **other))
    seen, whole = (lines(path, "train") for path in (folder, straight / "runs" / "straight"))
    assert [line["loss"] for line in seen] == [line["loss"] for line in whole]


def test_a_checkpoint_has_the_adapters_alone_and_refuses_another_base(straight: Path, tmp_path: Path):
    folder = unfinished(tmp_path, straight)
    checkpoint = folder / "checkpoints" / "step-00000004"
    stored = {n for path in checkpoint.glob("*.safetensors") for n in load_file(path)}
    names = {name.removeprefix("model/") for name in stored if name.startswith("model/")}
    assert len(names) == 56
    assert all("lora_" in name for name in names)
    base = tmp_path / "llama"
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
    model.save_pretrained(base)
    with pytest.raises(
        ConfigError, match=r"frozen weights.* model.layers.2.mlp.up_proj.base_layer.weight differ"
    ):
        run(checkpointed(tmp_path, "straight", train={"resume": str(folder)}))


@pytest.mark.slow
def test_conversions_that_need_the_base_are_refused_and_a_resplit_is_not(straight: Path, tmp_path: Path):
    checkpoint = straight / "runs" / "straight" / "checkpoints" / "step-00000004"
    for export in (export_transformers, export_dcp):
        with pytest.raises(ConfigError, match="has the trained weights alone; 39 frozen ones are those of"):
            export(checkpoint, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    folder = unfinished(tmp_path / "copy", straight)
    target = tmp_path / "step-00000004"
    resplit(checkpoint, target, 3)
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    target.rename(folder / "checkpoints" / "step-00000004")
    run(checkpointed(tmp_path / "copy", "straight", train={"resume": str(folder)}))
    whole = straight / "runs" / "straight"
    assert peft_models.same(load_file(folder / ADAPTER_WEIGHTS), load_file(whole / ADAPTER_WEIGHTS))


@pytest.mark.slow
def test_a_run_trains_the_adapters_of_another_further(straight: Path, tmp_path: Path):
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    before = tmp_path / "runs" / "straight"
    config = config_of(tmp_path, name="further", steps=2)
    tables = {"model": {"path": config.model.path}, "lora": {"path": str(before)}}
    further = tiny(
        tmp_path, tmp_path / "text", **tables, train={"name": "further", "steps": 2}, runtime={"threads": 1}
    )
    run(further)
    last = lines(before, "train")[-1]["loss"]
    first = lines(tmp_path / "runs" / "further", "train")[0]["loss"]
    assert abs(first - last) < 0.5
    one, other = (load_file(path / ADAPTER_WEIGHTS) for path in (before, tmp_path / "runs" / "further"))
    assert one.keys() == other.keys()
    assert not peft_models.same(one, other)


def test_modules_that_do_not_exist_leave_no_run_folder(tmp_path: Path):
    config = config_of(tmp_path, lora={"target_modules": "q_projection"})
    with pytest.raises(ConfigError, match="target_modules has 'q_projection', which no module"):
        run(config)
    assert not os.path.exists(config.train.folder)


@pytest.mark.slow
def test_a_run_without_checkpoints_is_evaluated_with_its_adapters(straight: Path, tmp_path: Path):
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "runs" / "straight"
    (expected,) = evaluate(folder / "checkpoints" / "step-00000006", [], []) or ()
    shutil.rmtree(folder / "checkpoints")
    (seen,) = evaluate(folder, [], []) or ()
    assert seen.loss == pytest.approx(expected.loss, abs=1e-6)
