"""One config for all processes of a run: each reads its own, and all compare before anything else happens."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError, TransportError
from penstock.huggingface.model_folder import CONFIG
from penstock.runtime.health.hang import Timeout
from penstock.runtime.workers.agreement import Facts, version_facts
from penstock.runtime.workers.run_group import RunGroup
from penstock.train.config.config import Config
from penstock.train.data.tokenizer import TOKENIZER_FILE
from penstock.train.run_folder import AUTO

MAY_DIFFER = (
    "data.path",  # hosts may have copies of their own: a digest of the tokens is compared
    "data.held_out_path",
    "runtime.device",  # the index of a GPU; its kind is compared
    "runtime.threads",  # hosts may have other numbers of cores
    "train.log_level",
)
"""Keys of the config that may differ between the processes of a run."""

_SOON = 10.0
"""Seconds that a process whose own config is refused waits for the others, to tell them."""


def agreed_config(read: Callable[[], Config]) -> Config:
    """Read the config in every process of the run, and compare; every process calls it, before it does anything else."""
    refused: ConfigError | None = None
    timeout = Timeout(_SOON)
    try:
        config = read()
        timeout = Timeout(config.runtime.timeout, config.runtime.first_timeout)
    except ConfigError as error:
        refused = error
    try:
        group = RunGroup.meet(timeout)
    except (TransportError, ConfigError):
        if refused is not None:
            raise refused from None
        raise
    told = group.each(lambda: ("" if refused is None else str(refused), socket.gethostname()))
    if any(text for text, _ in told):
        if refused is not None and all(text == str(refused) for text, _ in told):
            raise refused
        rank, (text, host) = next((n, each) for n, each in enumerate(told) if each[0])
        raise ConfigError(f"the config of rank {rank} (host {host}) is refused: {text}")
    group.require_same(_facts(config))
    return config


def _facts(config: Config) -> Facts:
    """Return what must be equal in all processes, beginning with what tells most."""
    train, model = config.train, config.model
    facts = {
        name: value for section, table in asdict(config).items() for name, value in _keys(section, table)
    }
    facts["runtime.device, the kind"] = config.runtime.device.partition(":")[0]
    run = Path(train.folder, train.name) if train.resume in ("", AUTO) else Path(train.resume)
    facts["the folder of the run"] = str(run.expanduser().absolute())
    facts |= version_facts()
    if source := model.path or model.config:
        for package in ("transformers", "tokenizers"):
            with suppress(PackageNotFoundError):
                facts[package] = version(package)
        folder = Path(source).expanduser()
        for file in (folder / CONFIG, folder / TOKENIZER_FILE) if folder.is_dir() else (folder,):
            facts[f"the file {file.name} of the model"] = _digest(file)
        facts["files with weights"] = ", ".join(
            f"{file.name} ({file.stat().st_size:,} bytes)" for file in sorted(folder.glob("*.safetensors"))
        )
    return facts


def _keys(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys of a part of the config that must be equal, with their values as text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _keys(f"{name}.{key}", inner)
    elif name not in MAY_DIFFER:
        yield name, repr(value)


def _digest(file: Path) -> str:
    try:
        return f"digest {hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()}"
    except OSError as error:
        return str(error.strerror)
