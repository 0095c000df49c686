"""What a config asks of this machine's memory; what cannot be had is refused before anything is read or started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import host
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.train.config.config import Config

_BYTES_PER_TOKEN = 24
"""As it is read, and as input and target; int64."""


def require_memory(config: Config, memory: int | None = None) -> None:
    """Refuse a batch, or held-out batches, that do not fit in memory as tokens alone.

    Args:
        config: checked otherwise.
        memory: bytes there are; by default those of this machine or container.

    Raises:
        ConfigError: it does not fit; says what it takes.
    """
    if memory is None:
        here = host.memory()
        if here is None:
            return
        memory = here.total
    train = config.train
    samples = train.batch * train.eval_batches
    needed = samples * config.data.sequence * _BYTES_PER_TOKEN
    if needed > memory:
        raise ConfigError(
            f"train.eval_batches {train.eval_batches:,} of train.batch {train.batch:,} samples with data.sequence "
            f"{config.data.sequence:,} tokens take about {needed / 1e9:,.0f} GB of memory, and there are "
            f"{memory / 1e9:,.0f} GB here; take fewer"
        )
