"""A model and a text small enough to train in a moment."""

from __future__ import annotations

from pathlib import Path

from penstock.train.config.config import Config, from_mapping

WORDS = ("def", "return", "self", "value", "for", "in", "range", "if", "not", "None")


def text_folder(root: Path, files: int = 10) -> Path:
    """A folder of small text files, each different from the others."""
    folder = root / "text"
    folder.mkdir()
    for n in range(files):
        lines = [
            " ".join(WORDS[(n * 7 + line * 3 + k * k) % len(WORDS)] for k in range(6)) for line in range(20)
        ]
        (folder / f"file_{n}.txt").write_text("\n".join(lines) + "\n")
    return folder


def tiny(root: Path, text: Path, **sections: dict[str, object]) -> Config:
    """A config that trains 3 steps of a model of 4 blocks and draws no page; sections are put over it."""
    tables: dict[str, dict[str, object]] = {
        "model": {"width": 16, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 24},
        "data": {"path": str(text), "held_out": 0.2, "sequence": 12},
        "optim": {"warmup": 0.3},
        "schedule": {"microbatches": 4},
        "parallel": {"pp": 2},
        "train": {
            "steps": 3,
            "batch": 8,
            "name": "tiny",
            "folder": str(root / "runs"),
            "log_every": 1,
            "eval_batches": 2,
            "report": False,
        },
        "sample": {"length": 8},
    }
    if "path" in sections.get("model", {}) or "config" in sections.get("model", {}):
        tables["model"] = {}  # a Hugging Face model brings its own sizes
    for name, table in sections.items():
        tables.setdefault(name, {}).update(table)
    return from_mapping(tables)
