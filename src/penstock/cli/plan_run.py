"""Recalibration of ``penstock plan`` on a run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.output import table_console
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.plan.cluster import Cluster
    from penstock.plan.fitting.recalibration import Residual
    from penstock.plan.run_layout import Layout
    from penstock.profile.model_profile import Profile


def corrected(profile: Profile, cluster: Cluster, run: Path, quiet: bool) -> Cluster:
    """Return the cluster corrected by a run's last traced step, and print the residuals.

    Args:
        profile: profile of the run's model.
        cluster: cluster to correct.
        run: folder of the run.
        quiet: print nothing.

    Raises:
        ConfigError: if the run has no config or no measured step.
    """
    from penstock.plan.fitting.recalibration import recalibrate, residuals
    from penstock.plan.prediction import predict
    from penstock.show.planned import plan
    from penstock.show.units import is_measured
    from penstock.trace.bubbles import makespan
    from penstock.trace.folder import read_folder

    layout, sequence, batch = _layout_of(run)
    measured = {step: trace for step, trace in read_folder(run).steps.items() if is_measured(trace)}
    if not measured:
        raise ConfigError(f"{run} has no trace of a step that ran")
    step = max(measured)
    usual = plan(measured[step])
    prediction = predict(profile, cluster, layout, sequence=sequence, batch=batch)
    rows = residuals(prediction, cluster, usual.costs, float(makespan(measured[step])))
    if not quiet:
        click.echo(f"step {step} of {run}, {layout}\n")
        _show(rows)
        click.echo()
    return recalibrate(cluster, rows)


def _layout_of(run: Path) -> tuple[Layout, int, int]:
    """Return the layout, the tokens of a sample, and the samples of a step of a run, from its config."""
    from penstock.plan.run_layout import Layout

    path = run / "config.toml"
    try:
        config: dict[str, Any] = tomllib.loads(path.read_text())
        schedule, parallel, runtime = config["schedule"], config["parallel"], config.get("runtime", {})
        batch = config["train"]["batch"]
        split = schedule.get("split", "even")
        layout = Layout(
            parallel["pp"], parallel["dp"], parallel["tp"], parallel["virtual_stages"],
            batch // schedule["microbatches"], schedule["name"], runtime.get("recompute", "none"), parallel["zero"],
            parallel["sequence_parallel"], split if isinstance(split, str) else tuple(split),
        )  # fmt: skip
        return layout, config["data"]["sequence"], batch
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read the layout of the run from {path}: {error!r}") from error


def _show(rows: tuple[Residual, ...]) -> None:
    from rich.table import Table

    from penstock.show.units import time_text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("term", "predicted", "measured", "measured/predicted"):
        table.add_column(name, justify="left" if name == "term" else "right")
    for row in rows:
        ratio = f"{row.measured / row.predicted:.2f}" if row.predicted > 0 else ""
        table.add_row(row.term, time_text(row.predicted), time_text(row.measured), ratio)
    table_console().print(table)
