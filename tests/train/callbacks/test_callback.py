"""Callbacks of a run: what they receive and when, where they come from, and what happens if one fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

import penstock
from penstock.base.errors import ConfigError, PenstockError, StoppedError
from penstock.huggingface import weights
from penstock.train.callbacks.callback import (
    Callback,
    EndEvent,
    EvaluateEvent,
    SaveEvent,
    StartEvent,
    StepEvent,
    TraceEvent,
    values_of,
)
from penstock.train.config.config import Config
from penstock.train.loop import train
from penstock.train.run_log import Reporter
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import Said, lines

Event = StartEvent | StepEvent | EvaluateEvent | SaveEvent | TraceEvent | EndEvent


class Kept(Callback):
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def keep(self, event: Event) -> None:
        self.events.append(event)

    on_start = on_evaluate = on_save = on_trace = on_end = keep

    def on_step(self, event: StepEvent) -> None:
        self.keep(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def run_with(config: Config, *callbacks: Callback, said: Reporter | None = None, **options) -> None:
    train(config, lambda steps, leads: said or Reporter(), callbacks=callbacks, **options)


def without_time(line: dict) -> dict:
    return {key: value for key, value in line.items() if key != "time"}


def test_a_run_tells_everything_in_order(tmp_path: Path):
    told = {"steps": 5, "log_every": 2, "checkpoint_every": 2, "eval_every": 2}
    kept, config = Kept(), tiny(tmp_path, text_folder(tmp_path), train=told)
    run_with(config, kept)
    folder = tmp_path / "runs" / "tiny"
    first, last = kept.events[0], kept.events[-1]
    assert (first.folder, first.step, first.steps) == (folder, 0, 5)
    assert first.config["train"]["name"] == "tiny"
    assert [event.step for event in kept.of(StepEvent)] == [1, 2, 3, 4, 5]
    assert [event.logged for event in kept.of(StepEvent)] == [False, True, False, True, True]
    assert all(event.loss > 0 and event.lr > 0 and event.grad_norm > 0 for event in kept.of(StepEvent))
    logged = [values_of(event) for event in kept.of(StepEvent) if event.logged]
    assert logged == [without_time(line) for line in lines(folder, "train")]
    assert logged[0]["samples"] == 2 * 8
    assert logged[0]["tokens"] == 2 * 8 * 12
    assert len(logged[0]["rss"]) == 1
    assert logged[0]["rss_peak"][0] >= logged[0]["rss"][0] > 10_000_000
    evaluations = [values_of(event) for event in kept.of(EvaluateEvent)]
    assert evaluations == [without_time(line) for line in lines(folder, "held_out")]
    assert [event.step for event in kept.of(EvaluateEvent)] == [2, 4, 5]
    saved = [(event.step, event.path.is_dir()) for event in kept.of(SaveEvent)]
    assert saved == [(2, True), (4, True), (5, True)]
    assert [event.step for event in kept.of(TraceEvent)] == [1, 5]
    assert kept.of(TraceEvent)[0].trace.ranks == 2
    assert isinstance(last, EndEvent)
    assert (last.outcome, last.step, last.error) == ("done", 5, "")
    assert [values_of(last)] == [without_time(line) for line in lines(folder, "final")]
    with pytest.raises(FrozenInstanceError):
        last.step = 6


class Failing(Kept):
    """Fails in a step, in the way that it is told."""

    def __init__(self, error: BaseException, step: int = 2) -> None:
        super().__init__()
        self.error, self.step = error, step

    def on_step(self, event: StepEvent) -> None:
        super().on_step(event)
        if event.step >= self.step:
            raise self.error


def test_a_callback_that_fails_is_named_and_the_run_is_the_same(tmp_path: Path):
    text = text_folder(tmp_path)
    plain = tiny(tmp_path, text, train={"name": "plain"})
    run_with(plain)
    said, other, bad = Said(), Kept(), Failing(ValueError("no such gauge"))
    run_with(tiny(tmp_path, text), bad, other, said=said)
    first, second = (weights.load(tmp_path / "runs" / name) for name in ("plain", "tiny"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    line = (
        f"the callback {__name__}:Failing failed in on_step: ValueError: no such gauge; it receives no more events but "
        "on_end. Training continues"
    )
    assert said.lines.count(line) == 1
    assert [event.step for event in bad.of(StepEvent)] == [1, 2]
    assert bad.events[-1] == other.events[-1]
    assert [event.step for event in other.of(StepEvent)] == [1, 2, 3]
    log = (tmp_path / "runs" / "tiny" / "logs" / "rank-0.log").read_text()
    assert "Traceback" in log
    assert "ValueError: no such gauge" in log


@pytest.mark.parametrize(
    ("error", "line", "seen"),
    [
        (SystemExit(7), "SystemExit: 7; it receives no more events but on_end. Training continues", [1, 2]),
        (OSError(28, "No space left"), "No space left; it misses such events. Training continues", [1, 2, 3]),
    ],
)
def test_a_callback_that_exits_does_not_end_the_run_and_a_full_disk_not_the_callback(
    tmp_path: Path, error: BaseException, line: str, seen: list[int]
):
    said, bad = Said(), Failing(error)
    run_with(tiny(tmp_path, text_folder(tmp_path), train={"checkpoint_every": 3}), bad, said=said)
    assert [event.step for event in bad.of(StepEvent)] == seen
    # Whose last step is one of these has one checkpoint of it, told before the end.
    assert [event.step for event in bad.of(SaveEvent)] == ([3] if 3 in seen else [])
    assert isinstance(bad.events[-1], EndEvent)
    (found,) = [text for text in said.lines if "Failing" in text]
    assert found.endswith(line)
    assert (tmp_path / "runs" / "tiny" / "model.safetensors").exists()


class BadStart(Callback):
    def on_start(self, event: StartEvent) -> None:
        raise RuntimeError("no token")


def test_a_callback_that_cannot_start_ends_the_run_before_its_first_step(tmp_path: Path):
    kept = Kept()
    with pytest.raises(
        ConfigError, match=r"the callback .*:BadStart failed in on_start: RuntimeError: no token"
    ):
        run_with(tiny(tmp_path, text_folder(tmp_path)), kept, BadStart())
    assert [type(event) for event in kept.events] == [StartEvent, EndEvent]
    assert kept.events[-1].outcome == "failed"


def test_a_run_that_stops_or_fails_says_so(tmp_path: Path):
    text, asked = text_folder(tmp_path), iter([False, False, True])
    stopped, failed = Kept(), Kept()
    with pytest.raises(StoppedError):
        run_with(tiny(tmp_path, text), stopped, stopping=lambda: next(asked))
    assert (stopped.events[-1].outcome, stopped.events[-1].step) == ("stopped", 2)
    assert "stopped after step 2, saved in" in stopped.events[-1].error
    with pytest.raises(PenstockError):
        run_with(tiny(tmp_path, text, train={"name": "bad"}, optim={"lr": 1e30, "clip": 0.0}), failed)
    assert failed.events[-1].outcome == "failed"
    assert "NaN or infinite" in failed.events[-1].error


MODULE = """
import penstock

class Notes(penstock.Callback):
    def on_end(self, event):
        with open("notes.txt", "a") as file:
            file.write(f"{event.outcome} ")

def several():
    return [Notes(), penstock.Callback()]

number, broken, wrong = 3, (lambda: 1 / 0), (lambda: "text")
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_hooks.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("import own_missing\n")
    yield "own_hooks"
    for name in ("own_hooks", "own_broken"):
        sys.modules.pop(name, None)


def test_the_config_names_functions_and_classes_of_the_current_folder(tmp_path: Path, own_module: str):
    before, named = list(sys.path), f"{own_module}:Notes, {own_module}:several"
    run_with(tiny(tmp_path, text_folder(tmp_path), train={"callbacks": named}))
    assert (tmp_path / "notes.txt").read_text() == "done done "
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nowhere:f", "there is no module own_nowhere, neither installed nor in the current folder"),
        ("own_hooks:Note", "module 'own_hooks' has no attribute 'Note'"),
        ("own_hooks:number", "it is 3, no function; name a function that returns a Callback"),
        ("own_hooks:broken", "calling it failed: ZeroDivisionError: division by zero"),
        ("own_hooks:wrong", "it returned 'text'; return a penstock.Callback or a list of them"),
        ("own_broken:f", "own_broken cannot be imported: No module named 'own_missing'"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_a_name_that_leads_to_no_callback_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, message: str
):
    with pytest.raises(ConfigError) as raised:
        run_with(tiny(tmp_path, text_folder(tmp_path), train={"callbacks": name}))
    assert str(raised.value) == f"train.callbacks names {name}, but {message}"
    assert not (tmp_path / "runs").exists()


def test_an_own_loop_calls_them_through_a_list(tmp_path: Path):
    kept, said = Kept(), []
    calls = penstock.CallbackList([Failing(KeyError("x")), kept], said.append)
    calls.on_start(penstock.StartEvent(tmp_path))
    for step in (1, 2, 3):
        calls.on_step(penstock.StepEvent(step=step, loss=1 / step))
    calls.on_end(penstock.EndEvent(outcome="done", step=3))
    calls.on_end(penstock.EndEvent(outcome="done", step=3))
    assert [event.step for event in kept.of(StepEvent)] == [1, 2, 3]
    assert len(kept.of(EndEvent)) == 1
    assert len(said) == 1
    assert json.dumps(values_of(kept.of(StepEvent)[1])) == '{"step": 2, "loss": 0.5}'


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_its_memory_is_in_the_metrics(tmp_path: Path):
    kept = Kept()
    run_with(tiny(tmp_path, text_folder(tmp_path), runtime={"device": "cuda"}), kept)
    last = kept.of(StepEvent)[-1]
    assert 0 < last.cuda_allocated[0] <= last.cuda_peak[0]
