"""Print the files of Penstock that a training step enters: ``python -m tools.walk``.

The second ``Pipeline.step`` and ``optimizer.step`` of a pipeline of two ranks that are threads are watched with
`sys.setprofile`, in all threads. CONTRIBUTING's *How a step runs* names all of them.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import penstock

SOURCE = Path(penstock.__file__).parent


class Walk:
    """Profile function that notes each file of Penstock in the order in which functions of it are first called.

    Attributes:
        files: by path below the package, the function of it that is called first.
        watching: whether calls are noted.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.watching = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call."""
        if not self.watching or event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            name = path.relative_to(SOURCE).as_posix()
            self.files.setdefault(name, frame.f_code.co_qualname.replace("<locals>.", ""))


def walk() -> Walk:
    """Return the files that the second step of a pipeline enters."""
    seen = Walk()
    threading.setprofile(seen)  # before the rank threads start
    sys.setprofile(seen)
    try:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        with penstock.Pipeline(model, nn.functional.mse_loss, ranks=2, microbatches=4) as pipe:
            optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3, clip=1.0)
            for number in range(2):
                seen.watching = number == 1
                pipe.step(torch.randn(8, 8), torch.randn(8, 8))
                optimizer.step()
            seen.watching = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def main() -> None:
    """Print one line per file, and their number."""
    files = walk().files
    for path, function in files.items():
        print(f"{path:45} {function}")
    print(f"{len(files)} files")


if __name__ == "__main__":
    main()
