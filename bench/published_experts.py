"""Published runs of mixtures of experts as inputs of a prediction, and what each leaves open.

Rows are those of ``bench/data/end_to_end.csv`` with ``ep`` above 1 on devices that have a preset.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.comparison import Row
from bench.fit import with_rates
from bench.published_runs import DATA, Run, preset_of
from penstock.plan.cluster import Cluster, read_cluster
from penstock.plan.prediction import Prediction, predict
from penstock.plan.run_layout import Layout
from penstock.profile.model_profile import of_shape
from penstock.profile.model_shape import ModelShape

_DEEPSEEK: dict[str, Any] = {
    "heads": 128, "kv_heads": 128, "head_size": 192, "query_rank": 1536, "kv_rank": 512, "rotary_size": 64,
    "value_size": 128,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "kv_heads": 4, "head_size": 128, "head_norm_weights": 256, "vocabulary": 151936, "experts": 128,
    "experts_per_token": 8,
}  # fmt: skip
_V3: dict[str, Any] = {
    **_DEEPSEEK, "hidden": 7168, "ffn": 18432, "vocabulary": 129280, "experts": 256, "experts_per_token": 8,
    "expert_ffn": 2048, "shared_ffn": 2048,
}  # fmt: skip
# Sizes of the configs that their makers publish, by the beginning of a row's name.
_SIZES: dict[str, dict[str, Any]] = {
    "DeepSeekV2 truncated": {
        **_DEEPSEEK, "layers": 4, "hidden": 5120, "ffn": 12288, "vocabulary": 102400, "experts": 160,
        "experts_per_token": 6, "expert_ffn": 1536, "shared_ffn": 3072, "dense_layers": 1,
    },
    "DeepSeekV3 truncated": {**_V3, "layers": 4, "dense_layers": 1},
    "DeepSeekV3 proxy": {**_V3, "layers": 15},
    "DeepSeekV3": {**_V3, "layers": 61, "dense_layers": 3},
    "Qwen3_30B": {**_QWEN, "layers": 48, "hidden": 2048, "heads": 32, "ffn": 6144, "expert_ffn": 768},
    "Qwen3_235B": {**_QWEN, "layers": 94, "hidden": 4096, "heads": 64, "ffn": 12288, "expert_ffn": 1536},
    "GPT OSS 120B": {
        "layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_size": 64, "ffn": 2880, "vocabulary": 201088,
        "head_norm_weights": 64, "qkv_bias": True, "output_bias": True, "ffn_bias": True, "experts": 128,
        "experts_per_token": 4, "expert_ffn": 2880,
    },
}  # fmt: skip
_GROUPS = {
    "SimuMax": "SimuMax", "Automodel": "AutoModel", "Megatron-LM #": "Megatron-LM", "Bridge": "Megatron-Bridge",
}  # fmt: skip


def expert_runs() -> Iterator[Run]:
    """Yield the runs whose model and layout are published."""
    with open(DATA / "end_to_end.csv", newline="") as file:
        for row in csv.DictReader(file):
            name = next((name for name in _SIZES if row["model"].startswith(name)), None)
            gpu = preset_of(row["gpu"])
            if name is not None and gpu is not None and row["ep"] not in ("", "1"):
                yield _run(row, ModelShape(name=name, **_SIZES[name]), gpu)


def _run(row: dict[str, str], shape: ModelShape, gpu: str) -> Run:
    v = int(row["vp"]) if row["vp"].isdigit() else 1
    eight = "FP8" in row["notes"]
    proxy = shape.name == "DeepSeekV3 proxy"
    layout = Layout(
        pp=int(row["pp"]),
        dp=int(row["dp"]),
        ep=int(row["ep"]),
        v=v if v > 1 else None,
        microbatch=int(row["microbatch"]),
        schedule="1f1b" if v == 1 else "interleaved-1f1b",
        recompute=row["recompute"] or "none",
        shard="optimizer",
        # The embedding with two blocks, six stages of two, and the block of multi-token prediction with the loss.
        split=(2,) * 7 + (1,) if proxy else "even",
        dtype="fp8" if eight else "bf16",
    )
    sequence, batch, gpus = int(row["seq"]), int(row["global_batch"]), int(row["gpus"])
    seconds = float(row["iter_time_s"] or 0)
    if not seconds:
        seconds = _flops(shape, sequence) * sequence * batch / gpus / float(row["tflops_per_gpu"]) / 1e12
    return Run(
        group=next(group for key, group in _GROUPS.items() if key in row["source"]),
        source=row["source"],
        table=row["table"],
        model=row["model"],
        gpu=gpu,
        profile=of_shape(shape),
        layout=layout,
        sequence=sequence,
        batch=batch,
        gpus=gpus,
        seconds=seconds,
        memory=float(row["peak_mem_GB"]) if row["peak_mem_GB"] else None,
        notes=row["notes"],
    )


def _flops(shape: ModelShape, sequence: int) -> float:
    """Return FLOPs of a token as Megatron-LM counts them: matrix products of chosen experts, and half of the scores."""
    query, _, value = shape.attention_sizes
    scores = sequence * (query + value * shape.heads // shape.kv_heads)
    matrices = sum(rows * columns for rows, columns in (*shape.latent_matrices, *shape.head_matrices))
    total = 2 * shape.hidden * shape.vocabulary
    for k in range(shape.layers):
        ffn = shape.ffn if k < shape.dense_layers else shape.active_ffn
        total += 2 * (matrices + shape.hidden * (3 * ffn + shape.experts)) + scores
    return 3.0 * total


def open_question(run: Run, plan: Prediction) -> str:
    """Return what a run leaves open that its step depends on; empty if nothing is."""
    if "canonical recipe" in run.notes:
        return "exchange and its overlap not published"
    if "exchange is hidden" in run.notes:
        return "exchange hidden by its recipe"
    if run.memory is None and run.layout.recompute == "none" and not plan.fits:
        return "recompute not published, and it does not fit without"
    return ""


def cluster_of(run: Run) -> Cluster:
    """Return a run's cluster; an exchange that sends a token once to each node has a wider network by so much."""
    cluster = with_rates(read_cluster(run.gpu), {}, run.gpus)
    shape, nodes = run.profile.shape, -(-run.layout.ep // cluster.ranks_per_node)
    assert shape is not None
    if nodes == 1 or not any(word in run.notes for word in ("hybridep", "canonical")):
        return cluster
    # Of k experts at random, so many are on other nodes, and so many other nodes have at least one.
    rows = shape.experts_per_token * (nodes - 1) / nodes
    once = (nodes - 1) * (1 - (1 - 1 / nodes) ** shape.experts_per_token)
    network = replace(cluster.network, bandwidth=cluster.network.bandwidth * rows / once)
    return replace(cluster, network=network)


def expert_rows(quick: bool) -> Iterator[Row]:
    """Yield the predicted step of every run beside the measured one."""
    for n, run in enumerate(expert_runs()):
        if quick and n % 8:
            continue
        plan = predict(run.profile, cluster_of(run), run.layout, sequence=run.sequence, batch=run.batch)
        layout = run.layout.with_values(dtype=None) if run.layout.dtype == "bf16" else run.layout
        yield Row(
            group=f"{run.group}, {run.gpu}",
            model=run.model,
            layout=f"{layout}, batch {run.batch}, sequence {run.sequence}",
            unit="s",
            predicted=plan.step_seconds,
            measured=run.seconds or 0.0,
            remark=open_question(run, plan),
            note=f"{plan.peak_bytes / 2**30:.1f} GiB"
            + (f", measured {run.memory:.1f}" if run.memory else ""),
        )
