"""A file of tokens, read by position with ordinary reads.

Files are not memory-mapped on purpose. If a mapped file has been truncated, the rest of its last page reads as zeros, and
the first access to a page beyond it (or to one that the disk cannot deliver) ends the process with SIGBUS, which Python
cannot catch. A read of the same range returns fewer bytes or an error, and both can be reported. Only the requested range
is in memory; the system caches the pages it has read.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.base.bounded_io import DAMAGED_ARRAY, open_regular
from penstock.base.errors import DataError

_OPEN_FILES = 256
_HEADER = 1 << 16  # bytes; numpy refuses headers of more than 10,000 characters


class TokenFile:
    """The tokens of one file: the integers of a ``.npy`` file, or the bytes of any other; `len` counts them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = open_regular(path)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
            self._dtype: np.dtype[np.generic] = np.dtype(np.uint8)
            self._first, self._count = 0, os.fstat(self._descriptor).st_size
            if path.suffix == ".npy":
                self._first, self._count, self._dtype = self._array(self._count)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error

    def _array(self, size: int) -> tuple[int, int, np.dtype[np.generic]]:
        """Return the offset of the first token in bytes, the number of tokens, and the dtype, from the header."""
        head = BytesIO(os.pread(self._descriptor, _HEADER, 0))
        try:
            version = np.lib.format.read_magic(head)
            if version not in _HEADERS:
                raise ValueError(f"it has version {version} of the format; write it with numpy.save")
            shape, _, dtype = _HEADERS[version](head)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            if any(length < 0 for length in shape):
                raise ValueError(f"its header says that its shape is {shape}")
        except DAMAGED_ARRAY as error:
            raise DataError(f"{self.path} is not a numpy token file: {error}") from error
        if len(shape) != 1 or dtype.kind not in "iu":
            raise DataError(
                f"{self.path} holds {dtype} of shape {shape}; tokens are one dimension of integers"
            )
        if head.tell() + math.prod(shape) * dtype.itemsize > size:
            raise DataError(
                f"{self.path} is not a numpy token file: it is cut short, its header says {shape}"
            )
        return head.tell(), shape[0], dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, tokens: slice) -> npt.NDArray[np.generic]:
        """Return tokens start..stop-1 of the file, in its dtype, shape (stop - start,)."""
        start, stop, _ = tokens.indices(self._count)
        at, end = (self._first + n * self._dtype.itemsize for n in (start, max(start, stop)))
        pieces: list[bytes] = []
        try:
            # A read may return fewer bytes than requested, and returns none only at the file's end.
            while at < end and (piece := os.pread(self._descriptor, end - at, at)):
                pieces.append(piece)
                at += len(piece)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error
        if at < end:
            raise DataError(f"{self.path} became shorter while it was being read")
        return np.frombuffer(b"".join(pieces), self._dtype)


_HEADERS: dict[tuple[int, int], Callable[[BytesIO], tuple[tuple[int, ...], bool, np.dtype[np.generic]]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def token_files() -> Callable[[Path], TokenFile]:
    """Return a function from a path to its `TokenFile`; the last 256 stay open."""
    return lru_cache(maxsize=_OPEN_FILES)(TokenFile)
