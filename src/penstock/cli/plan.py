"""``penstock plan``: the layout of a run, with its predicted time and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from penstock.base.errors import ConfigError
from penstock.cli.cost_arguments import parse_bytes, parse_count
from penstock.cli.plan_files import (
    data_of_run,
    differences,
    model_tables,
    pipeline_code,
    require_writable,
    run_config,
    run_tables,
    start_of_run,
    start_of_script,
    vocabulary_of,
    why_not_trained,
    write_signed,
)
from penstock.cli.plan_run import compare, config_of, precision_of
from penstock.cli.plan_text import (
    beside_table,
    changes_text,
    memory_table,
    plans_table,
    reasons_text,
    summary,
)
from penstock.plan.cluster import DATA_SHEETS, PRESETS, Cluster, read_cluster, with_memory
from penstock.plan.explore.branch_and_bound import search
from penstock.plan.explore.outlook import headline, left_out_text, limits_text
from penstock.plan.explore.search_result import SearchResult
from penstock.plan.explore.searched_orders import with_searched_order
from penstock.plan.plan_page import write_plan
from penstock.plan.prediction import Prediction, predict
from penstock.plan.run_layout import Layout, layout_values
from penstock.plan.side_by_side import Training
from penstock.plan.stage_costs import dtype_of
from penstock.profile.model_profile import (
    Profile,
    default_sequence,
    is_profile,
    read_model,
    with_lora,
    with_positions,
)
from penstock.profile.read_shape import NoClosedFormError

# Reasons against other layouts that are printed without --why.
_REASONS = 3


@click.command(
    epilog="Example:  penstock plan my-model/config.json --cluster 'h100*8x4' --sequence 4096 --batch 512\n\n"
    "          penstock plan model.toml --cluster cluster.toml --layout pp=4,dp=2,schedule=zb-v,recompute=full\n\n"
    "          penstock plan my-model --cluster 'a100-80gb*8x64' --batch 1536 --fix tp=8 --fix dp=8 --json"
)
@click.argument("model")
@click.option(
    "--cluster", "-c", "cluster_name", required=True, metavar="NAME*NxM[+...]|FILE",
    help="Machines: a preset with N devices a node and M nodes, or a TOML file, as `penstock doctor --measure` writes; with "
    "+ between, groups of unlike devices. "
    f"Presets fitted to runs: {', '.join(PRESETS)}. From data sheets: {', '.join(DATA_SHEETS)}.",
)  # fmt: skip
@click.option(
    "--sequence", "-s", type=int, metavar="S", help="Tokens of a sample. Default: the config's, or 2048."
)
@click.option(
    "--batch", "-b", type=int, metavar="B",
    help="Samples of a step, over all devices. Default: the config's, or a power of two, at least 4 per device.",
)  # fmt: skip
@click.option(
    "--layout", "layout_text", metavar="KEY=VALUE,...",
    help="Predict this layout only. Keys: pp, dp, tp, ep, cp, v, microbatch, schedule, recompute, shard, window, "
    "reduce_every, sequence_parallel, split, attention, overlap, dtype, chunked_loss, optimizer, imbalance.",
)  # fmt: skip
@click.option(
    "--beside", "beside_text", metavar="KEY=VALUE,...",
    help="Layout that you run today: print it beside the proposed one. Keys as in --layout.",
)  # fmt: skip
@click.option(
    "--tokens", "tokens_text", metavar="N",
    help="Tokens of the whole training, such as 300B: print its days and device hours.",
)  # fmt: skip
@click.option(
    "--positions", type=int, metavar="N",
    help="Longest sample that the model takes, in tokens, in place of its config's. Longer samples than the config's are "
    "only predicted.",
)  # fmt: skip
@click.option(
    "--lora", type=int, default=0, metavar="RANK",
    help="Train adapters of this rank beside all matrices of the blocks, and nothing else. Only predicted.",
)  # fmt: skip
@click.option(
    "--base-bits", type=int, default=16, metavar="4|16",
    help="Bits of the matrices beside which adapters are trained: 4 for QLoRA. Default: 16.",
)  # fmt: skip
@click.option(
    "--fix", "fixes", multiple=True, metavar="KEY=VALUE",
    help="Search only layouts with this value. May be repeated. Keys as in --layout.",
)  # fmt: skip
@click.option(
    "--schedule",
    "schedules",
    metavar="A,B,C",
    help="Schedules to search: families, MODULE:FUNCTION of your own, or CSV files. Default: all families of the catalogue "
    "but round-trip, which has all weights on every rank.",
)
@click.option("--devices", type=int, metavar="N", help="Devices to use. Default: all of the cluster.")
@click.option(
    "--memory-limit",
    metavar="BYTES",
    help="Memory of a device that a plan may use, such as 70GB. Default: all but 4 GB, or a tenth of a small device.",
)
@click.option(
    "--top", type=click.IntRange(1, 100), default=10, show_default=True, help="Number of plans to print."
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), metavar="T", help="End the search after T seconds."
)
@click.option(
    "--search-orders", "order_seconds", type=click.FloatRange(0, min_open=True), metavar="T",
    help="Search for a better order for each of the three best plans, T seconds each. One that beats all plans is used and "
    "written to plan-order.csv, in the folder of --out. Default: no search.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Config with the best plan, for `penstock train`. Default: run.toml, unless --layout or --json is given. "
    "For a profile: Python that makes the pipeline, which is printed by default.",
)  # fmt: skip
@click.option(
    "--from-run", "run", type=click.Path(file_okay=False, exists=True, path_type=Path), metavar="RUN",
    help="Folder of a run of this model on such devices: print where the prediction of its step is wrong, and correct the "
    "cluster by it. --sequence and --batch default to the run's.",
)  # fmt: skip
@click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), metavar="PATH",
    help="Page with the timeline, the memory of every rank, and time over memory of all layouts; works offline.",
)  # fmt: skip
@click.option(
    "--why", is_flag=True, help="Print all reasons against other layouts. Default: the nearest three."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    model: str,
    cluster_name: str,
    sequence: int | None,
    batch: int | None,
    layout_text: str | None,
    beside_text: str | None,
    tokens_text: str | None,
    positions: int | None,
    lora: int,
    base_bits: int,
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
    why: bool,
    as_json: bool,
) -> None:
    """Choose how to run a model on machines: the layout, whether it fits, how fast it is.

    MODEL is a config.json or a folder with one, a TOML file with [model], or a profile that penstock.profile_layers made of
    your own layers. The search covers pipeline, data and tensor parallel degrees, devices that divide experts or long
    samples, virtual stages, microbatches, all schedules, recompute, what replicas shard, and the split of the blocks; the
    step of every plan is simulated as it will run. Ctrl-C ends the search with the best plans so far.
    """
    values = layout_values_of(layout_text, fixes, schedules, devices, order_seconds)
    own, asked = is_profile(model), out is not None
    if not asked and layout_text is None and not as_json and not own:
        out = Path("run.toml")
    if own and out is not None and out.suffix == ".toml":
        raise click.UsageError(
            f"a plan of a profile is Python for your own script, got --out {out}; give --out plan.py"
        )
    files = [part.strip().partition("*")[0] for part in (cluster_name, *cluster_name.split("+"))]
    read = [model, *files, *([] if run is None else [str(run / "config.toml")])]
    order = (
        None if order_seconds is None else (out or Path("run.toml")).absolute().with_name("plan-order.csv")
    )
    require_writable(out, page, order, read)
    if seconds is not None and not seconds > 0:
        raise click.UsageError(f"--seconds must be above 0, got {seconds}")
    tokens = None if tokens_text is None else parse_count("--tokens", tokens_text)
    for name, value in (("--sequence", sequence), ("--batch", batch), ("--positions", positions)):
        if value is not None and not 1 <= value <= 2**31:
            raise ConfigError(f"{name} must be 1 to {2**31:,}, got {value}")
    cluster = read_cluster(cluster_name)
    profile = _read_profile(model, cluster, run, sequence, values)
    longest = None
    if positions is not None:
        longest = profile.shape and (profile.shape.positions or profile.shape.context)
        profile = with_positions(profile, positions)
    if lora or base_bits != 16:
        profile = with_lora(profile, lora, base_bits)
    if memory_limit is not None:
        cluster = with_memory(cluster, parse_bytes("--memory-limit", memory_limit))
    untrained = None if own else why_untrained(profile, cluster, values)
    if longest and sequence is not None and sequence > longest:
        untrained = (
            f"the model's config allows samples of {longest:,} tokens; set its max_position_embeddings, and what scales its "
            f"rotary positions, to plan a run of {sequence:,}"
        )
    if lora:
        untrained = "penstock train has no adapters; train them with penstock.PipelineTrainer"
    if asked and untrained is not None:
        raise ConfigError(f"cannot write {out}: {untrained}, or predict it without --out")
    comparison = None
    if run is not None:
        comparison = compare(profile, cluster, run, sequence)
        cluster, sequence, batch = comparison.cluster, comparison.sequence, batch or comparison.batch
        if not as_json:
            comparison.show()
    sequence, batch = sizes(Path(model), profile, cluster, sequence, batch)
    result: Prediction | SearchResult
    if layout_text is not None:
        result = best = predict(profile, cluster, Layout(**values), sequence=sequence, batch=batch)
    else:
        result = _search(
            profile,
            cluster,
            sequence=sequence,
            batch=batch,
            fixed=values,
            schedules=schedules,
            devices=devices,
            top=top,
            seconds=seconds,
            as_json=as_json,
        )
        if order is not None and order_seconds is not None:
            result = with_searched_order(
                profile, result, order, sequence=sequence, batch=batch, seconds=order_seconds
            )
        best = result.best
    today = None
    if beside_text is not None:
        today = predict(profile, cluster, beside_text, sequence=sequence, batch=batch)
    training = None if tokens is None else Training.of(best, tokens)
    # Files come first: they are complete even if the reader of the output is gone.
    lines = []
    if page is not None:
        write_plan(page, profile, cluster, result, sequence=sequence, batch=batch)
        lines += ["", f"page:    {page}"]
    if own:
        lines += _code_lines(profile, best, batch, out)
    elif untrained is not None and out is not None:
        lines += ["", f"There is no {out}: {untrained}."]
    elif out is not None:
        lines += _run_lines(Path(model), profile, best, sequence=sequence, batch=batch, out=out)
    if best.layout.schedule == str(order):
        lines += ["", f"order:   {order}"]
    if as_json:
        ran: dict[str, Any] = {} if comparison is None else {"from_run": comparison.as_dict()}
        if today is not None:
            ran["beside"] = today.as_dict()
        if training is not None:
            ran["training"] = training._asdict()
        click.echo(json.dumps(result.as_dict() | ran))
        return
    _show(profile, cluster, result, sequence=sequence, batch=batch, why=why, today=today, training=training)
    for line in lines:
        click.echo(line)


def _read_profile(
    model: str, cluster: Cluster, run: Path | None, sequence: int | None, values: Mapping[str, Any]
) -> Profile:
    """Return the profile of a model, traced if its family has no closed form; only then it loads torch."""
    try:
        return read_model(model)
    except NoClosedFormError as error:
        from penstock.huggingface.traced_config import trace_config

        if (tp := values.get("tp", 1)) != 1:
            raise ConfigError(
                f"{error.path} has no closed form and is traced with tp=1, got tp={tp}; take tp=1"
            ) from error
        config = model_tables(Path(model)) if run is None else config_of(run)
        of_data = config.get("data", {}).get("sequence")
        default = cluster.dtype if run is None else precision_of(config)
        length = sequence or (of_data if isinstance(of_data, int) else None)
        return trace_config(error, length, values.get("dtype") or default)


def _search(
    profile: Profile, cluster: Cluster, *, sequence: int, batch: int, fixed: dict[str, Any], schedules: str | None,
    devices: int | None, top: int, seconds: float | None, as_json: bool,
) -> SearchResult:  # fmt: skip
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
            profile, cluster, sequence=sequence, batch=batch, fixed=fixed, schedules=names, devices=devices, top=top,
            limit=seconds, progress=progress,
        )  # fmt: skip


def _show(
    profile: Profile,
    cluster: Cluster,
    result: Prediction | SearchResult,
    *,
    sequence: int,
    batch: int,
    why: bool,
    today: Prediction | None,
    training: Training | None,
) -> None:
    best = result if isinstance(result, Prediction) else result.best
    if isinstance(result, SearchResult):
        click.echo("\n".join(headline(profile, result, sequence)) + "\n")
    if today is not None:
        beside_table(today, best)
    if training is not None:
        click.echo(f"{training.text(best)}\n")
    if isinstance(result, Prediction):
        click.echo(f"{summary(profile, result, sequence, batch)}\n")
        click.echo(f"{limits_text(profile, result, sequence)}\n")
        memory_table(result)
        return
    plans_table(result)
    click.echo(f"\nThe best plan:\n\n{summary(profile, best, sequence, batch)}\n")
    memory_table(best)
    click.echo(f"\nWhy not another:\n{reasons_text(result, None if why else _REASONS)}")
    click.echo(f"\n{left_out_text(result)}")
    click.echo(f"\nWhat would change it:\n{changes_text(profile, cluster, result, sequence, batch)}")


def _run_lines(
    model: Path, profile: Profile, plan: Prediction, *, sequence: int, batch: int, out: Path
) -> list[str]:
    """Write the config of a plan's run; return the lines of text that say how to start it."""
    config = run_tables(model_tables(model) if model.suffix == ".toml" else {}, model, plan, sequence, batch)
    write_signed(out, run_config(plan, config))
    notes = [f"note:    {note}" for note in differences(plan.layout)]
    shape = profile.shape
    data = data_of_run(config, vocabulary_of(config) if shape is None else shape.vocabulary)
    notes += [] if data is None else [f"data:    {data}"]
    return ["", f"written: {out}", *notes, *_indented("start:   ", start_of_run(plan, out))]


def _code_lines(profile: Profile, plan: Prediction, batch: int, out: Path | None) -> list[str]:
    """Write the Python of a plan if it has a path; return the lines of text that show it and say how to start."""
    code = pipeline_code(profile, plan, batch)
    if out is not None:
        write_signed(out, code)
        lines = ["", f"written: {out}"]
    else:
        lines = ["", "In your script:", "", *(f"    {line}".rstrip() for line in code.splitlines()), ""]
    return [*lines, *_indented("start:   ", start_of_script("your_script.py", plan))]


def _indented(name: str, lines: list[str]) -> list[str]:
    """Return lines that begin in the same column, the first one behind a name."""
    return [(name if n == 0 else " " * len(name)) + line for n, line in enumerate(lines)]


def layout_values_of(
    layout: str | None, fixes: tuple[str, ...], schedules: str | None, *others: float | None
) -> dict[str, Any]:
    """Return the values that ``--layout`` or ``--fix`` give to a layout; ``--layout`` allows no options of a search."""
    if layout is None:
        return layout_values(",".join(fixes))
    if fixes or schedules or any(value is not None for value in others):
        raise click.UsageError(
            "--layout predicts one layout; --fix, --schedule, --devices and --search-orders belong to a search"
        )
    values = layout_values(layout)
    if not values:
        raise click.UsageError(
            "--layout must have at least one value, as in pp=2,dp=4; leave it out to search"
        )
    return values


def sizes(
    model: Path, profile: Profile, cluster: Cluster, sequence: int | None, batch: int | None
) -> tuple[int, int]:
    """Return the tokens of a sample and the samples of a step: as given, of the model's file, or the defaults."""
    tables = model_tables(model)
    # The default batch is the least power of two that has 4 samples for each device.
    of_data, of_train = tables.get("data", {}).get("sequence"), tables.get("train", {}).get("batch")
    return (
        sequence or (of_data if isinstance(of_data, int) else default_sequence(profile)),
        batch or (of_train if isinstance(of_train, int) else 2 ** (4 * cluster.devices - 1).bit_length()),
    )


def why_untrained(profile: Profile, cluster: Cluster, values: Mapping[str, Any]) -> str | None:
    """Return why no run can have a layout's values, with the cluster's dtype; None if one can."""
    if values.get("cp", 1) > 1 and values.get("sequence_parallel") and values.get("tp", 1) > 1:
        return "cp beside sequence_parallel is only predicted; plan with sequence_parallel=false to start it"
    return why_not_trained(dtype_of(profile, cluster, Layout(dtype=values.get("dtype"))))
