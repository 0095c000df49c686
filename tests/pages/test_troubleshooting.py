"""Every message on the page occurs in the source, and those that are cheap to provoke read as the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.plan import read_cluster, read_model, search
from penstock.runtime.start.launch_environment import find_launch
from penstock.schedule.check import check
from penstock.train import run_folder
from penstock.train.config.config import from_mapping
from penstock.train.config.file import load
from penstock.train.config.sections import DataConfig, TrainConfig
from penstock.train.data.file_formats import find_files
from tests.support.documentation import DOCS

SOURCE = Path(penstock.__file__).parent
HEADINGS = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.M)
PLACE = "…"
SHORT = 6
"""Parts of a message with fewer letters are too common to say anything."""


@pytest.fixture(scope="module")
def texts() -> str:
    """The source, in which strings over several lines are one."""
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def parts_of(heading: str) -> list[str]:
    return [part.strip(" .:") for part in heading.split(PLACE)]


def test_the_page_has_the_likeliest_messages():
    assert len(HEADINGS) >= 40
    assert len(set(HEADINGS)) == len(HEADINGS)


def test_every_message_is_still_in_the_source(texts: str):
    telling = {heading: [part for part in parts_of(heading) if len(part) >= SHORT] for heading in HEADINGS}
    assert [heading for heading, parts in telling.items() if not parts] == []
    assert [part for parts in telling.values() for part in parts if part not in texts] == []


X = torch.ones(8, 2)
MSE = nn.functional.mse_loss


def pipeline(model: object = None, loss_fn: object = MSE, **options: object) -> penstock.Pipeline:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)] if model is None else model
    return penstock.Pipeline(layers, loss_fn, **{"microbatches": 4, **options})


def step(model: object = None, *, x: torch.Tensor = X, **options: object) -> None:
    with pipeline(model, **options) as pipe:
        pipe.step(x, X)


def step_when_closed(_: Path) -> None:
    pipe = pipeline()
    pipe.close()
    pipe.step(X, X)


def step_within_hooks(_: Path) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        step(ranks=2)


def loads_another_state(_: Path) -> None:
    with pipeline() as pipe:
        pipe.load_state_dict({"other": torch.ones(1)})


def too_small(tmp: Path) -> object:
    (tmp / "m.toml").write_text("[model]\nwidth = 65536\nlayers = 64\nhidden = 262144\n")
    return search(read_model(str(tmp / "m.toml")), read_cluster("a100-40gb*1"), sequence=2048, batch=1).best


def deadlock(tmp: Path) -> None:
    (tmp / "own.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    check(penstock.read_csv(tmp / "own.csv"))


PROVOKED: dict[str, Callable[[Path], object]] = {
    "say where they meet": lambda _: find_launch({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}).url,
    "is set but": lambda _: find_launch({"RANK": "0"}),
    "a mesh of … needs": lambda _: pipeline(mesh=penstock.MeshShape(tp=2)),
    "sees no GPU": lambda _: pipeline(device="cuda"),
    "without a shape yet": lambda _: step([nn.LazyLinear(2), nn.Linear(2, 2)]),
    "among its outputs": lambda _: step([nn.Linear(2, 2), lambda x: object(), nn.Linear(2, 2)], ranks=3),
    "loss_fn must be given": lambda _: pipeline(None, None),
    "number of virtual stages": lambda _: pipeline(schedule="1f1b", virtual_stages=2, ranks=1),
    "deadlocks": deadlock,
    "is NaN or infinite": lambda _: step(x=X / 0),
    "is closed": step_when_closed,
    "is set around a step": step_within_hooks,
    "even with every layer recomputed": lambda _: step(recompute="auto", execution=penstock.ExecutionOptions(memory=1)),
    "no key": lambda _: from_mapping({"train": {"step": 2}}),
    "an override must be": lambda _: load(None, ["steps=20"]),
    "no file or folder": lambda _: find_files(DataConfig(path="no-such")),
    "already exists; choose another": lambda tmp: run_folder.choose(TrainConfig(folder=str(tmp.parent), name=tmp.name)),
    "fit the model": loads_another_state,
    "no layout fits": too_small,
    "cannot read the model": lambda _: read_model("llama-3-8b"),
    "no cluster": lambda _: read_cluster("laptop*8"),
}  # fmt: skip


REMEDIES = {
    "without a shape yet": "run one batch through the model",
    "among its outputs": "dataclasses that are registered",
    "loss_fn must be given": "returns the loss",
    "number of virtual stages": "is free in",
    "even with every layer recomputed": "use smaller microbatches",
    "an override must be": "as in train.steps=100",
    "no file or folder": "must name one",
    "no layout fits": "Take more devices",
    "no cluster": "with its size, such as",
}
"""Messages that the page leaves out, with the remedy that each one names itself."""


@pytest.mark.parametrize("part", PROVOKED)
def test_a_message_reads_as_on_the_page_or_names_its_remedy(part: str, tmp_path: Path):
    if part in REMEDIES:
        pattern = f"{re.escape(part)}.*{re.escape(REMEDIES[part])}"
    else:
        (heading,) = [heading for heading in HEADINGS if part in heading]
        pattern = ".*".join(re.escape(each) for each in parts_of(heading))
    with pytest.raises(penstock.PenstockError) as caught:
        PROVOKED[part](tmp_path)
    assert re.search(pattern, str(caught.value), re.S), str(caught.value)
