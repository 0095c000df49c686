"""A recorded run has plain PyTorch's tensors at any layout, and the numbers of a run that is not recorded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.base.errors import ConfigError
from penstock.recordings.files import Key, Kind, read
from penstock.runtime.workers.pool import LocalProcesses
from penstock.schedule.families import FAMILIES
from tests.support.lanes import slow
from tests.verify.loops import MICROBATCHES, STEPS, accumulate, batch, in_process, loss_of, make, piped, plain


def test_a_recording_has_every_tensor_of_every_kind(reference: Path):
    recording = read(reference)
    counts = {kind: sum(key.kind == kind for key in recording.entries) for kind in Kind}
    # 23 modules are called (a list of blocks is not), 4 microbatches, 2 steps; 26 parameters, also before the first.
    assert counts == {
        Kind.OUTPUT: 184,
        Kind.OUTPUT_GRADIENT: 184,
        Kind.SHARE: 208,
        Kind.GRADIENT: 52,
        Kind.PARAMETER: 78,
        Kind.BUFFER: 0,
    }
    assert recording.steps == [0, 1]
    assert not recording.cut_off


@pytest.mark.parametrize("recompute", ["none", *slow("full")])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_tensors_of_plain_pytorch(
    family: str, recompute: str, reference: Path, tmp_path: Path
):
    piped(tmp_path / "run", make(), schedule=family, recompute=recompute)
    found = penstock.compare(reference, tmp_path / "run")
    assert found.good, str(found)
    # All but the output of the whole model, which no stage is.
    assert found.same + found.rounded == 2 * (184 - 8) + 52 + 78
    assert not FAMILIES[family].in_order or found.rounded == 0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(self.norm(value.transpose(1, 2)).transpose(1, 2))


def with_buffers() -> nn.Module:
    model = make()
    model.blocks[1], model.blocks[2] = Normed(), Normed()
    return model


@pytest.fixture
def plain_with_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.verify.loops.make", with_buffers)
    plain(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-v", "recompute": "full"}], ids=str)
def test_buffers_are_recorded_after_each_step(
    options: dict[str, Any], plain_with_buffers: Path, tmp_path: Path
):
    piped(tmp_path / "run", with_buffers(), **options)
    found = penstock.compare(plain_with_buffers, tmp_path / "run")
    assert found.good, str(found)
    buffers = {key.name for key in found.verdicts if key.kind == Kind.BUFFER}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert buffers == {f"blocks.{n}.norm.{name}" for n in (1, 2) for name in statistics}
    assert {key.step for key in found.verdicts if key.kind == Kind.BUFFER} == {-1, 0, 1}
    assert not found.notes


def buffers_in_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    piped(Path(folder), with_buffers(), mesh=penstock.MeshShape(2, 2), microbatches=2)


def replica_in_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    replica = DistributedDataParallel(with_buffers())
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    with penstock.record(folder, replica, steps=STEPS, first_microbatch=2 * rank):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in batch(step).chunk(2)[rank].chunk(2):
                (loss_of(replica(part), part) / 2).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["of a pipeline", "of torch"])
def test_buffers_of_replicas(
    replicas: str, processes: LocalProcesses, plain_with_buffers: Path, tmp_path: Path
):
    ours = replicas == "of a pipeline"
    processes.run(4 if ours else 2, buffers_in_process if ours else replica_in_process, str(tmp_path / "run"))
    found = penstock.compare(plain_with_buffers, tmp_path / "run", scale=1.0 if ours else 2.0)
    buffers = [key for key in found.verdicts if key.kind == Kind.BUFFER and key.step >= 0]
    apart = [note for note in found.notes if "6 buffers are not compared" in note]
    assert found.good, str(found)
    # Of replicas of torch, the scratch that nobody writes is left.
    assert (len(buffers), len(apart)) == ((12, 0) if ours else (4, 1))


def test_buffers_of_two_copies_of_a_stage_are_not_compared(plain_with_buffers: Path, tmp_path: Path):
    piped(tmp_path / "run", with_buffers(), schedule="chimera")
    found = penstock.compare(plain_with_buffers, tmp_path / "run")
    assert found.good, str(found)
    assert not any(key.kind == Kind.BUFFER for key in found.verdicts)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda norm: norm.running_mean.mul_(1.001), "running_mean"),
        (lambda norm: norm.num_batches_tracked.add_(1), "num_batches_tracked"),
    ],
    ids=["mean", "count"],
)
def test_a_wrong_buffer_is_named(wrong: Any, name: str, plain_with_buffers: Path, tmp_path: Path):
    def after_backward(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        accumulate(model, ids, step)
        if step == 1:
            wrong(model.blocks[2].norm)

    plain(tmp_path / "run", after_backward)
    found = penstock.compare(plain_with_buffers, tmp_path / "run")
    assert found.first is not None
    assert str(found.first).startswith(f"step 1: blocks.2.norm.{name}, buffer after the step, ")
    assert len(found.differences) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
def test_recording_changes_no_number(schedule: str, tmp_path: Path):
    recorded, other = (piped(folder, make(), schedule=schedule) for folder in (tmp_path / "run", None))
    for ours, theirs in zip(recorded.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(plain(tmp_path / "plain").parameters(), plain(None).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_compiled_after_a_recording_has_no_warning_of_its_hooks(tmp_path: Path):
    plain(tmp_path / "run")
    layer = torch.compile(nn.Linear(2, 2), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("count", "options"),
    [
        *slow((2, {"schedule": "zb-h1"}), (4, {"mesh": penstock.MeshShape(2, 2), "microbatches": 2})),
        *slow((4, {"mesh": penstock.MeshShape(2, 2), "microbatches": 2, "zero": True})),
        *slow((2, {"ranks": None, "mesh": penstock.MeshShape(1, 2), "microbatches": 2, "zero": "overlap"})),
    ],
    ids=["2 ranks", "2 replicas", "ZeRO", "ZeRO that overlaps"],
)
def test_processes_record_their_parts(
    processes: LocalProcesses, count: int, options: dict[str, Any], reference: Path, tmp_path: Path
):
    processes.run(count, in_process, str(tmp_path / "run"), options)
    assert len(list((tmp_path / "run").iterdir())) == count
    found = penstock.compare(reference, tmp_path / "run")
    assert found.good, str(found)
    updates = [k for k in read(tmp_path / "run").entries if k.kind == Kind.PARAMETER and k.step >= 0]
    assert len(updates) == 52
    gradients = [
        k for k, verdict in found.verdicts.items() if k.kind == Kind.GRADIENT and verdict != "different"
    ]
    assert len(gradients) == 52
    assert found.same + found.rounded >= 2 * (184 - 8) + 52


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["gradients", "weights"])
def test_replicas_that_divide_more_record_what_they_have(
    shard: str, processes: LocalProcesses, reference: Path, tmp_path: Path
):
    options = {
        "ranks": None,
        "mesh": penstock.MeshShape(1, 2),
        "microbatches": 2,
        "parallel": penstock.ParallelOptions(shard=shard),
    }
    processes.run(2, in_process, str(tmp_path / "run"), options)
    found = penstock.compare(reference, tmp_path / "run")
    assert found.good, str(found)
    for kind in (Kind.PARAMETER, Kind.GRADIENT):
        assert len([k for k in found.verdicts if k.kind == kind and k.step >= 0]) == 52


def test_a_tied_weight_is_recorded_once(tmp_path: Path):
    plain(tmp_path / "plain", tied=True)
    piped(tmp_path / "run", make(tied=True))
    found = penstock.compare(tmp_path / "plain", tmp_path / "run")
    assert found.good, str(found)
    names = {key.name for key in read(tmp_path / "run").entries if key.kind == Kind.PARAMETER}
    assert "table.weight" in names
    assert "head.weight" not in names


def test_a_layer_called_twice_is_recorded_twice(tmp_path: Path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.inner(self.table(ids)).tanh()))

    torch.manual_seed(0)
    model = Twice()
    with penstock.record(tmp_path / "run", model, steps=1):
        accumulate(model, batch(0), 0)
    keys = read(tmp_path / "run").entries
    for kind in (Kind.OUTPUT, Kind.OUTPUT_GRADIENT):
        calls = {key.call for key in keys if key.name == "inner" and key.kind == kind}
        assert calls == {0, 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_has_the_same_recording(reentrant: bool, reference: Path, tmp_path: Path):
    model = make()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda value, inner=inner: torch.utils.checkpoint.checkpoint(
            inner, value, use_reentrant=reentrant
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with penstock.record(tmp_path / "run", model, steps=1):
        accumulate(model, batch(0), 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = penstock.compare(reference, tmp_path / "run")
    assert found.good, str(found)
    assert found.same == 92 + 92 + 104 + 26 + 52


def test_a_step_whose_gradients_accumulate_is_no_update(tmp_path: Path):
    def twice(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        for n in range(2):
            accumulate(model, batch(2 * step + n), step)
        for parameter in model.parameters():
            parameter.grad.div_(2)

    plain(tmp_path / "plain", twice)
    with penstock.Pipeline(make(), loss_of, ranks=2, microbatches=MICROBATCHES) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=1.0, accumulate=2)
        with penstock.record(tmp_path / "run", pipe):
            for n in range(2 * STEPS):
                pipe.step(batch(n), batch(n))
                optimizer.step()
    found = penstock.compare(tmp_path / "plain", tmp_path / "run")
    assert found.good, str(found)
    assert found.rounded == 0


def test_an_update_is_recorded_as_a_pipelines_optimizer_leaves_it(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    update = penstock.PipelineOptimizer._apply

    def wrong(self: penstock.PipelineOptimizer, rank: int) -> None:
        update(self, rank)
        with torch.no_grad():
            for name, parameter in self.pipe.named_parameters():
                if name == "blocks.1.up.weight" and rank == 0:
                    parameter[0, 0] += 0.1

    monkeypatch.setattr(penstock.PipelineOptimizer, "_apply", wrong)
    piped(tmp_path / "run", make())
    found = penstock.compare(reference, tmp_path / "run")
    assert str(found).startswith("step 0: blocks.1.up.weight, value after the update, ")


def test_evaluations_and_other_modules_are_not_recorded(tmp_path: Path):
    model, other = make(), make()
    nothing = pytest.warns(RuntimeWarning, match="nothing was recorded into")
    with nothing, penstock.record(tmp_path / "run", model, steps=1):
        with torch.no_grad():
            model(batch(0))
        other(batch(0))
        with penstock.Pipeline(other, loss_of, ranks=2, microbatches=2) as pipe:
            pipe.step(batch(0), batch(0))
    assert not read_entries(tmp_path / "run")
    with penstock.Pipeline(model, loss_of, ranks=2, microbatches=2) as pipe:
        with nothing, penstock.record(tmp_path / "pipe", pipe, steps=1):
            pipe.evaluate(batch(0), batch(0))
        assert not read_entries(tmp_path / "pipe")
        pipe.step(batch(0), batch(0))
    assert not read_entries(tmp_path / "pipe")


def read_entries(folder: Path) -> list[Key]:
    """Places of what was recorded in steps."""
    return [key for key in read(folder).entries if key.step >= 0]


def test_a_note_with_a_modules_name_is_refused_in_a_pipeline_too(tmp_path: Path):
    with (
        penstock.Pipeline(make(), loss_of, ranks=2, microbatches=2) as pipe,
        penstock.record(tmp_path / "run", pipe) as notes,
    ):
        with pytest.raises(ConfigError, match="that no module of the model has, got 'head'"):
            notes.note("head", 1.0)
        pipe.step(batch(0), batch(0))


def test_what_cannot_be_recorded_is_refused(tmp_path: Path):
    model = make()
    with penstock.record(tmp_path / "run", model) as notes:
        model(batch(0))
        for name, value, message in (
            (3, 1.0, "a note's name must be a text that no module of the model has, got 3"),
            ("head", 1.0, "got 'head'"),
            ("loss", "1", "its value must be a tensor or a number, got '1'"),
        ):
            with pytest.raises(ConfigError, match=message):
                notes.note(name, value)
        with pytest.raises(ConfigError, match="microbatch must be a whole number, got '0'"):
            notes.note("loss", 1.0, microbatch="0")
    with pytest.raises(ConfigError, match="comes after the block that records has ended"):
        notes.note("loss", 1.0)
    with pytest.raises(ConfigError, match="folder must be the path of a folder, got 3"):
        penstock.record(3, model).__enter__()
    with pytest.raises(ConfigError, match="has a recording of process 0 already"):
        penstock.record(tmp_path / "run", model).__enter__()
    with pytest.raises(ConfigError, match="record takes a module, a Pipeline or a mapping"):
        penstock.record(tmp_path / "a", [model]).__enter__()
    with pytest.raises(ConfigError, match="steps must be"):
        penstock.record(tmp_path / "a", model, steps=0).__enter__()
    with pytest.raises(ConfigError, match="first_microbatch must be a whole number"):
        penstock.record(tmp_path / "a", model, first_microbatch=-1).__enter__()
    with pytest.raises(ConfigError, match="the model is compiled"):
        penstock.record(tmp_path / "a", torch.compile(model, backend="eager")).__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write a recording into"):
        penstock.record(tmp_path / "file", model).__enter__()
    assert not (tmp_path / "a").exists()


def test_any_view_and_calls_without_values(tmp_path: Path):
    model = make()
    flat = torch.cat([torch.zeros(1), *(p.detach().flatten() for p in model.parameters())])
    place = 1
    for parameter in model.parameters():
        parameter.data = flat[place : place + parameter.numel()].view_as(parameter)
        place += parameter.numel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with penstock.record(tmp_path / "run", model, steps=1):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        per_sample = torch.func.grad(lambda w, ids: torch.func.functional_call(model, w, (ids[None],)).sum())
        torch.func.vmap(per_sample, (None, 0))(weights, batch(0))
        torch.export.export(model, (batch(0),))
        accumulate(model, batch(0), 0)
        optimizer.step()
    updated = [key for key in read(tmp_path / "run").entries if key.kind == Kind.PARAMETER and key.step == 0]
    assert len(updated) == 26


def test_wrapped_modules_have_the_names_of_the_model(reference: Path, tmp_path: Path):
    model = make()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with penstock.record(tmp_path / "run", nn.DataParallel(model), steps=1):
        accumulate(model, batch(0), 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = penstock.compare(reference, tmp_path / "run")
    assert found.good, str(found)
    assert found.same > 200
