"""`penstock.PipelineTrainer` with a process for each rank, beside plain Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import penstock
from penstock.huggingface.one_process import FilledSampler
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run
from penstock.trace.join import present
from tests.huggingface.test_trainer import (
    CONSTANT,
    OWN,
    Both,
    accuracy,
    adapted,
    arguments,
    assert_close,
    is_of_sgd,
    model,
    rows,
)

PIPELINE = {"ranks": 2, "microbatches": 2, "report": False}


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


def job(
    rank: int,
    folder: Path,
    kind: str,
    changes: dict[str, Any],
    pipeline: dict[str, Any],
    more: dict[str, Any],
) -> Any:
    """One process of a run; returns what it logged and evaluated, and whether it leads."""
    trainer = penstock.PipelineTrainer(
        model=KINDS[kind](**more.get("model", {})),
        args=arguments(folder, **changes),
        train_dataset=Stream() if more.get("streamed") else rows(more.get("rows", 44)),
        eval_dataset=rows(10),
        compute_metrics=accuracy,
        pipeline=pipeline,
        callbacks=[Generates()] if more.get("generates") else [],
    )
    trainer.train(resume_from_checkpoint=more.get("resume"))
    trainer.save_model(str(folder / "saved"))
    logged = [line for line in trainer.state.log_history if "loss" in line]
    evaluated = trainer.evaluate() if more.get("evaluates") else {}
    return logged, evaluated, trainer.is_world_process_zero()


def plainly(folder: Path, kind: str, changes: dict[str, Any], count: int = 44, **more: Any) -> Any:
    args = arguments(folder, **changes)
    trainer = Trainer(
        model=KINDS[kind](**more),
        args=args,
        train_dataset=rows(count),
        eval_dataset=rows(10),
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return trainer, [line for line in trainer.state.log_history if "loss" in line]


def saved_weights(folder: Path, name: str = "model.safetensors") -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "saved" / name)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    ours, theirs = (torch.cat([x[name].flatten() for name in sorted(x)]) for x in (one, other))
    return float((ours - theirs).norm() / theirs.norm())


CASES = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "cosine"},
    "adafactor": {"optim": "adafactor", "weight_decay": 0.1},
    "uneven": {"num_train_epochs": 2, "max_steps": -1},
    "dropped": {"num_train_epochs": 2, "max_steps": -1, "dataloader_drop_last": True},
    "no clip": {"max_grad_norm": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_two_ranks_train_as_trainer_does(tmp_path: Path, processes: LocalProcesses, changes: dict[str, Any]):
    _, logged = plainly(tmp_path / "plain", "whole", changes)
    told = processes.run(2, job, tmp_path / "piped", "whole", changes, PIPELINE, {})
    assert_close(told[0][0], logged)
    assert told[1][0] == told[0][0]
    assert [leads for *_, leads in told] == [True, False]
    assert distance(saved_weights(tmp_path / "piped"), saved_weights(tmp_path / "plain")) < 2e-6


@pytest.mark.slow
def test_groups_have_optimizers_of_their_own_and_resume(tmp_path: Path, processes: LocalProcesses):
    trainer = Both(model=model(), args=arguments(tmp_path / "plain", **CONSTANT), train_dataset=rows(44))
    trainer.train()
    trainer.save_model(str(tmp_path / "plain" / "saved"))
    logged = [line for line in trainer.state.log_history if "loss" in line]
    pipeline = PIPELINE | {"optimizer": OWN}
    saves = CONSTANT | {"save_strategy": "steps", "save_steps": 3}
    told = processes.run(2, job, tmp_path / "piped", "whole", saves, pipeline, {})
    assert_close(told[0][0], logged)
    assert distance(saved_weights(tmp_path / "piped"), saved_weights(tmp_path / "plain")) < 2e-6
    resume = {"resume": str(tmp_path / "piped" / "checkpoint-3")}
    processes.run(2, job, tmp_path / "resumed", "whole", CONSTANT, pipeline, resume)
    assert distance(saved_weights(tmp_path / "resumed"), saved_weights(tmp_path / "piped")) == 0
    muon = PIPELINE | {"optimizer": [{"match": is_of_sgd, "optimizer": torch.optim.Muon, "lr": 0.02}]}
    # Muon's products are in bf16, so another last bit of a gradient shows in the third digit.
    told = processes.run(2, job, tmp_path / "muon", "whole", {}, muon, {})
    in_threads, *_ = job(0, tmp_path / "threads", "whole", {}, muon, {})
    assert [line["loss"] for line in told[0][0]] == pytest.approx(
        [line["loss"] for line in in_threads], rel=2e-3
    )
    assert distance(saved_weights(tmp_path / "muon"), saved_weights(tmp_path / "threads")) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "changes"),
    [
        ({"cp": 2, "report": True}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}),
        ({"cp": 2, "ranks": 1}, {"label_smoothing_factor": 0.1}),
    ],
    ids=["ranks 2 x cp 2, clipped, accumulated", "dp 2 x cp 2, smoothed"],
)
def test_processes_that_divide_samples_train_as_trainer_does(
    tmp_path: Path, processes: LocalProcesses, pipeline: dict[str, Any], changes: dict[str, Any]
):
    rows_of = {
        f"per_device_{name}_batch_size": 8 * 2 // pipeline.get("ranks", 2) for name in ("train", "eval")
    }
    theirs, logged = plainly(tmp_path / "plain", "whole", {**changes, **rows_of}, 64)
    more = {"rows": 64, "evaluates": True}
    told = processes.run(4, job, tmp_path / "piped", "whole", changes, PIPELINE | pipeline, more)
    assert_close(told[0][0], logged)
    assert distance(saved_weights(tmp_path / "piped"), saved_weights(tmp_path / "plain")) < 2e-6
    expected = theirs.evaluate()
    for _, evaluated, _ in told:
        assert evaluated["eval_accuracy"] == expected["eval_accuracy"]
        assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "pipeline", "message"),
    [
        (1, {"cp": 2}, r"pipeline\['cp'\] is 2, and samples are divided over processes"),
        (2, {"cp": 2}, r"pipeline\['ranks'\] is 2 x cp 2, and there are 2 processes"),
        (2, {"cp": 0}, r"pipeline\['cp'\] must be a positive number of processes, got 0"),
    ],
)
def test_a_division_of_samples_that_does_not_fit_is_refused(
    tmp_path: Path, processes: LocalProcesses, ranks: int, pipeline: dict[str, Any], message: str
):
    with pytest.raises(penstock.PenstockError, match=message):
        processes.run(ranks, job, tmp_path, "whole", {}, PIPELINE | pipeline, {})


@pytest.mark.slow
def test_replicas_take_the_rows_of_several_batches(tmp_path: Path, processes: LocalProcesses):
    """Two pipelines of two ranks take two batches in a step; also metrics of an uneven last batch."""
    double = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
    accumulated = {"gradient_accumulation_steps": 2, "max_steps": 4}
    theirs, logged = plainly(tmp_path / "plain", "whole", {**double, **accumulated}, 64)
    pipeline = PIPELINE | {"report": True, "trace_every": 2}
    told = processes.run(
        4, job, tmp_path / "piped", "whole", accumulated, pipeline, {"rows": 64, "evaluates": True}
    )
    assert_close(told[0][0], logged)
    seen = read_run(tmp_path / "piped")
    assert {step: (trace.ranks, len(present(trace))) for step, trace in seen.traces.items()} == dict.fromkeys(
        (1, 2, 4), (2, 2)
    )
    assert (tmp_path / "piped" / "report.html").exists()
    assert distance(saved_weights(tmp_path / "piped"), saved_weights(tmp_path / "plain")) < 2e-6
    expected = theirs.evaluate()
    for _, evaluated, _ in told:
        assert evaluated["eval_accuracy"] == expected["eval_accuracy"]
        assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_replicas_take_the_rows_of_a_stream(tmp_path: Path, processes: LocalProcesses):
    """The rows are those of a list, in its order, for as many steps as there are whole batches."""
    args = arguments(tmp_path / "plain", max_steps=4, per_device_train_batch_size=16)
    theirs = Trainer(model=model(), args=args, train_dataset=Stream())
    theirs.train()
    told = processes.run(4, job, tmp_path / "piped", "whole", {"max_steps": 4}, PIPELINE, {"streamed": True})
    assert_close(told[0][0], [line for line in theirs.state.log_history if "loss" in line])


def test_a_callback_that_generates_is_refused_where_the_weights_are_divided(
    tmp_path: Path, processes: LocalProcesses
):
    with pytest.raises(penstock.PenstockError, match=r"model\.generate needs all weights"):
        processes.run(2, job, tmp_path, "whole", {"max_steps": 2}, PIPELINE, {"generates": True})


def test_replicas_of_another_model_are_refused(tmp_path: Path, processes: LocalProcesses):
    with pytest.raises(penstock.PenstockError, match="differ"):
        processes.run(4, job, tmp_path, "seeded by rank", {"max_steps": 1}, PIPELINE, {})


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 5, 8, 9, 23, 24])
def test_an_epoch_of_replicas_has_the_rows_that_accelerate_gives_them(replicas: int, count: int):
    batches = BatchSampler(SequentialSampler(range(count)), 4, drop_last=False)
    shards = [list(BatchSamplerShard(batches, replicas, r)) for r in range(replicas)]
    expected = [list(chain(*together)) for together in zip(*shards, strict=True)]
    filled = FilledSampler(SequentialSampler(range(count)), 4 * replicas)
    assert list(BatchSampler(filled, 4 * replicas, drop_last=False)) == expected
    assert len(filled) == len(list(filled)) == sum(map(len, expected))


def test_evaluations_have_the_metrics_of_one_process(tmp_path: Path, processes: LocalProcesses):
    changes = {"max_steps": 1}
    theirs, _ = plainly(tmp_path / "plain", "whole", changes)
    told = processes.run(2, job, tmp_path / "piped", "whole", changes, PIPELINE, {"evaluates": True})
    expected = theirs.evaluate()
    for _, evaluated, _ in told:
        assert evaluated["eval_accuracy"] == expected["eval_accuracy"]
        assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_what_is_saved_is_whole(tmp_path: Path, processes: LocalProcesses, tied: bool):
    changes = {"max_steps": 2}
    theirs, _ = plainly(tmp_path / "plain", "whole", changes, tied=tied)
    processes.run(2, job, tmp_path / "piped", "whole", changes, PIPELINE, {"model": {"tied": tied}})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "piped" / "saved")
    x = torch.arange(2, 14)[None]
    assert torch.allclose(again(x).logits, theirs.model.eval()(x).logits, atol=1e-5)
    assert saved_weights(tmp_path / "piped").keys() == saved_weights(tmp_path / "plain").keys()
    assert sorted(path.name for path in (tmp_path / "piped" / "saved").iterdir()) == sorted(
        path.name for path in (tmp_path / "plain" / "saved").iterdir()
    )


def test_adapters_are_saved_for_peft(tmp_path: Path, processes: LocalProcesses):
    import peft

    theirs, logged = plainly(tmp_path / "plain", "adapted", {"max_steps": 3})
    told = processes.run(2, job, tmp_path / "piped", "adapted", {"max_steps": 3}, PIPELINE, {})
    assert_close(told[0][0], logged)
    name = "adapter_model.safetensors"
    assert distance(saved_weights(tmp_path / "piped", name), saved_weights(tmp_path / "plain", name)) < 2e-6
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "piped" / "saved")
    x = torch.arange(2, 14)[None]
    assert torch.allclose(again(x).logits, theirs.model.eval()(x).logits, atol=1e-5)


DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2}
SAVING = {
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "constant",
}


def in_threads(folder: Path, changes: dict[str, Any], pipeline: dict[str, Any], more: dict[str, Any]) -> None:
    job(0, folder, "whole", changes, pipeline, more)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["the same", "threads first", "threads second", "other ranks"])
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, processes: LocalProcesses, layout: str):
    """With dropout, and bit for bit, at the layout of before and at others with as many microbatches."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    four = {"ranks": 4, "microbatches": 2}

    def run(folder: Path, steps: int, layout: str, **more: Any) -> None:
        changes = {**SAVING, "max_steps": steps}
        told = {"model": {"family": "gpt2", **DROPOUT}, **more}
        if layout == "threads":
            in_threads(folder, changes, PIPELINE, told)
        else:
            ranks, pipeline = (4, four) if layout == "four" else (2, PIPELINE)
            processes.run(ranks, job, folder, "whole", changes, pipeline, told)

    run(whole, 4, "processes")
    run(parts, 2, "threads" if layout == "threads first" else "processes")
    second = {"threads second": "threads", "other ranks": "four"}.get(layout, "processes")
    run(parts, 4, second, resume=True)
    ours, expected = saved_weights(parts), saved_weights(whole)
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_adapters_resume(tmp_path: Path, processes: LocalProcesses):
    """Also at another layout than that of the first steps."""
    changes = {**SAVING, "max_steps": 4}
    processes.run(2, job, tmp_path / "whole", "adapted", changes, PIPELINE, {})
    processes.run(2, job, tmp_path / "parts", "adapted", {**changes, "max_steps": 2}, PIPELINE, {})
    first = saved_weights(tmp_path / "parts", "adapter_model.safetensors")
    four = {"ranks": 4, "microbatches": 2}
    processes.run(4, job, tmp_path / "parts", "adapted", changes, four, {"resume": True})
    ours, expected = (
        saved_weights(tmp_path / name, "adapter_model.safetensors") for name in ("parts", "whole")
    )
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), name
    assert distance(first, expected) > 1e-3


def test_a_checkpoint_is_that_of_plain_trainer(tmp_path: Path, processes: LocalProcesses):
    changes = {**SAVING, "max_steps": 2}
    plainly(tmp_path / "plain", "whole", changes)
    processes.run(2, job, tmp_path / "piped", "whole", changes, PIPELINE, {})
    ours, theirs = (tmp_path / name / "checkpoint-2" for name in ("piped", "plain"))
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    one, other = (torch.load(folder / "optimizer.pt") for folder in (ours, theirs))
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        for key, value in state.items():
            assert torch.allclose(value, other["state"][number][key], rtol=1e-3, atol=1e-6), (number, key)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, processes: LocalProcesses):
    """The rate is so large that the first evaluation is the best."""
    changes = {
        "max_steps": 4, "learning_rate": 0.5, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps",
        "eval_steps": 1, "load_best_model_at_end": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    theirs, _ = plainly(tmp_path / "plain", "whole", changes)
    processes.run(2, job, tmp_path / "piped", "whole", changes, PIPELINE, {})
    assert theirs.state.best_global_step < 4
    assert distance(saved_weights(tmp_path / "piped"), saved_weights(tmp_path / "plain")) < 1e-4


def test_a_folder_that_cannot_be_written_ends_all_ranks(tmp_path: Path, processes: LocalProcesses):
    (tmp_path / "saved").write_text("a file")
    with pytest.raises(penstock.PenstockError, match="saved"):
        processes.run(2, job, tmp_path, "whole", {"max_steps": 1}, PIPELINE, {}, timeout=100)


@pytest.mark.parametrize(
    ("changes", "pipeline", "said"),
    [
        (
            {"optim": "lion_8bit"},
            {},
            "optim='lion_8bit' cannot be used with a pipeline: in processes, take one",
        ),
        ({"bf16_full_eval": True}, {}, "bf16_full_eval=True cannot be used"),
        ({"accelerator_config": {"split_batches": True}}, {}, "split_batches=True cannot be used"),
        ({"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches=True cannot be used"),
        ({"save_on_each_node": True}, {}, "save_on_each_node=True cannot be used"),
        ({}, {"ranks": 3}, r"pipeline\['ranks'\] is 3, and there are 2 processes"),
    ],
)
def test_what_cannot_work_in_processes_is_refused(
    tmp_path: Path, processes: LocalProcesses, changes: dict[str, Any], pipeline: dict[str, Any], said: str
):
    with pytest.raises(penstock.ConfigError, match=said):
        processes.run(2, job, tmp_path, "whole", changes, {**PIPELINE, **pipeline}, {})
