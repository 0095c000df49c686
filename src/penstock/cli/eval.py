"""``penstock eval``: the loss of a trained model on files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command(
    epilog="Example:  penstock eval runs/first notes.txt\n\n"
    "          penstock eval my-llama texts --set data.sequence=2048 parallel.pp=4 --json\n\n"
    "          torchrun --nproc-per-node 4 -m penstock eval runs/first/checkpoints/step-00000100 notes.txt"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, metavar="[FILE]... [SECTION.KEY=VALUE]...")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of the run's config, or of the defaults. May be repeated.",
)
@click.option("--ranks", "-p", type=int, help="Pipeline ranks. Short for --set parallel.pp=RANKS.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: Path, arguments: tuple[str, ...], overrides: tuple[str, ...], ranks: int | None, as_json: bool
) -> None:
    """Print the loss of a model on files.

    MODEL is the folder of a run, a checkpoint in one (RUN/checkpoints/step-NUMBER), or a local Hugging Face folder. Each
    FILE is a file or folder of any format of data.path, and is read from beginning to end. Without a FILE, the held-out
    data of the run is read.

    The loss is in nats per token, and the perplexity is its exponential. Bits per byte can be compared across tokenizers.
    """
    from penstock.train.evaluate import evaluate
    from penstock.train.run_log import tokenizing_bar

    paths = [argument for argument in arguments if "=" not in argument or Path(argument).exists()]
    pairs = [*overrides, *(argument for argument in arguments if argument not in paths)]
    if ranks is not None:
        pairs.append(f"parallel.pp={ranks}")
    with tokenizing_bar() as watch:
        results = evaluate(model.expanduser(), paths, pairs, watch)
    if results is None:
        return
    if as_json:
        click.echo(json.dumps({"model": str(model), "results": [asdict(result) for result in results]}))
        return
    rows = [("data", "tokens", "loss", "perplexity", "bits/token", "bits/byte")]
    rows += [
        (
            result.data,
            f"{result.tokens:,}",
            f"{result.loss:.4f}",
            "-" if result.perplexity is None else f"{result.perplexity:,.4g}",
            f"{result.bits_per_token:.4f}",
            "-" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}",
        )
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        click.echo("  ".join([first.ljust(widths[0]), *cells]))
