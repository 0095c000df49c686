"""Options of a `Pipeline` whose defaults most users keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.base.counts import is_count
from penstock.base.errors import ConfigError, ScheduleError
from penstock.parallel.replicas.layout import BUCKET_BYTES
from penstock.runtime.health.hang import FIRST_TIMEOUT, require_timeout
from penstock.schedule.residency import Shard, Sharding, Store

BufferRule = Literal["refuse", "mean", "first"]
COMPILED = ("none", "block", "stage")


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Options of replicas and tensor parallelism.

    Args:
        bucket_bytes: maximum bytes in a gradient bucket (default 25 MiB); buckets are reduced over replicas while the
            backward runs.
        buffers: what to do if copies of a stage change a persistent buffer differently: "refuse" the step (default), or
            take the "mean" or the "first". Statistics of batch normalization are always joined. See
            `penstock.runtime.copies.buffers.BufferCopies`.
        check_replicas: training steps between two comparisons of the copies' parameters and buffers (default 100); 0 never
            compares.
        family: model family whose matrices tensor parallelism shards (default "penstock", the built-in model); see
            `penstock.parallel.tensor.matrices.tensor_parallel`.
        sequence_parallel: also shard activations between the blocks along the sequence (default False).
        shard: what replicas divide: "none" (default), the "optimizer" state (ZeRO-1), also the "gradients" (ZeRO-2), or also
            the "weights" (ZeRO-3), which are then gathered before the ops that read them. It begins with the
            `PipelineOptimizer`. See `penstock.schedule.residency.Sharding`, also for the next two.
        window: with shard="weights" or a store, stages whose weights a rank may hold at once; None (default) for all of the
            rank.
        reduce_every: with shard="gradients" or "weights", or a store, microbatches whose gradients are added up before they
            are summed over the replicas or go to the store; None (default) for all of the step.
        store: where weights are while no op reads them: on the device ("none", default), in "host" memory, or on "disk", in
            files of the folder for temporary files (TMPDIR). Gradients and the optimizer's update are there, too. See
            `penstock.parallel.host_store`.

    Raises:
        ConfigError: if a value is not allowed.
    """

    bucket_bytes: int = BUCKET_BYTES
    buffers: BufferRule = "refuse"
    check_replicas: int = 100
    family: str = "penstock"
    sequence_parallel: bool = False
    shard: Shard = "none"
    window: int | None = None
    reduce_every: int | None = None
    store: Store = "none"

    def __post_init__(self) -> None:
        if not is_count(self.bucket_bytes):
            raise ConfigError(f"bucket_bytes must be a positive number of bytes, got {self.bucket_bytes!r}")
        if self.buffers not in get_args(BufferRule):
            raise ConfigError(f"buffers must be 'refuse', 'mean' or 'first', got {self.buffers!r}")
        if not is_count(self.check_replicas, 0):
            raise ConfigError(
                f"check_replicas must be a number of steps, or 0 for never, got {self.check_replicas!r}"
            )
        try:
            _ = self.sharding
        except ScheduleError as error:
            raise ConfigError(str(error)) from None

    @property
    def sharding(self) -> Sharding:
        """The choices of `shard`, `window`, `reduce_every` and `store`."""
        return Sharding(self.shard, self.window, self.reduce_every, self.store)


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """Options of how stages run.

    Args:
        first_timeout: timeout in seconds until the first training step is done, and in the first evaluation, since both
            compile and import (default 600).
        memory: bytes of activations that a rank may hold; for ``recompute="auto"`` alone, which needs it (default None).
        offload: keep tensors saved for the backward in host memory, for stages on a GPU (default False).
        compile: modules given to ``torch.compile``: "none" (default), "block" (each layer) or "stage" (each stage's layers
            together).
        check_finite: refuse a step in which a loss or a gradient is NaN or infinite (default True); on a GPU, a step then
            ends with a synchronization.
        strict: refuse a layer whose backward cannot be split into input and weight gradients without changing them,
            instead of running its full backward (default False).
        check_split: check in the first training step, and in an evaluation before it, that the model and the batch may be
            cut (default True). Two microbatches run together in evaluation mode, and must have the outputs and the loss
            that they have alone; after steps with `Microbatches`, those of the first batch that is cut here. Of a model with
            a forward of its own also compare loss and gradients with those of its layers, on the first microbatch; one that
            `penstock.split` has compared on a sample is not compared again.
        threads: CPU threads of each rank. 0 (default) divides ``torch.get_num_threads()`` among ranks that are threads, and
            keeps it in processes, but takes no more than the cgroup's quota and, in processes, a share of the machine's
            cores; OMP_NUM_THREADS lifts these limits.

    Raises:
        ConfigError: if a value is not allowed.
    """

    first_timeout: float = FIRST_TIMEOUT
    memory: int | None = None
    offload: bool = False
    compile: str = "none"
    check_finite: bool = True
    strict: bool = False
    check_split: bool = True
    threads: int = 0

    def __post_init__(self) -> None:
        require_timeout(self.first_timeout, "first_timeout")
        if self.compile not in COMPILED:
            raise ConfigError(f"compile must be 'none', 'block' or 'stage', got {self.compile!r}")
        if self.memory is not None and not is_count(self.memory):
            raise ConfigError(f"memory must be a positive number of bytes or None, got {self.memory!r}")
        if not is_count(self.threads, 0):
            raise ConfigError(
                f"threads must be a number of CPU threads per rank, or 0 for a share, got {self.threads!r}"
            )
