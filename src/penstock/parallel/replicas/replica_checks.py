"""Checks among replicas besides gradients: equal models, one bucket order, equal steps, failures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import ConfigError, PeerError, PenstockError
from penstock.parallel.dtensor import local
from penstock.parallel.replicas.reducer import GroupReducer

# Fixed: the replicas that receive the message take part in its exchange, and do not know its length. A multiple of 8.
TEXT_BYTES = 1024


class StepReport(NamedTuple):
    """One replica's report at the end of a step, exchanged as whole numbers.

    Attributes:
        frozen: digest of the changed ``requires_grad``; 0 if there is no change.
        carried: digest of the parameters with sums of earlier steps, to which this one's are added; 0 if there are none.
    """

    step: int
    failed: int = 0
    absent: int = 0
    late: int = 0
    frozen: int = 0
    carried: int = 0


def exchange_reports(reducer: GroupReducer, report: StepReport) -> Callable[[], list[StepReport]]:
    """Begin to exchange reports; return a function that waits for the reports of all replicas."""
    rows = reducer.exchange(list(report))
    return lambda: [StepReport(*row) for row in rows()]


def require_equal_models(reducer: GroupReducer, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Compare names, shapes, dtypes and values of all replicas' parameters by hash; every replica calls it.

    Args:
        parameters: those that require a gradient, or all.
    """
    kinds = [
        digest(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}".encode()) for name, p in parameters
    ]
    values = [digest(bytes_of(local(p.detach()))) for _, p in parameters]
    rows = reducer.exchange([len(parameters), digest(repr(kinds).encode()), digest(repr(values).encode())])()
    counts = [row[0] for row in rows]
    if len(set(counts)) > 1:
        each = ", ".join(f"replica {r} has {count}" for r, count in enumerate(counts))
        raise ConfigError(
            f"the replicas' models differ in the number of parameters that require a gradient: {each}; build the same model "
            "on all of them, with the same requires_grad"
        )
    for column, digests, aspect, advice in (
        (1, kinds, "name, shape, dtype or requires_grad", "build the same model on all of them"),
        (2, values, "initial values", "use the same seed or checkpoint on all of them"),
    ):
        if any(row[column] != rows[0][column] for row in rows):
            table = reducer.exchange(digests)()
            n, row = next((n, r) for n in range(len(parameters)) for r in table if r[n] != table[0][n])
            name, parameter = parameters[n]
            raise ConfigError(
                f"the replicas' models differ in {aspect}: replica {table.index(row)} from replica 0 first at parameter "
                f"{n}, here {name!r} of shape {tuple(parameter.shape)}, {parameter.dtype}; {advice}"
            )


def require_same_step(reducer: GroupReducer, reports: Sequence[StepReport]) -> None:
    """Check the replicas' reports at the end of a step."""
    failed = [r for r, report in enumerate(reports) if report.failed]
    if failed:
        raise_failure(reducer, failed)
    if any(report.step != reports[0].step for report in reports):
        steps = ", ".join(f"replica {r} is at step {report.step}" for r, report in enumerate(reports))
        raise PenstockError(f"the replicas do not take the same steps: {steps}; one of them left out a step")


def require_same_sums(reports: Sequence[StepReport]) -> None:
    """Check that all replicas have added the step's sums to those of the same parameters."""
    if any(report.carried != reports[0].carried for report in reports):
        raise PenstockError(
            "the gradients of earlier steps were dropped on some replicas and not on all, or not of the same parameters; "
            "drop them on all or on none. No weight was changed; call pipe.zero_grad() on all before the next step"
        )


def first_replicas(reducer: GroupReducer, numbers: list[int]) -> list[int]:
    """Return the numbers of replica 0 on every replica; all call it with equally many numbers."""
    return reducer.exchange(numbers)()[0]


def raise_failure(reducer: GroupReducer, failed: Sequence[int], message: str = "") -> None:
    """Raise on the replicas that have not failed, with the message of the first one that has; every replica calls it."""
    data = message.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    numbers = [int.from_bytes(data[n : n + 8], "little", signed=True) for n in range(0, TEXT_BYTES, 8)]
    row = reducer.exchange(numbers)()[failed[0]]
    text = b"".join(number.to_bytes(8, "little", signed=True) for number in row)
    if reducer.rank not in failed:
        raise PeerError(
            f"replica {failed[0]} failed: {text.rstrip(chr(0).encode()).decode(errors='replace')}", told=True
        )


def digest(data: Any) -> int:
    """Return 64 bits of a hash as a signed integer."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def bytes_of(tensor: Tensor) -> Any:
    """Return a tensor's bytes, for `digest`."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
