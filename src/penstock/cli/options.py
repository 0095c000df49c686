"""Options of a whole number and of a choice, which many commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def count(*names: str, help: str, **given: Any) -> Callable[[Command], Command]:
    """Return an option of a whole number of at least 1, whose help shows its default if it has one."""
    shows = True if "default" in given else None
    return click.option(*names, type=click.IntRange(1), show_default=shows, help=help, **given)


def choice(name: str, *values: str, help: str, default: str | None = None) -> Callable[[Command], Command]:
    """Return an option of one of some values; the first is its default unless another is given."""
    chosen = values[0] if default is None else default
    return click.option(name, type=click.Choice(values), default=chosen, show_default=True, help=help)
