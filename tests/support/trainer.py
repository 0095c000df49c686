"""Runs of the trainer in this process: their config, what they say and write, and how one run equals another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.find import steps_in
from penstock.huggingface import weights
from penstock.train.config.config import Config
from penstock.train.loop import train
from penstock.train.run_log import Reporter
from tests.support.tiny_run import tiny

TIMES = (
    "tokens_per_second",
    "bubble",
    "seconds",
    "time",
    "step_seconds",
    "rss",
    "rss_peak",
    "memory",
    "memory_peak",
)


class Said(Reporter):
    """Keeps what was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def quietly(config: Config, **options: Any) -> Any:
    """Train without a word; return the outcome."""
    return train(config, lambda steps, leads: Reporter(), **options)


def run(config: Config) -> list[str]:
    said = Said()
    train(config, lambda steps, leads: said)
    return said.lines


def config_of(root: Path, text: Path, name: str, steps: int, resume: str = "", **sections) -> Config:
    told = {"steps": steps, "name": name, "checkpoint_every": 2, "eval_every": 2, "resume": resume}
    return tiny(root, text, **{**sections, "train": {**told, **sections.get("train", {})}})


def metrics(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in found]


def stopped_at(root: Path, folder: Path, step: int) -> None:
    """Make of a finished run what one leaves that is killed after a step, with a line of metrics cut short."""
    for later, path in steps_in(folder / "checkpoints"):
        if later > step:
            path.rename(root / path.name)
    for path in (*folder.glob("model*"), folder / "sample.txt"):
        path.unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')


def same(one: Path, other: Path) -> None:
    first, second = weights.load(one), weights.load(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert metrics(one) == metrics(other)


def lines(folder: Path, kind: str) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "kind"} for line in read if line["kind"] == kind]


def numbers_by_name(folder: Path) -> dict[tuple[str, int], float]:
    """(name, step) → number, of every line of metrics."""
    numbers = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        kind, step = line.pop("kind"), line.pop("step")
        for name, value in line.items():
            if isinstance(value, list):
                numbers |= {(f"{kind}/{name}/rank_{rank}", step): each for rank, each in enumerate(value)}
            elif name != "time" and value is not None:
                numbers[f"{kind}/{name}", step] = value
    return numbers
