"""On which addresses this process listens, from /proc; and a program for `test_world` that says so of a pipeline's rank."""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path


def listening() -> set[str]:
    """The addresses on which sockets of this process listen for TCP, as text without the port."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1].split(":")[0], fields[3], fields[9]
            if state == "0A" and inode in own:
                words = [int(address[n : n + 8], 16) for n in range(0, len(address), 8)]
                found.add(str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))))
    return found


def _is_open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


if __name__ == "__main__":
    import torch
    from torch import nn

    import penstock
    from tests.runtime import plain

    torch.set_num_threads(1)
    with penstock.Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, timeout=30) as pipe:
        result = pipe.step(*plain.batch(0, 8))
        line = f"rank {pipe.rank} of {pipe.ranks}: {result.loss.item()!r} on {sorted(listening())}\n"
        os.write(1, line.encode())
