"""Sums over a tensor that a recording keeps in the place of its values, and that add up over its parts.

A tensor's bits, read as whole numbers, are multiplied by odd numbers that depend on the position alone and added up modulo
2**64 (a multilinear hash: Carter and Wegman, Universal classes of hash functions, 1979). Two tensors of one shape with
other bits have one `digest` with a chance of about 2**-32; but an even number of changed signs may cancel out, so bits are
the same only if the projections are, too. Its values are multiplied by `VECTORS` pseudo-random vectors,
whose entries have either sign and a size from 0.5 to 1.5, the product of one such number for each dimension. The difference
of two projections is the projection of the difference: about as large as its norm, and of two numbers that differ in one
place never zero. A difference that is spread over many places is missed if all of its projections are small by chance: a
projection of a difference of norm d is below d/100 with a chance of about 1%, all four of them with one of about 10**-8.

Neither depends on the name of the tensor, so one microbatch's values are known in the place of another's. Both are sums over
positions in the whole tensor, so those of parts add up to the whole's: a matrix that ranks divide is compared with the
undivided one from each part's sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise
from math import isfinite, sqrt

import numpy as np
import torch
from torch import Tensor

VECTORS = 4
GROUPS = 16
"""Into so many groups rows and tokens are divided whose projections are kept, to tell which of them differ."""
_BLOCK = 1 << 22
"""Elements that are converted at once: 16 MiB in float32."""
_MODULUS = 1 << 64

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Start of a box in a part of a tensor, its size, and its start in the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Sums over a tensor, or over a part of one.

    Attributes:
        shape: of the whole tensor.
        start: where the part begins in it, by dimension.
        size: shape of the part.
        digest: sum of its bits times odd numbers, modulo 2**64.
        squares: sum of the squares of its values.
        nonfinite: number of values that are infinite or not a number; the sums of values are then without meaning.
        projections: sums of its values times each pseudo-random vector.
        rows, columns: the first projection by groups of the first and of the second dimension; empty without that.
    """

    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    digest: int
    squares: float
    nonfinite: int
    projections: tuple[float, ...]
    rows: tuple[float, ...] = ()
    columns: tuple[float, ...] = ()

    @property
    def norm(self) -> float:
        """2-norm."""
        return sqrt(self.squares)

    @property
    def whole(self) -> bool:
        """True if it is of the whole tensor."""
        return self.size == self.shape


def fingerprint(
    value: Tensor, shape: Sequence[int] | None = None, start: Sequence[int] | None = None
) -> Fingerprint:
    """Return the sums over a tensor.

    Args:
        value: values of the part, on any device; of a sparse gradient, its dense form is taken.
        shape: shape of the whole tensor (default: the part's own).
        start: where the part begins in it (default: at 0).
    """
    if torch.is_autocast_enabled(value.device.type):  # it would round the projections to 16 bits
        with torch.autocast(value.device.type, enabled=False):
            return fingerprint(value, shape, start)
    value = value.detach()
    if value.layout is not torch.strided:
        value = value.to_dense()
    size = tuple(value.shape)
    whole, first = tuple(shape or size), tuple(start or (0,) * len(size))
    dtype = str(value.dtype).removeprefix("torch.")
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
        first = (*first, 0)
    if not value.numel():
        return Fingerprint(
            dtype=dtype,
            shape=whole,
            start=first[: len(size)],
            size=size,
            digest=0,
            squares=0.0,
            nonfinite=0,
            projections=(0.0,) * VECTORS,
        )
    value = value.resolve_neg().contiguous()
    if value.storage_offset() * value.element_size() % 8:
        value = value.clone()  # its bits are read eight bytes at a time
    dims = tuple(value.shape) or (1,)
    first = first or (0,)
    # On a GPU a product of float32 may be rounded to fewer bits (TF32).
    dtype_of_sums = torch.float64 if value.dtype == torch.float64 or value.is_cuda else torch.float32
    odd_rows, random_rows, last = _weights(first, dims, value.device, dtype_of_sums)
    flat = value.reshape(-1, dims[-1])
    words = _words(flat, first[-1])
    factors = _factors(len(dims) - 1, first[-1], dims[-1], value.element_size(), value.device)
    digests, norms, projected = [], [], []
    step = max(1, _BLOCK // dims[-1])
    for begin in range(0, len(flat), step):
        block = slice(begin, begin + step)
        digests.append((_products(words[block], odd_rows[block]) * factors).sum())
        numbers = flat[block].to(last.dtype)
        norms.append(torch.linalg.vector_norm(numbers))
        projected.append(last @ numbers.t())
    # What is left is small, and numpy takes a tenth of the time for a small array.
    total = sum(float(norm) ** 2 for norm in norms)
    nonfinite = 0 if isfinite(total) else int((~flat.isfinite()).sum())
    by_row = np.concatenate([part.cpu().numpy() for part in projected], 1)
    with np.errstate(invalid="ignore", over="ignore"):
        by_row = by_row * random_rows
        projections = tuple(by_row.sum(1).tolist())
        rows = _groups(by_row[0], dims[:-1], 0) if len(size) > 1 else ()
        columns = _groups(by_row[0], dims[:-1], 1) if len(size) > 2 else ()
    return Fingerprint(
        dtype=dtype,
        shape=whole,
        start=first[: len(size)],
        size=size,
        digest=sum(map(int, digests)) % _MODULUS,
        squares=0.0 if nonfinite else total,
        nonfinite=nonfinite,
        projections=projections,
        rows=rows,
        columns=columns,
    )


def fingerprints_of_range(
    values: Tensor,
    shape: Sequence[int],
    first: int = 0,
    whole: Sequence[int] | None = None,
    boxes: Iterable[Box] | None = None,
) -> list[Fingerprint]:
    """Return the sums over a range of a tensor's elements in the order of memory, by parts with a shape of their own.

    Args:
        values: values of the range, 1-d.
        shape: shape of the tensor that the range is in.
        first: number of the range's first element.
        whole: shape of the whole tensor that this tensor is a part of (default: it is the whole one).
        boxes: (start in this tensor, size, start in the whole one) of the boxes that this tensor is made of.
    """
    origin = (0,) * len(shape)
    whole, boxes = whole or shape, list(boxes or [(origin, tuple(shape), origin)])
    parts, begin = [], 0
    for start, size in _boxes(tuple(shape), first, len(values)):
        count = _volume(size)
        block = values[begin : begin + count].reshape(size)
        begin += count
        for box, width, place in boxes:
            low = tuple(max(a, b) for a, b in zip(start, box, strict=True))
            high = [min(a + n, b + m) for a, n, b, m in zip(start, size, box, width, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                cut = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
                at = tuple(a - b + p for a, b, p in zip(low, box, place, strict=True))
                parts.append(fingerprint(block[cut], whole, at))
    return parts


def _boxes(
    shape: tuple[int, ...], first: int, count: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (start, size) of the parts of a range: of its first row what is in it, whole rows, and of the last row."""
    if len(shape) <= 1:
        yield (first,) * len(shape), (count,) * len(shape)
        return
    inner = _volume(shape[1:])
    row, at = divmod(first, inner)
    if at:
        head = min(inner - at, count)
        yield from (((row, *start), (1, *size)) for start, size in _boxes(shape[1:], at, head))
        row, count = row + 1, count - head
    rows, tail = divmod(count, inner)
    if rows:
        yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
    if tail:
        yield from (((row + rows, *start), (1, *size)) for start, size in _boxes(shape[1:], 0, tail))


def joined(parts: Sequence[Fingerprint]) -> Fingerprint | None:
    """Return the sums over a whole tensor from those of its parts; None if they do not make it up.

    Args:
        parts: parts of one tensor; several processes may have the same one.
    """
    apart = list({(part.start, part.size): part for part in parts}.values())
    first = apart[0]
    if first.whole:
        return first
    if len({(part.shape, part.dtype) for part in apart}) > 1:
        return None
    if sum(_volume(part.size) for part in apart) != _volume(first.shape):
        return None
    return Fingerprint(
        dtype=first.dtype,
        shape=first.shape,
        start=(0,) * len(first.shape),
        size=first.shape,
        digest=sum(part.digest for part in apart) % _MODULUS,
        squares=sum(part.squares for part in apart),
        nonfinite=sum(part.nonfinite for part in apart),
        projections=tuple(map(sum, zip(*(part.projections for part in apart), strict=True))),
    )


def divided(of: Fingerprint, factor: float) -> Fingerprint:
    """Return the sums over a tensor that is divided by a factor; its bits are not known, and its digest is -1."""
    return replace(
        of,
        digest=-1,
        squares=of.squares / factor**2,
        projections=tuple(value / factor for value in of.projections),
        rows=tuple(value / factor for value in of.rows),
        columns=tuple(value / factor for value in of.columns),
    )


def forget_vectors() -> None:
    """Free the odd numbers and random entries that are kept from one tensor to the next of its shape."""
    for kept in (_weights, _factors, _odd, _random):
        kept.cache_clear()


def groups_of(length: int) -> list[range]:
    """Return the groups of a dimension's indices whose projections are kept."""
    count = min(length, GROUPS)
    edges = [length * n // count for n in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _volume(size: Sequence[int]) -> int:
    return reduce(lambda a, b: a * b, size, 1)


def _groups(by_row: np.ndarray, dims: tuple[int, ...], dim: int) -> tuple[float, ...]:
    """Return sums by groups of a dimension, of one number for each row."""
    along = by_row.reshape(dims).sum(tuple(n for n in range(len(dims)) if n != dim))
    return tuple(np.add.reduceat(along, _starts(dims[dim])).tolist())


@lru_cache(64)
def _starts(length: int) -> list[int]:
    return [group.start for group in groups_of(length)]


def _products(words: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of each column's products with a factor for each row, modulo 2**64."""
    # The product of a matrix and a vector reads memory once, in a third of the time; CUDA has none of whole numbers.
    return (words * factors[:, None]).sum(0) if words.is_cuda else torch.mv(words.t(), factors)


@lru_cache(64)
def _weights(
    first: tuple[int, ...], dims: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, np.ndarray, Tensor]:
    """Return odd numbers of rows, (rows,), random entries of rows, (vectors, rows), and of the last dimension.

    The last ones are (vectors, count). A vector's entries are side by side in memory: the product then takes a fifth of
    the time.
    """
    places = list(enumerate(zip(first, dims, strict=True)))
    with np.errstate(over="ignore"):
        odd = reduce(_outer, (_odd(d, *place) for d, place in places[:-1]), np.ones(1, np.int64))
    random = [_random(d, *place) for d, place in places]
    return (
        torch.from_numpy(odd).to(device),
        reduce(_outer, random[:-1], np.ones((VECTORS, 1))),
        torch.from_numpy(random[-1]).to(device, dtype),
    )


def _outer(rows: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """Return the product of each row's number with each entry of the next dimension, flat, for each vector."""
    product: np.ndarray = rows[..., None] * entries[..., None, :]
    return product.reshape(*rows.shape[:-1], -1)


def _words(flat: Tensor, start: int) -> Tensor:
    """Return the bits of values as whole numbers by row, of eight bytes, or of one value where rows have parts of these."""
    size = flat.element_size()
    if _in_eights(size, start, flat.shape[1]):
        return flat.view(torch.int64)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return flat.view(kind).long() & ((1 << (8 * size)) - 1)


@lru_cache(64)
def _factors(dim: int, start: int, count: int, size: int, device: torch.device) -> Tensor:
    """Return the factor of each of the whole numbers of a row, whose values have so many bytes.

    A factor belongs to eight bytes; where a row has parts of them alone, each value has its own, shifted by its place.
    """
    per = 8 // size
    if _in_eights(size, start, count):
        return torch.from_numpy(_odd(dim, start // per, count // per)).to(device)
    places = np.arange(start, start + count)
    first = start // per
    factors = _odd(dim, first, (start + count - 1) // per + 1 - first)[places // per - first]
    return torch.from_numpy(factors << (8 * size * (places % per))).to(device)


def _in_eights(size: int, start: int, count: int) -> bool:
    return start * size % 8 == count * size % 8 == 0


@lru_cache(64)
def _odd(dim: int, start: int, count: int) -> np.ndarray:
    """Return the odd numbers of a dimension's indices, (count,)."""
    return (_mixed(dim, start, count, 0) | np.uint64(1)).view(np.int64)


@lru_cache(64)
def _random(dim: int, start: int, count: int) -> np.ndarray:
    """Return the entries of the random vectors for a dimension's indices, (vectors, count)."""
    mixed = np.stack([_mixed(dim, start, count, vector + 1) for vector in range(VECTORS)])
    # The upper 53 bits make a number from 0 to 1, the lowest one its sign.
    size = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53 + 0.5
    return np.where(mixed & np.uint64(1), size, -size)


def _mixed(dim: int, start: int, count: int, vector: int) -> np.ndarray:
    """Return 64 random bits for each index: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of its number."""
    with np.errstate(over="ignore"):
        seed = np.uint64(dim * 16 + vector + 1) * np.uint64(0xD1342543DE82EF95)
        z = (np.arange(start, start + count, dtype=np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
