"""Folders for fuzzing: checkpoints and weights, and the traces of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from torch import nn, randn

from bench.faults.mutate import NUMBERS, any_file, change, npy, spoil, to_json, trap
from penstock.base.errors import DataError

BOMB = "bomb.npz"
Read = Callable[[Path], None]


def prepare_checkpoint(folder: Path) -> Read:
    import torch

    from penstock.checkpoint.checkpoints import Checkpoints
    from penstock.huggingface import weights
    from penstock.runtime.optim.optimizer import PipelineOptimizer
    from penstock.runtime.pipeline import Pipeline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = Pipeline(model, nn.functional.mse_loss, microbatches=2, ranks=1)
    optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.1)
    checkpoints = Checkpoints(folder, pipe, optimizer)
    pipe.step(randn(4, 3), randn(4, 3))
    optimizer.step()
    checkpoints.save({"seen": (1, 2.0, None), "far": float("inf")})
    checkpoints.wait()
    (folder / "weights").mkdir()
    names = sorted(pipe.state_dict())
    for part in range(2):
        weights.save_part(
            folder / "weights", {name: pipe.state_dict()[name] for name in names[part::2]}, part, 2
        )
    weights.write_index(folder / "weights", 2)

    def read(place: Path) -> None:
        if (place / "weights").exists():
            weights.load(place / "weights")
            return
        reader = Checkpoints(place, pipe, optimizer)
        if reader.load_newest() is None:
            raise DataError("nothing was found")

    return read


def spoil_checkpoint(rng: Random, folder: Path, sprung: Path) -> bool:
    if rng.random() < 0.25:
        shutil.rmtree(folder / "step-00000001")
        if (done := any_file(rng, folder, sprung)) is not None:
            return done
        path = rng.choice(sorted((folder / "weights").iterdir()))
        data = path.read_bytes()
        path.write_bytes(_safetensors(rng, data) if path.suffix == ".safetensors" else _json_of(rng, data))
        return False
    shutil.rmtree(folder / "weights")
    if (done := any_file(rng, folder, sprung)) is not None:
        return done
    place = folder / "step-00000001"
    manifest = place / "manifest.json"
    table = json.loads(manifest.read_bytes())
    table.pop("sha256")
    must_fail = False
    dice = rng.random()
    (stored,) = place.glob("*.safetensors")
    if dice < 0.35:  # files that agree with the manifest, and are something else
        data = stored.read_bytes()
        data = rng.choice(
            (partial(_safetensors, rng, data), partial(spoil, rng, data), partial(trap, rng, sprung))
        )()
        stored.write_bytes(data)
        table["files"][stored.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    elif dice < 0.45:  # names that lead elsewhere
        name = rng.choice(
            ("../../outside.safetensors", "/etc/passwd", "../step-00000001/" + stored.name, "a/b", "\0", ".")
        )
        table["files"][name] = table["files"].pop(stored.name)
        for tensor in table["tensors"].values():
            tensor["file"] = name
        must_fail = True
    elif dice < 0.55:
        name = rng.choice(sorted(table["tensors"]))
        table["tensors"][name]["shape"] = [int(rng.choice(NUMBERS)) for _ in range(rng.randrange(4))]
    else:
        change(rng, rng.choice((table, table["values"], table["tensors"], table["files"])))
    if rng.random() < 0.7 and isinstance(table.get("config"), dict):
        from penstock.checkpoint.manifest import digest_of_config

        table["config_sha256"] = digest_of_config(table["config"])
    rest = to_json(rng, table)[1:]
    manifest.write_bytes(b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest)
    return must_fail


def _json_of(rng: Random, data: bytes) -> bytes:
    return to_json(rng, change(rng, json.loads(data)))


def _safetensors(rng: Random, data: bytes) -> bytes:
    """Return a safetensors file with a corrupted header."""
    size = int.from_bytes(data[:8], "little")
    header = _json_of(rng, data[8 : 8 + size])
    claimed = len(header) if rng.random() < 0.8 else int(rng.choice(NUMBERS)) % 2**64
    return claimed.to_bytes(8, "little") + header + data[8 + size :]


def prepare_trace(folder: Path) -> Read:
    from click.testing import CliRunner

    from penstock.cli import group
    from penstock.schedule.check import check
    from penstock.schedule.families import build_schedule
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulator import simulate
    from penstock.trace.folder import save_step

    program = check(build_schedule("1f1b", 2, 4)).program
    trace = simulate(program, Costs.of(program.schedule.placement, 1.0, 1.0, 1.0))
    trace = dataclasses.replace(
        trace, info={**trace.info, "source": "measured", "clock_offset": 0.0, "origin": 0.0}
    )
    (folder / "run").mkdir()
    save_step(folder / "run", 1, trace)
    save_step(folder / "run", 2, trace.select(trace.rank == 1))
    (folder / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    (folder / "run" / "config.toml").write_text("[train]\nsteps = 2\n")
    _make_bomb(folder.with_name(BOMB))
    runner = CliRunner()

    def read(place: Path) -> None:
        words = ["--html", str(place.with_name("out.html"))] if (place / "page").exists() else ["--json"]
        result = runner.invoke(
            group, ["trace", str(place / "run"), "--out", str(place.with_name("out.json")), *words]
        )
        if result.exception is not None:
            raise result.exception

    (folder / "page").touch()  # load all that a page needs now
    read(folder)
    (folder / "page").unlink()
    return read


def spoil_trace(rng: Random, folder: Path, sprung: Path) -> bool:
    if rng.random() < 0.5:  # the other step is then no way out
        for path in (folder / "run" / "traces").glob("step-000002*"):
            path.unlink()
    if rng.random() < 0.1:
        (folder / "page").touch()
    if (done := any_file(rng, folder, sprung)) is not None:
        return done
    path = rng.choice(sorted((folder / "run" / "traces").iterdir()))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    dice = rng.random()
    if dice < 0.25:
        members[name] = npy(rng, members[name])
    elif dice < 0.5:
        with np.load(path) as stored:
            columns = {key: stored[key] for key in stored.files}
        header = change(rng, json.loads(str(columns["header"])))
        columns["header"] = np.array(json.dumps(header))
        np.savez_compressed(path, **columns)
        return False
    elif dice < 0.75:
        with np.load(path) as stored:
            columns = {key: stored[key].copy() for key in stored.files}
        key = rng.choice([key for key in columns if key != "header"])
        at = rng.randrange(len(columns[key]))
        small = np.iinfo(columns[key].dtype) if columns[key].dtype.kind == "i" else None
        columns[key][at] = rng.choice((0, 1, 5, 100) if small is None else (small.min, small.max, -1, 0, 9))
        np.savez_compressed(path, **columns)
        return False
    elif dice < 0.8:
        members[name] = trap(rng, sprung)
    elif dice < 0.85:
        members["../../outside.npy"] = members.pop(name)
    elif dice < 0.86:
        shutil.copy(folder.with_name(BOMB), path)
        return False
    else:
        members[name] = spoil(rng, members[name])
    with zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))) as archive:
        for key, data in members.items():
            archive.writestr(key, data)
    return False


def _make_bomb(path: Path) -> None:
    """Write a trace of 20 million events, all zeros: 600 MB in 3 MB."""
    types = {
        "rank": "i4",
        "stage": "i4",
        "kind": "i1",
        "microbatch": "i4",
        "start": "f8",
        "end": "f8",
        "paired": "?",
    }
    header = np.array(json.dumps({"format": 1, "ranks": 1, "info": {}}))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, column in {
            "header": header,
            **{k: np.zeros(20_000_000, t) for k, t in types.items()},
        }.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, column)
