"""The ``penstock`` command: one file per command, imported when it is called."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from typing import NoReturn

import click

from penstock.base.errors import (
    ConfigError,
    HangError,
    NonFiniteError,
    PenstockError,
    StageError,
    StoppedError,
    TransportError,
)
from penstock.base.garbage import begin_loading
from penstock.base.version import __version__
from penstock.cli.output import UNWRITTEN, drop_output
from penstock.train.signals import ExitCode, of_signal

FIRST_STEPS = f"""\
Penstock {__version__}: train PyTorch models split into pipeline stages; see, prove and predict what the pipeline does.

Train something now: a small decoder on the source of Python, on two ranks, in about 90 s on two cores
    penstock train train.name=first

See where the time of that run went; runs/first/report.html shows more
    penstock trace runs/first

Prove that pipelined training equals plain PyTorch
    penstock verify --ranks 2

Plan a run: the layout of a model on machines, with its time and memory
    penstock plan runs/first/config.toml --cluster 'h100*8'

All commands: penstock --help; one of them: penstock COMMAND --help. In Python: help("penstock.Pipeline").
Documentation: README.md and docs/ in Penstock's repository and source distribution.
"""


COMMANDS = {
    "checkpoint": "list, verify, convert and export checkpoints",
    "compare": "find the first tensor that differs between two recordings",
    "config": "explain the keys of a training run's config",
    "doctor": "check a machine or cluster before a run",
    "eval": "print the loss of a trained model on files",
    "plan": "choose a layout for a model and machines",
    "sample": "generate text from a trained run",
    "schedule": "list, show, check, draw, convert and search schedules",
    "simulate": "predict what a schedule costs",
    "trace": "show where the time of a run went",
    "train": "train a model through a pipeline",
    "verify": "prove that pipelined training equals plain PyTorch",
}


class LazyGroup(click.Group):
    """Group that lists every command without importing any, and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"penstock.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="penstock")
@click.pass_context
def group(ctx: click.Context) -> None:
    """Train PyTorch models split into pipeline stages; see, prove and predict what the pipeline does."""
    if ctx.invoked_subcommand is None:
        click.echo(FIRST_STEPS, nl=False)


def main() -> None:
    """Run the command, and exit with one line and code 2 after bad input, with 1 after a failed run (see `ExitCode`)."""
    begin_loading()
    try:
        # click returns the exit code that a command chose.
        code = group(prog_name="penstock", standalone_mode=False)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
        if isinstance(code, int):
            sys.exit(code)
    except click.Abort:
        sys.exit(of_signal(signal.SIGINT))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITTEN:
            raise
        drop_output()
        if error.errno != errno.EPIPE:  # | head
            click.echo(f"penstock: cannot write to stdout: {error.strerror}", err=True)
        sys.exit(ExitCode.FAILED)
    except StoppedError:
        sys.exit(ExitCode.STOPPED)  # how to continue has been printed
    except PenstockError as error:
        if (
            isinstance(error, StageError)
            and not isinstance(error, NonFiniteError)
            and error.__cause__ is not None
        ):
            # The user's own code failed, so print where.
            traceback.print_exception(error.__cause__)
        click.echo(f"penstock: {error}", err=True)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

            # torchrun prints the error of the rank that failed first.
            ErrorHandler().record_exception(error)
        _end(_code_of(error), at_once=isinstance(error, TransportError))


def _code_of(error: PenstockError) -> ExitCode:
    if isinstance(error, ConfigError):
        return ExitCode.FAILED if error.begun else ExitCode.BAD_INPUT
    if isinstance(error, HangError):
        return ExitCode.HUNG
    return ExitCode.NOT_FINITE if isinstance(error, NonFiniteError) else ExitCode.FAILED


def _end(code: int, at_once: bool = False) -> NoReturn:
    """End the process, even if a rank's thread hangs.

    With `at_once`, Python's own clean-up is skipped, which would wait for messages of a process that is gone or
    stopped.
    """
    from penstock.runtime.health.hang import AT_WORK

    if at_once or AT_WORK:
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
