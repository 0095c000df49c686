"""Checkpoints that are sound byte for byte and still cannot be loaded, and links where folders are expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.base.errors import DataError
from penstock.base.tensor_file import write_tensors
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.find import damage, read_manifest, steps_in
from penstock.checkpoint.manifest import MANIFEST, Manifest, dump
from penstock.checkpoint.read import Reader
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.checkpoint_runs import adamw, equal, pipeline, state_of, steps
from tests.support.lanes import slow


def sign_again(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Change a manifest, and give it the right digest."""
    (path / MANIFEST).write_bytes(dump(change(read_manifest(path))))


def reshaped(manifest: Manifest) -> Manifest:
    name, stored = next(iter(manifest.tensors.items()))
    return replace(
        manifest, tensors={**manifest.tensors, name: replace(stored, shape=(*stored.shape, 1 << 20))}
    )


def renamed(manifest: Manifest) -> Manifest:
    tensors = dict(manifest.tensors)
    name = next(iter(tensors))
    return replace(manifest, tensors={"model/other": tensors.pop(name), **tensors})


def test_a_signed_manifest_that_contradicts_its_files_is_refused(saved_twice: Path):
    path = steps_in(saved_twice)[0][1]
    assert damage(path, read_manifest(path)) == []
    kept = (path / MANIFEST).read_bytes()
    sign_again(path, reshaped)
    (wrong,) = damage(path, read_manifest(path))
    assert "stage-00001-of-00002.safetensors: 'model/" in wrong
    assert "1048576]" in wrong
    (path / MANIFEST).write_bytes(kept)
    sign_again(path, renamed)
    wrong = "; ".join(damage(path, read_manifest(path)))
    assert "it has no tensor 'model/other', which the manifest says it has" in wrong
    assert "which the manifest does not know" in wrong


def extra_of_no_dictionary(path: Path) -> None:
    sign_again(path, lambda manifest: replace(manifest, values={**manifest.values, "extra": [1]}))


def no_optimizer_state(path: Path) -> None:
    sign_again(path, lambda manifest: replace(manifest, values={**manifest.values, "optimizer": {}}))


def spoil_generator(path: Path, name: str = "generators/0/cpu") -> None:
    """Replace the state of a default generator by zeros, consistently in file and manifest."""
    manifest = read_manifest(path)
    file = manifest.tensors[name].file
    with Reader(path, manifest) as reader:
        held = {key: reader.tensor(key) for key, tensor in manifest.tensors.items() if tensor.file == file}
    held[name] = torch.zeros_like(held[name])
    (path / file).unlink()
    stored = write_tensors(path / file, held)
    sign_again(path, lambda manifest: replace(manifest, files={**manifest.files, file: stored}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: sign_again(path, reshaped), "and the manifest says"),
        (extra_of_no_dictionary, "'extra' must be a dictionary"),
        (no_optimizer_state, "the optimizer's state in .* does not fit"),
        (spoil_generator, "has no sound state of the generator of cpu"),
        (lambda path: (path / MANIFEST).unlink(), "cannot read .*manifest.json: No such file"),
        (lambda path: (path / MANIFEST).write_text("{}"), "is not a manifest of a checkpoint"),
    ],
)
def test_after_any_refusal_the_previous_checkpoint_is_loaded(
    saved_twice: Path, spoil: Callable[[Path], None], said: str
):
    (_, newest), (_, before) = steps_in(saved_twice)
    spoil(newest)
    with pipeline(ranks=2) as pipe, Checkpoints(saved_twice, pipe, adamw(pipe)) as checkpoints:
        fresh = state_of(pipe, checkpoints.optimizer)
        with pytest.raises(DataError, match=said):
            checkpoints.load(newest)
        assert equal(state_of(pipe, checkpoints.optimizer), fresh)
        loaded = checkpoints.load_newest()
        assert (loaded.step, loaded.path, pipe.steps) == (1, before, 1)
        (refused,) = loaded.refused
        assert str(newest) in refused


def in_processes(rank: int, folder: Path) -> tuple[int, tuple[str, ...]]:
    torch.set_num_threads(1)
    with pipeline() as pipe, Checkpoints(folder, pipe, adamw(pipe)) as checkpoints:
        for _ in range(2):
            steps(pipe, checkpoints.optimizer, 1)
            checkpoints.save()
        checkpoints.wait()
        if rank == 1:
            spoil_generator(steps_in(folder)[0][1], "generators/1/cpu")
        pipe.sum_over_ranks(torch.zeros(1, dtype=torch.float64))  # not before it is spoiled
        loaded = checkpoints.load_newest()
        return loaded.step, loaded.refused


def test_a_checkpoint_that_one_process_refuses_is_loaded_by_none(tmp_path: Path, processes: LocalProcesses):
    answers = processes.run(2, in_processes, tmp_path)
    assert answers[0] == answers[1]
    step, (refused,) = answers[0]
    assert step == 1
    assert "has no sound state of the generator of cpu" in refused


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (".step-00000003.unfinished", ""),
        (".step-00000002.unfinished", None),
        *slow(("step-00000003", ""), ("step-00000003", "nothing"), ("step-00000001", "step-00000001")),
    ],
)
def test_a_link_does_not_block_a_save_and_its_target_stays(
    saved_twice: Path, tmp_path: Path, name: str, target: str | None
):
    """Links elsewhere, to nothing and to a checkpoint that was moved, and a file, in place of what a save writes."""
    folder, elsewhere = saved_twice, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    if name == "step-00000001":
        (folder / name).rename(elsewhere / name)
    if target is None:
        (folder / name).touch()
    else:
        (folder / name).symlink_to(elsewhere / target)
    there = sorted(elsewhere.rglob("*"))
    with pipeline(ranks=2) as pipe, Checkpoints(folder, pipe, adamw(pipe), keep_last=2) as checkpoints:
        assert checkpoints.load(folder / "step-00000002").step == 2
        for _ in range(2):
            steps(pipe, checkpoints.optimizer, 1)
            checkpoints.save()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]
    assert sorted(elsewhere.rglob("*")) == there
