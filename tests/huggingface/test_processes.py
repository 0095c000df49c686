"""Models of transformers with a process for each rank: what is saved, and `PipelineTrainer` beside plain Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from transformers import AutoModelForCausalLM, TrainerCallback

import penstock
from penstock.huggingface.one_process import FilledSampler
from penstock.runtime.workers.pool import LocalProcesses
from penstock.show.run import read_run
from penstock.trace.join import present
from tests.support import hf_models, hf_trainer
from tests.support.groups import run_cases
from tests.support.hf_models import distance
from tests.support.hf_trainer import (
    CONSTANT,
    DOUBLE,
    OWN,
    Both,
    arguments,
    assert_as_plain,
    model,
    rows,
    saved,
)
from tests.support.lanes import exhaustive, slow

PIPELINE = {"ranks": 2, "microbatches": 2, "report": False}
SAVING = {
    "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant",
}  # fmt: skip


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


def with_other_modules() -> Any:
    net = model()
    for block in net.model.layers:
        block.mlp.up_proj = nn.Sequential(block.mlp.up_proj)
    return net


MODELS = {
    "whole": model, "adapted": hf_trainer.adapted, "seeded by rank": seeded_by_rank,
    "with other modules": with_other_modules,
}  # fmt: skip


def make(
    folder: Path,
    pipeline: dict[str, Any] | None,
    *,
    net: str = "whole",
    options: dict[str, Any] | None = None,
    data: int | None = 44,
    generates: bool = False,
    kind: Any = None,
    **changes: Any,
) -> Any:
    """Make a trainer.

    Args:
        net: one of `MODELS`; `options` are those of the model.
        data: number of rows; None for a stream.
        kind: a class of plain trainers.
    """
    return hf_trainer.trainer(
        MODELS[net](**(options or {})), arguments(folder, **changes), pipeline, kind,
        train_dataset=Stream() if data is None else rows(data), compute_metrics=hf_trainer.accuracy,
        callbacks=[Generates()] if generates else [],
    )  # fmt: skip


def run_in(
    processes: LocalProcesses | None,
    folder: Path,
    changes: dict[str, Any],
    pipeline: dict[str, Any] | None = PIPELINE,
    ranks: int = 2,
    resume: Any = None,
) -> list[hf_trainer.Run]:
    """Train in processes, or in this one."""
    given = (make, folder, pipeline, changes, resume)
    if processes is None:
        return [hf_trainer.run(0, *given)]
    return processes.run(ranks, hf_trainer.run, *given, timeout=300)


def saved_in_parts(rank: int, kind: str, source: Path, folder: Path) -> str:
    """Save a model or its adapters from processes; return what it refuses."""
    net = source if kind == "whole" else MODELS[kind]()
    try:
        with hf_models.pipeline(net, None) as pipe:
            if kind == "adapted":
                penstock.save_adapters(pipe, folder, net)
            else:
                penstock.save_transformers(pipe, folder, net)
    except penstock.ConfigError as error:
        return str(error)
    return ""


def test_processes_write_a_part_each_with_an_index_and_one_file_of_adapters(
    tmp_path: Path, processes: LocalProcesses
):
    net = model().eval()
    net.save_pretrained(tmp_path / "source")
    cases = [
        (kind, tmp_path / "source", tmp_path / kind) for kind in ("whole", "adapted", "with other modules")
    ]
    (tmp_path / "whole").mkdir()
    # A reader would take it for the weights.
    save_file({"old": torch.zeros(1)}, tmp_path / "whole" / "model.safetensors")
    *saves, refused = run_cases(processes, 2, saved_in_parts, cases)
    assert saves == [["", ""], ["", ""]]
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == 2
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert_same_bits(again.state_dict(), net.state_dict())
    hf_trainer.adapted().save_pretrained(tmp_path / "one")
    ours, theirs = (
        (tmp_path / each / "adapter_model.safetensors").read_bytes() for each in ("adapted", "one")
    )
    assert ours == theirs
    assert refused[0] == refused[1]
    assert "model.layers.0.mlp.up_proj.weight is missing" in refused[0]
    assert not (tmp_path / "with other modules").exists()


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, processes: LocalProcesses) -> Path:
    """Two steps of a model with tied weights in two processes, and of plain Trainer; each saves a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {**SAVING, "max_steps": 2, "options": {"tied": True}}
    (plain,) = run_in(None, folder / "plain", changes, None)
    told = run_in(processes, folder / "piped", changes)
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
        hf_trainer.trainer(model(), arguments(folder, **changes), PIPELINE | pipeline)
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
    (plain,) = run_in(None, tmp_path / "plain", changes, None)
    assert_as_plain(tmp_path, run_in(processes, tmp_path / "piped", changes), plain)


@pytest.mark.slow
def test_groups_have_optimizers_of_their_own_and_resume(tmp_path: Path, processes: LocalProcesses):
    pipeline, changes = PIPELINE | {"optimizer": OWN}, CONSTANT | {"save_strategy": "steps", "save_steps": 2}
    (plain,) = run_in(None, tmp_path / "plain", {**CONSTANT, "kind": Both}, None)
    assert_as_plain(tmp_path, run_in(processes, tmp_path / "piped", changes, pipeline), plain)
    run_in(
        processes, tmp_path / "resumed", CONSTANT, pipeline, resume=str(tmp_path / "piped" / "checkpoint-2")
    )
    assert_same_bits(saved(tmp_path / "resumed"), saved(tmp_path / "piped"))
    muon = [{"match": hf_trainer.is_of_sgd, "optimizer": torch.optim.Muon, "lr": 0.02}]
    for name, where in (("muon", processes), ("threads", None)):
        run_in(where, tmp_path / name, {}, PIPELINE | {"optimizer": muon})
    # Its products are in bf16.
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
    # Whole batches for replicas as well: a last batch that is not is filled for them, as accelerate fills it.
    changes = {**changes, "data": 64}
    (plain,) = run_in(None, tmp_path / "plain", {**changes, **rows_of}, None)
    assert_as_plain(tmp_path, run_in(processes, tmp_path / "piped", changes, PIPELINE | pipeline, 4), plain)


@pytest.mark.slow
def test_replicas_take_the_rows_of_several_batches(tmp_path: Path, processes: LocalProcesses):
    """Two pipelines of two ranks take two batches in a step; also metrics of an uneven last batch."""
    changes = {"gradient_accumulation_steps": 2, "max_steps": 4, "data": 64}
    (plain,) = run_in(None, tmp_path / "plain", {**DOUBLE, **changes}, None)
    pipeline = PIPELINE | {"report": True, "trace_every": 2}
    assert_as_plain(tmp_path, run_in(processes, tmp_path / "piped", changes, pipeline, 4), plain)
    traces = read_run(tmp_path / "piped").traces
    assert {n: (t.ranks, len(present(t))) for n, t in traces.items()} == dict.fromkeys((1, 2, 4), (2, 2))
    assert (tmp_path / "piped" / "report.html").exists()


@pytest.mark.slow
def test_replicas_take_the_rows_of_a_stream(tmp_path: Path, processes: LocalProcesses):
    """The rows are those of a list, in its order, for as many steps as there are whole batches."""
    changes = {"data": None, "max_steps": 4}
    (plain,) = run_in(None, tmp_path / "plain", {**DOUBLE, **changes}, None)
    assert_as_plain(tmp_path, run_in(processes, tmp_path / "piped", changes, ranks=4), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (2, {"generates": True}, r"model\.generate needs all weights"),
        (4, {"net": "seeded by rank"}, "differ"),
        (2, {}, "saved"),
    ],
    ids=["a callback that generates", "replicas of another model", "a folder that cannot be written"],
)
def test_an_error_in_a_run_ends_all_ranks(
    tmp_path: Path, processes: LocalProcesses, ranks: int, changes: dict[str, Any], said: str
):
    (tmp_path / "saved").write_text("a file")
    with pytest.raises(penstock.PenstockError, match=said):
        run_in(processes, tmp_path, {**changes, "max_steps": 1}, ranks=ranks)


@pytest.mark.parametrize(
    "layout", [*slow("other ranks"), *exhaustive("the same", "threads first", "threads second")]
)
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, processes: LocalProcesses, layout: str):
    """With dropout, and bit for bit, at the layout of before and at others with as many microbatches."""
    changes = {**SAVING, "max_steps": 4, "options": {"family": "gpt2", "resid_pdrop": 0.2, "embd_pdrop": 0.2}}
    run_in(processes, tmp_path / "whole", changes)
    first = None if layout == "threads first" else processes
    run_in(first, tmp_path / "parts", {**changes, "max_steps": 2})
    second, ranks = None if layout == "threads second" else processes, 4 if layout == "other ranks" else 2
    run_in(second, tmp_path / "parts", changes, PIPELINE | {"ranks": ranks}, ranks, True)
    assert_same_bits(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


@pytest.mark.slow
def test_adapters_are_saved_for_peft_and_resume(tmp_path: Path, processes: LocalProcesses):
    """Also at another layout than that of the first steps."""
    import peft

    name, changes = "adapter_model.safetensors", {**SAVING, "max_steps": 4, "net": "adapted"}
    (plain,) = run_in(None, tmp_path / "plain", changes, None)
    assert_as_plain(tmp_path, run_in(processes, tmp_path / "piped", changes), plain, name)
    x = torch.arange(2, 14)[None]
    one, other = (
        peft.PeftModel.from_pretrained(model(), tmp_path / each / "saved")(x).logits
        for each in ("piped", "plain")
    )
    assert torch.allclose(one, other, atol=1e-5)
    run_in(processes, tmp_path / "parts", {**changes, "max_steps": 2})
    first = saved(tmp_path / "parts", name)
    run_in(processes, tmp_path / "parts", changes, PIPELINE | {"ranks": 4}, 4, True)
    assert_same_bits(saved(tmp_path / "parts", name), saved(tmp_path / "piped", name))
    assert distance(first, saved(tmp_path / "piped", name)) > 1e-3


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, processes: LocalProcesses):
    """The rate is so large that the first evaluation is the best."""
    changes = {
        "max_steps": 4, "learning_rate": 0.5, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps",
        "eval_steps": 1, "load_best_model_at_end": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    run_in(None, tmp_path / "plain", changes, None)
    run_in(processes, tmp_path / "piped", changes)
    ours, theirs = saved(tmp_path / "piped"), saved(tmp_path / "plain")
    assert distance(ours, theirs) < 1e-4
    assert distance(theirs, load_file(tmp_path / "plain" / "checkpoint-4" / "model.safetensors")) > 1e-2
