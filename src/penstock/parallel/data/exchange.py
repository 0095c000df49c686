"""Values of every process of a group for every process of it, as `penstock.encoding` writes them: nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist

from penstock.encoding import decode, encode
from penstock.errors import ConfigError, PenstockError

T = TypeVar("T")


def _wait(work: dist.Work) -> None:
    work.wait()


def gather_values(
    value: object, group: dist.ProcessGroup | None, finish: Callable[[dist.Work], None] = _wait
) -> list[Any]:
    """The values of all processes of a group, by rank; all of them call it.

    Args:
        value: as `encode` takes it.
        group: None for all processes.
        finish: waits for what was begun.

    Raises:
        TypeError: as `encode`, before anything is sent.
        TransportError: as `decode`.
        RuntimeError: what ``torch.distributed``, or `finish`, raises where a process is gone.
    """
    size = dist.get_world_size(group)
    # Between hosts' memories where the group can, so that nobody waits for a device.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    finish(_started(dist.all_gather(lengths, torch.tensor([len(data)], device=device), group, async_op=True)))
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in range(size)]
    finish(_started(dist.all_gather(parts, padded, group, async_op=True)))
    return [decode(part[:n].cpu().numpy().data) for part, n in zip(parts, counts, strict=True)]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work


def run_each(job: Callable[[], T], exchange: Callable[[object], list[Any]] | None) -> list[T]:
    """Run a job on every process; return all results, or raise on every process if one failed.

    Args:
        job: job of this process; returns a value that `encode` takes.
        exchange: ``exchange(value)`` returns the values of all processes by rank; None if there is one process.

    Returns:
        What the jobs returned, by rank.

    Raises:
        PenstockError: on every process, if a job raised one, or an OSError, on any of them. A process whose own job failed
            raises its own error; the others raise the first one's text, as a `ConfigError` if it was one.
    """
    value: T | None = None
    failure: PenstockError | None = None
    try:
        value = job()
    except PenstockError as error:
        failure = error
    except OSError as error:
        failure = PenstockError(describe_os_error(error))
        failure.__cause__ = error
    report = (value, None if failure is None else (str(failure), isinstance(failure, ConfigError)))
    reports = [report] if exchange is None else exchange(report)
    if failure is not None:
        raise failure
    for _, refusal in reports:
        if refusal is not None:
            text, is_config = refusal
            raise ConfigError(text) if is_config else PenstockError(text)
    return [cast(T, result) for result, _ in reports]


def describe_os_error(error: OSError) -> str:
    """Return an operating system's error as text, with the file first."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text
