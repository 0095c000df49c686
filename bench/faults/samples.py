"""What is fuzzed: for every kind of file sound ones, ways to spoil them that know what they are, and what reads them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from torch import nn, randn

from bench.faults.mutate import DEEP, NUMBERS, TEXTS, change, spoil, to_json, trap, value
from penstock.errors import DataError

Read = Callable[[Path], None]


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        prepare: makes sound ones in a folder, once; gives what reads them, and has to raise nothing but PenstockError.
        spoil: puts one case into a folder that holds a copy of the sound ones; whether it has to be refused.
    """

    prepare: Callable[[Path], Read]
    spoil: Callable[[Random, Path, Path], bool]


def _any_file(rng: Random, folder: Path, sprung: Path) -> bool | None:
    """What can happen to any file: bytes, a pickle in its place, a link, a hole, a pipe. None: nothing was done."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    dice = rng.random()
    if dice < 0.35:
        path.write_bytes(spoil(rng, path.read_bytes()))
    elif dice < 0.40:
        path.write_bytes(trap(rng, sprung))
    elif dice < 0.42:
        path.unlink()
        path.symlink_to(
            rng.choice(("/dev/zero", "/dev/null", "/nothing", "/", ".", path.name, "/proc/self/mem"))
        )
    elif dice < 0.43:
        path.unlink()
        os.mkfifo(path) if path.parent != folder else path.mkdir()
    elif dice < 0.44:
        os.truncate(path, rng.choice((0, 1, 1 << 40)))
    else:
        return None
    return False


# --- config ---------------------------------------------------------------------------------------------------------------


def _prepare_config(folder: Path) -> Read:
    from penstock.schedule.placement import Placement
    from penstock.simulate.cost_file import read_costs
    from penstock.train.config import Config, resolve
    from penstock.train.config_file import dump, load

    (folder / "run.toml").write_text(dump(Config()))
    (folder / "costs.toml").write_text(
        'F = 10.4\nB = 10.2\nW = [7.7, 7.7]\npair_output = "end"\nbandwidth = 200e9\n'
    )
    (folder / "costs.json").write_text('{"F": 1, "B": [1, 2], "W": 1, "latency": 0, "blocks": "none"}')

    def read(place: Path) -> None:
        for path in sorted(place.iterdir()):
            if path.name.startswith("run"):
                resolve(load(path), None)
            else:
                read_costs(path, Placement.loop(2))

    return read


def _spoil_config(rng: Random, folder: Path, sprung: Path) -> bool:
    path = _keep_one(rng, folder)
    if (done := _any_file(rng, folder, sprung)) is not None:
        return done
    if path.suffix == ".json":
        path.write_bytes(to_json(rng, change(rng, json.loads(path.read_text()))))
        return False
    lines = path.read_text().splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        key = lines[at].partition(" = ")[0] if rng.random() < 0.8 else rng.choice(TEXTS)
        lines[at] = rng.choice(
            (f"{key} = {_toml(rng)}", f"{key}.{key} = 1", f"[{key}]", "", f"[[{key}]]", lines[-1])
        )
    path.write_text("\n".join(lines), "utf-8", errors="surrogateescape")
    return False


def _toml(rng: Random) -> str:
    if rng.random() < 0.02:
        return "[" * DEEP
    if rng.random() < 0.1:
        return rng.choice(
            ("1979-05-27T07:32:00Z", "{a = 1}", "inf", "-nan", "9" * 5000, "'''a", "0b1", "_1", "true")
        )
    return json.dumps(value(rng), ensure_ascii=False)


# --- data -----------------------------------------------------------------------------------------------------------------


def _prepare_data(folder: Path) -> Read:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from penstock.train.codec import words_of
    from penstock.train.config import DataConfig
    from penstock.train.corpus import open_corpora
    from penstock.train.data import check_tokens, train_batch

    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("one two three " * 20)
    np.save(folder / "text" / "b.npy", np.arange(200, dtype=np.uint16))
    words = Tokenizer(
        models.WordLevel({"<end>": 0, "<unknown>": 1, "one": 2, "two": 3}, unk_token="<unknown>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))

    def read(place: Path) -> None:
        tokenizer = None
        if (place / "tokenizer.json").exists():
            tokenizer = words_of(place / "tokenizer.json", 64, 0, None)
        training, _ = open_corpora(DataConfig(path=str(place / "text"), sequence=8), tokenizer)
        check_tokens(training, "training", 8)
        train_batch(training, seed=0, step=3, batch=4, sequence=8, vocabulary=256)

    return read


def _spoil_data(rng: Random, folder: Path, sprung: Path) -> bool:
    if rng.random() < 0.6:
        (folder / "tokenizer.json").unlink()
    if (done := _any_file(rng, folder, sprung)) is not None:
        return done
    tokenizer, array = folder / "tokenizer.json", folder / "text" / "b.npy"
    if tokenizer.exists():
        tokenizer.write_bytes(to_json(rng, change(rng, json.loads(tokenizer.read_text()))))
        return False
    array.write_bytes(_npy(rng, array.read_bytes()))
    return False


def _npy(rng: Random, data: bytes) -> bytes:
    """An array whose header says something else."""
    kind = rng.choice(
        ("<u2", "|O", "<f8", "|V8", "<U4", "<M8[s]", "<i8", "[('a', '<i4')]", ">i4", "|b1", "<c16")
    )
    shape = rng.choice(
        ("(200,)", "(10, 20)", "()", "(-1,)", f"({int(rng.choice(NUMBERS))},)", "(0,)", "[1]", "(2**40,)")
    )
    text = f"{{'descr': '{kind}', 'fortran_order': {rng.choice((True, False))}, 'shape': {shape}, }}"
    if rng.random() < 0.1:
        text = rng.choice(("(" * 5000, "__import__('os')", "{" + "'a':1," * 4000 + "}", "", "{'descr': 1}"))
    header = text.encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    body = data[128:] if rng.random() < 0.8 else rng.randbytes(rng.randrange(400))
    return b"\x93NUMPY\x01\x00" + (len(header) % 65536).to_bytes(2, "little") + header + body


# --- schedules ------------------------------------------------------------------------------------------------------------


def _prepare_schedule(folder: Path) -> Read:
    from penstock.schedule.check import check
    from penstock.schedule.families import build_schedule
    from penstock.schedule.text import read_csv, write_csv

    for name, ranks in (("1f1b", 2), ("zb-v", 2), ("dualpipe", 2), ("gpipe", 3)):
        write_csv(build_schedule(name, ranks, 4), folder / f"{name}.csv")

    def read(place: Path) -> None:
        for path in sorted(place.iterdir()):
            check(read_csv(path))

    return read


def _spoil_schedule(rng: Random, folder: Path, sprung: Path) -> bool:
    path = _keep_one(rng, folder)
    if (done := _any_file(rng, folder, sprung)) is not None:
        return done
    lines = [line.split(",") for line in path.read_text().splitlines()]
    for _ in range(rng.choice((1, 1, 2, 4))):
        line = rng.choice(lines)
        at, other = rng.randrange(len(line)), rng.choice(rng.choice(lines) or [""])
        number = rng.choice((0, 1, 2, 7, 2**31, 999_999_999, 10**12))
        match rng.randrange(6):
            case 0:
                line[at : at + 1] = []
                line.append("")
            case 1:
                line[at] = other
            case 2:
                line[at] = rng.choice(
                    (f"{number}F{number}", f"0B{number}", f"{number}W0", f"0R{number}", "0I0", "1SEND_F1")
                )
            case 3:
                line[at] = f"({other};{line[at]})OVERLAP_F_B"
            case 4:
                line[at] = rng.choice((*TEXTS, '"', '"' + "x" * 200_000, "((((((", "0F0" * 50))
            case _:
                lines.append(list(line)) if rng.random() < 0.5 else rng.shuffle(line)
    path.write_text("\n".join(",".join(line) for line in lines), "utf-8", errors="surrogateescape")
    return False


# --- checkpoints ----------------------------------------------------------------------------------------------------------


def _prepare_checkpoint(folder: Path) -> Read:
    import torch

    from penstock.runtime.optimizer import PipelineOptimizer
    from penstock.runtime.pipeline import Pipeline
    from penstock.train import weights
    from penstock.train.checkpoint.checkpoints import Checkpoints
    from penstock.train.models.transformers.checkpoint import stored_tensors

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
            tensors = stored_tensors(place / "weights")
            if weights.load(place / "weights").keys() != tensors.keys():
                raise AssertionError("two readers of one folder differ")
            return
        reader = Checkpoints(place, pipe, optimizer)
        if reader.load_newest() is None:
            raise DataError("nothing was found")

    return read


def _spoil_checkpoint(rng: Random, folder: Path, sprung: Path) -> bool:
    if rng.random() < 0.25:
        shutil.rmtree(folder / "step-00000001")
        if (done := _any_file(rng, folder, sprung)) is not None:
            return done
        path = rng.choice(sorted((folder / "weights").iterdir()))
        data = path.read_bytes()
        path.write_bytes(_safetensors(rng, data) if path.suffix == ".safetensors" else _json_of(rng, data))
        return False
    shutil.rmtree(folder / "weights")
    if (done := _any_file(rng, folder, sprung)) is not None:
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
        from penstock.train.checkpoint.manifest import digest_of_config

        table["config_sha256"] = digest_of_config(table["config"])
    rest = to_json(rng, table)[1:]
    manifest.write_bytes(b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest)
    return must_fail


def _json_of(rng: Random, data: bytes) -> bytes:
    return to_json(rng, change(rng, json.loads(data)))


def _safetensors(rng: Random, data: bytes) -> bytes:
    """A safetensors file whose header says something else."""
    size = int.from_bytes(data[:8], "little")
    header = _json_of(rng, data[8 : 8 + size])
    claimed = len(header) if rng.random() < 0.8 else int(rng.choice(NUMBERS)) % 2**64
    return claimed.to_bytes(8, "little") + header + data[8 + size :]


# --- traces ---------------------------------------------------------------------------------------------------------------


def _prepare_trace(folder: Path) -> Read:
    from click.testing import CliRunner

    from penstock.cli import group
    from penstock.schedule.check import check
    from penstock.schedule.families import build_schedule
    from penstock.simulate.costs import Costs
    from penstock.simulate.engine import simulate
    from penstock.trace.folder import save_step

    program = check(build_schedule("1f1b", 2, 4)).program
    trace = simulate(program, Costs.of(program.schedule.placement, 1.0, 1.0, 1.0))
    trace = dataclasses.replace(
        trace, info={**trace.info, "source": "measured", "clock_offset": 0.0, "origin": 0.0}
    )
    (folder / "run").mkdir()
    save_step(folder / "run", 1, trace)
    for rank in range(2):
        save_step(folder / "run", 2, trace.select(trace.rank == rank), rank)
    (folder / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    (folder / "run" / "config.toml").write_text("[train]\nsteps = 2\n")
    runner = CliRunner()

    def read(place: Path) -> None:
        words = ["--html", str(place.with_name("out.html"))] if (place / "page").exists() else ["--json"]
        result = runner.invoke(
            group, ["trace", str(place / "run"), "--chrome", str(place.with_name("out.json")), *words]
        )
        if result.exception is not None:
            raise result.exception

    return read


def _spoil_trace(rng: Random, folder: Path, sprung: Path) -> bool:
    if rng.random() < 0.5:  # the other step is then no way out
        for path in (folder / "run" / "traces").glob("step-000002*"):
            path.unlink()
    if rng.random() < 0.1:
        (folder / "page").touch()
    if (done := _any_file(rng, folder, sprung)) is not None:
        return done
    path = rng.choice(sorted((folder / "run" / "traces").iterdir()))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    dice = rng.random()
    if dice < 0.25:
        members[name] = _npy(rng, members[name])
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
    elif dice < 0.855:  # a bomb: three gigabytes of zeros in three megabytes
        text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (402653184,), }"
        text += b" " * (-(len(text) + 11) % 64) + b"\n"
        with (
            zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
            archive.open("bomb.npy", "w") as file,
        ):
            file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        _bomb(path, members, text)
        return True
    else:
        members[name] = spoil(rng, members[name])
    with zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))) as archive:
        for key, data in members.items():
            archive.writestr(key, data)
    return False


def _bomb(path: Path, members: dict[str, bytes], header: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, data in members.items():
            if key not in ("start.npy", "end.npy"):
                archive.writestr(key, data)
        for key in ("start.npy", "end.npy"):
            with archive.open(key, "w", force_zip64=True) as file:
                file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
                zeros = bytes(16 << 20)
                for _ in range(192):
                    file.write(zeros)


def _keep_one(rng: Random, folder: Path) -> Path:
    """Delete all files but one."""
    paths = sorted(folder.iterdir())
    kept = rng.choice(paths)
    for path in paths:
        if path != kept:
            path.unlink()
    return kept


KINDS = {
    "config": Kind(_prepare_config, _spoil_config),
    "data": Kind(_prepare_data, _spoil_data),
    "schedule": Kind(_prepare_schedule, _spoil_schedule),
    "checkpoint": Kind(_prepare_checkpoint, _spoil_checkpoint),
    "trace": Kind(_prepare_trace, _spoil_trace),
}
