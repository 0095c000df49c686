"""Conditions under which steps can flow into each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


def flow_problem(pipe: Pipeline, *, accumulate: int = 1, scaler: bool = False, zero: bool = False) -> str:
    """Return the reason why a pipeline's steps cannot flow; empty if they can.

    Args:
        pipe: the pipeline.
        accumulate: pipeline steps that make one update (default 1).
        scaler: whether the loss is scaled for fp16 (default False).
        zero: whether replicas divide the optimizer's work (default False).
    """
    problems = {
        "the ranks are threads of one process; start one process per rank": not pipe.in_processes,
        "there are replicas (dp > 1), whose gradients are reduced at the end of a step": pipe.replicas > 1,
        "matrices are sharded (tp > 1), and their gradients' norms are sums over processes": pipe.tensor_ranks
        > 1,
        "weights are on several ranks (tied weights, or a schedule with two copies of every stage), and their gradients are "
        "added at the end of a step": pipe.has_shared_weights,
        "stages are on a GPU, for which this has not been tested": any(
            p.device.type != "cpu" for module in pipe.stage_modules() for p in module.parameters()
        ),
        f"accumulate={accumulate}; gradients of earlier steps cannot be taken back": accumulate > 1,
        "a GradScaler needs the gradients of all ranks before the update": scaler,
        "zero=True reduces the gradients at the end of a step": bool(zero),
    }
    return "; ".join(problem for problem, holds in problems.items() if holds)
