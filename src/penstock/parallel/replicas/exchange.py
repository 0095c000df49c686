"""All-gather of Python values over processes, encoded by `penstock.base.encoding`: nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.base.encoding import decode, encode
from penstock.base.errors import ConfigError, PenstockError

T = TypeVar("T")


def _wait(work: dist.Work) -> None:
    work.wait()


def gather_values(
    value: object, group: dist.ProcessGroup | None, finish: Callable[[dist.Work], None] = _wait
) -> list[Any]:
    """Return the values of all processes of a group, by rank; all of them call it."""
    size = dist.get_world_size(group)
    # In host memory where the group supports it, so that no process waits for a device.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"
    # A copy, since torch warns of a tensor over memory that cannot be written.
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)

    def all_gather(tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(size)]
        work = dist.all_gather(gathered, tensor, group, async_op=True)
        assert work is not None, "this process is in the group"
        finish(work)
        return gathered

    # The lengths first: in an all-gather all tensors have one size.
    lengths = [int(length) for length in all_gather(torch.tensor([len(data)], device=device))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    gathered = all_gather(padded)
    return [decode(tensor[:n].cpu().numpy().data) for tensor, n in zip(gathered, lengths, strict=True)]


def run_each(job: Callable[[], T], exchange: Callable[[object], list[Any]] | None) -> list[T]:
    """Run a job on every process; return all results, or raise on every process if one failed."""
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
    for _, refusal in reports:
        if refusal is not None:
            text, is_config = refusal
            if failure is not None and str(failure) == text:
                raise failure
            kind: type[PenstockError] = ConfigError if is_config else PenstockError
            if is_config and isinstance(failure, ConfigError):
                kind = type(failure)
            raise kind(text) from failure
    return [cast(T, result) for result, _ in reports]


def describe_os_error(error: OSError) -> str:
    """Return an operating system's error as text, with the file first."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text
