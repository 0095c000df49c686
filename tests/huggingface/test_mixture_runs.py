"""`penstock train` of mixtures of experts under torchrun, and what follows from a checkpoint in the middle of a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from penstock.cli import group
from penstock.huggingface.small_config import small_config
from penstock.train.config.file import load
from tests.support.commands import python
from tests.support.hf_curve import by_microbatches
from tests.support.hf_models import distance
from tests.support.lanes import exhaustive
from tests.support.trainer import lines, same, stopped_at

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MIXTURES = ("mixtral", "deepseek_v3")
"""Families whose files have a tensor for each expert; the other one has dense blocks and shared experts, too."""
STEPS, SAVED = 4, 2
LONGEST = 12
"""Tokens of a sample."""


def config_of(family: str, dropout: float) -> Any:
    return small_config(CONFIG_MAPPING[family](), dropout=dropout, eos_token_id=None)


def started(folder: Path, family: str, dropout: bool) -> list[str]:
    """The command of a run: from a folder's weights, or with dropout and random weights from a config."""
    name, schedule = (f"{family}-dropout", "zb-h1") if dropout else (family, "zb-v")
    model = f"model.config={folder / name / 'config.json'}" if dropout else f"model.path={folder / name}"
    return [
        "train", model, f"data.path={folder / 'tokens.npy'}", "data.held_out=0.2", f"data.sequence={LONGEST}",
        "train.batch=8", "schedule.microbatches=4", f"schedule.name={schedule}", "runtime.recompute=full",
        "runtime.threads=1", "optim.lr=3e-3", f"train.steps={STEPS}", f"train.checkpoint_every={SAVED}", "train.log_every=1",
        f"train.eval_every={SAVED}", "train.eval_batches=2", "train.trace_every=0", "train.report=false", "sample.length=4",
        f"train.folder={folder / 'runs'}", f"train.name={name}",
    ]  # fmt: skip


def gone_on(run: Path, copy: Path, schedule: str, *others: str) -> list[str]:
    """The command that goes on, from its middle, with a copy of a run, with another schedule and without recompute."""
    if not copy.exists():
        shutil.copytree(run, copy)
        (left := copy.with_name(f"{copy.name}-left")).mkdir()
        stopped_at(left, copy, SAVED)
    return [
        "train", "--resume", str(copy), f"schedule.name={schedule}", "runtime.recompute=none", "parallel.virtual_stages=1",
        *others,
    ]  # fmt: skip


def launched(folder: Path, processes: int, commands: Sequence[list[str]]) -> str:
    told = folder / "commands.json"
    told.write_text(json.dumps(commands))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = ROOT / "tests" / "support" / "commands_under_torchrun.py"
    done = python([*torchrun, str(script), str(told)], folder, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def checkpoint_of(folder: Path, family: str) -> Path:
    return folder / "runs" / family / "checkpoints" / f"step-{SAVED:08}"


def commanded(*words: str) -> str:
    result = CliRunner().invoke(group, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module", params=[MIXTURES[0], *exhaustive(MIXTURES[1])])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, family: str) -> tuple[Path, dict[str, Any]]:
    """Runs of a family in one launch, those that another launch went on with, and what it told of its checkpoint."""
    folder = tmp_path_factory.mktemp("mixtures")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(3, 60, 1200) // 4)
    np.save(folder / "others.npy", np.random.default_rng(1).integers(3, 60, 100))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family, 0.0)).save_pretrained(folder / family)
    config_of(family, 0.1).save_pretrained(folder / f"{family}-dropout")
    launched(folder, 2, [started(folder, family, dropout) for dropout in (False, True)])
    evaluation = [
        "eval", str(checkpoint_of(folder, family)), str(folder / "others.npy"), "--json", "schedule.name=1f1b",
        "parallel.virtual_stages=1", "parallel.pp=3",
    ]  # fmt: skip
    with_dropout = folder / "runs" / f"{family}-dropout"
    resumed = gone_on(with_dropout, folder / f"{family}-dropout-on-3", "1f1b", "parallel.pp=3")
    # Another start of processes, each of which imports transformers, is for the other family.
    in_processes = family == MIXTURES[1]
    said = (
        launched(folder, 3, [evaluation, resumed])
        if in_processes
        else commanded(*evaluation) + commanded(*resumed)
    )
    (result,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert Path(result["model"]) == checkpoint_of(folder, family)
    return folder, result["results"][0]


def test_a_run_goes_on_at_any_layout_in_processes_and_threads_as_if_it_was_never_stopped(
    trained: tuple[Path, dict[str, Any]], family: str
):
    folder, _ = trained
    for name, ranks in ((family, 4), (f"{family}-dropout", 1)):
        straight = folder / "runs" / name
        commanded(*gone_on(straight, folder / f"{name}-in-threads", "gpipe", f"parallel.pp={ranks}"))
        same(folder / f"{name}-in-threads", straight)
    same(folder / f"{family}-dropout-on-3", folder / "runs" / f"{family}-dropout")
    assert AutoConfig.from_pretrained(folder / "runs" / f"{family}-dropout").attention_dropout == 0.1


def test_losses_weights_and_evaluations_are_those_of_plain_transformers(
    trained: tuple[Path, dict[str, Any]], family: str, tmp_path: Path
):
    folder, evaluated = trained
    run, checkpoint = folder / "runs" / family, checkpoint_of(folder, family)
    losses, weights = by_microbatches(load(run / "config.toml"), (SAVED,))
    assert [line["loss"] for line in lines(run, "train")] == pytest.approx(losses, rel=1e-6)
    commanded("checkpoint", "export-hf", str(checkpoint), str(tmp_path / "middle"))
    for exported, expected in zip((tmp_path / "middle", run), weights, strict=True):
        ours, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert distance(ours.state_dict(), expected) < 1e-6
    assert distance(*weights) > 1e-3

    commanded("checkpoint", "export", str(checkpoint), str(tmp_path / "weights.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "middle").eval()
    state = load_file(tmp_path / "weights.safetensors")
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    seen, nats, counted = evaluated, 0.0, 0
    for window in torch.from_numpy(np.load(folder / "others.npy")).split(LONGEST):
        with torch.no_grad():
            nats += model(window[None], labels=window[None]).loss.item() * (len(window) - 1)
        counted += len(window) - 1
    assert seen["tokens"] == counted
    assert seen["loss"] == pytest.approx(nats / counted, rel=1e-6)
