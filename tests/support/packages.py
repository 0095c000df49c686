"""Installed packages, as pip leaves them, in a folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path


def package(
    folder: Path, name: str, version: str, families: Mapping[str, str], **modules: Callable[..., object]
) -> None:
    """Write a package's metadata, with entry points of schedule families, and modules with one function ``build`` each."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "".join(f"{family} = {value}\n" for family, value in families.items())
    (info / "entry_points.txt").write_text(f"[penstock.schedules]\n{points}")
    for module, function in modules.items():
        source = inspect.getsource(function).replace(f"def {function.__name__}(", "def build(")
        (folder / f"{module}.py").write_text(source)
