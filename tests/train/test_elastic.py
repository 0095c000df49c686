"""A run of torchrun whose hosts come and go: each world has a plan of its own, and the numbers are those of one run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from penstock.huggingface import weights
from penstock.train.config import file as config_file
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.model.trainable import build_model
from tests.support.agents import APART, Agent
from tests.support.documentation import DOCS, blocks
from tests.support.elastic import FULL, digest_of
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, lines, run
from tests.support.waiting import until

STEPS = 24


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    started: list[Agent] = []
    yield started
    for one in started:
        one.kill()


@pytest.mark.exhaustive  # minutes; tests/runtime/start/test_restarts.py loses one process
def test_a_run_loses_one_host_of_three_and_goes_on_with_two_and_then_with_four(
    tmp_path: Path, agents: list[Agent]
):
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    text, notes = text_folder(tmp_path), tmp_path / "notes"
    notes.mkdir()
    runtime = {"threads": 1, "timeout": 300.0}
    config = config_of(tmp_path, text, "elastic", STEPS, runtime=runtime, parallel={"pp": None})
    (tmp_path / "my.toml").write_text(config_file.dump(config))
    (line,) = [
        line for block in blocks(DOCS / "clusters.md") for line in block.commands if "--nnodes 2:4" in line
    ]
    page = shlex.split(line)  # but for the values of its config
    words = [word for word in page[page.index("penstock") + 1 :] if "=" not in word and word != "--set"]
    words[words.index("my.toml")] = str(tmp_path / "my.toml")
    words += ["--plan", "auto"]  # which the page has for the CPUs of one machine

    def join(*names: str) -> None:
        for name in names:
            program = ("-m", "tests.support.elastic", str(notes), *words)
            agents.append(Agent(store.port, tmp_path / f"{name}.err", "2:4", *program, **APART))

    def told() -> str:
        return "\n".join(one.errors.read_text()[-2000:] for one in agents)

    join("a", "b", "c")
    until(lambda: (notes / "lost").exists() or ended(agents), 600)
    until(lambda: (notes / "waiting-in-a-world-of-2").exists() or ended(agents), 600)
    join("d", "e")
    codes = sorted(one.ended() for one in agents)
    assert codes == [-9, 0, 0, 0, 0], told()

    seen = [json.loads(line) for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {one["world"] for one in seen} == {2, 3, FULL}
    model = build_model(config)
    data = open_data(config, model)
    assert {(one["batch"], one["digest"]) for one in seen} == {
        (step, digest_of(training_batch(data, config, model, step))) for step in range(STEPS)
    }
    last = [one["batch"] for one in seen if one["world"] == FULL and one["rank"] == 0]
    assert last == list(range(last[0], STEPS))

    torch.set_num_threads(1)
    run(config_of(tmp_path, text, "undisturbed", STEPS, runtime=runtime))
    elastic, undisturbed = tmp_path / "runs" / "elastic", tmp_path / "runs" / "undisturbed"
    found, expected = (
        {line["step"]: line["loss"] for line in lines(folder, "train")} for folder in (elastic, undisturbed)
    )
    assert list(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected, abs=1e-5)
    assert config_file.load(elastic / "config.toml").parallel.pp == FULL
    saved, wanted = weights.load(elastic), weights.load(undisturbed)
    assert saved.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


def ended(agents: list[Agent]) -> bool:
    """Return whether no agent runs any more."""
    return all(one.process.poll() is not None for one in agents)
