"""Corrupted folders of ``torch.distributed.checkpoint``: above all their pickles, in which no code may run."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from bench.faults.mutate import NUMBERS, TEXTS, any_file, spoil, trap, value


def prepare_dcp(folder: Path) -> Callable[[Path], None]:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    from penstock.checkpoint.dcp import read_dcp

    state = {
        "model": {"a.weight": torch.randn(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)},
        "optim": {"state": {"a.weight": {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "params": ["b"]}]},
        "step": 7,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves alone is intended
        save(state, checkpoint_id=str(folder), no_dist=True)

    def read(place: Path) -> None:
        read_dcp(place)

    read(folder)
    return read


def spoil_dcp(rng: Random, folder: Path, sprung: Path) -> bool:
    if (done := any_file(rng, folder, sprung)) is not None:
        return done
    metadata, parts = folder / ".metadata", next(folder.glob("*.distcp"))
    dice = rng.random()
    if dice < 0.4:
        described = pickle.loads(metadata.read_bytes())  # our own, sound one
        _change(rng, described)
        metadata.write_bytes(pickle.dumps(described, rng.choice((2, 4, 5))))
    elif dice < 0.5:
        metadata.write_bytes(rng.choice((trap(rng, sprung), _deep(), _growing(rng))))
    elif dice < 0.9:
        parts.write_bytes(_archives(rng, parts.read_bytes(), sprung))
    else:
        parts.write_bytes(spoil(rng, parts.read_bytes()))
    return False


def _change(rng: Random, described: Any) -> None:
    """Change the description of an entry: its size, its chunks, or their place."""
    places: list[tuple[Any, str]] = []
    for entry in described.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            places += [(entry, "size"), (entry, "chunks"), (entry, "properties"), (entry.chunks[0], "sizes")]
            places += [(entry.chunks[0], "offsets"), (entry.properties, "dtype")]
    for index, info in described.storage_data.items():
        places += [
            (index, "fqn"),
            (index, "offset"),
            (info, "relative_path"),
            (info, "offset"),
            (info, "length"),
        ]
    places += [(described, "state_dict_metadata"), (described, "planner_data"), (described, "storage_data")]
    for _ in range(rng.choice((1, 1, 2, 5))):
        owner, name = rng.choice(places)
        new = rng.choice(
            (
                int(rng.choice(NUMBERS)),
                rng.choice(TEXTS),
                value(rng),
                (2, 6),
                (1 << 40,),
                (-1, 3),
            )
        )
        object.__setattr__(owner, name, new)


def _archives(rng: Random, data: bytes, sprung: Path) -> bytes:
    """Return the file with one archive replaced, so that later ones are not where described, or with its end removed."""
    starts = [
        n for n in range(len(data)) if data.startswith(b"PK\x03\x04", n) and b"data.pkl" in data[n : n + 64]
    ]
    start = rng.choice(starts)
    stop = next((n for n in starts if n > start), len(data))
    made = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(io.BytesIO(data[start:stop])) as before, zipfile.ZipFile(made, "w", kind) as after:
        for name in before.namelist():
            held = before.read(name)
            if name.endswith("data.pkl"):
                held = rng.choice((spoil(rng, held), trap(rng, sprung), _deep(), held))
            elif rng.random() < 0.3:
                held = spoil(rng, held)
            after.writestr(name, held)
    return data[:start] + made.getvalue().ljust(stop - start, b"\0")[: stop - start] + data[stop:]


def _deep() -> bytes:
    """Return deeply nested lists."""
    return b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."


def _growing(rng: Random) -> bytes:
    """Return bytes and numbers that claim to be longer than the file."""
    return b"\x80\x04" + rng.choice((b"\x8e", b"\x8d", b"\x96")) + (1 << 40).to_bytes(8, "little") + b"x."
