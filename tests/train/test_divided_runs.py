"""`penstock train` with samples or weights divided over processes, beside the loop over the unsplit model."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.huggingface import weights
from penstock.train.config import file as config_file
from penstock.train.evaluate import evaluate
from tests.support.commands import python
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, lines, run, stopped_at
from tests.support.unsplit import unsplit

LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-4
"""Bounds on what another order of sums explains after six steps: absolute, relative to the norm, absolute."""
STEPS, AT = 6, 4


@pytest.mark.slow
def test_a_run_is_the_plain_loop_and_continues_with_whole_samples(tmp_path: Path):
    torch.set_num_threads(1)
    config = config_of(
        tmp_path, text_folder(tmp_path), "divided", STEPS,
        parallel={"pp": 2, "cp": 2, "zero": True}, schedule={"microbatches": 4},
        optim={"clip": 0.5}, train={"accumulate": 2}, runtime={"threads": 1, "timeout": 300.0},
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(config_file.dump(config))
    assert "1f1b on 4 ranks (pp 2 x dp 1 x cp 2 x tp 1)" in torchrun("train", str(tmp_path / "run.toml"))
    plain = unsplit(config)
    assert min(plain[1]) > config.optim.clip  # every update is clipped
    folder = tmp_path / "runs" / "divided"
    assert_like(plain, folder)
    whole = evaluate(folder, [], ["parallel.cp=1", "parallel.zero=false"])
    assert whole is not None
    divided = json.loads(torchrun("eval", str(folder), "--json").splitlines()[-1])
    assert divided["results"][0]["loss"] == pytest.approx(whole[0].loss, abs=LOSS)

    stopped_at(tmp_path, folder, AT)
    parallel = replace(config.parallel, cp=1, zero=False)
    run(replace(config, parallel=parallel, train=replace(config.train, resume=str(folder))))
    assert_like(plain, folder)


@pytest.mark.slow
def test_a_run_with_sharded_weights_is_the_plain_loop_and_continues_with_whole_ones(tmp_path: Path):
    torch.set_num_threads(1)
    config = config_of(
        tmp_path, text_folder(tmp_path), "sharded", STEPS,
        parallel={"pp": 2, "dp": 2, "virtual_stages": 2, "shard": "weights", "window": 1, "reduce_every": 1},
        schedule={"name": "interleaved-1f1b", "microbatches": 4}, optim={"clip": 0.5}, train={"accumulate": 2},
        runtime={"threads": 1, "timeout": 300.0},
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(config_file.dump(config))
    torchrun("train", str(tmp_path / "run.toml"))
    plain = unsplit(config)
    folder = tmp_path / "runs" / "sharded"
    assert_like(plain, folder)

    stopped_at(tmp_path, folder, AT)
    copied = shutil.copytree(folder, tmp_path / "runs" / "copied")
    again = replace(config, train=replace(config.train, resume=str(copied)))
    (tmp_path / "again.toml").write_text(config_file.dump(again))
    torchrun("train", str(tmp_path / "again.toml"))
    assert_like(plain, copied)
    parallel = replace(config.parallel, dp=1, shard="none", window=None, reduce_every=None)
    run(replace(config, parallel=parallel, train=replace(config.train, resume=str(folder))))
    assert_like(plain, folder)


def torchrun(*words: str) -> str:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "penstock"]
    done = python(["-m", *launch, *words], Path.cwd(), {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


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
