"""``penstock train``: train a Llama-style decoder through a pipeline."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.output import outlive_readers
from penstock.launch.parent_death import follow_launcher

if TYPE_CHECKING:
    from penstock.train.config.config import Config


@click.command(
    epilog="Example:  penstock train --set train.steps=100 --set schedule.name=gpipe\n\n"
    "          penstock train --resume runs/first --set parallel.pp=4\n\n"
    "          penstock train --restarts 3 --set parallel.pp=2 train.checkpoint_every=50\n\n"
    "          torchrun --nproc-per-node 2 -m penstock train my.toml\n\n"
    "          srun -N 2 --ntasks-per-node 8 penstock train my.toml --set parallel.dp=2\n\n"
    "          torchrun --nproc-per-node 8 -m penstock train --set parallel.pp=2 parallel.dp=2 parallel.tp=2"
)
@click.argument("words", nargs=-1, metavar="[CONFIG.toml]")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of the config; may be given several times, and further pairs may follow one.",
)
@click.option("--ranks", "-p", type=int, help="Pipeline ranks; the same as --set parallel.pp=RANKS.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="auto",
    metavar="[RUN]",
    help="Go on from the newest sound checkpoint of RUN, a run's folder, with its config; or from the one that is "
    "given, RUN/checkpoints/step-NUMBER. Without RUN: of the run train.name, if it has one.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the outcome as one JSON object, the rest to stderr."
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start a process for each rank of [parallel] on this machine. When one fails all are started anew and go on from "
    "the newest checkpoint, until N starts in a row have failed without a newer one.",
)
@click.option(
    "--profile", is_flag=True, help="Profile one step with torch.profiler: RUN/profile, for ui.perfetto.dev."
)
def command(
    words: tuple[str, ...],
    overrides: tuple[str, ...],
    ranks: int | None,
    resume: str | None,
    as_json: bool,
    restarts: int | None,
    profile: bool,
) -> int | None:
    """Train a model through a pipeline.

    Without a config a small model learns the text of Python's own standard library on two ranks, in a few minutes.
    model.path=FOLDER trains a Hugging Face model from its local folder instead, model.config=FILE one from nothing.
    The ranks are threads of one process; under torchrun, srun or mpirun every process is a rank. The run's folder keeps
    the config with every default filled in, metrics.jsonl, the weights as safetensors, a sample of generated text, and
    report.html, which shows where the time of the steps went.

    SIGTERM, Ctrl-C, SIGHUP or SIGUSR1: the step in hand is finished and a checkpoint saved; another one, two seconds later
    or more, ends the run at once. Where nobody reads its output any more (| head, a closed terminal) the run goes on.

    \b
    Exit codes:
        0    done
        1    the run failed
        2    something given cannot be used; nothing was written
        3    too many steps in a row were NaN or infinite
        4    --restarts: failed again and again without a newer checkpoint
        75   stopped by a signal and saved; --resume goes on
        124  a rank hung, and was ended
        130  ended at once by a second Ctrl-C; 143 by a second SIGTERM, 129 SIGHUP, 138 SIGUSR1
    """
    launched = follow_launcher()
    outlive_readers()
    from penstock.launch.signals import Interrupts
    from penstock.runtime.start.launch_environment import find_launch
    from penstock.train.config.file import load
    from penstock.train.loop import train
    from penstock.train.report.progress import reporter

    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise click.UsageError(f"one config at most; given were {', '.join(files)}")
    pairs = [*overrides, *(word for word in words if "=" in word)]
    if ranks is not None:
        pairs.append(f"parallel.pp={ranks}")
    config = load(_config_file(files, resume), pairs)
    if resume is not None:
        config = replace(config, train=replace(config.train, resume=resume))
    if restarts is not None:
        return _supervise(config, restarts, as_json, profile)
    launch = find_launch()
    with Interrupts(tells=not launched and (launch is None or launch.rank == 0)) as interrupts:
        outcome = train(
            config,
            lambda steps, leads: reporter(steps, leads=leads, to_stderr=as_json),
            profile=profile,
            stopping=interrupts.asked,
            lock=not launched,
        )
    if outcome is None:
        return None
    if as_json:
        click.echo(json.dumps(asdict(outcome)))
        return None
    bigram = "" if outcome.bigram_bits is None else f"; a bigram table: {outcome.bigram_bits:.3f}"
    click.echo(
        f"\nheld-out bits/{outcome.unit}: {outcome.held_out_bits:.3f}{bigram}\n"
        f"{outcome.steps} steps in {outcome.seconds:.0f} s, {outcome.tokens_per_second:,.0f} tokens/s\n"
        f"kept in {outcome.folder}\n\n{outcome.sample}"
    )
    if outcome.report is not None:
        click.echo(f"\nreport: {outcome.report}")
    return None


def _supervise(config: Config, restarts: int, as_json: bool, profile: bool) -> int:
    from penstock.launch.supervise import supervise
    from penstock.runtime.start.launch_environment import find_launch

    if "RANK" in os.environ or find_launch() is not None:
        raise click.UsageError(
            "--restarts starts the processes itself; where others do, as torchrun and srun do, use theirs "
            "(--max-restarts; sbatch --requeue), with --resume"
        )
    words = [word for word, given in (("--json", as_json), ("--profile", profile)) if given]
    return supervise(config, restarts=restarts, words=words)


def _config_file(files: list[str], resume: str | None) -> Path | None:
    """The config that was given, or that of the run to go on with."""
    if resume is not None and resume.endswith(".toml"):
        raise click.UsageError(f"--resume takes the folder of a run; write  penstock train {resume} --resume")
    if files or resume in (None, "auto"):
        return Path(files[0]) if files else None
    given = Path(str(resume)).expanduser()
    run = next(
        (folder for folder in (given, given.parent.parent) if os.path.isfile(folder / "config.toml")), None
    )
    if run is None:
        raise click.UsageError(f"{given} is neither the folder of a run nor a checkpoint in one")
    return run / "config.toml"
