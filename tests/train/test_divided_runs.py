"""`penstock train` with samples or weights divided over processes, beside the loop over the unsplit model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.huggingface import weights
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.config import Config
from penstock.train.evaluate import evaluate
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, lines, run, stopped_at
from tests.support.unsplit import unsplit

pytestmark = pytest.mark.slow

LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-4
"""Bounds on what another order of sums explains after six steps: absolute, relative to the norm, absolute."""
STEPS, AT = 6, 4


def in_a_process(rank: int, config: Config) -> list[str]:
    torch.set_num_threads(1)
    return run(config)


def evaluated(rank: int, folder: Path, words: list[str]) -> float | None:
    torch.set_num_threads(1)
    results = evaluate(folder, [], words)
    return None if results is None else results[0].loss


def config_in(root: Path, **sections: dict) -> Config:
    sections |= {
        "optim": {"clip": 0.5},
        "train": {"accumulate": 2},
        "runtime": {"threads": 1, "timeout": 300.0},
    }
    return config_of(root, text_folder(root), "divided", STEPS, **sections)


def test_a_run_is_the_plain_loop_and_continues_with_whole_samples(tmp_path: Path, processes: LocalProcesses):
    parallel = {"pp": 2, "cp": 2, "zero": True}
    config = config_in(tmp_path, parallel=parallel, schedule={"microbatches": 4})
    said = processes.run(4, in_a_process, config)[0]
    assert "1f1b on 4 ranks (pp 2 x dp 1 x cp 2 x tp 1)" in said[0]
    plain = unsplit(config)
    assert min(plain[1]) > config.optim.clip  # every update is clipped
    folder = tmp_path / "runs" / "divided"
    assert_like(plain, folder)
    whole = evaluated(0, folder, ["parallel.cp=1", "parallel.zero=false"])
    assert processes.run(4, evaluated, folder, [])[0] == pytest.approx(whole, abs=LOSS)

    stopped_at(tmp_path, folder, AT)
    parallel = replace(config.parallel, cp=1, zero=False)
    run(replace(config, parallel=parallel, train=replace(config.train, resume=str(folder))))
    assert_like(plain, folder)


def test_a_run_with_sharded_weights_is_the_plain_loop_and_continues_with_whole_ones(
    tmp_path: Path, processes: LocalProcesses
):
    shard = {"shard": "weights", "window": 1, "reduce_every": 1}
    schedule = {"name": "interleaved-1f1b", "microbatches": 4}
    config = config_in(tmp_path, parallel={"pp": 2, "dp": 2, "virtual_stages": 2, **shard}, schedule=schedule)
    processes.run(4, in_a_process, config)
    plain = unsplit(config)
    folder = tmp_path / "runs" / "divided"
    assert_like(plain, folder)

    stopped_at(tmp_path, folder, AT)
    copied = shutil.copytree(folder, tmp_path / "runs" / "copied")
    processes.run(4, in_a_process, replace(config, train=replace(config.train, resume=str(copied))))
    assert_like(plain, copied)
    parallel = replace(config.parallel, dp=1, shard="none", window=None, reduce_every=None)
    run(replace(config, parallel=parallel, train=replace(config.train, resume=str(folder))))
    assert_like(plain, folder)


def assert_like(plain: tuple, folder: Path) -> None:
    losses, norms, last, bits = plain
    seen = lines(folder, "train")
    assert [line["step"] for line in seen] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in seen] == pytest.approx(losses, abs=LOSS)
    assert [line["grad_norm"] for line in seen] == pytest.approx(norms, rel=NORM)
    assert lines(folder, "final")[0]["held_out_bits"] == pytest.approx(bits, abs=1e-4)
    saved = weights.load(folder)
    assert saved.keys() == last.keys()
    for name, weight in last.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-3, atol=WEIGHT)
