"""A plan compared with a run: where its prediction is wrong, and the cluster that corrects it."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from penstock.base.errors import ConfigError
from penstock.cli.output import table_console
from penstock.plan.cluster import Cluster
from penstock.plan.fitting import Residual, recalibrate, residuals
from penstock.plan.prediction import Prediction, predict
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile
from penstock.profile.read_shape import NoClosedFormError, read_shape
from penstock.show.planned import plan
from penstock.show.run import read_run
from penstock.show.units import finite, interval_text, is_measured, time_text
from penstock.trace.bubbles import makespan
from penstock.trace.events import Trace


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The prediction of a run's step, and what was measured."""

    run: Path
    step: int
    prediction: Prediction
    rows: tuple[Residual, ...]
    cluster: Cluster
    sequence: int
    batch: int

    @property
    def inside(self) -> bool | None:
        """True if the measured step is inside the predicted interval; None without metrics or interval."""
        step = next((row for row in self.rows if row.term == "step"), None)
        low, high = self.prediction.low, self.prediction.high
        if step is None or low is None or high is None:
            return None
        return low <= step.measured <= high

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON can represent."""
        return {
            "run": str(self.run),
            "step": self.step,
            "layout": self.prediction.layout.as_dict(),
            "low": self.prediction.low,
            "high": self.prediction.high,
            "inside": self.inside,
            "terms": [row._asdict() for row in self.rows],
        }

    def show(self) -> None:
        click.echo(f"step {self.step} of {self.run}, {self.prediction.layout}\n")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("term", "predicted", "measured", "measured/predicted"):
            table.add_column(name, justify="left" if name == "term" else "right")
        for row in self.rows:
            ratio = f"{row.measured / row.predicted:.2f}" if row.predicted > 0 else ""
            table.add_row(row.term, time_text(row.predicted), time_text(row.measured), ratio)
        table_console().print(table)
        if self.inside is not None:
            where = "inside" if self.inside else "outside"
            interval = interval_text(self.prediction.low, self.prediction.high)
            click.echo(f"The measured step is {where} the predicted interval of {interval}.")
        click.echo("The predictions below use the cluster corrected by these factors.\n")


def compare(profile: Profile, cluster: Cluster, run: Path, sequence: int | None) -> RunComparison:
    """Compare the prediction of a run's step with its metrics and its trace of usual length."""
    if len(cluster.groups) > 1:
        raise ConfigError(
            f"--from-run corrects the rates of alike devices, got {cluster.name}; give the cluster of one group, and its run"
        )
    config = config_of(run)
    layout, length, batch = _layout_of(run, config)
    _require_same_model(profile, run, config)
    if sequence not in (None, length):
        raise ConfigError(
            f"--sequence must equal the run's, {length} tokens, got {sequence}; leave it out, or give a run with samples of "
            f"{sequence} tokens"
        )
    if profile.shape is not None:
        layout = layout.with_values(dtype=precision_of(config))
        if layout.dtype not in cluster.device.matmul:
            raise ConfigError(
                f"{run} multiplied in {layout.dtype}, and {cluster.name} has rates for {', '.join(cluster.device.matmul)}; "
                "give a run on the devices of the cluster"
            )
    view = read_run(run)
    step, trace = _usual_step(run, view.traces)
    prediction = predict(profile, cluster, layout, sequence=length, batch=batch)
    seconds = _seconds_of_step(view.metrics, batch * length)
    rows = residuals(prediction, cluster, plan(trace).costs, float(makespan(trace)), seconds)
    return RunComparison(
        run=run,
        step=step,
        prediction=prediction,
        rows=rows,
        cluster=recalibrate(cluster, rows),
        sequence=length,
        batch=batch,
    )


def precision_of(config: dict[str, Any]) -> str:
    """Return the dtype of the matrix products of a run, from its config."""
    return str(config.get("runtime", {}).get("precision", "fp32")).removesuffix("-weights")


def config_of(run: Path) -> dict[str, Any]:
    """Return the config of a run."""
    path = run / "config.toml"
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config of the run, {path}: {error}") from error


def _layout_of(run: Path, config: dict[str, Any]) -> tuple[Layout, int, int]:
    """Return the layout, the tokens of a sample, and the samples of a step of a run, from its config."""
    try:
        schedule, parallel, runtime = config["schedule"], config["parallel"], config.get("runtime", {})
        batch = config["train"]["batch"]
        split = schedule.get("split", "even")
        split = "even" if split == "measured" else split
        layout = Layout(
            pp=parallel["pp"],
            dp=parallel["dp"],
            tp=parallel["tp"],
            ep=parallel.get("ep", 1),
            cp=parallel.get("cp", 1),
            v=parallel["virtual_stages"],
            microbatch=batch // schedule["microbatches"],
            schedule=schedule["name"],
            recompute=runtime.get("recompute", "none"),
            shard=_shard(parallel),
            store=parallel.get("store", "none"),
            window=parallel.get("window"),
            reduce_every=parallel.get("reduce_every"),
            sequence_parallel=parallel["sequence_parallel"],
            split=split if isinstance(split, str) else tuple(split),
        )
        return layout, int(config["data"]["sequence"]), batch
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"cannot read the layout of the run from {run / 'config.toml'}: {error!r}"
        ) from error


def _shard(parallel: dict[str, Any]) -> Any:
    """Return what the replicas of a run sharded."""
    shard = parallel.get("shard", "none")
    return "optimizer" if shard == "none" and parallel["zero"] else shard


def _require_same_model(profile: Profile, run: Path, config: dict[str, Any]) -> None:
    """Raise `ConfigError` if a run's model has other sizes than the one that is planned."""
    table = config.get("model", {})
    # A finished run of a Hugging Face model has its config.
    kept = (table.get("config") or table.get("path")) and (run / "config.json").is_file()
    for what, planned, ran in _sizes(profile, run / ("config.json" if kept else "config.toml")):
        if planned != ran:
            raise ConfigError(
                f"{run} trained a different model from {profile.name}: it has {ran:,} {what}, and {profile.name} has "
                f"{planned:,}; give a run of the model that you plan"
            )


def _sizes(profile: Profile, path: Path) -> list[tuple[str, int, int]]:
    """Return (name, size of the planned model, size of the run's) for every size that both have."""
    planned = profile.shape
    try:
        shape = read_shape(path)
    except NoClosedFormError as error:
        from penstock.huggingface.traced_config import sizes_of

        blocks, parameters = sizes_of(error)
        return [("blocks", profile.blocks, blocks), ("parameters", round(profile.parameters), parameters)]
    if planned is None:
        counts = [("blocks", profile.blocks, shape.layers)]
        # A profile of one's own layers may count tied weights on both of them.
        return (
            counts if shape.tied else [*counts, ("parameters", round(profile.parameters), shape.parameters)]
        )
    names = {
        "layers": "blocks", "hidden": "values in a hidden state", "heads": "heads", "kv_heads": "key and value heads",
        "ffn": "values in a feed-forward", "experts": "experts", "experts_per_token": "experts of a token",
        "vocabulary": "tokens in its vocabulary", "parameters": "parameters",
    }  # fmt: skip
    return [(what, getattr(planned, name), getattr(shape, name)) for name, what in names.items()]


def _usual_step(run: Path, traces: Mapping[int, Trace]) -> tuple[int, Trace]:
    """Return the measured step with the median makespan; the first step, which warms up, only if there is no other."""
    measured = [(step, trace) for step, trace in traces.items() if is_measured(trace)]
    if not measured:
        raise ConfigError(f"{run} has no trace of a step that ran")
    steady = [pair for pair in measured if pair[0] > 1] or measured
    return sorted(steady, key=lambda pair: float(makespan(pair[1])))[len(steady) // 2]


def _seconds_of_step(metrics: Sequence[Mapping[str, Any]], tokens: int) -> float | None:
    """Return the median seconds of a run's steps; those before the first line of metrics count only if there is no other."""
    speeds = [finite(row.get("tokens_per_second")) for row in metrics if row.get("kind") == "train"]
    steady = [speed for speed in (speeds[1:] or speeds) if speed]
    return tokens / statistics.median(steady) if steady else None
