"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, nothing from further ranks."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter(Protocol):
    """Where the loop tells what it does; a context manager around the run."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def step(self, done: int, loss: float) -> None:
        """A step is done; `done` counts from 1."""

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        """Some steps are done and were measured; `bubble` is a share from 0 to 1."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...


class Silent:
    """Says nothing: the ranks after the first."""

    def say(self, text: str) -> None:
        pass

    def step(self, done: int, loss: float) -> None:
        pass

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        pass


class Lines(Silent):
    """Plain lines, for logs and pipes."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        self.say(
            f"step {done:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  "
            f"{tokens_per_second:,.0f} tokens/s  bubble {bubble:.1%}"
        )


class Bar(Silent):
    """One live line on a terminal: step, loss, tokens/s and the measured bubble."""

    def __init__(self, console: Console, steps: int) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("bubble {task.fields[bubble]:.1%}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=steps, loss=float("nan"), speed=0.0, bubble=0.0)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def step(self, done: int, loss: float) -> None:
        self._bar.update(self._task, completed=done, loss=loss)

    def measured(self, done: int, loss: float, tokens_per_second: float, bubble: float) -> None:
        self._bar.update(self._task, completed=done, loss=loss, speed=tokens_per_second, bubble=bubble)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()


def reporter(steps: int, *, leads: bool, to_stderr: bool = False) -> Reporter:
    """The reporter that suits: none for a rank that does not lead, a bar on a terminal, lines elsewhere."""
    if not leads:
        return Silent()
    console = Console(stderr=to_stderr)
    return Bar(console, steps) if console.is_terminal else Lines(console, steps)
