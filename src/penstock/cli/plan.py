"""``penstock plan``: the layout of a run, with its predicted time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.cost_arguments import parse_bytes
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.plan.cluster import Cluster
    from penstock.plan.explore.search_result import SearchResult
    from penstock.plan.prediction import Prediction
    from penstock.profile.model_profile import Profile


@click.command(
    epilog="Example:  penstock plan my-model/config.json --cluster 'h100*8x4' --sequence 4096 --batch 512\n\n"
    "          penstock plan model.toml --cluster cluster.toml --layout pp=4,dp=2,schedule=zb-v,recompute=full\n\n"
    "          penstock plan my-model --cluster 'a100-80gb*8x64' --batch 1536 --fix tp=8 --fix dp=8 --json"
)
@click.argument("model")
@click.option(
    "--cluster", "-c", "cluster_name", required=True, metavar="NAME*NxM|FILE",
    help="Machines: a preset (a100-40gb, a100-80gb, h100, h200, b200, mi300x) with N devices a node and M nodes, or a TOML "
    "file, as `penstock doctor --measure` writes.",
)  # fmt: skip
@click.option(
    "--sequence", "-s", type=int, metavar="S", help="Tokens of a sample. Default: the config's, or 2048."
)
@click.option(
    "--batch", "-b", type=int, metavar="B",
    help="Samples of a step, over all devices. Default: the config's, or the power of two from 4 a device on.",
)  # fmt: skip
@click.option(
    "--layout", "layout_text", metavar="KEY=VALUE,...",
    help="Predict this layout only. Keys: pp, dp, tp, v, microbatch, schedule, recompute, zero, sequence_parallel, split, "
    "attention, overlap, dtype.",
)  # fmt: skip
@click.option(
    "--fix", "fixes", multiple=True, metavar="KEY=VALUE",
    help="Search only layouts with this value. May be repeated. Keys as in --layout.",
)  # fmt: skip
@click.option(
    "--schedule",
    "schedules",
    metavar="A,B,C",
    help="Schedule families or CSV files to search. Default: all families.",
)
@click.option("--devices", type=int, metavar="N", help="Devices to use. Default: all of the cluster.")
@click.option(
    "--memory-limit",
    metavar="BYTES",
    help="Memory of a device that a plan may use, such as 70GB. Default: all.",
)
@click.option(
    "--top", type=click.IntRange(1, 100), default=10, show_default=True, help="Number of plans to print."
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), metavar="T", help="End the search after T seconds."
)
@click.option(
    "--search-orders", "order_seconds", type=click.FloatRange(0, min_open=True), metavar="T",
    help="Search an order of their own for the three best plans, T seconds each, and take the best if it is quicker. It is "
    "written to plan-order.csv, beside --out. Default: no search.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Config that `penstock train` starts with the best plan. Default: run.toml, unless --layout or --json is given. "
    "For a profile: Python that makes the pipeline, which is printed by default.",
)  # fmt: skip
@click.option(
    "--from-run", "run", type=click.Path(file_okay=False, exists=True, path_type=Path), metavar="RUN",
    help="Folder of a run of this model: print where the prediction of its step is wrong, and correct the cluster by it.",
)  # fmt: skip
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Page with the timeline, the memory of every rank, and time over memory of all layouts; works offline.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    cluster_name: str,
    sequence: int | None,
    batch: int | None,
    layout_text: str | None,
    fixes: tuple[str, ...],
    schedules: str | None,
    devices: int | None,
    memory_limit: str | None,
    top: int,
    seconds: float | None,
    order_seconds: float | None,
    out: Path | None,
    run: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Choose how to run a model on machines: the layout, whether it fits, how fast it is.

    MODEL is a config.json or a folder with one, a TOML file with [model], or a profile that penstock.profile_layers made of
    your own layers. The search covers pipeline, data and
    tensor parallel degrees, virtual stages, microbatches, all schedules, recompute, ZeRO and the split of the blocks; the
    step of every plan is simulated as it will run. Ctrl-C ends the search with the best plans so far.
    """
    from penstock.plan.cluster import read_cluster
    from penstock.plan.prediction import predict
    from penstock.profile.model_profile import is_profile, read_model

    if layout_text is not None and (fixes or schedules or devices is not None or order_seconds is not None):
        raise click.UsageError(
            "--layout predicts one layout; --fix, --schedule, --devices and --search-orders belong to a search"
        )
    own = is_profile(model)
    if out is None and layout_text is None and not as_json and not own:
        out = Path("run.toml")
    if own and out is not None and out.suffix == ".toml":
        raise click.UsageError(
            f"a plan of a profile is Python for your own script, got --out {out}; give --out plan.py"
        )
    _require_writable(out, page)
    if seconds is not None and not seconds > 0:
        raise click.UsageError(f"--seconds must be above 0, got {seconds}")
    profile, cluster = read_model(model), read_cluster(cluster_name)
    sequence, batch = _sizes(Path(model), profile, cluster, sequence, batch)
    if run is not None:
        from penstock.cli.plan_run import corrected

        cluster = corrected(profile, cluster, run, as_json)
    if layout_text is not None:
        prediction = predict(
            profile, _limited(cluster, memory_limit), layout_text, sequence=sequence, batch=batch
        )
        if as_json:
            click.echo(json.dumps(prediction.as_dict()))
        else:
            _show_one(profile, cluster, prediction, sequence, batch)
        result: Prediction | SearchResult = prediction
        best = prediction
    else:
        found = _search(
            profile, cluster, sequence, batch, fixes, schedules, devices, memory_limit, top, seconds, as_json
        )
        if order_seconds is not None:
            from penstock.plan.explore.searched_orders import with_searched_order

            found = with_searched_order(
                profile, _limited(cluster, memory_limit), found, (out or Path("run.toml")).with_name("plan-order.csv"),
                sequence=sequence, batch=batch, seconds=order_seconds,
            )  # fmt: skip
        result, best = found, found.best
        if as_json:
            click.echo(json.dumps(found.as_dict()))
        else:
            _show_search(profile, cluster, found, sequence, batch)
    if page is not None:
        from penstock.show.plan_page import write_plan

        write_plan(page, profile, cluster, result, sequence=sequence, batch=batch)
        if not as_json:
            click.echo(f"\npage:    {page}")
    if own:
        _give_code(profile, cluster, best, batch, out, as_json)
    elif out is not None:
        _write_run(out, Path(model), best, sequence, batch)
        if not as_json:
            click.echo(f"\nwritten: {out}\nstart:   {_start_command(best, cluster, out)}")


def _require_writable(out: Path | None, page: Path | None) -> None:
    """Raise `ConfigError` if a file cannot be written, or is one that penstock plan did not write."""
    from penstock.bounded_io import read_bytes
    from penstock.cli.plan_text import HEADER

    for option, path in (("--out", out), ("--html", page)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(
                f"cannot write {path}: there is no folder {path.parent}; make it, or give another {option}"
            )
    if out is None or not out.exists():
        return
    try:
        ours = read_bytes(out, 2**20).startswith(HEADER.encode())
    except OSError as error:
        raise ConfigError(f"cannot read {out}: {error}; give another --out") from error
    if not ours:
        raise ConfigError(f"{out} exists and was not written by penstock plan; give another --out")


def _sizes(
    model: Path, profile: Profile, cluster: Cluster, sequence: int | None, batch: int | None
) -> tuple[int, int]:
    """Return the tokens of a sample and the samples of a step: as given, of the model's file, or the defaults."""
    from penstock.plan.prediction import default_sequence

    for name, value in (("--sequence", sequence), ("--batch", batch)):
        if value is not None and not 1 <= value <= 2**31:
            raise ConfigError(f"{name} must be 1 to {2**31:,}, got {value}")
    tables = _tables(model)
    of_data, of_train = tables.get("data", {}).get("sequence"), tables.get("train", {}).get("batch")
    return (
        sequence or (of_data if isinstance(of_data, int) else default_sequence(profile)),
        batch or (of_train if isinstance(of_train, int) else 2 ** (4 * cluster.devices - 1).bit_length()),
    )


def _tables(model: Path) -> dict[str, Any]:
    """Return the content of the model's file: the tables of a TOML file, or the keys of a config.json."""
    import tomllib

    path = model / "config.json" if model.is_dir() else model
    text = path.read_text()  # it was read before
    tables = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    return tables if isinstance(tables, dict) else {}


def _limited(cluster: Cluster, memory_limit: str | None) -> Cluster:
    from dataclasses import replace

    if memory_limit is None:
        return cluster
    return replace(
        cluster, device=replace(cluster.device, memory=parse_bytes("--memory-limit", memory_limit))
    )


def _search(
    profile: Profile, cluster: Cluster, sequence: int, batch: int, fixes: tuple[str, ...], schedules: str | None,
    devices: int | None, memory_limit: str | None, top: int, seconds: float | None, as_json: bool,
) -> SearchResult:  # fmt: skip
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from penstock.plan.explore.branch_and_bound import search
    from penstock.plan.run_layout import Layout

    given = Layout.parse(",".join(fixes))
    keys = [pair.partition("=")[0].strip() for pair in ",".join(fixes).split(",") if pair.strip()]
    fixed = {key: value for key, value in given.as_dict().items() if key in [_full_name(key) for key in keys]}
    names = None if schedules is None else [name.strip() for name in schedules.split(",") if name.strip()]
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
        disable=as_json or not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("searching", total=None)

        def progress(evaluated: int, simulated: int, leader: Prediction | None) -> None:
            best = "" if leader is None else f"; best so far {leader.step_seconds:.4g} s"
            bar.update(task, description=f"{evaluated:,} layouts, {simulated:,} simulated{best}")

        return search(
            profile, cluster, sequence=sequence, batch=batch, fixed=fixed, schedules=names, devices=devices,
            memory=None if memory_limit is None else parse_bytes("--memory-limit", memory_limit), top=top,
            limit=seconds, progress=progress,
        )  # fmt: skip


def _full_name(key: str) -> str:
    from penstock.plan.run_layout import SHORT_NAMES

    return SHORT_NAMES.get(key, key)


def _show_one(profile: Profile, cluster: Cluster, plan: Prediction, sequence: int, batch: int) -> None:
    from penstock.cli.plan_text import memory_table, summary

    click.echo(summary(profile, cluster, plan, sequence, batch))
    click.echo()
    memory_table(plan)


def _show_search(profile: Profile, cluster: Cluster, result: SearchResult, sequence: int, batch: int) -> None:
    from penstock.cli.plan_text import changes_text, memory_table, plans_table, reasons_text, summary

    plans_table(result)
    click.echo(f"\nThe best plan:\n\n{summary(profile, cluster, result.best, sequence, batch)}\n")
    memory_table(result.best)
    click.echo(f"\nWhy not another:\n{reasons_text(result)}")
    click.echo(f"\nWhat would change it:\n{changes_text(profile, cluster, result, sequence, batch)}")


def _write_run(path: Path, model: Path, plan: Prediction, sequence: int, batch: int) -> None:
    """Write the config of a plan's run.

    Raises:
        ConfigError: if it cannot be written.
    """
    from penstock.cli.plan_text import run_config

    tables = _tables(model) if model.suffix == ".toml" else {}
    _write(path, run_config(tables, model, plan, sequence, batch))


def _give_code(
    profile: Profile, cluster: Cluster, plan: Prediction, batch: int, out: Path | None, as_json: bool
) -> None:
    """Write the Python of a plan, or print it."""
    from penstock.cli.plan_code import pipeline_code

    code = pipeline_code(profile, plan, batch)
    if out is not None:
        _write(out, code)
    if as_json:
        return
    if out is not None:
        click.echo(f"\nwritten: {out}")
    else:
        click.echo(
            "\nIn your script:\n\n" + "".join(f"    {line}".rstrip() + "\n" for line in code.splitlines())
        )
    click.echo(f"start:   {_launched('your_script.py', plan, cluster)}")


def _write(path: Path, text: str) -> None:
    """Write a file; raise `ConfigError` if that is not possible."""
    from penstock.atomic import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _start_command(plan: Prediction, cluster: Cluster, out: Path) -> str:
    layout = plan.layout
    if cluster.nodes == 1 and layout.dp * layout.tp == 1 and layout.pp <= 2:
        return f"penstock train {out}"
    return _launched(f"-m penstock train {out}", plan, cluster)


def _launched(script: str, plan: Prediction, cluster: Cluster) -> str:
    """Return the command that starts a script with a process for each device of a plan."""
    devices = plan.layout.devices
    if cluster.nodes == 1:
        return f"torchrun --nproc-per-node {devices} {script}"
    nodes, each = -(-devices // cluster.ranks_per_node), min(devices, cluster.ranks_per_node)
    meet = "--rdzv-backend c10d --rdzv-endpoint HOST"
    return f"torchrun --nnodes {nodes} --nproc-per-node {each} {meet} {script}"
