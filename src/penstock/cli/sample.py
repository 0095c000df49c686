"""``penstock sample``: text from a trained run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click


@click.command(epilog='Example:  penstock sample runs/first "def " --length 400 --temperature 0.7')
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--length", type=click.IntRange(0), help="Tokens to generate. Default: the run's.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Sampling temperature; 0 always takes the likeliest token. Default: the run's.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    help="Sample from this many likeliest tokens; 0 means all. Default: the run's.",
)
@click.option("--seed", type=click.IntRange(0), help="Random seed. Default: the run's.")
def command(
    run: Path,
    prompt: str | None,
    length: int | None,
    temperature: float | None,
    top_k: int | None,
    seed: int | None,
) -> None:
    """Generate text with the weights of a run, after a PROMPT.

    RUN is the folder of a run. PROMPT is text, or token numbers if the model has neither bytes nor a tokenizer.
    """
    from penstock.train.model.sampling import read_config, sample_run

    options: dict[str, Any] = {"prompt": prompt, "length": length, "temperature": temperature, "top_k": top_k}
    config = replace(read_config(run).sample, **{key: v for key, v in options.items() if v is not None})
    click.echo(sample_run(run, config, seed))
