"""Ways to corrupt sound bytes, text and JSON trees; each is drawn from a seeded generator."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from random import Random
from typing import Any

TEXTS = (
    "", "\0", "../../x", "/etc/passwd", "a" * 5000, "$tensor", "$float", "nan", "-1", "é", "\udcff", "{}", "[", "\n", "%s",
    "__class__", "stage-00001-of-00001.safetensors", "C:\\x", "~", "1e999", "0x10", "None",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.5, 1e-300, 1e308,
)  # fmt: skip
DEEP = 100_000
"""Nesting of the deepest JSON and TOML."""


class Trap:
    """An object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def trap(rng: Random, sprung: Path) -> bytes:
    """Return a pickle that touches a file; bare, or as torch or numpy would write it."""
    data = pickle.dumps(Trap(sprung), protocol=rng.choice((0, 2, 4)))
    if rng.random() < 0.3:
        header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        header += b" " * (-(len(header) + 11) % 64) + b"\n"
        return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data
    return data


def spoil(rng: Random, data: bytes) -> bytes:
    """Return bytes with a few errors."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(found) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 64, 1024))
        match rng.randrange(8):
            case 0 if found:
                found[min(at, len(found) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = rng.randbytes(length)
            case 3:
                found[at:at] = found[at : at + length]
            case 4:
                del found[at:]
            case 5:
                number = int(rng.choice(NUMBERS)) % 2**64
                found[at : at + 8] = number.to_bytes(8, "little")
            case 6:
                found[at : at + length] = bytes(length)
            case _:
                found[at:at] = rng.choice(TEXTS).encode("utf-8", "surrogateescape")
    return bytes(found)


def value(rng: Random, depth: int = 3) -> Any:
    """Return any value that JSON can represent, or NaN."""
    match rng.randrange(8 if depth else 5):
        case 0:
            return rng.choice((None, True, False))
        case 1 | 2:
            return rng.choice(NUMBERS)
        case 3:
            return rng.choice((float("nan"), float("inf"), rng.random(), rng.getrandbits(40)))
        case 4:
            return rng.choice(TEXTS)
        case 5 | 6:
            return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            keys = [rng.choice((*TEXTS, "$tuple", "$dict", "$counter")) for _ in range(rng.randrange(4))]
            return {key: value(rng, depth - 1) for key in keys}


def change(rng: Random, tree: Any) -> Any:
    """Return a JSON tree with something replaced, removed, duplicated or renamed; also changes the tree itself."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.02:
        return value(rng)
    walk(tree)
    for _ in range(rng.choice((1, 1, 2, 5))):
        node, key = rng.choice(places)
        if (isinstance(node, list) and key >= len(node)) or (isinstance(node, dict) and key not in node):
            continue
        match rng.randrange(6):
            case 0:
                node.pop(key)
            case 1 if isinstance(node, dict):
                node[rng.choice(TEXTS)] = node.pop(key)
            case 2 if isinstance(node, list):
                node.insert(key, node[key])
            case 3 if isinstance(node[key], int):
                node[key] += rng.choice((-1, 1, 2**31))
            case _:
                node[key] = value(rng)
    return tree


def to_json(rng: Random, tree: Any) -> bytes:
    """Return a tree as JSON; sometimes with something nested far too deeply, or a number with far too many digits."""
    text = json.dumps(tree)
    if (dice := rng.random()) < 0.02:
        bracket = rng.choice(("[", '{"a":'))
        text = text.replace("null", bracket * DEEP, 1) if "null" in text else bracket * DEEP
    elif dice < 0.04 and "0" in text:
        text = text.replace("0", "9" * 50_000, 1)
    return text.encode("utf-8", "surrogatepass")


def any_file(rng: Random, folder: Path, sprung: Path) -> bool | None:
    """Corrupt a file as can happen to any: bytes, a pickle in its place, a link, a hole, a pipe. None: nothing was done."""
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


def npy(rng: Random, data: bytes) -> bytes:
    """Return an array file with a corrupted header."""
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
