"""Digests of weights that are not trained, in place of these weights, for small checkpoints of adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.base.counts import few
from penstock.base.errors import ConfigError, DataError

KEY = "frozen"
"""Key of the digests in a manifest's values."""


class FrozenDigests:
    """Digests of parameters by name; each is computed again only if the parameter has been written to."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[int, int], str]] = {}

    def of(self, name: str, parameter: Tensor, value: Tensor) -> str:
        """Return the digest of a parameter, which may be sharded; `value` is its full value."""
        # A write in place raises the version, and new memory (load_state_dict with assign=True) has another address.
        state = (parameter.data_ptr(), parameter._version)
        known = self._known.get(name)
        if known is None or known[0] != state:
            known = self._known[name] = state, digest(value)
        return known[1]


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 digest of a tensor's dtype, shape and values."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    result = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    result.update(values.numpy().data)
    return result.hexdigest()


def digests_in(values: Mapping[str, Any], where: Path) -> dict[str, str]:
    """Return the digests in a manifest's values, by name; none if the checkpoint has all weights."""
    table = values.get(KEY, {})
    if not isinstance(table, dict) or not all(isinstance(each, str) for each in table.values()):
        raise DataError(f"{where}: {KEY!r} must be a dictionary of digests, got {table!r:.80}")
    return table


def require_same(own: Iterable[tuple[str, Tensor]], digests: Mapping[str, str], where: Path) -> None:
    """Require that weights are those that a checkpoint was made with."""
    differing = [name for name, value in own if digest(value) != digests[name]]
    if differing:
        raise ConfigError(
            f"{where} has no frozen weights, and was made with different ones: {few(differing, 4)} "
            "differ. Start from the base model that it began with, in the same dtype"
        )


def require_all_weights(values: Mapping[str, Any], where: Path) -> None:
    """Require that a checkpoint has all weights of its model."""
    if digests := digests_in(values, where):
        raise ConfigError(
            f"{where} has the trained weights alone; {len(digests)} frozen weights are in the base model. Load it into a "
            "pipeline of that model (penstock.Checkpoints) and save it with penstock.save_adapters or "
            "penstock.save_transformers, or finish the run"
        )
