"""``penstock train``: train a Llama-style decoder through a pipeline."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.base.counts import plural
from penstock.base.garbage import end_loading
from penstock.cli.output import outlive_readers
from penstock.runtime.start.launch_environment import find_launch
from penstock.train.signals import Interrupts

if TYPE_CHECKING:
    from penstock.train.config.config import Config
    from penstock.train.run_log import Reporter


class _TrainCommand(click.Command):
    """The command, with a hint for config keys that are written as options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from penstock.train.config.config import nearest_key

            near = nearest_key(error.option_name)
            if error.possibilities and not near:
                raise
            raise click.UsageError(
                f"{error.option_name} is not an option; write a key of the config as section.key=VALUE{near}",
                ctx,
            ) from error


@click.command(
    cls=_TrainCommand,
    epilog="Example:  penstock train --set train.steps=100 --set schedule.name=gpipe\n\n"
    "          penstock train --resume runs/first --set parallel.pp=4\n\n"
    "          penstock train my.toml --ranks 2 --plan auto\n\n"
    "          torchrun --nproc-per-node 2 --max-restarts 3 -m penstock train my.toml --set train.name=first --resume\n\n"
    "          srun -N 2 --ntasks-per-node 8 penstock train my.toml --set parallel.dp=2\n\n"
    "          torchrun --nproc-per-node 8 -m penstock train --set parallel.pp=2 parallel.dp=2 parallel.tp=2",
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG.toml] [SECTION.KEY=VALUE]...")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of the config; KEY= unsets one. May be repeated, and one --set may be followed by several pairs.",
)
@click.option("--ranks", "-p", type=int, help="Pipeline ranks. Short for --set parallel.pp=RANKS.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="auto",
    metavar="[RUN]",
    help="Resume a run from its newest sound checkpoint, with its config. RUN is the run's folder, or one checkpoint in it "
    "(RUN/checkpoints/step-NUMBER). Without RUN: the run train.name, which is started if it does not exist.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the outcome as one JSON object, and progress to stderr."
)
@click.option(
    "--plan",
    type=click.Choice(["auto"]),
    help="auto: measure the model's layers on this machine first, and run the schedule, microbatches, split and recompute "
    "that are predicted to take least time. On the CPUs of one machine, in threads or under a launcher. With --resume, a "
    "run on as many ranks as before keeps its layout, and on fewer or more it is planned again.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the config with all its defaults as TOML, and train nothing. `penstock config` explains every key.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Profile one step with torch.profiler, and write it to RUN/profile for ui.perfetto.dev.",
)
def command(
    *,
    arguments: tuple[str, ...],
    overrides: tuple[str, ...],
    ranks: int | None,
    resume: str | None,
    as_json: bool,
    plan: str | None,
    print_config: bool,
    profile: bool,
) -> int | None:
    """Train a model through a pipeline.

    Without a config, a small model learns the source of Python's standard library on two ranks, in a few minutes. Set
    model.path=FOLDER to train a Hugging Face model from a local folder, or model.config=FILE to train one from scratch.
    Set data.path to text files, tokens (.npy), JSON lines, Parquet, or a folder that `datasets` saved.
    The ranks are threads of one process; under torchrun, srun or mpirun every process is a rank. The run's folder gets
    the config with all defaults, metrics.jsonl, the weights as safetensors, a sample of generated text, and report.html,
    which shows where the time of the steps went.

    On SIGTERM, Ctrl-C, SIGHUP or SIGUSR1 the run finishes its step, saves a checkpoint and stops; a second signal, at least
    two seconds later, ends it at once. If the reader of its output is gone (| head, a closed terminal), the run continues.

    \b
    Exit codes:
        0    done
        1    the run failed
        2    bad input; nothing was written
        3    too many steps in a row were NaN or infinite
        75   stopped by a signal and saved; continue with --resume
        124  a rank hung and was ended
        130  ended at once by a second Ctrl-C (SIGTERM: 143, SIGHUP: 129, SIGUSR1: 138)
    """
    outlive_readers()
    from penstock.train.config.file import load
    from penstock.train.loop import train
    from penstock.train.run_log import reporter

    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise click.UsageError(
            f"give at most one config, got {', '.join(files)}; values of it are written as section.key=value"
        )
    pairs = [*overrides, *(argument for argument in arguments if "=" in argument)]
    if ranks is not None:
        pairs.append(f"parallel.pp={ranks}")

    def read() -> Config:
        config = load(_config_file(files, resume), pairs)
        return config if resume is None else replace(config, train=replace(config.train, resume=resume))

    if print_config:
        _print(read())
        return None
    launch = find_launch()
    if launch is None:
        config = read()
    else:
        from penstock.train.config.agreed import agreed_config

        config = agreed_config(read)
    if plan is not None:
        from penstock.train.auto_plan import choose_plan

        config = choose_plan(config, lambda line: click.echo(line, err=as_json))

    def start_reporter(steps: int, leads: bool) -> Reporter:
        end_loading()  # what the run needs is loaded: torch's optimizers were the last
        return reporter(steps, leads=leads, to_stderr=as_json)

    with Interrupts(announce=launch is None or launch.rank == 0) as interrupts:
        outcome = train(
            config,
            start_reporter,
            profile=profile,
            stopping=interrupts.asked,
        )
    if outcome is None:
        return None
    if as_json:
        click.echo(json.dumps(asdict(outcome)))
        return None
    bigram = "" if outcome.bigram_bits is None else f"; a bigram table: {outcome.bigram_bits:.3f}"
    click.echo(
        f"\nheld-out bits/{outcome.unit}: {outcome.held_out_bits:.3f}{bigram}\n"
        f"{plural(outcome.steps, 'step')} in {outcome.seconds:.0f} s, {outcome.tokens_per_second:,.0f} tokens/s\n"
        f"kept in {outcome.folder}\n\n{outcome.sample}"
    )
    if outcome.report is not None:
        click.echo(f"\nreport: {outcome.report}")
    return None


def _print(config: Config) -> None:
    """Print a config as it is resolved for the processes that were started."""
    from penstock.train.config.file import dump
    from penstock.train.config.resolve import resolve

    launch = find_launch()
    if launch is None or launch.rank == 0:
        click.echo(dump(resolve(config, launch.size if launch else None)), nl=False)


def _config_file(files: list[str], resume: str | None) -> Path | None:
    """Return the config on the command line, or the config of the run to resume."""
    if resume is not None and resume.endswith(".toml"):
        raise click.UsageError(
            f"--resume must be a run's folder, got {resume}; write  penstock train {resume} --resume"
        )
    if files or resume in (None, "auto"):
        return Path(files[0]) if files else None
    path = Path(str(resume)).expanduser()
    run = next(
        (folder for folder in (path, path.parent.parent) if os.path.isfile(folder / "config.toml")), None
    )
    if run is None:
        raise click.UsageError(f"{path} is neither the folder of a run nor a checkpoint in one")
    return run / "config.toml"
