"""What replicas tell each other besides gradients: that their models are equal, whose order counts, who failed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PeerError, PenstockError
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.dtensor import local

TEXT_BYTES = 1024


def require_equal_models(reducer: Reducer, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Compare names, shapes, dtypes and values of all replicas' parameters by hash; every replica calls it.

    Raises:
        ConfigError: on every replica, if they differ; names the first parameter that does.
    """
    kinds = [digest(f"{name} {tuple(p.shape)} {p.dtype}".encode()) for name, p in parameters]
    values = [digest(_bytes(local(p.detach()))) for _, p in parameters]
    rows = reducer.exchange([len(parameters), digest(repr(kinds).encode()), digest(repr(values).encode())])()
    what = "the replicas' models differ"
    counts = [row[0] for row in rows]
    if len(set(counts)) > 1:
        each = ", ".join(f"replica {r} has {count}" for r, count in enumerate(counts))
        raise ConfigError(
            f"{what} in their number of parameters: {each}; build the same model on all of them"
        )
    for column, digests, aspect, advice in (
        (1, kinds, "name, shape or dtype", "build the same model on all of them"),
        (2, values, "initial values", "use the same seed or checkpoint on all of them"),
    ):
        if any(row[column] != rows[0][column] for row in rows):
            table = reducer.exchange(digests)()
            n, row = next((n, r) for n in range(len(parameters)) for r in table if r[n] != table[0][n])
            name, parameter = parameters[n]
            raise ConfigError(
                f"{what} in {aspect}: replica {table.index(row)} from replica 0 first at parameter {n}, here {name!r} of "
                f"shape {tuple(parameter.shape)}, {parameter.dtype}; {advice}"
            )


def require_same_step(reducer: Reducer, rows: Sequence[Sequence[int]]) -> None:
    """Check what the replicas reported at the end of a step: (step, whether it failed, ...), by replica.

    Raises:
        PeerError: a replica failed.
        PenstockError: they are at different steps.
    """
    failed = [r for r, row in enumerate(rows) if row[1]]
    if failed:
        raise_failure(reducer, failed)
    if any(row[0] != rows[0][0] for row in rows):
        steps = ", ".join(f"replica {r} is at step {row[0]}" for r, row in enumerate(rows))
        raise PenstockError(f"the replicas do not take the same steps: {steps}; one of them left out a step")


def first_replicas(reducer: Reducer, numbers: list[int]) -> list[int]:
    """The numbers of replica 0, for all; every replica calls it with equally many."""
    return reducer.exchange(numbers)()[0]


def raise_failure(reducer: Reducer, failed: Sequence[int], message: str = "") -> None:
    """Every replica calls it once one has failed; those that have not learn what the first one said.

    Args:
        reducer: all replicas.
        failed: which replicas failed; every replica knows that.
        message: what this one has to say, if it failed.

    Raises:
        PeerError: here, if this replica is not one of them.
    """
    said = message.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    numbers = [int.from_bytes(said[n : n + 8], "little", signed=True) for n in range(0, TEXT_BYTES, 8)]
    row = reducer.exchange(numbers)()[failed[0]]
    text = b"".join(number.to_bytes(8, "little", signed=True) for number in row)
    if reducer.rank not in failed:
        raise PeerError(
            f"replica {failed[0]} failed: {text.rstrip(chr(0).encode()).decode(errors='replace')}"
        )


def digest(data: Any) -> int:
    """64 bits of a hash, as a signed number."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _bytes(tensor: Tensor) -> Any:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
