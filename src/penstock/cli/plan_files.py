"""Files of ``penstock plan``, and the command that starts a plan's run."""

from __future__ import annotations

import json
import os.path
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError

if TYPE_CHECKING:
    from penstock.plan.cluster import Cluster
    from penstock.plan.prediction import Prediction


def require_writable(out: Path | None, page: Path | None, order: Path | None, inputs: list[str]) -> None:
    """Check the paths of the files before a plan is made: only a file that `penstock plan` wrote may be replaced."""
    from penstock.base.output_files import PAGE, SCHEDULE, OutputFile, require_outputs, signed_kind
    from penstock.cli.plan_config import HEADER

    config = signed_kind("penstock plan", HEADER)
    outputs = (
        None if out is None else OutputFile("--out", out, config),
        None if page is None else OutputFile("--html", page, PAGE),
        None if order is None else OutputFile("--search-orders", order, SCHEDULE),
    )
    require_outputs(outputs, [*inputs, *(os.path.join(path, "config.json") for path in inputs)])
    if page is not None:
        from penstock.show.figures import require_bokeh

        require_bokeh()


def write_signed(path: Path, text: str) -> None:
    """Write a config or Python with its checksum; raise `ConfigError` if that is not possible."""
    from penstock.base.atomic import write_text
    from penstock.base.output_files import signed

    try:
        write_text(path, signed(text))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def model_tables(model: Path) -> dict[str, Any]:
    """Return the content of a model's file that was read before: tables of a TOML file, or keys of a config.json."""
    import tomllib

    path = model / "config.json" if model.is_dir() else model
    text = path.read_text()
    tables = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    return tables if isinstance(tables, dict) else {}


def start_of_run(plan: Prediction, cluster: Cluster, out: Path) -> list[str]:
    """Return the lines of text that say how to start `penstock train` with a plan's config."""
    layout = plan.layout
    if cluster.nodes == 1 and layout.dp * layout.tp == 1 and layout.pp <= 2:
        return [f"penstock train {out}"]
    return start_of_script(f"-m penstock train {out}", plan, cluster)


def start_of_script(script: str, plan: Prediction, cluster: Cluster) -> list[str]:
    """Return the lines of text that say how to start a script with one process for each device of a plan.

    Ranks fill the nodes one after the other, as in the prediction.
    """
    each = cluster.ranks_per_node
    nodes, rest = divmod(plan.layout.devices, each)
    if not nodes or (nodes, rest) == (1, 0):
        return [f"torchrun --nproc-per-node {plan.layout.devices} {script}"]
    if not rest:
        meet = "--rdzv-backend c10d --rdzv-endpoint HOST"
        return [f"torchrun --nnodes {nodes} --nproc-per-node {each} {meet} {script}"]

    def on(node: str, processes: int) -> str:
        meet = f"--node-rank {node} --master-addr HOST"
        return f"torchrun --nnodes {nodes + 1} {meet} --nproc-per-node {processes} {script}"

    return [
        f"the last node has {rest} of the {plan.layout.devices} processes; HOST is node 0:",
        *(on(str(node), each) for node in range(min(nodes, 2))),
        *([f"... and so on up to --node-rank {nodes - 1}"] if nodes > 2 else []),
        on(str(nodes), rest),
    ]
