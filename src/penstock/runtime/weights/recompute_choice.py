"""Choose the layers that a rank must recompute to stay below a memory limit."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import ConfigError
from penstock.schedule.memory import peak
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.stage import Stage


def choose_recompute(schedule: Schedule, rank: int, stages: Mapping[int, Stage], limit: int) -> None:
    """Let a rank's stages recompute as few layers as the limit allows, those first that free the most bytes.

    The rank's peak memory is the one that the checker predicts (`penstock.schedule.memory.peak`), plus the largest
    recomputed layer, which is back in memory during its backward.

    Args:
        stages: stages of the rank by number, after a step in which every layer was recomputed and measured.
        limit: bytes of activations that the rank may hold.

    Raises:
        ConfigError: if the rank exceeds the limit with every layer recomputed; says how many bytes it needs.
    """
    kept = {s: [layer.kept for layer in stage.layer_bytes()] for s, stage in stages.items()}
    inputs = {s: [layer.inputs for layer in stage.layer_bytes()] for s, stage in stages.items()}
    recomputed = {s: [False] * len(kept[s]) for s in stages}

    def peak_bytes() -> int:
        saved = [0] * schedule.stages
        largest = 0
        for s in stages:
            for full, few, again in zip(kept[s], inputs[s], recomputed[s], strict=True):
                saved[s] += few if again else full
                largest = max(largest, full if again else 0)
        return int(peak(schedule, saved)[rank]) + largest

    order = sorted((inputs[s][n] - kept[s][n], s, n) for s in stages for n in range(len(kept[s])))
    for _, s, n in order:
        if peak_bytes() <= limit:
            break
        recomputed[s][n] = True
    if (needed := peak_bytes()) > limit:
        raise ConfigError(
            f"rank {rank} holds {needed} bytes of activations even with every layer recomputed, and may hold {limit}; "
            "use smaller microbatches, more ranks, or a schedule that holds fewer"
        )
    for s, stage in stages.items():
        stage.set_recompute(recomputed[s])
