"""Options of gradient buckets."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from penstock.errors import ConfigError

Missing = Literal["error", "zeros"]


class BucketOptions(TypedDict, total=False):
    """Options that `Shards` passes to `GradientBuckets`, which describes them."""

    order: Sequence[Tensor] | None
    bucket_bytes: int
    first_bucket_bytes: int
    divisor: float | None
    missing: Missing
    reduce_dtype: torch.dtype | None
    groups: Mapping[Tensor, Hashable] | None
    dynamic: bool


def require_options(missing: object, reduce_dtype: torch.dtype | None, divisor: float) -> None:
    """Check options of `GradientBuckets`.

    Raises:
        ConfigError: if an option cannot be used.
    """
    if missing not in ("error", "zeros"):
        raise ConfigError(f'missing must be "error" or "zeros", got {missing!r}')
    if reduce_dtype is not None and not reduce_dtype.is_floating_point:
        raise ConfigError(f"reduce_dtype must be a floating-point dtype, got {reduce_dtype}")
    if not divisor > 0:
        raise ConfigError(f"divisor must be a positive number, got {divisor!r}")
