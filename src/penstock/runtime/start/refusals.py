"""Refusals that no code catches, under torchrun: rank 0 prints where, with the text last, and the others a line each."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from penstock.base.errors import ConfigError


def print_traceback_once() -> None:
    """Have this process print a line in place of a traceback where rank 0 prints that; may be called twice."""
    before = sys.excepthook
    if os.environ.get("RANK", "0") == "0" or before.__module__ == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ConfigError):
            text = " ".join(str(error).split())  # all of it, since rank 0 may not have the same
            print(f"rank {os.environ.get('RANK')}: {kind.__name__}: {text}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook
