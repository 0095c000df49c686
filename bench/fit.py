"""Least-squares fit of a cluster's rates to the measured steps of published runs.

A fit begins with the rates that the vendor states, or usual shares of them (`RATED`), and a weak prior keeps those that the
runs do not determine near them. The loss is robust, since some published rows are outliers: beyond `ROBUST` an error
counts by its size, no longer by its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bench.published_runs import Run, runs
from penstock.plan.cluster import Cluster
from penstock.plan.prediction import predict

Rates = Mapping[str, float]
Vector = npt.NDArray[np.float64]
ROBUST = 0.015
"""Relative error beyond which a row counts less than its square."""
PRIOR = 0.05
"""Weight of the prior on the logarithm of a rate; 1 equals a run with an error of 100 %."""
RATED: dict[str, Rates] = {
    "a100-80gb": {
        "matmul.bf16": 0.75 * 312e12, "matmul_width": 128, "attention.bf16": 200e12, "memory_bandwidth": 2.039e12,
        "score_bandwidth": 2.039e12, "launch": 2e-5, "optimizer_bandwidth": 2.039e12, "node.latency": 3e-6,
        "node.bandwidth": 300e9, "network.bandwidth": 25e9, "network.reduce_bandwidth": 25e9,
    },
    "h100": {
        "matmul.bf16": 0.65 * 989e12, "matmul.fp8": 0.6 * 1979e12, "matmul_width": 128, "attention.bf16": 600e12,
        "memory_bandwidth": 3.35e12, "launch": 5e-6, "optimizer_bandwidth": 3.35e12, "node.bandwidth": 450e9,
        "network.bandwidth": 50e9, "network.reduce_bandwidth": 50e9,
    },
    "b200": {
        "matmul.bf16": 0.65 * 2250e12, "matmul.fp8": 0.6 * 4500e12, "matmul_width": 128, "attention.bf16": 1200e12,
        "memory_bandwidth": 8e12, "launch": 5e-6, "optimizer_bandwidth": 8e12, "node.bandwidth": 900e9,
        "node.reduce_bandwidth": 900e9,
    },
}  # fmt: skip
"""Where a fit begins, by preset: rated bandwidths, usual shares of the rated FLOP/s, and guesses of launch and latency."""


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


def errors(measured: Sequence[Run], cluster: Cluster, rates: Rates) -> Vector:
    """Return log(predicted / measured) of every run."""
    return np.array([math.log(seconds(run, cluster, rates) / (run.seconds or math.nan)) for run in measured])


def fitted_runs(preset: str) -> list[Run]:
    """Return the runs that a preset's rates are fitted to."""
    return [run for run in runs() if run.gpu == preset and run.seconds and run.reason_not_fitted is None]


def preset_rates(cluster: Cluster, names: Iterable[str]) -> dict[str, float]:
    """Return a cluster's values of these rates."""
    values = {}
    for name in names:
        kind, _, part = name.partition(".")
        owner = getattr(cluster.device if kind in ("matmul", "attention") else cluster, kind, None)
        if owner is None:
            values[name] = getattr(cluster.device, kind)
        else:
            values[name] = owner[part] if isinstance(owner, Mapping) else getattr(owner, part)
    return values


def jacobian(measured: Sequence[Run], cluster: Cluster, rates: Rates) -> Vector:
    """Return the derivatives of `errors` by the logarithm of each rate, shape (runs, rates)."""
    step, now = 1e-3, errors(measured, cluster, rates)
    moved = ({**rates, name: rate * math.exp(step)} for name, rate in rates.items())
    return np.stack([(errors(measured, cluster, other) - now) / step for other in moved], axis=1)


def fit(
    measured: Sequence[Run],
    cluster: Cluster,
    rated: Rates,
    start: Rates | None = None,
    slopes: Vector | None = None,
    rounds: int = 12,
) -> dict[str, float]:
    """Return the rates that fit the runs best, by Levenberg and Marquardt's method on their logarithms.

    Args:
        measured: the runs.
        cluster: cluster whose other values stay.
        rated: rates that the prior is centred on.
        start: rates to begin with (default `rated`).
        slopes: `jacobian` at the start, which then serves every round (default: computed in every round).
        rounds: largest number of rounds.
    """
    names = list(rated)
    weights = np.array([run.weight for run in measured])
    theta = np.log([(start or rated)[name] / rated[name] for name in names])

    def rates_at(theta: Vector) -> dict[str, float]:
        return {name: rated[name] * math.exp(x) for name, x in zip(names, theta, strict=True)}

    def loss(error: Vector, theta: Vector) -> float:
        size = np.abs(error) / ROBUST
        return float(
            np.sum(2 * (weights * ROBUST) ** 2 * (size - np.log1p(size))) + np.sum((PRIOR * theta) ** 2)
        )

    error = errors(measured, cluster, rates_at(theta))
    now, damping = loss(error, theta), 1e-2
    for _ in range(rounds):
        slope = jacobian(measured, cluster, rates_at(theta)) if slopes is None else slopes
        squares = weights**2 / (1 + np.abs(error) / ROBUST)
        normal = slope.T @ (squares[:, None] * slope) + PRIOR**2 * np.eye(len(names))
        gradient = slope.T @ (squares * error) + PRIOR**2 * theta
        before = now
        for _ in range(6):
            move = -np.linalg.solve(normal + damping * np.eye(len(names)), gradient)
            moved = theta + np.clip(move, -0.7, 0.7)
            there = errors(measured, cluster, rates_at(moved))
            if (lower := loss(there, moved)) < now:
                theta, error, now, damping = moved, there, lower, damping / 3
                break
            damping *= 4
        if before - now < 1e-3 * before:
            break
    return rates_at(theta)
