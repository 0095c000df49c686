"""Saved runs continue bit for bit at any split; damaged checkpoints are refused by name, and the previous one is used."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from bench.faults.saves import DAMAGES, flip, killed
from torch import nn

from penstock.base.errors import ConfigError, DataError, PenstockError
from penstock.base.run_lock import locked
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.find import read_manifest, steps_in
from penstock.checkpoint.manifest import MANIFEST
from penstock.checkpoint.read import Reader
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.checkpoint_runs import adamw, equal, pipeline, state_of, steps, trained
from tests.support.full_disk import files_of_at_most
from tests.support.groups import outcome, run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.states import joined


@pytest.mark.parametrize("schedule", ["zb-h1", *slow("dualpipe-v"), *exhaustive("1f1b", "interleaved-1f1b")])
def test_three_and_three_steps_are_six_bit_for_bit_with_dropout(tmp_path: Path, schedule: str):
    options = {"ranks": 2, "schedule": schedule, "dropout": 0.3}
    options |= {"virtual_stages": 2} if schedule == "interleaved-1f1b" else {}
    torch.manual_seed(11)
    straight, _, (weights, state) = trained(0, tmp_path / "none", None, 3, 3, saves=False, **options)
    drawn = torch.rand(3)
    torch.manual_seed(11)
    first, _, _ = trained(0, tmp_path / "c", None, 3, 0, **options)
    torch.manual_seed(12)  # another process has other default generators
    second, _, again = trained(0, tmp_path / "c", None, 0, 3, saves=False, **options)
    assert first + second == straight
    assert equal(again, (weights, state))
    assert torch.equal(torch.rand(3), drawn)


def test_the_step_and_the_users_own_values_come_back(tmp_path: Path):
    with pipeline(ranks=2) as pipe, Checkpoints(tmp_path, pipe, adamw(pipe)) as checkpoints:
        steps(pipe, checkpoints.optimizer, 3)
        extra = {"epoch": 2, "seen": (1, 2.5, None), "order": torch.arange(5), "loss": float("inf")}
        checkpoints.save(extra)
        assert checkpoints.wait() == tmp_path / "step-00000003"
        loaded = checkpoints.load_newest()
    assert loaded.step == 3
    assert equal(loaded.extra, extra)
    assert loaded.refused == ()


def test_a_save_is_refused_while_another_run_writes_in_the_folder(tmp_path: Path):
    """Otherwise it would delete the other's unfinished checkpoint, or the other would publish its files."""
    other = tmp_path / ".step-00000001.unfinished"
    other.mkdir()
    with pipeline(ranks=2) as pipe, Checkpoints(tmp_path, pipe) as checkpoints:
        steps(pipe, adamw(pipe), 1)
        with locked(tmp_path, say=pytest.fail):
            checkpoints.save()
            with pytest.raises(PenstockError, match=r"no checkpoint was written in .* in use by process"):
                checkpoints.wait()
            assert other.exists()
        checkpoints.save()
        assert checkpoints.wait() == tmp_path / "step-00000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_copy_is_of_the_moment_of_saving(tmp_path: Path):
    with pipeline(ranks=2) as pipe, Checkpoints(tmp_path, pipe, adamw(pipe)) as checkpoints:
        for _ in range(2):
            steps(pipe, checkpoints.optimizer, 1)
            before = state_of(pipe, checkpoints.optimizer)
            checkpoints.save()
            steps(pipe, checkpoints.optimizer, 1)
            checkpoints.load_newest()
            assert equal(state_of(pipe, checkpoints.optimizer), before)


def test_the_newest_checkpoints_and_multiples_of_keep_every_are_kept(tmp_path: Path):
    with pipeline(ranks=1) as pipe:
        with Checkpoints(tmp_path, pipe, None, keep_last=2, keep_every=4) as checkpoints:
            for n in range(1, 11):
                pipe.steps = n
                checkpoints.save()
        assert [step for step, _ in steps_in(tmp_path)] == [10, 9, 8, 4]
        assert {path.name for path in tmp_path.iterdir()} == {path.name for _, path in steps_in(tmp_path)}


STEPS = 2
"""Steps at each of the layouts."""
LAYOUTS = [
    (2, None, {"schedule": "interleaved-1f1b", "virtual_stages": 2}),
    (4, MeshShape(1, 2, 2), {"zero": True}),
    (2, MeshShape(1, 2, 1), {"zero": "overlap"}),
]
MORE = [(4, None, {}), (4, MeshShape(2, 2, 1), {"zero": True}), (2, MeshShape(1, 1, 2), {})]


@pytest.mark.parametrize(
    "layouts", [*slow(LAYOUTS), *exhaustive([*MORE, *LAYOUTS])], ids=["each kind of cut", "many"]
)
def test_a_run_continues_at_other_layouts_in_processes(
    tmp_path: Path, processes: LocalProcesses, layouts: list
):
    losses, before = [], None
    for count, mesh, options in layouts:
        parts = processes.run(count, in_processes, tmp_path, mesh, options)
        losses += parts[0][0]
        assert all(part[0] == parts[0][0] for part in parts)
        replicas = 1 if mesh is None else mesh.dp * mesh.tp
        for replica in range(replicas):
            own = [part for n, part in enumerate(parts) if n % replicas == replica]
            if before is not None:
                assert equal(joined([part[1] for part in own]), before)
        before = joined([part[2] for part in parts])
    plain, _, _ = trained(0, tmp_path / "none", None, STEPS * len(layouts), 0, saves=False, ranks=1)
    assert losses == pytest.approx(plain, abs=1e-5)
    # And in threads.
    _, loaded, _ = trained(0, tmp_path, None, 0, 0, saves=False, ranks=2)
    assert equal(by_name(loaded), by_name(before))


def by_name(states):
    """Joined states list names in the order of the processes."""
    weights, state = states
    return dict(sorted(weights.items())), {k: v for k, v in state.items() if k != "groups"}


def in_processes(rank: int, folder: Path, mesh: MeshShape | None, options: dict):
    return trained(rank, folder, mesh, STEPS, 0, **options)


def read_elements(rank: int, folder: Path, zero: bool) -> int:
    """Number of elements of the optimizer's state that a process with every parameter reads."""
    read = 0
    original = Reader._run

    def counting(self, name, dim, run):
        nonlocal read
        found = original(self, name, dim, run)
        read += found.numel() if name.startswith("optimizer/") else 0
        return found

    Reader._run = counting
    try:
        trained(rank, folder, MeshShape(1, 2, 1), 0, 0, saves=False, zero=zero)
    finally:
        Reader._run = original
    return read


def test_a_divided_optimizer_reads_the_rows_of_its_own_pieces(saved_twice: Path, processes: LocalProcesses):
    cases = [(saved_twice, False), (saved_twice, True)]
    (whole, _), divided = run_cases(processes, 2, read_elements, cases)
    assert max(divided) < 0.6 * whole, (divided, whole)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_each_damaged_file_is_named_and_the_previous_checkpoint_is_used(saved_twice: Path, damage):
    (_, newest), (_, before) = steps_in(saved_twice)
    with pipeline(ranks=2) as pipe, Checkpoints(saved_twice, pipe, adamw(pipe)) as checkpoints:
        for path in sorted(newest.iterdir()):
            kept = path.read_bytes()
            damage(path)
            with pytest.raises(DataError, match=path.name):
                checkpoints.load(newest)
            loaded = checkpoints.load_newest()
            assert (loaded.step, loaded.path) == (1, before)
            assert len(loaded.refused) == 1
            assert str(path) in loaded.refused[0]
            path.write_bytes(kept)
        assert checkpoints.load_newest().step == 2


def test_no_bit_of_a_manifest_can_change_unseen(saved_twice: Path):
    path = saved_twice / "step-00000002" / MANIFEST
    data = path.read_bytes()
    for at in (*range(0, 80, 7), *range(80, len(data), 997), len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(DataError):
            read_manifest(path.parent)


def test_nothing_is_loaded_if_no_checkpoint_is_sound(saved_twice: Path):
    for _, path in steps_in(saved_twice):
        flip(next(path.glob("stage-00002*")))
    with pipeline(ranks=2) as pipe, Checkpoints(saved_twice, pipe, adamw(pipe)) as checkpoints:
        before = state_of(pipe, checkpoints.optimizer)
        with pytest.raises(DataError, match=r"no checkpoint in .* is sound: .*stage-00002.*stage-00002"):
            checkpoints.load_newest()
        assert equal(state_of(pipe, checkpoints.optimizer), before)
        assert pipe.steps == 0


def test_a_full_disk_leaves_the_previous_checkpoint_and_training_continues(saved_twice: Path):
    there = sorted(path.name for path in saved_twice.rglob("*"))
    said = r"no checkpoint was written .*File too large.* earlier checkpoints are unchanged"
    with pipeline(ranks=2) as pipe, Checkpoints(saved_twice, pipe, adamw(pipe)) as checkpoints:
        assert checkpoints.load_newest().step == 2
        steps(pipe, checkpoints.optimizer, 1)
        with files_of_at_most(20_000):
            checkpoints.save()
            with pytest.raises(PenstockError, match=said):
                checkpoints.wait()
        assert sorted(path.name for path in saved_twice.rglob("*")) == there
        steps(pipe, checkpoints.optimizer, 1)
        checkpoints.save()
        assert checkpoints.wait() == saved_twice / "step-00000004"


def on_a_full_disk(rank: int, folder: Path) -> str:
    disk = files_of_at_most(5_000) if rank == 1 else contextlib.nullcontext()
    with pipeline() as pipe, Checkpoints(folder, pipe, None) as checkpoints, disk:
        checkpoints.save()
        return outcome(checkpoints.wait)


def test_every_process_names_the_rank_that_could_not_write(tmp_path: Path, processes: LocalProcesses):
    told = processes.run(2, on_a_full_disk, tmp_path)
    assert told[0] == told[1]
    assert "rank 1: " in told[0]
    assert "File too large" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_another_model_or_optimizer_is_refused(saved_twice: Path):
    with (
        pipeline(ranks=2, dropout=0.5, seed=3) as pipe,
        Checkpoints(saved_twice, pipe, None) as checkpoints,
        pytest.raises(ConfigError, match="of a run with seed 0, this pipeline has 3"),
    ):
        checkpoints.load_newest()
    with pipeline(ranks=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
        with (
            Checkpoints(saved_twice, pipe, optimizer) as checkpoints,
            pytest.raises(ConfigError, match="does not fit"),
        ):
            checkpoints.load_newest()


def in_half_precision(scale: float) -> tuple[Pipeline, PipelineOptimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).half()
    pipe = Pipeline(model, nn.functional.mse_loss, microbatches=2, ranks=2)
    scaler = GradScaler(init_scale=scale, growth_interval=3)
    return pipe, PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3, main_weights=True, scaler=scaler)


def half_steps(pipe: Pipeline, optimizer: PipelineOptimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(pipe.steps)
        x = torch.randn(4, 8, generator=generator).half()
        losses.append(float(pipe.step(x, x).loss))
        optimizer.step()
    return losses


def test_a_loss_scale_and_its_counter_continue(tmp_path: Path):
    pipe, optimizer = in_half_precision(2.0**20)  # too large: the first steps are skipped
    with pipe:
        straight = half_steps(pipe, optimizer, 12)
        expected = state_of(pipe, optimizer)
    pipe, optimizer = in_half_precision(2.0**20)
    with pipe, Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
        first = half_steps(pipe, optimizer, 7)
        checkpoints.save()
        kept = optimizer.scaler.state_dict()
        assert optimizer.state_dict()["skipped"] > 0
    pipe, optimizer = in_half_precision(1.0)
    with pipe, Checkpoints(tmp_path, pipe, optimizer) as checkpoints:
        assert checkpoints.load_newest().step == 7
        assert optimizer.scaler.state_dict() == kept
        assert first + half_steps(pipe, optimizer, 5) == straight
        assert equal(state_of(pipe, optimizer), expected)


@pytest.mark.slow
def test_killed_at_twenty_random_points_of_a_save_the_newest_loads_twenty_times(tmp_path: Path):
    """It leaves the previous checkpoint or the new one, never half of one."""
    assert killed(tmp_path, True).failures == []
