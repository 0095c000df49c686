"""``penstock train`` on a mesh of processes has the curve, the norms and the weights of the loop over an unsplit model."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.huggingface import weights
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run, write_report
from penstock.train.config import file as config_file
from penstock.train.config.config import Config
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.evaluate import evaluate
from penstock.train.model.sampling import sample_run
from penstock.train.model.trainable import build_model
from tests.support import hf_folders
from tests.support.commands import python
from tests.support.groups import outcome, run_cases
from tests.support.hf_curve import assert_same_curve
from tests.support.lanes import exhaustive
from tests.support.tiny_run import WORDS, text_folder, tiny
from tests.support.trainer import config_of, lines, quietly, run, stopped_at
from tests.support.unsplit import unsplit

pytestmark = pytest.mark.slow

STEPS = 6
RUNTIME = {"threads": 1, "timeout": 300.0}


def in_a_process(rank: int, config: Config) -> object:
    torch.set_num_threads(1)
    return quietly(config)


def on_a_mesh(root: Path, **parallel: object) -> Config:
    """A tiny config with two pipeline ranks, if nothing else is said."""
    return tiny(root, text_folder(root), runtime=RUNTIME, parallel=parallel, train={"steps": STEPS})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """The run of `on_a_mesh` in plain PyTorch; it is the same on every mesh."""
    torch.set_num_threads(1)
    return unsplit(on_a_mesh(tmp_path_factory.mktemp("unsplit")))


def assert_like(reference: tuple, folder: Path) -> None:
    """The bounds are on what another order of sums explains after six steps."""
    losses, norms, last, bits = reference
    seen = lines(folder, "train")
    assert [line["step"] for line in seen] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in seen] == pytest.approx(losses, abs=1e-5)
    assert [line["grad_norm"] for line in seen] == pytest.approx(norms, rel=1e-4)
    assert all(0 <= line["bubble"] < 1 and line["tokens_per_second"] > 0 for line in seen)
    assert lines(folder, "final")[0]["held_out_bits"] == pytest.approx(bits, abs=1e-4)
    saved = weights.load(folder)
    assert saved.keys() == last.keys()
    for name, value in last.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


ALONG = {"sequence_parallel": True}
ZERO = {"zero": True, "bucket_bytes": 1024}
MESHES: dict[str, dict[str, Any]] = {
    "pp2 dp2, ZeRO": {"pp": 2, "dp": 2, **ZERO},
    "pp2 tp2, tp outermost, along the sequence": {"pp": 2, "tp": 2, "order": "tp,pp,dp", **ALONG},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "dp2 tp2, small buckets": {"pp": 1, "dp": 2, "tp": 2, "bucket_bytes": 1024},
    "dp4": {"pp": 1, "dp": 4},
    "dp2 tp2, ZeRO, along the sequence": {"pp": 1, "dp": 2, "tp": 2, **ZERO, **ALONG},
}


# One whose samples are divided, and one whose matrices are.
@pytest.mark.parametrize("name", [*list(MESHES)[:2], *exhaustive(*list(MESHES)[2:])])
def test_training_on_a_mesh_is_the_unsplit_loop(
    name: str, tmp_path: Path, processes: LocalProcesses, reference
):
    told = processes.run(4, in_a_process, on_a_mesh(tmp_path, **MESHES[name]))
    assert [one is None for one in told] == [False, True, True, True]
    folder, files = tmp_path / "runs" / "tiny", MESHES[name]["pp"]
    assert_like(reference, folder)
    kept = config_file.load(folder / "config.toml").parallel
    assert (kept.pp, kept.dp * kept.tp) == (files, 4 // files)
    assert len(list(folder.glob("model*.safetensors"))) == files


@pytest.mark.exhaustive
def test_eight_processes_have_the_curve_of_one(tmp_path: Path, reference):
    config = on_a_mesh(tmp_path, pp=2, dp=2, tp=2)
    with LocalProcesses(8) as eight:
        eight.run(8, in_a_process, config)
    assert_like(reference, tmp_path / "runs" / "tiny")


@pytest.mark.exhaustive  # tests/train/test_torchrun.py starts runs by it, too
def test_two_processes_under_torchrun_have_the_curve_of_one(tmp_path: Path, reference):
    (tmp_path / "run.toml").write_text(config_file.dump(on_a_mesh(tmp_path)))
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "penstock", "train"]
    words = [str(tmp_path / "run.toml"), "--set", "parallel.pp=1", "parallel.dp=2"]
    done = python(["-m", *launch, *words], Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert_like(reference, tmp_path / "runs" / "tiny")


def refused(rank: int, config: Config) -> str:
    return outcome(in_a_process, rank, config)


def test_what_one_stage_cannot_do_every_process_refuses(tmp_path: Path, processes: LocalProcesses):
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 251)
    given = {"parallel": {"pp": 2, "tp": 2}, "sample": {"prompt": "1"}}
    cases = {
        "feed_forward.gate has 25 outputs, which do not divide over tp = 2": {"hidden": 25},
        "attention.key has 1 heads of width 4, which do not divide over tp = 2": {"kv_heads": 1},
        # Only the first and the last stage have words; the other rank must not wait for them.
        "embedding has 257 words of vocabulary, which do not divide over tp = 2": {"vocabulary": 257},
    }
    configs = [(tiny(tmp_path, tmp_path / "tokens.npy", model=model, **given),) for model in cases.values()]
    for said, told in zip(cases, run_cases(processes, 4, refused, configs), strict=True):
        assert all(said in text for text in told), told
    assert not (tmp_path / "runs").exists()


def divided(root: Path, **sections: dict) -> Config:
    sections |= {"optim": {"clip": 0.5}, "train": {"accumulate": 2}, "runtime": RUNTIME}
    return config_of(root, text_folder(root), "divided", STEPS, **sections)


def evaluated(rank: int, folder: Path, words: list[str]) -> float | None:
    torch.set_num_threads(1)
    results = evaluate(folder, [], words)
    return None if results is None else results[0].loss


def test_a_run_with_divided_samples_continues_with_whole_ones(tmp_path: Path, processes: LocalProcesses):
    parallel = {"pp": 2, "cp": 2, "zero": True}
    config = divided(tmp_path, parallel=parallel, schedule={"microbatches": 4})
    processes.run(4, in_a_process, config)
    plain, folder = unsplit(config), tmp_path / "runs" / "divided"
    assert min(plain[1]) > config.optim.clip  # every update is clipped
    assert_like(plain, folder)
    assert "1f1b on 4 ranks (pp 2 x dp 1 x cp 2 x tp 1)" in (folder / "logs" / "rank-0.log").read_text()
    whole = evaluated(0, folder, ["parallel.cp=1", "parallel.zero=false"])
    assert processes.run(4, evaluated, folder, [])[0] == pytest.approx(whole, abs=1e-5)

    stopped_at(tmp_path, folder, 4)
    parallel = replace(config.parallel, cp=1, zero=False)
    run(replace(config, parallel=parallel, train=replace(config.train, resume=str(folder))))
    assert_like(plain, folder)


def test_a_run_with_sharded_weights_continues_with_whole_ones(tmp_path: Path, processes: LocalProcesses):
    shard = {"shard": "weights", "window": 1, "reduce_every": 1}
    schedule = {"name": "interleaved-1f1b", "microbatches": 4}
    config = divided(tmp_path, parallel={"pp": 2, "dp": 2, "virtual_stages": 2, **shard}, schedule=schedule)
    processes.run(4, in_a_process, config)
    plain, folder = unsplit(config), tmp_path / "runs" / "divided"
    assert_like(plain, folder)

    stopped_at(tmp_path, folder, 4)
    copied = shutil.copytree(folder, tmp_path / "runs" / "copied")
    processes.run(4, in_a_process, replace(config, train=replace(config.train, resume=str(copied))))
    assert_like(plain, copied)
    parallel = replace(config.parallel, dp=1, shard="none", window=None, reduce_every=None)
    run(replace(config, parallel=parallel, train=replace(config.train, resume=str(folder))))
    assert_like(plain, folder)


def test_a_run_with_divided_experts_shows_their_load(tmp_path: Path, processes: LocalProcesses):
    text, steps, tokens, chosen = text_folder(tmp_path), 3, 8 * 12, 2
    model = {"experts": 4, "shared_hidden": 8, "auxiliary_loss": 0.01}
    run(config_of(tmp_path, text, "one", steps, model=model))
    parallel = {"pp": 2, "dp": 2, "ep": 2, "zero": True}
    processes.run(
        4, in_a_process, config_of(tmp_path, text, "divided", steps, model=model, parallel=parallel)
    )
    one, many = (lines(tmp_path / "runs" / name, "train") for name in ("one", "divided"))
    assert len(many) == steps
    for expected, line in zip(one, many, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert "expert_tokens" not in expected
        # Two blocks of each of two stages, whose experts two processes divide.
        stages = [sum(line["expert_tokens"][:2]), sum(line["expert_tokens"][2:])]
        assert stages == [2 * tokens * chosen] * 2
        assert 1 <= line["expert_imbalance"] <= 2
        assert all(0 < seconds < line["step_seconds"] * steps for seconds in line["exchange_seconds"])
    view = read_run(tmp_path / "runs" / "divided")
    for trace in view.traces.values():
        experts = trace.info["experts"]
        assert list(experts) == [f"blocks.{n}.feed_forward.experts" for n in range(4)]
        assert all(sum(counts) == tokens * chosen for counts in experts.values())
    page = write_report(view, tmp_path / "page.html").read_text()
    assert "<h2>Experts</h2>" in page
    assert page.count("blocks.0.feed_forward.experts</td>") == len(view.traces)


def of_hugging_face(root: Path, family: str, tied: bool, steps: int, **sections: dict) -> Config:
    """A run whose rate shows it learn: the default is that of fine-tuning."""
    model = {"path": str(hf_folders.folder(root, family, tied=tied, vocab_size=62))}
    sections |= {"optim": {"lr": 0.004}, "train": {"steps": steps}, "runtime": RUNTIME}
    return tiny(root, text_folder(root), model=model, **sections)


# The two ends that share the table are on two ranks with 1f1b, and on one with zb-v. In threads: below. A model of Hugging
# Face with matrices divided over processes is in tests/checkpoint/test_cut.py, too.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "schedule", "parallel"),
    [
        ("llama", "1f1b", {"pp": 2, "tp": 2}),
        ("gpt2", "zb-v", {"pp": 2, "tp": 2}),
        ("gpt2", "1f1b", {"pp": 4}),
        ("llama", "1f1b", {"pp": 2, "cp": 2}),
        ("gpt2", "1f1b", {"pp": 1, "dp": 2, "tp": 2, **ZERO}),
    ],
)
def test_a_hugging_face_model_in_processes_has_the_curve_of_plain_transformers(
    family: str, schedule: str, parallel: dict, tmp_path: Path, processes: LocalProcesses
):
    config = of_hugging_face(tmp_path, family, True, 12, schedule={"name": schedule}, parallel=parallel)
    processes.run(4, in_a_process, config)
    assert_same_curve(config, falls_to=0.9)


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), *exhaustive(("llama", False))])
@pytest.mark.parametrize("ranks", [2, *exhaustive(4)])
def test_a_hugging_face_model_in_threads_has_it_too(family: str, tied: bool, ranks: int, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    config = of_hugging_face(tmp_path, family, tied, 50, parallel={"pp": ranks})
    run(config)
    assert_same_curve(config)
    folder, language = tmp_path / "runs" / "tiny", build_model(config)
    tokens = training_batch(open_data(config, language), config, language, 0).x
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again(tokens, labels=tokens).loss.item() < 0.7 * lines(folder, "train")[0]["loss"]
    assert (folder / "tokenizer.json").is_file()
    assert set(sample_run(folder).split()) <= set(WORDS) | {"<unknown>"}
