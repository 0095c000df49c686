"""Gradient buckets of replicas made, and made again, by the threads of their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.parallel.data.thread_reducer import thread_reducers
from penstock.runtime.executor import Executor
from penstock.runtime.local_stages import LocalStages
from penstock.runtime.tracing.recorder import measured_trace
from penstock.runtime.workers.rank_threads import RankThreads


def make_thread_buckets(
    replicas: Sequence[LocalStages], ranks: Sequence[int], timeout: float, rank_threads: RankThreads
) -> None:
    """Make the buckets of all ranks of all replicas, each on its own thread: they communicate while they are made.

    Args:
        replicas: replicas of the pipeline, all in this process.
        ranks: ranks of each.
        timeout: longest wait in seconds.
        rank_threads: threads of all ranks of all replicas.
    """
    reducers = {rank: thread_reducers(len(replicas), timeout) for rank in ranks}
    jobs = [
        partial(replica.make_buckets, rank, reducers[rank][n], None)
        for n, replica in enumerate(replicas)
        for rank in ranks
    ]
    rank_threads.run(jobs, no_job)


def tune_buckets(executors: Sequence[Executor], rank_threads: RankThreads | None) -> None:
    """Have the replicas make their buckets again by the last step.

    Args:
        executors: executors of the step.
        rank_threads: their threads, if replicas are threads of this process; otherwise None.
    """
    reducing = [(e, e.replica_reduction) for e in executors if e.replica_reduction is not None]
    jobs = [partial(reduction.tune, e.program, measured_trace([e])) for e, reduction in reducing]
    if rank_threads is not None:
        rank_threads.run(jobs, no_job)
    else:
        for job in jobs:
            job()


def no_job(why: str = "") -> None:
    """Do nothing, on threads that have no part in a job."""
