"""`penstock.PipelineTrainer` with a process for each rank, beside plain Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from transformers import AutoModelForCausalLM, TrainerCallback

import penstock
from penstock.huggingface.one_process import FilledSampler
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run
from penstock.trace.join import present
from tests.support.groups import run_cases
from tests.support.hf_models import distance
from tests.support.hf_trainer import (
    CONSTANT,
    OWN,
    Both,
    accuracy,
    adapted,
    arguments,
    assert_close,
    is_of_sgd,
    logged,
    model,
    rows,
    trainer,
)
from tests.support.lanes import exhaustive, slow

PIPELINE = {"ranks": 2, "microbatches": 2, "report": False}
DOUBLE = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
"""Batches with the rows of two replicas."""
SAVING = {
    "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant",
}  # fmt: skip
ADAPTERS = "adapter_model.safetensors"


def seeded_by_rank() -> Any:
    return model(seed=torch.distributed.get_rank())


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows whose number is not known before they have been read."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(rows(64))


class Generates(TrainerCallback):
    """A callback that writes text in the middle of training."""

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        model.generate(torch.ones((1, 2), dtype=torch.int64), max_new_tokens=2)


KINDS = {"whole": model, "adapted": adapted, "seeded by rank": seeded_by_rank}


class Run(NamedTuple):
    logged: list[dict[str, Any]]
    evaluated: dict[str, float]
    leads: bool


def job(
    rank: int, folder: Path, changes: dict[str, Any], pipeline: dict[str, Any] | None, more: dict[str, Any]
) -> Run:
    """One process of a run, or plain Trainer without a pipeline, which saves its model.

    Args:
        more: what to make and do: ``kind`` and ``model`` (its options), ``rows`` or ``streamed``, ``generates``, ``trainer``
            (a class), ``resume``, ``evaluates``.
    """
    net = KINDS[more.get("kind", "whole")](**more.get("model", {}))
    ours = trainer(
        net, arguments(folder, **changes), pipeline, more.get("trainer"), compute_metrics=accuracy,
        train_dataset=Stream() if more.get("streamed") else rows(more.get("rows", 44)),
        callbacks=[Generates()] if more.get("generates") else [],
    )  # fmt: skip
    lines = logged(ours, more.get("resume"))
    ours.save_model(str(folder / "saved"))
    return Run(lines, ours.evaluate() if more.get("evaluates") else {}, ours.is_world_process_zero())


def saved(folder: Path, name: str = "model.safetensors") -> dict[str, Tensor]:
    return load_file(folder / "saved" / name)


def assert_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def assert_as_plain(
    folder: Path, told: list[Run], plain: Run, name: str = "model.safetensors", most: float = 2e-6
) -> None:
    """Compare losses, gradient norms, the weights that are saved, and the metrics of an evaluation."""
    assert_close(told[0].logged, plain.logged)
    assert distance(saved(folder / "piped", name), saved(folder / "plain", name)) < most
    for run in told:
        assert run.logged == told[0].logged
        assert run.evaluated.get("eval_accuracy") == plain.evaluated.get("eval_accuracy")
        assert run.evaluated.get("eval_loss") == pytest.approx(plain.evaluated.get("eval_loss"), rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, processes: LocalProcesses) -> Path:
    """Two steps of a model with tied weights in two processes, and of plain Trainer; each saves a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    changes, more = {**SAVING, "max_steps": 2}, {"model": {"tied": True}, "evaluates": True}
    plain = job(0, folder / "plain", changes, None, more)
    told = processes.run(2, job, folder / "piped", changes, PIPELINE, more)
    assert_as_plain(folder, told, plain)
    assert [run.leads for run in told] == [True, False]
    return folder


def test_what_is_saved_is_whole(folder: Path):
    ours, theirs = (folder / name / "saved" for name in ("piped", "plain"))
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    assert saved(folder / "piped").keys() == saved(folder / "plain").keys()
    x = torch.arange(2, 14)[None]
    one, other = (AutoModelForCausalLM.from_pretrained(each)(x).logits for each in (ours, theirs))
    assert torch.allclose(one, other, atol=1e-5)


def test_a_checkpoint_is_that_of_plain_trainer(folder: Path):
    ours, theirs = (folder / name / "checkpoint-2" for name in ("piped", "plain"))
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    one, other = (torch.load(each / "optimizer.pt") for each in (ours, theirs))
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        for key, value in state.items():
            assert torch.allclose(value, other["state"][number][key], rtol=1e-3, atol=1e-6), (number, key)


REFUSED = [
    ({"optim": "lion_8bit"}, {}, "optim='lion_8bit' cannot be used with a pipeline: in processes, take one"),
    ({"bf16_full_eval": True}, {}, "bf16_full_eval=True cannot be used"),
    ({"accelerator_config": {"split_batches": True}}, {}, "split_batches=True cannot be used"),
    ({"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches=True cannot be used"),
    ({"save_on_each_node": True}, {}, "save_on_each_node=True cannot be used"),
    ({}, {"ranks": 3}, "pipeline['ranks'] is 3, and there are 2 processes"),
    ({}, {"cp": 2}, "pipeline['ranks'] is 2 x cp 2, and there are 2 processes"),
    ({}, {"cp": 0}, "pipeline['cp'] must be a positive number of processes, got 0"),
]


def refusal(rank: int, folder: Path, changes: dict[str, Any], pipeline: dict[str, Any]) -> str:
    try:
        trainer(model(), arguments(folder, **changes), PIPELINE | pipeline)
    except penstock.ConfigError as error:
        return str(error)
    return "not refused"


def test_what_cannot_work_in_processes_is_refused(tmp_path: Path, processes: LocalProcesses):
    cases = [(tmp_path, changes, pipeline) for changes, pipeline, _ in REFUSED]
    for (*_, said), told in zip(REFUSED, run_cases(processes, 2, refusal, cases), strict=True):
        assert all(said in text for text in told), told


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 5, 8, 9, 23, 24])
def test_an_epoch_of_replicas_has_the_rows_that_accelerate_gives_them(replicas: int, count: int):
    batches = BatchSampler(SequentialSampler(range(count)), 4, drop_last=False)
    shards = [list(BatchSamplerShard(batches, replicas, r)) for r in range(replicas)]
    expected = [list(chain(*together)) for together in zip(*shards, strict=True)]
    filled = FilledSampler(SequentialSampler(range(count)), 4 * replicas)
    assert list(BatchSampler(filled, 4 * replicas, drop_last=False)) == expected
    assert len(filled) == len(list(filled)) == sum(map(len, expected))


EPOCHS = {"num_train_epochs": 2, "max_steps": -1}


@pytest.mark.parametrize(
    "changes",
    [
        *slow({**EPOCHS, "optim": "adafactor", "weight_decay": 0.1, "max_grad_norm": 0.0}),
        *exhaustive(
            {"optim": "sgd", "lr_scheduler_type": "cosine"}, {**EPOCHS, "dataloader_drop_last": True}
        ),
    ],
    ids=", ".join,
)
def test_two_ranks_train_as_trainer_does(tmp_path: Path, processes: LocalProcesses, changes: dict[str, Any]):
    plain = job(0, tmp_path / "plain", changes, None, {})
    assert_as_plain(tmp_path, processes.run(2, job, tmp_path / "piped", changes, PIPELINE, {}), plain)


@pytest.mark.slow
def test_groups_have_optimizers_of_their_own_and_resume(tmp_path: Path, processes: LocalProcesses):
    pipeline, changes = PIPELINE | {"optimizer": OWN}, CONSTANT | {"save_strategy": "steps", "save_steps": 2}
    plain = job(0, tmp_path / "plain", CONSTANT, None, {"trainer": Both})
    assert_as_plain(tmp_path, processes.run(2, job, tmp_path / "piped", changes, pipeline, {}), plain)
    resume = {"resume": str(tmp_path / "piped" / "checkpoint-2")}
    processes.run(2, job, tmp_path / "resumed", CONSTANT, pipeline, resume)
    assert_bits(saved(tmp_path / "resumed"), saved(tmp_path / "piped"))
    muon = PIPELINE | {"optimizer": [{"match": is_of_sgd, "optimizer": torch.optim.Muon, "lr": 0.02}]}
    # Muon's products are in bf16, so another last bit of a gradient shows in the third digit.
    told = processes.run(2, job, tmp_path / "muon", {}, muon, {})
    expected = job(0, tmp_path / "threads", {}, muon, {})
    losses = [[line["loss"] for line in run.logged] for run in (told[0], expected)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert distance(saved(tmp_path / "muon"), saved(tmp_path / "threads")) < 1e-2


@pytest.mark.parametrize(
    ("pipeline", "changes", "rows_of"),
    [
        *slow(({"cp": 2, "report": True}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, {})),
        *exhaustive(({"cp": 2, "ranks": 1}, {"label_smoothing_factor": 0.1}, DOUBLE)),
    ],
    ids=["ranks 2 x cp 2, clipped, accumulated", "dp 2 x cp 2, smoothed"],
)
def test_processes_that_divide_samples_train_as_trainer_does(
    tmp_path: Path,
    processes: LocalProcesses,
    pipeline: dict[str, Any],
    changes: dict[str, Any],
    rows_of: dict,
):
    more = {"rows": 64, "evaluates": True}
    plain = job(0, tmp_path / "plain", {**changes, **rows_of}, None, more)
    assert_as_plain(
        tmp_path, processes.run(4, job, tmp_path / "piped", changes, PIPELINE | pipeline, more), plain
    )


@pytest.mark.slow
def test_replicas_take_the_rows_of_several_batches(tmp_path: Path, processes: LocalProcesses):
    """Two pipelines of two ranks take two batches in a step; also metrics of an uneven last batch."""
    changes, more = {"gradient_accumulation_steps": 2, "max_steps": 4}, {"rows": 64, "evaluates": True}
    plain = job(0, tmp_path / "plain", {**DOUBLE, **changes}, None, more)
    pipeline = PIPELINE | {"report": True, "trace_every": 2}
    assert_as_plain(tmp_path, processes.run(4, job, tmp_path / "piped", changes, pipeline, more), plain)
    traces = read_run(tmp_path / "piped").traces
    assert {n: (t.ranks, len(present(t))) for n, t in traces.items()} == dict.fromkeys((1, 2, 4), (2, 2))
    assert (tmp_path / "piped" / "report.html").exists()


@pytest.mark.slow
def test_replicas_take_the_rows_of_a_stream(tmp_path: Path, processes: LocalProcesses):
    """The rows are those of a list, in its order, for as many steps as there are whole batches."""
    more, changes = {"streamed": True}, {"max_steps": 4}
    plain = job(0, tmp_path / "plain", {**DOUBLE, **changes}, None, more)
    assert_as_plain(tmp_path, processes.run(4, job, tmp_path / "piped", changes, PIPELINE, more), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "told", "said"),
    [
        (2, {"generates": True}, r"model\.generate needs all weights"),
        (4, {"kind": "seeded by rank"}, "differ"),
        (2, {"place": "a file"}, "a file"),
    ],
    ids=["a callback that generates", "replicas of another model", "a folder that cannot be written"],
)
def test_an_error_in_a_run_ends_all_ranks(
    tmp_path: Path, processes: LocalProcesses, ranks: int, told: dict[str, Any], said: str
):
    (tmp_path / "a file").mkdir()
    (tmp_path / "a file" / "saved").write_text("")
    folder = tmp_path / told.get("place", "run")
    with pytest.raises(penstock.PenstockError, match=said):
        processes.run(ranks, job, folder, {"max_steps": 1}, PIPELINE, told, timeout=100)


@pytest.mark.parametrize(
    "layout", [*slow("other ranks"), *exhaustive("the same", "threads first", "threads second")]
)
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, processes: LocalProcesses, layout: str):
    """With dropout, and bit for bit, at the layout of before and at others with as many microbatches."""
    model_of = {"model": {"family": "gpt2", "resid_pdrop": 0.2, "embd_pdrop": 0.2}}

    def run(name: str, steps: int, threads: bool = False, ranks: int = 2, **more: Any) -> None:
        given = (
            tmp_path / name,
            {**SAVING, "max_steps": steps},
            PIPELINE | {"ranks": ranks},
            model_of | more,
        )
        if threads:
            job(0, *given)
        else:
            processes.run(ranks, job, *given)

    run("whole", 4)
    run("parts", 2, layout == "threads first")
    run("parts", 4, layout == "threads second", 4 if layout == "other ranks" else 2, resume=True)
    assert_bits(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


@pytest.mark.slow
def test_adapters_are_saved_for_peft_and_resume(tmp_path: Path, processes: LocalProcesses):
    """Also at another layout than that of the first steps."""
    import peft

    changes, more = {**SAVING, "max_steps": 4}, {"kind": "adapted"}
    plain = job(0, tmp_path / "plain", changes, None, more)
    told = processes.run(2, job, tmp_path / "piped", changes, PIPELINE, more)
    assert_as_plain(tmp_path, told, plain, ADAPTERS)
    again, other = (
        peft.PeftModel.from_pretrained(model(), tmp_path / name / "saved") for name in ("piped", "plain")
    )
    x = torch.arange(2, 14)[None]
    assert torch.allclose(again(x).logits, other(x).logits, atol=1e-5)
    processes.run(2, job, tmp_path / "parts", {**changes, "max_steps": 2}, PIPELINE, more)
    first = saved(tmp_path / "parts", ADAPTERS)
    processes.run(4, job, tmp_path / "parts", changes, PIPELINE | {"ranks": 4}, more | {"resume": True})
    assert_bits(saved(tmp_path / "parts", ADAPTERS), saved(tmp_path / "piped", ADAPTERS))
    assert distance(first, saved(tmp_path / "piped", ADAPTERS)) > 1e-3


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, processes: LocalProcesses):
    """The rate is so large that the first evaluation is the best."""
    changes = {
        "max_steps": 4, "learning_rate": 0.5, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps",
        "eval_steps": 1, "load_best_model_at_end": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    job(0, tmp_path / "plain", changes, None, {})
    processes.run(2, job, tmp_path / "piped", changes, PIPELINE, {})
    assert distance(saved(tmp_path / "piped"), saved(tmp_path / "plain")) < 1e-4
    assert (
        distance(
            saved(tmp_path / "plain"), load_file(tmp_path / "plain" / "checkpoint-4" / "model.safetensors")
        )
        > 1e-2
    )
