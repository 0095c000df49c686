"""Namespaces of a host, by the kernel's ``unshare``: its own users, network, processes, mounts, name, IPC and clock.

No root is needed where the kernel lets users make namespaces. Run as a program it makes them, with a network card, and says
why if it cannot. Only the standard library, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_USER, _NET, _PID, _MOUNT, _NAME, _IPC, _TIME = (
    0x10000000, 0x40000000, 0x20000000, 0x00020000, 0x04000000, 0x08000000, 0x00000080,
)  # fmt: skip
_OTHERS = _NET | _PID | _MOUNT | _NAME | _IPC | _TIME
_PR_SET_PDEATHSIG = 1


def enter(clock: int) -> int:
    """Make a host's namespaces and a first process in them.

    Args:
        clock: seconds by which the host's monotonic clock is ahead of this one's.

    Returns:
        0 in the host's first process; in this process the number of that one, which ends with this one.

    Raises:
        OSError: if the kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_USER | _OTHERS)
    except PermissionError:
        _unshare(_OTHERS)  # as root this works, too
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {clock} 0\nboottime {clock} 0")
    process = os.fork()
    if not process:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        mount("--make-rprivate", "/")
        mount("-t", "proc", "proc", "/proc")
    return process


def mount(*words: str) -> None:
    """Mount as the command does."""
    subprocess.run(["mount", *words], check=True)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, f"no namespaces: {os.strerror(number)}")


if __name__ == "__main__":
    os.close(os.open("/dev/net/tun", os.O_RDWR))
    first = enter(1)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) if first else 0)
