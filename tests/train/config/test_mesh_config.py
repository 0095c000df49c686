"""``penstock train`` on a mesh of processes has the curve, the norms and the weights of the loop over an unsplit model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.huggingface import weights
from penstock.parallel.mesh import MeshShape
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config import file as config_file
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.resolve import describe, find_mesh, resolve, shape_of
from penstock.train.config.sections import ParallelConfig
from penstock.train.loop import train
from penstock.train.run_log import Reporter
from tests.support import hf_folders
from tests.support.commands import python
from tests.support.hf_curve import assert_same_curve
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import lines
from tests.support.unsplit import unsplit

STEPS = 6


@pytest.mark.parametrize(
    ("given", "processes", "shape"),
    [
        ({}, None, MeshShape(2)),
        ({"pp": 3}, None, MeshShape(3)),
        ({}, 5, MeshShape(5)),
        ({"dp": 2, "tp": 2}, 8, MeshShape(2, 2, 2)),
        ({"dp": 4}, 4, MeshShape(1, 4, 1)),
        ({"pp": 2, "dp": 3, "order": "dp, pp, tp"}, 6, MeshShape(2, 3, 1, ("dp", "pp", "tp"))),
        ({"cp": 2}, 4, MeshShape(2, cp=2)),
        (
            {"dp": 2, "cp": 2, "ep": 4, "order": "cp,pp,dp,tp"},
            4,
            MeshShape(1, 2, 1, ("cp", "pp", "dp", "tp"), 4, 2),
        ),
    ],
)
def test_the_mesh_is_what_is_given_and_the_pipeline_what_is_left(given, processes, shape: MeshShape):
    assert find_mesh(ParallelConfig(**given), processes) == shape
    resolved = resolve(
        from_mapping({"parallel": given, "schedule": {"microbatches": 12}, "train": {"batch": 12}}), processes
    )
    assert shape_of(resolved.parallel) == shape


@pytest.mark.parametrize(
    ("given", "processes", "said"),
    [
        ({"pp": 2, "dp": 2, "tp": 2}, 6, "a mesh of pp 2 x dp 2 x tp 2 has 8 ranks, but the launch has 6 processes"),
        ({"pp": 2, "dp": 2}, 8, "start 4 processes, or take dp = 4"),
        ({"dp": 2, "tp": 2}, 6, "6 processes cannot be divided into pipelines .* start 4 or a multiple of it"),
        ({"tp": 2}, None, "a mesh of pp 2 x dp 1 x tp 2 needs 4 processes, .* torchrun --nproc-per-node 4 -m penstock"),
        ({"dp": 2}, None, "a mesh of pp 2 x dp 2 x tp 1 needs 4 processes, .* parallel.cp=1 and parallel.tp=1"),
        ({"cp": 4}, 6, "6 processes cannot be divided .* parallel.cp = 4 and parallel.tp = 1; start 4 or a multiple"),
        ({"pp": 3}, 2, "parallel.pp is 3, but the launch has 2 processes; leave it unset or start 3"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_the_processes_is_refused(given, processes, said: str):
    with pytest.raises(ConfigError, match=said):
        resolve(from_mapping({"parallel": given}), processes)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"parallel": {"dp": 3}}, "train.batch 16 does not divide over parallel.dp 3: .* take 18, or"),
        (
            {"parallel": {"dp": 3}, "schedule": {"microbatches": 8}},
            "microbatches 8 do not divide .* take a multiple of 3, or parallel.dp = 1",
        ),
        (
            {"parallel": {"dp": 12}, "schedule": {"microbatches": 8}},
            "take a multiple of 12, or parallel.dp = 4",
        ),
        ({"parallel": {"order": "pp,dp"}}, "parallel.order must be pp, dp and tp once each"),
        (
            {"parallel": {"order": "pp,dp,tp,cp,cp"}},
            "parallel.order must be pp, dp and tp once each, and cp or",
        ),
        ({"parallel": {"cp": 0}}, "parallel.cp must be greater than or equal to 1"),
        ({"parallel": {"cp": "2"}}, "parallel.cp must be a whole number, got '2'"),
        (
            {"parallel": {"cp": 3}, "data": {"sequence": 128}},
            "data.sequence 128 does not divide into 2 x parallel.cp = 6 chunks; take a multiple of 6",
        ),
        (
            {"parallel": {"cp": 2, "tp": 2, "sequence_parallel": True}},
            "parallel.sequence_parallel cannot be used with parallel.cp = 2: it divides the same tokens",
        ),
        (
            {"parallel": {"cp": 2}, "runtime": {"compile": "block"}},
            "runtime.compile cannot be used with parallel.cp = 2",
        ),
        (
            {"parallel": {"cp": 2}, "train": {"reduction": "sum"}},
            "train.reduction cannot be used with parallel.cp = 2",
        ),
        (
            {"parallel": {"cp": 2}, "model": {"experts": 4, "hidden": 64, "auxiliary_loss": 0.1}},
            "model.auxiliary_loss cannot be used with parallel.cp = 2",
        ),
        ({"parallel": {"tp": 0}}, "parallel.tp must be greater than or equal to 1"),
        ({"parallel": {"sequence_parallel": 1}}, "parallel.sequence_parallel must be true or false, got 1"),
        (
            {"parallel": {"sequence_parallel": True, "tp": 3}},
            "data.sequence 128 does not divide over parallel.tp 3, .* take a multiple of 3",
        ),
    ],
)
def test_shares_that_do_not_divide_are_refused_with_what_would(tables, said: str):
    with pytest.raises(ConfigError, match=said):
        from_mapping(tables)


def test_a_mesh_is_described_by_its_ranks_and_axes():
    assert [describe(MeshShape(*sizes)) for sizes in ((1,), (4,), (2, 2, 2))] == [
        "1 rank",
        "4 ranks",
        "8 ranks (pp 2 x dp 2 x tp 2)",
    ]


def in_a_process(rank: int, config: Config) -> object:
    torch.set_num_threads(1)
    return train(config, lambda steps, leads: Reporter())


def on_a_mesh(root: Path, **parallel: object) -> Config:
    """A tiny config with two pipeline ranks, if nothing else is said."""
    return tiny(
        root,
        text_folder(root),
        runtime={"threads": 1, "timeout": 300.0},
        parallel=parallel,
        train={"steps": STEPS},
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """The run of `on_a_mesh` in plain PyTorch; it is the same on every mesh."""
    torch.set_num_threads(1)
    return unsplit(on_a_mesh(tmp_path_factory.mktemp("unsplit")))


def assert_like(reference: tuple, config: Config) -> None:
    losses, norms, last, bits = reference
    folder = Path(config.train.folder) / config.train.name
    seen = lines(folder, "train")
    worst = max(abs(line["loss"] - loss) for line, loss in zip(seen, losses, strict=True))
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps; largest difference {worst:.1e}")
    assert worst < 1e-5
    assert [line["grad_norm"] for line in seen] == pytest.approx(norms, rel=1e-4)
    assert all(0 <= line["bubble"] < 1 and line["tokens_per_second"] > 0 for line in seen)
    assert lines(folder, "final")[0]["held_out_bits"] == pytest.approx(bits, abs=1e-4)
    saved = weights.load(folder)
    assert saved.keys() == last.keys()
    for name, value in last.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


MESHES = {
    "pp2 dp2": ({"dp": 2}, 2),
    "pp2 tp2": ({"tp": 2}, 2),
    "pp2 tp2, tp outermost, along the sequence": (
        {"tp": 2, "order": "tp,pp,dp", "sequence_parallel": True},
        2,
    ),
    "dp2 tp2, small buckets": ({"pp": 1, "dp": 2, "tp": 2, "bucket_bytes": 1024}, 1),
    "dp4": ({"pp": 1, "dp": 4}, 1),
    "pp2 dp2, ZeRO": ({"dp": 2, "zero": True, "bucket_bytes": 1024}, 2),
    "dp2 tp2, ZeRO, along the sequence": (
        {"pp": 1, "dp": 2, "tp": 2, "zero": True, "bucket_bytes": 1024, "sequence_parallel": True},
        1,
    ),
}


FAST = ("pp2 dp2", "pp2 dp2, ZeRO")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MESHES]
)
def test_training_on_a_mesh_is_the_unsplit_loop(
    name: str, tmp_path: Path, processes: LocalProcesses, reference
):
    parallel, files = MESHES[name]
    config = on_a_mesh(tmp_path, **parallel)
    told = processes.run(4, in_a_process, config)
    assert [outcome is None for outcome in told] == [False, True, True, True]
    assert_like(reference, config)
    kept = config_file.load(tmp_path / "runs" / "tiny" / "config.toml").parallel
    assert (kept.pp, kept.dp * kept.tp) == (files, 4 // files)
    assert len(list((tmp_path / "runs" / "tiny").glob("model*.safetensors"))) == files


@pytest.mark.slow
def test_eight_processes_have_the_curve_of_one(tmp_path: Path, reference):
    config = on_a_mesh(tmp_path, pp=2, dp=2, tp=2)
    with LocalProcesses(8) as eight:
        eight.run(8, in_a_process, config)
    assert_like(reference, config)


@pytest.mark.slow
def test_two_processes_under_torchrun_have_the_curve_of_one(tmp_path: Path, reference):
    config = on_a_mesh(tmp_path)
    (tmp_path / "run.toml").write_text(config_file.dump(config))
    done = torchrun(str(tmp_path / "run.toml"), "--set", "parallel.pp=1", "parallel.dp=2")
    assert done.returncode == 0, done.stderr
    assert_like(reference, config)


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return python(["-m", *launch, "-m", "penstock", "train", *words], Path.cwd(), environment)


@pytest.mark.slow
def test_what_cannot_be_cut_ends_every_process_with_exit_code_2(tmp_path: Path):
    config = on_a_mesh(tmp_path, pp=1, tp=2)
    (tmp_path / "run.toml").write_text(config_file.dump(config))
    done = torchrun(str(tmp_path / "run.toml"), "--set", "model.kv_heads=1")
    assert "attention.key has 1 heads of width 4, which do not divide over tp = 2" in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "runs").exists()


def refused(rank: int, config: Config) -> str:
    try:
        train(config, lambda steps, leads: Reporter())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"hidden": 25}, "feed_forward.gate has 25 outputs, which do not divide over tp = 2"),
        # Only the first and the last stage have words; the other rank must not wait for them.
        ({"vocabulary": 257}, "embedding has 257 words of vocabulary, which do not divide over tp = 2"),
    ],
)
def test_what_one_stage_cannot_do_every_process_refuses(
    model, said: str, tmp_path, processes: LocalProcesses
):
    config = tiny(
        tmp_path,
        text_folder(tmp_path),
        model=model,
        parallel={"pp": 2, "tp": 2},
        sample={"prompt": "1"},
        data={"path": str(tokens(tmp_path))},
    )
    told = processes.run(4, refused, config)
    assert all(said in text for text in told), told
    assert not (tmp_path / "runs").exists()


def tokens(root: Path) -> Path:
    import numpy as np

    path = root / "tokens.npy"
    np.save(path, np.arange(4000, dtype=np.uint16) % 251)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule", "parallel"),
    [
        ("llama", "1f1b", {"pp": 2, "tp": 2}),
        ("gpt2", "zb-v", {"pp": 2, "tp": 2}),
        ("llama", "1f1b", {"pp": 2, "cp": 2}),
        ("gpt2", "1f1b", {"pp": 1, "dp": 2, "tp": 2, "zero": True, "bucket_bytes": 1024}),
    ],
)
def test_a_tied_hugging_face_model_whose_matrices_are_cut(
    family: str, schedule: str, parallel: dict, tmp_path: Path, processes: LocalProcesses
):
    """The two ends that share the table are on two ranks with 1f1b, and on one with zb-v."""
    model = hf_folders.folder(tmp_path, family, tied=True, vocab_size=62)
    config = tiny(
        tmp_path,
        text_folder(tmp_path),
        model={"path": str(model)},
        schedule={"name": schedule},
        parallel=parallel,
        train={"steps": 12},
        optim={"lr": 0.004},  # to see it learn; with model.path the default is that of fine-tuning
        runtime={"threads": 1, "timeout": 300.0},
    )
    processes.run(4, in_a_process, config)
    assert_same_curve(config, falls_to=0.9)
