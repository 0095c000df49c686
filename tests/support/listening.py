"""On which addresses processes listen, from /proc."""

from __future__ import annotations

import ipaddress
import os
import struct
from contextlib import suppress
from pathlib import Path


def listening(pid: int | str = "self") -> set[str]:
    """The addresses on which sockets of a process listen for TCP, as text without the port."""
    folder = f"/proc/{pid}/fd"
    links = []
    with suppress(FileNotFoundError):  # the process has ended
        for descriptor in os.listdir(folder):
            with suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(f"{folder}/{descriptor}"))
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
