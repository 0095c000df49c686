"""``penstock checkpoint``: list, verify, convert and export checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from penstock.base.errors import DataError


@click.group(
    epilog="Example:  penstock checkpoint list runs/first\n\n          penstock checkpoint verify runs/first\n\n"
    "          penstock checkpoint convert runs/first/checkpoints/step-00000100 other/step-00000100 --stages 4"
)
def command() -> None:
    """List, verify, convert and export checkpoints.

    RUN is the folder of a run; CHECKPOINT is a folder step-NUMBER in its checkpoints.
    """


@command.command("list", epilog="Example:  penstock checkpoint list runs/first --json")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(run: Path, as_json: bool) -> None:
    """List the checkpoints of a RUN, the newest first. Reads manifests and file sizes only."""
    from penstock.checkpoint.find import folder_of, missing, read_manifest, steps_in

    rows: list[dict[str, Any]] = []
    for step, path in steps_in(folder_of(run)):
        try:
            manifest = read_manifest(path)
        except DataError as error:
            rows.append({"step": step, "path": str(path), "complete": False, "problems": [str(error)]})
            continue
        problems = missing(path, manifest)
        rows.append(
            {
                "step": step,
                "path": str(path),
                "complete": not problems,
                "problems": problems,
                "bytes": manifest.bytes,
                "stages": len(manifest.layers),
                "tensors": len(manifest.tensors),
                "versions": manifest.versions,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        if row["complete"]:
            click.echo(f"{row['path']}  {row['stages']} stages, {row['bytes']:,} bytes")
        else:
            click.echo(f"{row['path']}  not complete: {'; '.join(row['problems'])}")


@command.command(epilog="Example:  penstock checkpoint verify runs/first/checkpoints/step-00000100")
@click.argument("path", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def verify(path: Path, as_json: bool) -> None:
    """Read checkpoints and compare digests.

    Exit code 1 if one is damaged.
    """
    from penstock.checkpoint.find import damage, folder_of, is_checkpoint, read_manifest, steps_in

    paths = [path] if is_checkpoint(path) else [checkpoint for _, checkpoint in steps_in(folder_of(path))]
    rows: list[dict[str, Any]] = []
    for checkpoint in paths:
        try:
            problems = damage(checkpoint, read_manifest(checkpoint))
        except DataError as error:
            problems = [str(error)]
        rows.append({"path": str(checkpoint), "sound": not problems, "problems": problems})
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        for row in rows:
            click.echo(f"{row['path']}  {'sound' if row['sound'] else 'DAMAGED'}")
            for problem in row["problems"]:
                click.echo(f"  {problem}")
    if not all(row["sound"] for row in rows):
        raise click.exceptions.Exit(1)


@command.command(
    epilog="Example:  penstock checkpoint convert runs/first/checkpoints/step-00000100 other/step-00000100 --stages 4"
)
@click.argument("source", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--stages", type=click.IntRange(1), help="Write a checkpoint with files for this many stages.")
@click.option("--to-dcp", is_flag=True, help="Write torch's distributed checkpoint format (DCP).")
@click.option("--from-dcp", is_flag=True, help="Read CHECKPOINT as DCP, without unpickling anything.")
@click.option(
    "--like",
    metavar="CHECKPOINT",
    type=click.Path(path_type=Path),
    help="With --from-dcp: a checkpoint of the run to continue, which provides all but weights and optimizer state.",
)
def convert(
    source: Path, target: Path, stages: int | None, to_dcp: bool, from_dcp: bool, like: Path | None
) -> None:
    """Write a CHECKPOINT in another form.

    The folder TARGET must not exist. If a run will load it, it must have the checkpoint's name, step-NUMBER. Another split
    needs no conversion: every checkpoint loads at any split.
    """
    from penstock.checkpoint.convert import resplit
    from penstock.checkpoint.dcp import export_dcp, import_dcp

    if (stages is not None) + to_dcp + from_dcp != 1:
        raise click.UsageError("give exactly one of --stages, --to-dcp and --from-dcp")
    if from_dcp != (like is not None):
        raise click.UsageError("--from-dcp needs --like, and --like needs --from-dcp")
    if stages is not None:
        resplit(source, target, stages)
    elif like is not None:
        import_dcp(source, target, like)
    else:
        export_dcp(source, target)
    click.echo(f"written: {target}")


@command.command(
    epilog="Example:  penstock checkpoint export runs/first/checkpoints/step-00000100 model.safetensors",
)
@click.argument("source", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path))
def export(source: Path, target: Path) -> None:
    """Export the weights as one file.

    Writes the weights of a CHECKPOINT to FILE, which ends in .safetensors or .pt, by the names of the model. A tied weight
    has all its names, so that model.load_state_dict takes the file's contents.
    """
    from penstock.checkpoint.convert import export_weights

    export_weights(source, target)
    click.echo(f"written: {target}")


@command.command(
    "export-hf",
    epilog="Example:  penstock checkpoint export-hf runs/llama/checkpoints/step-00000100 exported",
)
@click.argument("source", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def export_hf(source: Path, target: Path) -> None:
    """Export the weights of a Hugging Face model.

    Writes the weights of a CHECKPOINT to the folder TARGET, from which from_pretrained loads them.
    """
    from penstock.checkpoint.convert import export_transformers

    export_transformers(source, target)
    click.echo(f"written: {target}")
