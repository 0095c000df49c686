"""Packed samples train as unpacked ones, and runs on packed, weighted data resume to the sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.huggingface import weights
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.module import StageModule
from penstock.train.config.config import Config
from penstock.train.data.run_data import open_data, training_batch
from penstock.train.loop import train
from penstock.train.model.trainable import TrainableModel, build_model
from penstock.train.report.progress import Reporter
from tests.support import hf_models, records
from tests.support.trainer import config_of, metrics, run, same, stopped_at


def gradients(
    config: Config, model: TrainableModel, batches: int
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Sum of the losses of an epoch's tokens, its gradients, and the number of tokens, in plain PyTorch."""
    data = open_data(config, model)
    net = StageModule(model.layers)
    total, valid = 0.0, 0
    for step in range(batches):
        batch = training_batch(data, config, model, step)
        loss = model.masked_loss_fn(net(batch.x, **batch.named), batch.y) * batch.valid
        loss.backward()
        total, valid = total + loss.item(), valid + batch.valid
    return total, {name: p.grad for name, p in net.whole_model_parameters()}, valid


FAST = ("own", "llama", "gemma3_text", "gpt2")
FAMILIES = [
    pytest.param(family, marks=() if family in FAST else pytest.mark.slow)
    for family in ("own", *sorted(hf_models.FAMILIES))
]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_training_is_unpacked_training_to_summation_order(tmp_path: Path, family: str):
    path = records.write_lines(tmp_path / "pairs.jsonl", records.completions(40))
    place = {} if family == "own" else {"path": str(records.folder(tmp_path, family))}
    found = []
    for packing in (False, True):
        data = {"packing": packing, "sequence": 96, "held_out": 0.2}
        # An epoch in one batch.
        size = 32
        config = config_of(tmp_path, path, "packed", 1, model=place, data=data, train={"batch": size})
        model = build_model(config)
        rows = open_data(config, model).per_epoch
        assert rows < 20 if packing else rows == size
        config = config_of(
            tmp_path,
            path,
            "p",
            1,
            model=place,
            data=data,
            train={"batch": rows},
            schedule={"microbatches": 1},
        )
        found.append(gradients(config, model, 1))
    (loss, grads, valid), (packed_loss, packed_grads, packed_valid) = found
    assert valid == packed_valid > 400
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    for name, grad in grads.items():
        scale = grad.abs().max().item()
        assert torch.allclose(packed_grads[name], grad, rtol=0, atol=2e-5 * scale + 1e-6), name


def mixed(root: Path, name: str, steps: int, resume: str = "", **parallel: int) -> Config:
    """Three sources, one of them plain text, in rows with several records."""
    sources = [
        {"path": str(root / "pairs.jsonl"), "weight": 3},
        {"path": str(root / "texts.jsonl"), "weight": 1.5, "text_field": "body"},
        {"path": str(root / "plain.txt")},
    ]
    data = {"path": "", "sources": sources, "packing": True, "sequence": 48, "held_out": 0.2}
    return config_of(root, root, name, steps, resume, data=data, parallel=parallel or {"pp": 2})


@pytest.fixture
def straight(tmp_path: Path) -> Path:
    """A run of 6 steps on a mixture, in one go."""
    records.write_lines(tmp_path / "pairs.jsonl", records.completions(60))
    renamed = [{"body": record["text"]} for record in records.texts(60, words=30)]
    records.write_lines(tmp_path / "texts.jsonl", renamed)
    (tmp_path / "plain.txt").write_text("\n".join(record["text"] for record in records.texts(60, seed=3)))
    run(mixed(tmp_path, "straight", 6))
    return tmp_path / "runs" / "straight"


@pytest.mark.parametrize(
    "layout", [{"pp": 4}, *(pytest.param({"pp": n}, marks=pytest.mark.slow) for n in (1, 2))], ids=str
)
def test_a_run_resumes_in_the_middle_of_packed_weighted_data_bit_for_bit(
    tmp_path: Path, straight: Path, layout: dict[str, int]
):
    folder = tmp_path / "runs" / "again"
    run(mixed(tmp_path, "again", 6))
    stopped_at(tmp_path, folder, 4)
    run(mixed(tmp_path, "again", 6, str(folder), **layout))
    same(folder, straight)


def in_a_process(rank: int, config: Config) -> None:
    torch.set_num_threads(1)
    train(config, lambda steps, leads: Reporter())


@pytest.mark.slow
def test_replicas_resume_on_the_same_samples(tmp_path: Path, straight: Path, processes: LocalProcesses):
    folder = tmp_path / "runs" / "again"
    run(mixed(tmp_path, "again", 6))
    stopped_at(tmp_path, folder, 4)
    processes.run(2, in_a_process, mixed(tmp_path, "again", 6, str(folder), pp=1, dp=2))
    expected, found = (weights.load(one) for one in (straight, folder))
    assert all(torch.allclose(found[name], weight, atol=1e-6) for name, weight in expected.items())
    assert [line["step"] for line in metrics(folder)] == [line["step"] for line in metrics(straight)]


def test_another_weight_or_other_records_are_refused_at_resume(tmp_path: Path, straight: Path):
    config = mixed(tmp_path, "straight", 8, str(straight))
    heavier = [replace(config.data.sources[0], weight=4.0), *config.data.sources[1:]]
    said = (
        r"a different run: weight of source 1 in data.sources \(pairs.jsonl\) was 3.0 and is 4.0. Resume with"
    )
    with pytest.raises(ConfigError, match=said):
        run(replace(config, data=replace(config.data, sources=heavier)))
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    changed = lines[7].replace("=>", "->")
    (tmp_path / "pairs.jsonl").write_text("\n".join([*lines[:7], changed, *lines[8:]]) + "\n")
    with pytest.raises(
        ConfigError, match=r"the data is not what .*: the .* file '1:pairs.jsonl' has other tokens"
    ):
        run(config)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("pairs.jsonl", "texts.jsonl", "plain.txt"):
        (tmp_path / name).rename(moved / name)
    sources = [replace(one, path=str(moved / Path(one.path).name)) for one in config.data.sources]
    run(replace(config, data=replace(config.data, sources=sources, cache=str(tmp_path / "cache"))))


def test_the_loss_is_the_mean_over_the_batchs_valid_tokens(tmp_path: Path):
    """Also where a microbatch has far fewer than another."""
    path = records.write_lines(tmp_path / "pairs.jsonl", records.completions(40))
    config = config_of(
        tmp_path, path, "padded", 1, data={"sequence": 40, "held_out": 0.2}, train={"batch": 8}
    )
    run(config)
    model = build_model(config)
    batch = training_batch(open_data(config, model), config, model, 0)
    net = StageModule(model.layers)
    expected = torch.nn.functional.cross_entropy(
        net(batch.x).flatten(0, 1), batch.y.flatten(), ignore_index=-100
    )
    valid = [int((rows != -100).sum()) for rows in batch.y.chunk(4)]
    assert len(set(valid)) > 1
    (line,) = [line for line in metrics(tmp_path / "runs" / "padded") if line["kind"] == "train"]
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-6)
