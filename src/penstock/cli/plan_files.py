"""Files of ``penstock plan``: the config of a run or, for a model of one's own, Python; and the command that starts it."""

from __future__ import annotations

import json
import os.path
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from penstock.base.atomic import write_text
from penstock.base.errors import ConfigError, os_errors_as
from penstock.base.output_files import PAGE, SCHEDULE, OutputFile, require_outputs, signed, signed_kind
from penstock.plan.prediction import Prediction
from penstock.plan.rank_devices import RankDevices
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import Profile
from penstock.schedule.text import is_csv
from penstock.show.figures import require_bokeh
from penstock.show.units import interval_text, size_text, time_text

HEADER = "# Written by `penstock plan`."
"""Beginning of a file that a plan is written to."""
# Tokens of a vocabulary of bytes.
_BYTES = 256
_SHARDING = ("shard", "store", "window", "reduce_every")
_PRECISION = {"fp32": "fp32", "bf16": "bf16-weights"}
"""Values of runtime.precision by the dtype of matrix products, with weights and optimizer of the size that is predicted."""


def require_writable(out: Path | None, page: Path | None, order: Path | None, inputs: list[str]) -> None:
    """Check the paths of the files before a plan is made: only a file that `penstock plan` wrote may be replaced."""
    config = signed_kind("penstock plan", HEADER)
    outputs = (
        None if out is None else OutputFile("--out", out, config),
        None if page is None else OutputFile("--html", page, PAGE),
        None if order is None else OutputFile("--search-orders", order, SCHEDULE),
    )
    require_outputs(outputs, [*inputs, *(os.path.join(path, "config.json") for path in inputs)])
    if page is not None:
        require_bokeh()


def write_signed(path: Path, text: str) -> None:
    """Write a config or Python with its checksum; raise `ConfigError` if that is not possible."""
    with os_errors_as(ConfigError, f"cannot write {path}"):
        write_text(path, signed(text))


def model_tables(model: Path) -> dict[str, Any]:
    """Return the content of a model's file that was read before: tables of a TOML file, or keys of a config.json."""
    path = model / "config.json" if model.is_dir() else model
    text = path.read_text()
    tables = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    return tables if isinstance(tables, dict) else {}


def run_tables(
    tables: dict[str, Any], model: Path, plan: Prediction, sequence: int, batch: int
) -> dict[str, dict[str, Any]]:
    """Return the sections of the config of a plan's run, the model's own tables unchanged."""
    layout, costs = plan.layout, plan.costs
    config: dict[str, dict[str, Any]] = {name: dict(table) for name, table in tables.items()}
    if not tables:
        folder = model if model.is_dir() else model.parent
        weights = any(folder.glob("*.safetensors"))
        config["model"] = (
            {"path": str(folder.resolve())}
            if weights
            else {"config": str((folder / "config.json").resolve())}
        )
        if not weights and model.is_file():
            config["model"] = {"config": str(model.resolve())}
    for key in ("path", "config"):
        if tables and (inner := config.get("model", {}).get(key)):
            config["model"][key] = str((model.parent / inner).resolve())
    config.setdefault("data", {})["sequence"] = sequence
    config.setdefault("train", {})["batch"] = batch
    config["schedule"] = {"name": layout.schedule, "microbatches": batch // layout.microbatch}
    if costs is not None and layout.split != "even":
        config["schedule"]["split"] = list(costs.counts)
    parallel = config.setdefault("parallel", {})
    if layout.cp > 1 or "cp" in parallel:
        parallel["cp"] = layout.cp
    parallel |= {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp, "virtual_stages": layout.v}
    if layout.ep > 1 or "ep" in parallel:
        parallel["ep"] = layout.ep
    for key in ("zero", *_SHARDING):  # of the model's own tables
        parallel.pop(key, None)
    parallel |= {key: value for key in _SHARDING if (value := getattr(layout, key)) not in (None, "none")}
    parallel["sequence_parallel"] = layout.sequence_parallel
    if layout.optimizer == "muon":
        config.setdefault("optim", {})["matrices"] = "Muon"
    runtime = config.setdefault("runtime", {})
    # A run recomputes no modules; whole blocks keep less between their forward and backward.
    whole = "full" if layout.modules else layout.recompute
    runtime["recompute"] = "none" if layout.recompute == "selective" else whole
    runtime["precision"] = _PRECISION[plan.dtype]
    return config


def run_config(plan: Prediction, config: dict[str, dict[str, Any]]) -> str:
    """Return the config of a plan's run as TOML, with comments."""
    notes = "".join(f"# {note}\n" for note in differences(plan.layout))
    return f"{header(plan)}{notes}\n{tomli_w.dumps(config)}"


def vocabulary_of(config: dict[str, dict[str, Any]]) -> int:
    """Return the tokens of the vocabulary of a run's Hugging Face model; 0 if its config does not say."""
    size = model_tables(Path(config["model"].get("path") or config["model"]["config"])).get("vocab_size")
    return size if isinstance(size, int) else 0


def data_of_run(config: dict[str, dict[str, Any]], vocabulary: int) -> str | None:
    """Return a sentence about the data of a run that sets no ``data.path``; None if it does, or trains no model of yours."""
    source = config["model"].get("path") or config["model"].get("config")
    if config["data"].get("path") or not source:
        return None
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    text = "the source of Python's standard library"
    if (folder / "tokenizer.json").is_file():
        return f"{text}; set data.path=FOLDER to train on your text"
    missing = f"there is no tokenizer.json in {folder}"
    if config["model"].get("path") or vocabulary < _BYTES:
        return f"none yet: {missing}, so set data.path to .npy files of tokens"
    if vocabulary == _BYTES:
        return f"the bytes of {text}; set data.path=FOLDER to train on your text"
    return (
        f"the bytes of {text}, since {missing}; put one there and set data.path=FOLDER to train on your text, or set "
        "data.path to .npy files of tokens"
    )


def why_not_trained(dtype: str) -> str | None:
    """Return why `penstock train` has no matrix products in a dtype; None if it has."""
    if dtype in _PRECISION:
        return None
    return f"penstock plan starts runs in {' or '.join(_PRECISION)}, not in {dtype}; plan with dtype=bf16 to start it"


def differences(layout: Layout) -> list[str]:
    """Return sentences about what a layout says and a config cannot."""
    sentences = []
    if layout.recompute == "selective":
        sentences.append(
            "recompute=selective: attention of the run never stores its scores, so there are none to recompute."
        )
    if layout.modules:
        sentences.append(
            f"recompute={layout.recompute}: the run recomputes whole blocks, so its step and memory are those of "
            "recompute=full."
        )
    if layout.attention == "unfused":
        sentences.append(
            "attention=unfused: the run has fused attention, so it may be faster than predicted."
        )
    if layout.chunked_loss:
        sentences.append("chunked_loss=true: penstock train computes whole logits; PipelineTrainer does not.")
    if layout.overlap is False:
        sentences.append("overlap=false: the run reduces gradients during the backward.")
    return sentences


def header(plan: Prediction) -> str:
    """Return the comment at the head of a file that a plan is written to."""
    return (
        f"{HEADER} Predicted: {time_text(plan.step_seconds)} a step ({interval_text(plan.low, plan.high)}),\n"
        f"# {plan.tokens_per_second:,.0f} {plan.unit}/s, {size_text(plan.peak_bytes)} on the fullest device.\n"
        f"# Layout: {plan.layout}\n"
        + (f"# Devices of the pipeline's ranks: {', '.join(plan.devices)}.\n" if plan.devices else "")
    )


def pipeline_code(profile: Profile, plan: Prediction, batch: int) -> str:
    """Return a script's lines that make the pipeline of a plan, from the names ``model`` and ``loss_fn``."""
    layout, costs = plan.layout, plan.costs
    arguments = {
        "microbatches": str(batch // (layout.dp * layout.microbatch)),
        "schedule": json.dumps(layout.schedule),
    }
    if layout.replicas * layout.tp > 1:
        degrees = f"pp={layout.pp}, dp={layout.dp}" + "".join(
            f", {name}={degree}" for name, degree in (("tp", layout.tp), ("cp", layout.cp)) if degree > 1
        )
        arguments = {"mesh": f"penstock.MeshShape({degrees})", **arguments}
    else:
        arguments = {"ranks": str(layout.pp), **arguments}
    if layout.v is not None and layout.v > 1 and not is_csv(layout.schedule):
        arguments["virtual_stages"] = str(layout.v)
    if costs is not None and layout.split != "even":
        arguments["split"] = str(list(costs.counts))
    if layout.recompute == "full" or isinstance(layout.recompute, int):
        arguments["recompute"] = json.dumps(layout.recompute)
    half = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(plan.dtype)
    if half is not None and (profile.autocast or profile.shape is not None):
        arguments["autocast"] = half
    keys = [*(_SHARDING if layout.sharding.comes_and_goes else ()), "sequence_parallel"]
    options = [
        f"{key}={json.dumps(value) if isinstance(value, str) else value}"
        for key in keys
        if (value := getattr(layout, key)) not in (None, False, "none")
    ]
    if options:
        arguments["parallel"] = f"penstock.ParallelOptions({', '.join(options)})"
    lines = "".join(f"    {name}={value},\n" for name, value in arguments.items())
    text = f"pipe = penstock.Pipeline(\n    model,\n    loss_fn,\n{lines})\n"
    if layout.sharding.shard != "none":
        text += "optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, zero=True)\n"
    imports = "import torch\n\nimport penstock\n" if "torch." in text else "import penstock\n"
    return f"{header(plan)}{imports}\n{text}"


def start_of_run(plan: Prediction, out: Path) -> list[str]:
    """Return the lines of text that say how to start `penstock train` with a plan's config."""
    layout, cluster = plan.layout, plan.cluster
    # Threads run on the CPU alone; devices with rated peaks are GPUs, one for each process of a launcher.
    on_cpu = cluster.device.peak is None
    if on_cpu and cluster.nodes == 1 and layout.replicas * layout.tp == 1 and layout.pp <= 2:
        return [f"penstock train {out}"]
    return start_of_script(f"-m penstock train {out}", plan)


def start_of_script(script: str, plan: Prediction) -> list[str]:
    """Return the lines of text that say how to start a script with one process for each device of a plan.

    Ranks fill the nodes one after the other, as in the prediction.
    """
    cluster = plan.cluster
    if len(cluster.groups) > 1:
        return _start_on_groups(script, plan)
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


def _start_on_groups(script: str, plan: Prediction) -> list[str]:
    """Return the lines that start a script on groups of unlike devices, whose order is that of the pipeline's ranks."""
    cluster = plan.cluster
    ranks = np.bincount(RankDevices(cluster, plan.layout).places, minlength=len(cluster.groups))
    width = plan.layout.replicas * plan.layout.tp
    used = [(group, int(n) * width) for group, n in zip(cluster.groups, ranks, strict=True) if n]
    if cluster.between.same_host:
        order = ", ".join(f"{count} x {group.name}" for group, count in used)
        return [
            f"CUDA_VISIBLE_DEVICES must list the devices in this order: {order};",
            f"torchrun --nproc-per-node {plan.layout.devices} {script}",
        ]
    nodes = [
        (min(group.ranks_per_node, count - first), group.name)
        for group, count in used
        for first in range(0, count, group.ranks_per_node)
    ]
    meet = f"torchrun --nnodes {len(nodes)} --master-addr HOST"
    # Of nodes that start alike, the first and the last.
    ends = [
        n
        for n, node in enumerate(nodes)
        if n in (0, len(nodes) - 1) or node != nodes[n - 1] or node != nodes[n + 1]
    ]
    return [
        "on each host its own line, as the order of devices is the plan's; HOST is node 0:",
        *(f"{meet} --node-rank {n} --nproc-per-node {nodes[n][0]} {script}  # {nodes[n][1]}" for n in ends),
        *(
            [f"... and so on: {len(nodes) - len(ends)} more nodes like those before and after"]
            if len(ends) < len(nodes)
            else []
        ),
    ]
