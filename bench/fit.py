"""Least-squares fit of a cluster's rates to the measured steps of published runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bench.published_runs import Run
from penstock.plan.cluster import Cluster
from penstock.plan.prediction import predict

Rates = Mapping[str, float]
Vector = npt.NDArray[np.float64]
_ROBUST = 0.03
"""Relative error from which on a row counts less than its square: some published rows are outliers."""


def with_rates(cluster: Cluster, rates: Rates, gpus: int) -> Cluster:
    """Return the cluster with other rates, and as many nodes as the devices need."""
    device, node, network = cluster.device, cluster.node, cluster.network
    matmul, attention = dict(device.matmul), dict(device.attention or {})
    for name, rate in rates.items():
        kind, _, dtype = name.partition(".")
        if kind == "matmul":
            matmul[dtype] = rate
            if dtype == "bf16":
                matmul["fp16"] = rate
        elif kind == "attention":
            attention.update(bf16=rate, fp16=rate)
        elif kind in ("matmul_width", "memory_bandwidth", "score_bandwidth", "launch", "optimizer_bandwidth"):
            device = replace(device, **{kind: rate})
        elif kind == "node":
            node = replace(node, **{dtype: rate})
        else:
            network = replace(network, **{dtype: rate})
    nodes = -(-gpus // cluster.ranks_per_node)
    device = replace(device, matmul=matmul, attention=attention)
    return replace(cluster, device=device, node=node, network=network, nodes=nodes)


def seconds(run: Run, cluster: Cluster, rates: Rates) -> float:
    """Return the predicted seconds of a run's step."""
    fitted = with_rates(cluster, rates, run.gpus)
    return predict(run.profile, fitted, run.layout, sequence=run.sequence, batch=run.batch).step_seconds


def errors(runs: Sequence[Run], cluster: Cluster, rates: Rates) -> Vector:
    """Return log(predicted / measured) of every run."""
    return np.array([math.log(seconds(run, cluster, rates) / (run.seconds or math.nan)) for run in runs])


def fit(
    runs: Sequence[Run],
    cluster: Cluster,
    start: Rates,
    weight: Callable[[Run], float],
    prior: float = 0.05,
    rounds: int = 12,
) -> dict[str, float]:
    """Return the rates that fit the runs best: Levenberg-Marquardt on the rates' logarithms, with a robust loss.

    Args:
        runs: measured runs.
        cluster: cluster whose other values stay.
        start: rates to begin with, to which a weak prior holds those that the runs do not determine.
        weight: weight of a run.
        prior: weight of the prior; 1 equals one run with an error of 100 %.
        rounds: largest number of rounds.
    """
    names = list(start)
    weights = np.array([weight(run) for run in runs])

    def rates_at(theta: Vector) -> dict[str, float]:
        return {name: start[name] * math.exp(step) for name, step in zip(names, theta, strict=True)}

    def residuals(theta: Vector) -> Vector:
        error = errors(runs, cluster, rates_at(theta))
        robust = error / np.sqrt(1 + np.abs(error) / _ROBUST)
        return np.concatenate([weights * robust, prior * theta])

    theta = np.zeros(len(names))
    now, damping, step = residuals(theta), 1e-2, 1e-3
    for _ in range(rounds):
        columns = [(residuals(theta + step * unit) - now) / step for unit in np.eye(len(names))]
        jacobian = np.stack(columns, axis=1)
        before = float(now @ now)
        for _ in range(8):
            normal = jacobian.T @ jacobian + damping * np.eye(len(names))
            move = np.clip(-np.linalg.solve(normal, jacobian.T @ now), -0.7, 0.7)
            moved = residuals(theta + move)
            if moved @ moved < before:
                theta, now, damping = theta + move, moved, damping / 3
                break
            damping *= 4
        if before - float(now @ now) < 1e-4 * before:
            break
    return rates_at(theta)
