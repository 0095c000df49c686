"""How many layers have to be recomputed for a rank to stay below a memory limit."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import ConfigError
from penstock.schedule.memory import peak
from penstock.schedule.schedule import Schedule
from penstock.stage.compute.stage import Stage


def choose_recompute(schedule: Schedule, rank: int, stages: Mapping[int, Stage], limit: int) -> None:
    """Let a rank's stages recompute as few layers as the limit allows, those first that free the most bytes.

    What the rank will hold at most is what the checker predicts (`schedule.memory.peak`), and the largest
    recomputed layer, which is back in memory during its backward.

    Args:
        schedule: whose order says how many microbatches are in flight.
        rank: whose stages they are.
        stages: after a step in which every layer was recomputed and measured.
        limit: bytes the rank may hold.

    Raises:
        ConfigError: even with every layer recomputed the rank holds more; the message says how much it takes.
    """
    kept = {s: [layer.kept for layer in stage.layer_bytes()] for s, stage in stages.items()}
    inputs = {s: [layer.inputs for layer in stage.layer_bytes()] for s, stage in stages.items()}
    again = {s: [False] * len(kept[s]) for s in stages}

    def most() -> int:
        saved = [0] * schedule.stages
        back = 0
        for s in stages:
            for k, i, recomputed in zip(kept[s], inputs[s], again[s], strict=True):
                saved[s] += i if recomputed else k
                back = max(back, k if recomputed else 0)
        return int(peak(schedule, saved)[rank]) + back

    order = sorted(
        ((s, n) for s in stages for n in range(len(kept[s]))),
        key=lambda at: (inputs[at[0]][at[1]] - kept[at[0]][at[1]], at),
    )
    for s, n in order:
        if most() <= limit:
            break
        again[s][n] = True
    if (least := most()) > limit:
        raise ConfigError(
            f"rank {rank} holds {least} bytes of activations even with every layer recomputed, and may hold {limit}; "
            "use smaller microbatches, more ranks, or a schedule that holds fewer"
        )
    for s, stage in stages.items():
        stage.set_recompute(again[s])
