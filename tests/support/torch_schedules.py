"""torch's own schedules, made without processes and without modules."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed.pipelining import schedules as torch_schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

CLASSES = {
    "ScheduleInterleaved1F1B": (2, False),
    "ScheduleInterleavedZeroBubble": (2, False),
    "ScheduleLoopedBFS": (3, False),
    "ScheduleZBVZeroBubble": (2, True),
    "ScheduleDualPipeV": (2, True),
}
"""Names of torch's schedules with several stages per rank: their number, and whether the stages are folded to a V."""


class Stage(_PipelineStageBase):
    """What torch's schedules ask of a stage while they plan; no process group, no module."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, stages, 0, ranks
        self.has_backward, self.stage_index_to_group_rank = False, {}
        self.submod = self.device = self.group = None

    def _create_grad_recv_info(self, *_: object, **__: object) -> None: ...
    def _prepare_backward_infra(self, *_: object, **__: object) -> None: ...
    def _prepare_forward_infra(self, *_: object, **__: object) -> None: ...


def torchs(name: str, p: int, m: int, v: int, folded: bool = False):
    """torch's schedule, or None for counts it does not take; rank 0 holds stage 0 and, folded, the last."""
    indices = [0, 2 * p - 1] if folded else range(0, p * v, p)
    stages = [Stage(index, p * v, p) for index in indices]
    try:
        return getattr(torch_schedules, name)(stages, m, loss_fn=lambda output, target: 0)
    except ValueError:
        return None


def orders(schedule) -> list[str]:
    """Ops of every rank as text, without idle slots."""
    ranks = sorted(schedule.pipeline_order)
    return [" ".join(str(op) for op in schedule.pipeline_order[r] if op is not None) for r in ranks]
