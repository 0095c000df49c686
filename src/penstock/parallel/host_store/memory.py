"""Tensors in host memory or in files."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.base.host import memory


class HostMemory:
    """Host memory, which a GPU reads by itself if it is pinned.

    Args:
        pinned: whether tensors are pinned (default False).
    """

    on_disk = False

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._needed: dict[str, int] = {}

    def require(self, size: int, what: str) -> None:
        """Require room for something that is not there yet.

        Raises:
            ConfigError: if there is no room for this, or for all that was required so far.
        """
        self._needed[what] = size
        here, needed = memory(), sum(self._needed.values())
        if here is not None and needed > here.available:
            raise ConfigError(
                f"store='host' needs {needed:,} bytes of host memory beside the weights, {size:,} of them for {what}, and "
                f"{here.available:,} are available; use store='disk', or more processes on other hosts"
            )

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a new tensor without values, of shape (count,)."""
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def home(self, values: Tensor) -> Tensor:
        """Return a tensor with the values of another one, which may be that itself."""
        return values if values.device.type == "cpu" and not self._pinned else self._copied(values)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy values between a device and the store; on a GPU, on its current stream, for which the host does not wait."""
        target.copy_(source, non_blocking=True)

    def _copied(self, values: Tensor) -> Tensor:
        copied = self.empty(values.numel(), values.dtype).as_strided(values.shape, values.stride())
        return copied.copy_(values)


class DiskMemory(HostMemory):
    """Files in the folder for temporary files (TMPDIR), mapped into memory.

    A file has no name in the folder, so that no other process can change it, and its room is freed when this one ends, in
    whatever way. All of its bytes are allocated when it is made: a disk that gets full later does not matter.

    Raises:
        ConfigError: if the folder is in memory.
    """

    on_disk = True

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(os, "posix_fallocate"):
            raise ConfigError(
                "store='disk' needs an operating system that allocates files (posix_fallocate), as Linux does; use 'host'"
            )
        self.folder = Path(tempfile.gettempdir())
        if (kind := _filesystem(self.folder)) in ("tmpfs", "ramfs"):
            raise ConfigError(
                f"store='disk' writes to {self.folder}, which is a {kind} and so in memory; set TMPDIR to a folder on a disk"
            )

    def require(self, size: int, what: str) -> None:
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise ConfigError(
                f"store='disk' needs {size:,} bytes in {self.folder} for {what}, and {free:,} are free there; free some, or "
                "set TMPDIR to a folder on another disk"
            )

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        size = count * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ConfigError(
                f"store='disk' cannot have a file of {size:,} bytes in {self.folder}: {error.strerror}; free some room, or "
                "set TMPDIR to a folder on another disk"
            ) from error
        return torch.frombuffer(mapped, dtype=dtype)

    def home(self, values: Tensor) -> Tensor:
        return self._copied(values)


def _filesystem(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the kind of the file system that a folder is on; empty if the system does not tell."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    # A place in the table has an octal number for each space.
    places = {line[1].replace(r"\040", " "): line[2] for line in lines}
    path = folder.resolve()
    return next((places[str(at)] for at in (path, *path.parents) if str(at) in places), "")
