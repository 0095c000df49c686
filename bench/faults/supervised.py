"""Run ``penstock train --restarts N`` with victims as processes.

    python -m bench.faults.supervised RESTARTS FOLDER FAULT train --set=SECTION.KEY=VALUE ... [--resume]

FOLDER and FAULT are the victim's.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from penstock.train.config.file import load
from penstock.train.run_folder import AUTO
from penstock.train.supervise import supervise


def main() -> None:
    """Run, and end with the same exit code."""
    restarts, folder, fault, command, *words = sys.argv[1:]
    config = load(None, [word.removeprefix("--set=") for word in words if word.startswith("--set=")])
    if "--resume" in words:
        config = replace(config, train=replace(config.train, resume=AUTO))
    victim = (sys.executable, "-m", "bench.faults.victim", folder, fault, command)
    sys.exit(supervise(config, restarts=int(restarts), command=victim))


if __name__ == "__main__":
    main()
