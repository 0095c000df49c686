"""``penstock train`` on a mesh of processes has the curve, the norms and the weights of the loop over an unsplit model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.huggingface import weights
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config import file as config_file
from penstock.train.config.config import Config
from penstock.train.loop import train
from penstock.train.run_log import Reporter
from tests.support import hf_folders
from tests.support.commands import python
from tests.support.groups import run_cases
from tests.support.hf_curve import assert_same_curve
from tests.support.lanes import exhaustive
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import lines
from tests.support.unsplit import unsplit

pytestmark = pytest.mark.slow

RUNTIME = {"threads": 1, "timeout": 300.0}


def in_a_process(rank: int, config: Config) -> object:
    torch.set_num_threads(1)
    return train(config, lambda steps, leads: Reporter())


def on_a_mesh(root: Path, **parallel: object) -> Config:
    """A tiny config with two pipeline ranks, if nothing else is said."""
    return tiny(root, text_folder(root), runtime=RUNTIME, parallel=parallel, train={"steps": 6})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """The run of `on_a_mesh` in plain PyTorch; it is the same on every mesh."""
    torch.set_num_threads(1)
    return unsplit(on_a_mesh(tmp_path_factory.mktemp("unsplit")))


def assert_like(reference: tuple, config: Config) -> None:
    losses, norms, last, bits = reference
    folder = Path(config.train.folder) / config.train.name
    seen = lines(folder, "train")
    assert [line["loss"] for line in seen] == pytest.approx(losses, abs=1e-5)
    assert [line["grad_norm"] for line in seen] == pytest.approx(norms, rel=1e-4)
    assert all(0 <= line["bubble"] < 1 and line["tokens_per_second"] > 0 for line in seen)
    assert lines(folder, "final")[0]["held_out_bits"] == pytest.approx(bits, abs=1e-4)
    saved = weights.load(folder)
    assert saved.keys() == last.keys()
    for name, value in last.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


MESHES = {
    "pp2 dp2, ZeRO": {"pp": 2, "dp": 2, "zero": True, "bucket_bytes": 1024},
    "pp2 tp2, tp outermost, along the sequence": {"pp": 2, "tp": 2, "order": "tp,pp,dp", "sequence_parallel": True},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "dp2 tp2, small buckets": {"pp": 1, "dp": 2, "tp": 2, "bucket_bytes": 1024},
    "dp4": {"pp": 1, "dp": 4},
    "dp2 tp2, ZeRO, along the sequence":
        {"pp": 1, "dp": 2, "tp": 2, "zero": True, "bucket_bytes": 1024, "sequence_parallel": True},
}  # fmt: skip


# One whose samples are divided, and one whose matrices are.
@pytest.mark.parametrize("name", [*list(MESHES)[:2], *exhaustive(*list(MESHES)[2:])])
def test_training_on_a_mesh_is_the_unsplit_loop(
    name: str, tmp_path: Path, processes: LocalProcesses, reference
):
    config = on_a_mesh(tmp_path, **MESHES[name])
    told = processes.run(4, in_a_process, config)
    assert [outcome is None for outcome in told] == [False, True, True, True]
    assert_like(reference, config)
    kept = config_file.load(tmp_path / "runs" / "tiny" / "config.toml").parallel
    files = MESHES[name]["pp"]
    assert (kept.pp, kept.dp * kept.tp) == (files, 4 // files)
    assert len(list((tmp_path / "runs" / "tiny").glob("model*.safetensors"))) == files


@pytest.mark.exhaustive
def test_eight_processes_have_the_curve_of_one(tmp_path: Path, reference):
    config = on_a_mesh(tmp_path, pp=2, dp=2, tp=2)
    with LocalProcesses(8) as eight:
        eight.run(8, in_a_process, config)
    assert_like(reference, config)


def test_two_processes_under_torchrun_have_the_curve_of_one(tmp_path: Path, reference):
    config = on_a_mesh(tmp_path)
    (tmp_path / "run.toml").write_text(config_file.dump(config))
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "penstock", "train"]
    words = [str(tmp_path / "run.toml"), "--set", "parallel.pp=1", "parallel.dp=2"]
    done = python(["-m", *launch, *words], Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert_like(reference, config)


def refused(rank: int, config: Config) -> str:
    try:
        train(config, lambda steps, leads: Reporter())
    except ConfigError as error:
        return str(error)
    return ""


def test_what_one_stage_cannot_do_every_process_refuses(tmp_path: Path, processes: LocalProcesses):
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 251)
    cases = {
        "feed_forward.gate has 25 outputs, which do not divide over tp = 2": {"hidden": 25},
        "attention.key has 1 heads of width 4, which do not divide over tp = 2": {"kv_heads": 1},
        # Only the first and the last stage have words; the other rank must not wait for them.
        "embedding has 257 words of vocabulary, which do not divide over tp = 2": {"vocabulary": 257},
    }
    mesh, prompt = {"pp": 2, "tp": 2}, {"prompt": "1"}
    configs = [
        tiny(tmp_path, tmp_path / "tokens.npy", model=model, parallel=mesh, sample=prompt)
        for model in cases.values()
    ]
    for said, told in zip(cases, run_cases(processes, 4, refused, [(c,) for c in configs]), strict=True):
        assert all(said in text for text in told), told
    assert not (tmp_path / "runs").exists()


# The two ends that share the table are on two ranks with 1f1b, and on one with zb-v.
@pytest.mark.parametrize(
    ("family", "schedule", "parallel"),
    [
        ("llama", "1f1b", {"pp": 2, "tp": 2}),
        *exhaustive(
            ("gpt2", "zb-v", {"pp": 2, "tp": 2}),
            ("llama", "1f1b", {"pp": 2, "cp": 2}),
            ("gpt2", "1f1b", {"pp": 1, "dp": 2, "tp": 2, "zero": True, "bucket_bytes": 1024}),
        ),
    ],
)
def test_a_tied_hugging_face_model_whose_matrices_are_cut(
    family: str, schedule: str, parallel: dict, tmp_path: Path, processes: LocalProcesses
):
    config = tiny(
        tmp_path, text_folder(tmp_path), schedule={"name": schedule}, parallel=parallel, runtime=RUNTIME,
        model={"path": str(hf_folders.folder(tmp_path, family, tied=True, vocab_size=62))},
        train={"steps": 12}, optim={"lr": 0.004},  # to see it learn: the default is that of fine-tuning
    )  # fmt: skip
    processes.run(4, in_a_process, config)
    assert_same_curve(config, falls_to=0.9)
