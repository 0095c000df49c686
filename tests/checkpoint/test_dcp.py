"""Folders of ``torch.distributed.checkpoint`` are read without running what is in them, and a run continues from them."""

from __future__ import annotations

import collections
import io
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import penstock
from penstock.base.errors import ConfigError, DataError, PenstockError
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.dcp import _schedule, export_dcp, import_dcp
from penstock.parallel.mesh import make_mesh
from penstock.runtime.workers.pool import LocalProcesses
from tests.checkpoint.test_manifest import Trap
from tests.support.checkpoint_runs import adamw, equal, pipeline, state_of, steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of_all_kinds() -> dict:
    torch.manual_seed(4)
    return {
        "model": {"a.weight": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "none": torch.zeros(0, 3)},
        "optim": {
            "state": {"a.weight": {"step": torch.tensor(2.0), "exp_avg": torch.randn(4, 3).t()}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.weight"], "foreach": None}],
        },
        "step": 7,
        "nested": {"list": [1, 2.5, {"t": torch.ones(2)}], "ordered": collections.OrderedDict(x=1)},
        "kinds": [
            torch.randn(4).to(dtype)
            for dtype in (torch.float8_e4m3fn, torch.float16, torch.float64, torch.complex64)
        ],
        "whole": [torch.arange(3, dtype=dtype) for dtype in (torch.int64, torch.int8, torch.uint8)],
        "bits": torch.tensor([True, False]),
    }


def test_a_folder_that_torch_saved_is_read(tmp_path: Path):
    state = state_of_all_kinds()
    save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert equal(penstock.read_dcp(tmp_path / "dcp"), state)


def save_in_parts(rank: int, folder: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = make_mesh(tp=2).axis("tp")
    whole = torch.arange(40, dtype=torch.float32).reshape(5, 8)
    save(
        {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole, mesh, [Shard(1)]),
            "both": distribute_tensor(whole, mesh, [Replicate()]),
        },
        checkpoint_id=str(folder),
    )


def test_shards_that_two_processes_saved_are_joined(tmp_path: Path, processes: LocalProcesses):
    processes.run(2, save_in_parts, tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    whole = torch.arange(40, dtype=torch.float32).reshape(5, 8)
    assert equal(penstock.read_dcp(tmp_path / "dcp"), {"rows": whole, "columns": whole, "both": whole})


def with_trap(archive: bytes, trap: Trap) -> bytes:
    """An archive of torch.save with another pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as before, zipfile.ZipFile(made, "w") as after:
        for name in before.namelist():
            after.writestr(name, pickle.dumps(trap, 2) if name.endswith("data.pkl") else before.read(name))
    return made.getvalue()


@pytest.mark.parametrize("held", [torch.ones(3), {"x": 1}], ids=["tensor", "value"])
def test_a_trap_in_any_pickle_of_a_folder_is_refused_and_does_not_spring(tmp_path: Path, held):
    sprung, folder = tmp_path / "sprung", tmp_path / "dcp"
    trap = Trap(sprung)
    save({"held": held}, checkpoint_id=str(folder), no_dist=True)
    (part,) = folder.glob("*.distcp")
    described = pickle.loads((folder / ".metadata").read_bytes())
    part.write_bytes(with_trap(part.read_bytes(), trap))
    for info in described.storage_data.values():
        info.offset, info.length = 0, part.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(DataError, match=r"Path\.touch|getattr"):
        penstock.read_dcp(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(trap))
    with pytest.raises(DataError, match="does not describe a checkpoint"):
        penstock.read_dcp(folder)
    assert not sprung.exists()
    pickle.loads(pickle.dumps(trap))
    assert sprung.exists()


def elsewhere(described: Any) -> None:
    next(iter(described.storage_data.values())).relative_path = "../x.distcp"


def larger(described: Any) -> None:
    described.state_dict_metadata["held"].size = torch.Size([10_000])


def with_a_gap(described: Any) -> None:
    chunks = described.state_dict_metadata["held"].chunks
    chunks[0] = replace(chunks[0], sizes=torch.Size([2]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (elsewhere, r"'\.\./x\.distcp' is not a file of the folder"),
        (larger, r"'held' of \[10000\] needs more than the bytes that are stored of it"),
        (with_a_gap, "'held' has 2 of 3 numbers"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, change: Callable[[Any], None], said: str):
    save({"held": torch.ones(3)}, checkpoint_id=str(tmp_path), no_dist=True)
    described = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(described)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(DataError, match=said):
        penstock.read_dcp(tmp_path)


def test_changed_bytes_give_a_clear_error_or_what_was_there(tmp_path: Path):
    folder = tmp_path / "dcp"
    save({"t": torch.ones(3), "v": {"x": [1, 2]}}, checkpoint_id=str(folder), no_dist=True)
    chance, said = random.Random(3), 0
    for path in sorted(folder.iterdir()):
        kept = path.read_bytes()
        for _ in range(60):
            data = bytearray(kept)
            for _ in range(chance.choice((1, 1, 2, 8))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data[: chance.choice((len(data), len(data), chance.randrange(len(data))))])
            try:
                penstock.read_dcp(folder)
            except DataError:
                said += 1
        path.write_bytes(kept)
    assert said > 40


def saved(folder: Path, count: int):
    """Train some steps; return their checkpoint and the state."""
    with pipeline(ranks=2) as pipe, Checkpoints(folder, pipe, adamw(pipe)) as checkpoints:
        steps(pipe, checkpoints.optimizer, count)
        checkpoints.save()
        return checkpoints.wait(), state_of(pipe, checkpoints.optimizer)


def test_an_exported_checkpoint_is_imported_without_loss(tmp_path: Path):
    first, state = saved(tmp_path / "a", 3)
    like, _ = saved(tmp_path / "b", 1)
    export_dcp(first, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "b" / "step-00000003", like)
    with pipeline(ranks=1) as pipe, Checkpoints(tmp_path / "b", pipe, adamw(pipe)) as checkpoints:
        assert checkpoints.load_newest().step == 3
        assert equal(state_of(pipe, checkpoints.optimizer), state)
        found = steps(pipe, checkpoints.optimizer, 2)
    with pipeline(ranks=2) as pipe, Checkpoints(tmp_path / "a", pipe, adamw(pipe)) as checkpoints:
        checkpoints.load_newest()
        assert steps(pipe, checkpoints.optimizer, 2) == found


def test_a_run_continues_from_a_plain_loops_folder(tmp_path: Path):
    """torch's own functions name the state; the learning-rate schedule is ours, moved to the step."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from penstock.train.model.llama import next_token_loss
    from tests.support.checkpoint_runs import model, tokens

    like, _ = saved(tmp_path / "run", 1)
    net, layers = nn.Module(), model()
    for layer in layers:
        parent, _, last = layer.name.rpartition(".")
        if parent and parent not in dict(net.named_modules()):
            net.add_module(parent, nn.Module())
        net.get_submodule(parent).add_module(last, layer.build())
    names = {id(p): name for name, p in net.named_parameters()}
    norms = [p for p in net.parameters() if "norm" in names[id(p)]]
    others = [p for p in net.parameters() if "norm" not in names[id(p)]]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=0.01)
    built = [net.get_submodule(layer.name) for layer in layers]

    def step(n: int) -> float:
        x, y = tokens(n)
        value = x
        for layer in built:
            value = layer(value)
        loss = next_token_loss(value, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + n)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for n in range(3):
        step(n)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / 4
    weights, state = get_state_dict(net, optimizer)
    save({"model": weights, "optim": state}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "run" / "step-00000003", like)
    with pipeline(ranks=2) as pipe, Checkpoints(tmp_path / "run", pipe, adamw(pipe)) as checkpoints:
        assert checkpoints.load_newest().step == 3
        found = steps(pipe, checkpoints.optimizer, 3)
    assert found == pytest.approx([step(n) for n in range(3, 6)], abs=1e-5)


def test_a_schedule_of_learning_rates_is_taken_over_or_moved_to_the_step():
    ours = {"last_epoch": 0, "_step_count": 1, "base_lrs": [0.1]}
    theirs = {"last_epoch": 7, "_step_count": 8, "base_lrs": [0.2]}
    assert _schedule(None, theirs, 3) is None
    assert _schedule(ours, theirs, 3) == theirs
    for other in (None, {"last_epoch": 7}, [1]):
        assert _schedule(ours, other, 3) == {**ours, "last_epoch": 3, "_step_count": 4}
    for own in ([1], {"last_epoch": 0}):
        with pytest.raises(DataError, match="learning rates cannot be moved to step 3"):
            _schedule(own, None, 3)


@pytest.mark.slow
def test_a_folder_that_does_not_fit_is_refused_and_nothing_is_written(saved_twice: Path, tmp_path: Path):
    first = saved_twice / "step-00000002"
    export_dcp(first, tmp_path / "dcp")
    good = penstock.read_dcp(tmp_path / "dcp")
    name = next(iter(good["model"]))

    def told(state: dict, target: str = "step-00000002") -> str:
        shutil.rmtree(tmp_path / "changed", ignore_errors=True)
        save(state, checkpoint_id=str(tmp_path / "changed"), no_dist=True)
        with pytest.raises(PenstockError) as caught:
            import_dcp(tmp_path / "changed", tmp_path / "b" / target, first)
        assert isinstance(caught.value, ConfigError | DataError)
        assert not (tmp_path / "b").exists()
        return str(caught.value)

    model, optim = good["model"], good["optim"]
    less = {k: v for k, v in model.items() if k != name}
    assert f"without {name}" in told({**good, "model": less})
    # Another name for one of the weights, as tied ones have, is none too many.
    save(
        {**good, "model": {**model, "twin": model[name]}}, checkpoint_id=str(tmp_path / "tied"), no_dist=True
    )
    import_dcp(tmp_path / "tied", tmp_path / "c" / "step-00000002", first)
    assert "with unknown extra" in told({**good, "model": {**model, "extra": torch.ones(1)}})
    assert "not of shape" in told({**good, "model": {**model, name: torch.ones(1)}})
    assert "cannot hold" in told({**good, "model": {**model, name: model[name].double()}})
    assert "no optimizer's state" in told({"model": model})
    assert "has 1 groups of parameters; none has" in told(
        {**good, "optim": {**optim, "param_groups": optim["param_groups"][:1]}}
    )
    assert "must be called step-00000002" in told(good, "step-00000009")
    assert "must be called step-NUMBER" in told(good, "two")
    with pytest.raises(DataError, match=r"no \.metadata"):
        import_dcp(saved_twice, tmp_path / "b" / "step-00000002", first)
