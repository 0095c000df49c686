"""Progress of tokenizing, which may take long before a run begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tokenizing_bar() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows which file is being tokenized, and the share of all files that is done.

    On a terminal that is a bar on standard error, from its first call on; elsewhere a line.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield _line_once()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenizing {task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)

    def show(name: str, share: float) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("", total=1.0)
        bar.update(bar.tasks[0].id, description=Path(name).name, completed=share)

    try:
        yield show
    finally:
        bar.stop()


def _line_once() -> Callable[[str, float], None]:
    shown: list[str] = []

    def show(name: str, share: float) -> None:
        if not shown:
            shown.append(name)
            if sys.stderr is not None:
                print(f"tokenizing {name} ...", file=sys.stderr, flush=True)

    return show
