"""Debian's packages of Slurm, unpacked into a folder without installing them: ``python -m tests.support.slurm_packages``.

Nothing outside the folder changes, and no service starts. The folder is ``.slurm`` beside the sources, or that of the
environment variable `FOLDER`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = "PENSTOCK_SLURM"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
PROGRAMS = (
    "slurmctld",
    "slurmd",
    "slurmstepd",
    "salloc",
    "sbatch",
    "scancel",
    "scontrol",
    "sinfo",
    "squeue",
    "srun",
)


def folder() -> Path:
    """Return the folder where the packages are, or will be."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parents[2] / ".slurm").absolute()


def programs() -> Path | None:
    """Return the folder with Slurm's programs; None if the packages have not been unpacked."""
    path = folder() / "bin"
    return path if path.is_dir() else None


def plugins() -> Path:
    """Return the folder with Slurm's plugins."""
    return next(folder().glob("usr/lib/*/slurm-wlm"))


def unpack() -> None:
    """Download and unpack the packages, unless they are there.

    Raises:
        RuntimeError: if this machine has no apt, or apt cannot get the packages.
    """
    if programs() is not None:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise RuntimeError("apt-get and dpkg must be there to get Slurm, which this machine does not have")
    folder().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder().parent, prefix=".slurm-") as name:
        path = Path(name)
        path.chmod(0o755)  # for the user _apt
        try:
            _download(path)
        except RuntimeError:  # the lists of packages are missing or old
            _apt(path, "apt-get", "update")
            _download(path)
        for package in path.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, path], check=True)
            package.unlink()
        shutil.rmtree(folder(), ignore_errors=True)
        path.rename(folder())
        path.mkdir()  # for TemporaryDirectory to remove
    _write_programs()


def _download(path: Path) -> None:
    """Download the packages, and the libraries that they name: a small system may lack some."""
    lines = _apt(path, "apt-cache", "depends", *PACKAGES).splitlines()
    libraries = {line.split()[-1] for line in lines if line.strip().startswith("Depends: lib")} - {"libc6"}
    _apt(path, "apt-get", "download", *PACKAGES, *sorted(libraries))


def _apt(path: Path, *command: str) -> str:
    result = subprocess.run(command, cwd=path, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()}")
    return result.stdout


def _write_programs() -> None:
    """Write a script for each program, which starts it with the libraries in the folder.

    The dynamic linker is called directly: a variable such as LD_LIBRARY_PATH would reach the jobs, too.
    """
    linker = next(path for place in ("/lib64", "/lib") for path in Path(place).glob("ld-linux-*.so.*"))
    libraries = ":".join(map(str, (plugins(), plugins().parent, *folder().glob("lib/*-linux-*"))))
    bin_folder = folder() / "making"
    bin_folder.mkdir()
    for name in PROGRAMS:
        places = (
            folder() / "usr" / place / f"{name}{end}" for place in ("bin", "sbin") for end in ("", "-wlm")
        )
        program = next(path for path in places if path.is_file())
        line = f"{linker} --library-path '{libraries}' '{program}' \"$@\""
        # slurmstepd overwrites its environment, by which tests find what they started, so it ends with the shell above it.
        lines = [f"setpriv --pdeathsig KILL {line}", "exit $?"] if name == "slurmstepd" else [f"exec {line}"]
        script = bin_folder / name
        script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        script.chmod(0o755)
    bin_folder.rename(folder() / "bin")


if __name__ == "__main__":
    try:
        unpack()
    except RuntimeError as error:
        sys.exit(str(error))
    print(programs())
