"""Precision, accumulation, optimizers and the rest of what a config says about updates: the plain loop's numbers."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.errors import ConfigError, NonFiniteError
from penstock.huggingface import weights
from penstock.train.data.run_data import open_data
from penstock.train.loop import with_steps
from penstock.train.model.trainable import build_model
from tests.support.lanes import exhaustive, slow
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import config_of, lines, run, same, stopped_at
from tests.support.unsplit import unsplit

Sections = dict[str, dict[str, Any]]
MOMENTUM: Sections = {"optim": {"name": "SGD", "lr": 0.1, "arguments": {"momentum": 0.9, "nesterov": True}}}
FP16: Sections = {
    "optim": {"loss_scale": 2.0**24, "loss_scale_interval": 2},
    "runtime": {"precision": "fp16"},
}
"""A scale at which the first steps overflow, and which grows again after two that do not."""

ON_DISK: Sections = {
    "parallel": {"store": "disk", "window": 1, "virtual_stages": 2},
    "schedule": {"name": "breadth-first"},
}

CASES: dict[str, Sections] = {
    "accumulation": {"train": {"accumulate": 3}},
    "weights on disk": ON_DISK,
    "fp16 with a scaled loss": {**FP16, "train": {"steps": 8, "accumulate": 2}},
    "bf16 weights with main weights": {"runtime": {"precision": "bf16-weights"}, "train": {"accumulate": 2}},
    "bf16 autocast, recomputed": {"runtime": {"precision": "bf16", "recompute": "full"}},
    "momentum": MOMENTUM,
    "a line": {"optim": {"name": "RMSprop", "lr": 1e-3, "lr_schedule": "linear"}},
    "a constant": {"optim": {"name": "Adafactor", "lr_schedule": "constant"}},
}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_the_store_of_a_run_is_its_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny(tmp_path, text_folder(tmp_path), **ON_DISK)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(ConfigError, match="which is a tmpfs and so in memory; set TMPDIR"):
        run(config)


# One of each precision; the optimizers have tests of their own.
@pytest.mark.parametrize("case", [*list(CASES)[:3], *slow(*list(CASES)[3:5]), *exhaustive(*list(CASES)[5:])])
def test_a_run_is_the_plain_loop(tmp_path: Path, case: str):
    config = tiny(tmp_path, text_folder(tmp_path), **CASES[case])
    said = run(config)
    losses, norms, last, bits = unsplit(config)
    folder = tmp_path / "runs" / "tiny"
    seen = {key: [line[key] for line in lines(folder, "train")] for key in ("loss", "grad_norm")}
    assert seen == {"loss": losses, "grad_norm": pytest.approx(norms, rel=1e-6)}
    saved = weights.load(folder)
    assert saved.keys() == last.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in last.items())
    assert lines(folder, "final")[0]["held_out_bits"] == pytest.approx(bits, abs=1e-2)
    overflows = [line for line in said if "a gradient overflowed at a loss scale of" in line]
    assert len(overflows) == config.train.steps - len(losses)
    assert bool(overflows) == (case == "fp16 with a scaled loss")
    assert len(lines(folder, "skipped")) == len(overflows)


RESUMED: dict[str, Sections] = {
    "bf16 weights, momentum, accumulation": {
        **MOMENTUM, "runtime": {"precision": "bf16-weights"}, "train": {"accumulate": 2},
    },
    "fp16, accumulation": {**FP16, "train": {"accumulate": 2, "steps": 8}},
    "Adafactor, sum": {"optim": {"name": "Adafactor"}, "train": {"reduction": "sum"}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", [*list(RESUMED)[:1], *exhaustive(*list(RESUMED)[1:])])
def test_a_resumed_run_at_another_layout_is_the_run_that_was_never_stopped(tmp_path: Path, case: str):
    sections = RESUMED[case]
    steps = sections.get("train", {}).get("steps", 6)
    text = text_folder(tmp_path)
    folder = tmp_path / "runs"
    run(config_of(tmp_path, text, "straight", steps, **sections))
    run(config_of(tmp_path, text, "again", steps, **sections))
    stopped_at(tmp_path, folder / "again", steps - 2)
    run(config_of(tmp_path, text, "again", steps, str(folder / "again"), **sections, parallel={"pp": 4}))
    same(folder / "again", folder / "straight")


def test_epochs_are_passes_over_the_training_samples(tmp_path: Path):
    text = text_folder(tmp_path)
    config = tiny(tmp_path, text, train={"batch": 4, "accumulate": 2})
    config = replace(config, train=replace(config.train, epochs=1.5))
    data = open_data(config, build_model(config))
    assert data.per_epoch > 16
    assert with_steps(config, data).train.steps == math.ceil(1.5 * data.per_epoch / 8)
    with pytest.raises(ConfigError, match="a run has less than 2,147,483,648"):
        with_steps(replace(config, train=replace(config.train, epochs=1e9)), data)


def test_a_sum_is_told_as_the_mean(tmp_path: Path):
    """The loss in nats a token and the held-out bits do not depend on the reduction; the gradients do."""
    text = text_folder(tmp_path)
    seen = {}
    for reduction in ("mean", "sum"):
        one_step = {"name": reduction, "steps": 1, "reduction": reduction}
        run(tiny(tmp_path, text, train=one_step, optim={"clip": 0}))
        folder = tmp_path / "runs" / reduction
        seen[reduction] = lines(folder, "train")[0]
    assert seen["sum"]["loss"] == pytest.approx(seen["mean"]["loss"], rel=1e-6)
    assert seen["sum"]["grad_norm"] == pytest.approx(4 * seen["mean"]["grad_norm"], rel=1e-5)


def test_a_loss_that_no_scale_makes_finite_stops_the_run(tmp_path: Path):
    optim, runtime = {"lr": 1e30, "clip": 0, "loss_scale": 4.0}, {"precision": "fp16"}
    config = tiny(tmp_path, text_folder(tmp_path), optim=optim, runtime=runtime, train={"steps": 9})
    with pytest.raises(NonFiniteError, match=r"a gradient, at a loss scale of 1, is NaN or infinite"):
        run(config)


# The code that inductor makes takes the longest; tests/runtime/test_recompute.py has a pipeline with it.
@pytest.mark.filterwarnings("ignore")  # those of torch's own compiler
@pytest.mark.parametrize(
    ("what", "backend"),
    [*slow(("block", "aot_eager")), *exhaustive(("block", "inductor"), ("stage", "inductor"))],
)
def test_compiled_stages_train_close_to_the_plain_loop(
    tmp_path: Path, what: str, backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layers = 4 if what == "block" else 2  # each block is compiled once, or as often as the stages have blocks
    config = tiny(
        tmp_path, text_folder(tmp_path), model={"layers": layers},
        runtime={"compile": what, "precision": "bf16-weights"},
    )  # fmt: skip
    run(config)
    losses, _, _, _ = unsplit(config)
    seen = [line["loss"] for line in lines(tmp_path / "runs" / "tiny", "train")]
    assert seen == pytest.approx(losses, abs=2e-2)


@pytest.mark.slow
def test_what_saves_memory_or_chooses_a_split_changes_no_number(tmp_path: Path):
    text = text_folder(tmp_path)
    run(tiny(tmp_path, text))
    options: Sections = {
        "runtime": {
            "recompute": "auto",
            "memory": 10**9,
            "offload": True,
            "check_finite": False,
            "strict": True,
        },
        "schedule": {"split": "measured"},
        "parallel": {"buffers": "mean"},
    }
    run(tiny(tmp_path, text, **options, train={"name": "options"}))
    same(tmp_path / "runs" / "options", tmp_path / "runs" / "tiny")
