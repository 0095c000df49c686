"""A run whose steps flow into each other writes the same losses, norms, weights and checkpoints as one with a barrier."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.errors import NonFiniteError, StoppedError
from penstock.huggingface import weights
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train import loop
from penstock.train.config.config import Config
from tests.support.groups import run_cases
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import TIMES, Said, lines

STEPS = 9


def train(rank: int, config: Config, bad: tuple[int, ...], stop: int | None) -> tuple[bool, list[str], str]:
    """Train with a NaN gradient on the first rank in some steps; stop when asked after a number of steps."""
    torch.set_num_threads(1)
    build = loop.build_pipeline
    made: list[Pipeline] = []
    asked = 0

    def built(*given: object) -> Pipeline:
        pipe = build(*given)
        made.append(pipe)
        for parameter in pipe.stages[0].module.parameters() if 0 in pipe.stages else ():
            parameter.register_hook(lambda grad: grad * math.nan if pipe.steps in bad else grad)
        return pipe

    def stopping() -> bool:
        nonlocal asked
        asked += 1
        return stop is not None and rank == 1 and asked > stop

    said, error = Said(), ""
    flows: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_pipeline", built)
        trainer = loop.Trainer

        def noted(run: loop.TrainingRun, progress: object) -> object:
            flows.append(run.pipe.flow is not None)
            return trainer(run, progress)

        patch.setattr(loop, "Trainer", noted)
        try:
            loop.train(config, lambda steps, leads: said, stopping=stopping)
        except (StoppedError, NonFiniteError) as caught:
            error = f"{type(caught).__name__}: {caught}"
    return flows[0], said.lines, error


def config_of(folder: Path, flow: str, schedule: str = "zb-v", **told: object) -> Config:
    text = folder.parent / "text"
    config = tiny(
        folder,
        text if text.exists() else text_folder(folder.parent),
        parallel={"pp": 2},
        train={
            "steps": STEPS,
            "log_every": 1,
            "skip_nonfinite": 2,
            "checkpoint_every": 4,
            "eval_every": 4,
            **told,
        },
        runtime={"threads": 1},
    )
    return replace(config, schedule=replace(config.schedule, name=schedule, flow=flow, microbatches=4))


def figures(folder: Path, kind: str) -> list[dict]:
    return [
        {k: v for k, v in line.items() if k not in TIMES} for line in lines(folder / "runs" / "tiny", kind)
    ]


@pytest.mark.slow
def test_a_run_that_flows_writes_what_a_run_with_a_barrier_writes(tmp_path: Path, processes: LocalProcesses):
    folders = {name: tmp_path / name for name in ("off", "auto", "1f1b", "every", "stopped", "refused")}
    cases = [
        (config_of(folders["off"], "off"), (2, 5, 6), None),
        (config_of(folders["auto"], "auto"), (2, 5, 6), None),
        (config_of(folders["every"], "on", log_every=3, eval_every=5), (2, 5, 6), None),
        (config_of(folders["1f1b"], "auto", "1f1b", steps=2), (), None),
        (config_of(folders["stopped"], "on"), (), 3),
        (config_of(folders["refused"], "on"), (2, 3, 4), None),
    ]
    off, auto, every, loop_schedule, stopped, refused = run_cases(processes, 2, train, cases)
    assert [ranks[0][0] for ranks in (off, auto, every, loop_schedule)] == [False, True, True, False]
    for kind in ("train", "skipped", "held_out", "final"):
        assert figures(folders["auto"], kind) == figures(folders["off"], kind)
    assert [line["step"] for line in figures(folders["off"], "skipped")] == [3, 6, 7]
    assert figures(folders["every"], "skipped") == figures(folders["off"], "skipped")
    final = weights.load(folders["off"] / "runs" / "tiny")
    for name in ("auto", "every"):
        for key, value in weights.load(folders[name] / "runs" / "tiny").items():
            assert torch.equal(value, final[key]), (name, key)
    assert [line for line in auto[0][1] if "skipped" in line] == [
        line for line in off[0][1] if "skipped" in line
    ]
    for _, _, error in stopped:
        assert error.startswith("StoppedError: stopped after step 4")
    for _, _, error in refused:
        assert "this is step number 3 in a row" in error


def test_a_stopped_run_that_flows_resumes_with_the_same_numbers(tmp_path: Path, processes: LocalProcesses):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    again = config_of(parts, "on")
    again = replace(again, train=replace(again.train, resume=str(parts / "runs" / "tiny")))
    cases = [(config_of(whole, "off"), (), None), (config_of(parts, "on"), (), 2), (again, (), None)]
    run_cases(processes, 2, train, cases)
    assert figures(parts, "train") == figures(whole, "train")
    for key, value in weights.load(whole / "runs" / "tiny").items():
        assert torch.equal(value, weights.load(parts / "runs" / "tiny")[key]), key
