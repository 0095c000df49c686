"""The config sections of the schedule and of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.parallel.data.layout import BUCKET_BYTES
from penstock.train.config.fields import (
    AxisOrder,
    Buffers,
    Count,
    Flag,
    NotNegative,
    Split,
    Table,
    Text,
)


@dataclass(frozen=True)
class ScheduleConfig(Table):
    """``[schedule]``: the pipeline schedule.

    Attributes:
        name: name of a schedule family (``penstock schedule list``), MODULE:FUNCTION that builds one, or path of a CSV file.
        microbatches: number of equal parts of a batch, divided equally among the ``parallel.dp`` replicas (default: 8, or
            the largest number below it that ``train.batch`` allows).
        split: ``even``; ``measured`` for stages of equal time, measured before the first step; or a list with the number of
            blocks of every stage.
    """

    name: Text = "1f1b"
    microbatches: Count = 8
    split: Split = "even"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Table):
    """``[parallel]``: the ranks on each axis.

    Attributes:
        pp: pipeline ranks (default: the processes that `dp` and `tp` leave under torchrun, else 2 threads, or 1 for
            a model of one layer).
        virtual_stages: stages per rank (default: the usual number of the schedule family).
        dp: replicas of the pipeline that share each batch; with `dp` or `tp` a run takes ``pp * dp * tp`` processes.
        tp: processes that share every matrix of a stage.
        order: order of the axes, outermost first; neighbouring processes differ in the last one.
        sequence_parallel: with `tp`, also divide activations between the matrices along the sequence.
        bucket_bytes: with `dp`, maximum size of the buckets in which gradients are reduced during the backward.
        zero: with `dp`, each replica keeps a share of the optimizer's state and updates a share of the weights.
        buffers: reaction to copies of a stage that change a buffer differently: ``refuse`` the step, or take the ``mean`` or
            the ``first``.
        check_replicas: steps between two comparisons of replicated weights (`dp`, `tp`, stages on two ranks); 0 for none.
    """

    pp: Count | None = None
    virtual_stages: Count | None = None
    dp: Count = 1
    tp: Count = 1
    order: AxisOrder = "pp,dp,tp"
    sequence_parallel: Flag = False
    bucket_bytes: Count = BUCKET_BYTES
    zero: Flag = False
    buffers: Buffers = "refuse"
    check_replicas: NotNegative = 100
