"""Samples for fuzzing: for every kind of file, sound ones, ways to corrupt them, and a reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from bench.faults.dcp_folder import prepare_dcp, spoil_dcp
from bench.faults.folders import Read, prepare_checkpoint, prepare_trace, spoil_checkpoint, spoil_trace
from bench.faults.mutate import DEEP, TEXTS, any_file, change, npy, to_json, value


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        prepare: function that writes sound files to a folder, once, and returns a reader that may raise only PenstockError.
        spoil: function that writes one case to a folder with a copy of the sound files; returns whether it must be refused.
    """

    prepare: Callable[[Path], Read]
    spoil: Callable[[Random, Path, Path], bool]


def _prepare_config(folder: Path) -> Read:
    from penstock.schedule.placement import Placement
    from penstock.simulate.cost_file import read_costs
    from penstock.train.config.config import Config
    from penstock.train.config.file import dump, load
    from penstock.train.config.resolve import resolve

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
    if (done := any_file(rng, folder, sprung)) is not None:
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


def _prepare_data(folder: Path) -> Read:
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers

    from penstock.train.config.sections import DataConfig
    from penstock.train.data.samples import batch_of
    from penstock.train.data.sources import open_sources
    from penstock.train.data.tokenizer import ByteTokenizer, read_tokenizer
    from penstock.train.data.tokenizer import Tokenizer as AnyTokenizer

    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("one two three " * 20)
    np.save(folder / "text" / "b.npy", np.arange(200, dtype=np.uint16))
    rows = [{"text": f"one {n} " + "two " * (n % 5)} for n in range(200)]
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    words = Tokenizer(
        models.WordLevel({"<end>": 0, "<unknown>": 1, "one": 2, "two": 3}, unk_token="<unknown>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))

    def read(place: Path) -> None:
        tokenizer: AnyTokenizer = ByteTokenizer()
        if (place / "tokenizer.json").exists():
            tokenizer = read_tokenizer(place / "tokenizer.json", 64, 0, None)
        for name in ("text", "saved"):
            config = DataConfig(path=str(place / name), sequence=8)
            opened = open_sources(config, tokenizer, 0, lambda name, share: None)
            batch_of(opened.training.read(np.arange(12, 16)), 256, target_is_input=False)

    return read


def _spoil_data(rng: Random, folder: Path, sprung: Path) -> bool:
    if rng.random() < 0.6:
        (folder / "tokenizer.json").unlink()
    if (done := any_file(rng, folder, sprung)) is not None:
        return done
    tokenizer, array = folder / "tokenizer.json", folder / "text" / "b.npy"
    if tokenizer.exists():
        tokenizer.write_bytes(to_json(rng, change(rng, json.loads(tokenizer.read_text()))))
        return False
    array.write_bytes(npy(rng, array.read_bytes()))
    return False


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
    if (done := any_file(rng, folder, sprung)) is not None:
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
    "checkpoint": Kind(prepare_checkpoint, spoil_checkpoint),
    "trace": Kind(prepare_trace, spoil_trace),
    "dcp": Kind(prepare_dcp, spoil_dcp),
}
