"""Comparison of what all processes of a run must have in common, before they build or write anything.

Each process has facts: names with values, as text. A digest of all of them is gathered; only if the digests differ do two
processes send their facts, and every process then raises the same error.
"""

from __future__ import annotations

import hashlib
import platform
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.base.errors import ConfigError, ScheduleError
from penstock.base.version import __version__
from penstock.parallel.dtensor import is_dtensor
from penstock.runtime.batch.digests import sample_digest_of
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.workers.collectives import Collectives
from penstock.schedule.schedule import Schedule
from penstock.schedule.text import is_csv
from penstock.stage.layers import Layer, whole_name

Facts = Mapping[str, str]

# Differences that an error shows, and characters of each value.
_SHOWN, _LONGEST = 5, 120
_OPS = "ops of rank"
_DIFFER = "the processes of this run differ"
_ALIKE = "Start all of them with the same config, arguments, files and versions, and give each run its own MASTER_PORT"


def require_same(
    facts: Facts,
    collectives: Collectives,
    what: str = _DIFFER,
    missing: str = "not there",
    advice: str = _ALIKE,
    note: object = None,
) -> list[Any]:
    """Check that all processes have the same facts, or raise on all of them; every process calls it.

    The error begins with `what` and ends with `advice`; a fact that a process does not have is `missing`.

    Returns:
        The `note` of each process, which may be another on each.
    """
    action = "compare what they were started with"
    told = collectives.gather(
        (_digest(repr(sorted(facts.items())).encode()), socket.gethostname(), note), None, action
    )
    odd = [number for number, (digest, *_) in enumerate(told) if digest != told[0][0]]
    if not odd:
        return [noted for *_, noted in told]
    pair = collectives.gather(dict(facts) if collectives.rank in (0, odd[0]) else None, None, action)
    first, other = pair[0], pair[odd[0]]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    alike = [number for number in odd if told[number][0] == told[odd[0]][0]]
    listed = ", ".join(map(str, alike[:8])) + (", …" if len(alike) > 8 else "")
    there = f"rank{'s' if len(alike) > 1 else ''} {listed} (host {told[odd[0]][1]})"
    differences = [
        f"{name} is {_shown(first.get(name, missing))} on rank 0 (host {told[0][1]}) and "
        f"{_shown(other.get(name, missing))} on {there}"
        for name in names[:_SHOWN]
    ]
    if len(names) > _SHOWN:
        differences.append(f"and {len(names) - _SHOWN:,} more")
    kind = ScheduleError if all(name.startswith(_OPS) for name in names) else ConfigError
    raise kind(f"{what}: {'; '.join(differences)}. {advice}")


STANDS_FOR = "_stands_for"
"""Attribute of a parameter without values in the place of one of another class: that class's name."""


def require_same_pipeline(
    collectives: Collectives,
    *,
    schedule: Schedule,
    layers: Sequence[Layer],
    given: Mapping[str, object],
) -> None:
    """Check that all processes build the same pipeline with the same versions; every process calls it.

    Args:
        schedule: the schedule. Its ops are compared, and the name of a family or function, but not of a file, which may
            have other paths.
    """
    facts = dict(version_facts())
    for name, value in given.items():
        fields = vars(value) if isinstance(value, ParallelOptions | ExecutionOptions) else None
        for inner, own in {"": value}.items() if fields is None else fields.items():
            if inner != "threads":  # hosts may have other numbers of cores
                facts[f"{name}.{inner}".rstrip(".")] = _argument(own)
    facts["number of layers"] = str(len(layers))
    for layer in layers:
        facts[f"layer {layer.name}"] = f"a layer ({layer.role})"
        for name, p in layer.module.named_parameters() if layer.module is not None else ():
            facts[f"parameter {whole_name(layer.name, name)}"] = _parameter(p)
    facts["placement of the stages"] = f"digest {_digest(repr(schedule.placement).encode())}"
    for r in range(schedule.ranks):
        columns = b"".join(column.tobytes() for column in schedule.columns(r))
        facts[f"{_OPS} {r} in the schedule"] = f"{schedule.name}, digest {_digest(columns)}"
    samples = set(require_same(facts, collectives, note=_sample_of_weights(layers))) - {None}
    if len(samples) > 1 and collectives.rank == 0:
        warnings.warn(
            "the processes were given models with other weights. Each stage keeps those of the process that runs it, so "
            "the model that trains is none of them; call torch.manual_seed with one number on every process before the "
            "model is built, or load the same weights",
            RuntimeWarning,
            stacklevel=2,
        )


def _parameter(parameter: Tensor) -> str:
    """Describe a parameter; one that is quantised has another shape and dtype where it has no values."""
    if (name := getattr(parameter, STANDS_FOR, None)) is not None:
        return f"a {name}"
    if type(parameter) in (Tensor, nn.Parameter) or is_dtensor(parameter):
        return f"{tuple(parameter.shape)} {parameter.dtype}"
    return f"a {type(parameter).__name__}"


def _sample_of_weights(layers: Sequence[Layer]) -> int | None:
    """Return a digest of a sample of the weights; None if this process was not given all of them as plain tensors."""
    given = [layer.module for layer in layers]
    weights = [p for module in given if module is not None for p in module.parameters()]
    if None in given or any(p.is_meta or is_dtensor(p) or is_lazy(p) for p in weights):
        return None
    return sample_digest_of(weights)


def require_same_arguments(collectives: Collectives, given: Mapping[str, object]) -> None:
    """Check that all processes gave a call the same arguments, or raise ConfigError on all; every process calls it."""
    require_same({name: _argument(value) for name, value in given.items()}, collectives)


def version_facts() -> Facts:
    """Return the versions that must be equal, with a digest of Penstock's own code."""
    return {
        "Penstock": f"{__version__}, code {_code()}",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


@cache
def _code() -> str:
    """Return a digest of Penstock's source files."""
    root = Path(__file__).parents[2]
    files = sorted(root.rglob("*.py"))
    return _digest(
        b"\0".join(part for p in files for part in (str(p.relative_to(root)).encode(), p.read_bytes()))
    )


def _argument(value: object) -> str:
    """Describe an argument of a pipeline, the same in every process that was given the same."""
    if isinstance(value, dict):  # a measured split
        return "measured"
    if isinstance(value, Path | Schedule) or (isinstance(value, str) and is_csv(value)):
        return "a file or an object"  # its ops are compared
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)} {value.dtype}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between processes


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _shown(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]} …"
