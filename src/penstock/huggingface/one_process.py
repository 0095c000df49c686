"""One process as Trainer and Accelerate see a run in several: it takes the rows of all replicas.

Every process of a run takes the same batch, and the pipeline keeps the part of its own replica. So nothing is left for
Trainer to divide, gather or wrap, and its arithmetic is that of one process with a batch for all replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any

from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers.training_args import ParallelMode

from penstock.base.errors import ConfigError


def as_one_process(args: Any, rank: int, replicas: int) -> Any:
    """Return training arguments of one process, whose batches have the rows of all replicas.

    Args:
        rank: rank of this process in the run; the first one logs and saves.
    """
    kind = type(args)

    def rows(name: str) -> property:
        return property(lambda own: getattr(kind, name).fget(own) * replicas)

    def reduce(own: Any, protocol: int) -> Any:
        plain = object.__new__(kind)
        plain.__dict__.update(own.__dict__)
        return plain.__reduce_ex__(1)  # later protocols compare the classes

    _ = args.device  # is set up once, with all processes
    single = copy.copy(args)
    single.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "__reduce_ex__": reduce,  # what is saved is of the class that was given
            "world_size": property(lambda own: 1),
            "process_index": property(lambda own: rank),
            "parallel_mode": property(lambda own: ParallelMode.NOT_PARALLEL),
            "train_batch_size": rows("train_batch_size"),
            "eval_batch_size": rows("eval_batch_size"),
        },
    )
    return single


def make_one_process(accelerator: Any, clip: Callable[[float], Tensor]) -> None:
    """Make an accelerator behave as in one process, in place.

    Args:
        clip: function that clips the gradients of all ranks by their norm, and returns it.
    """
    kind = type(accelerator)

    def prepare_model(own: Any, model: nn.Module, *others: Any, **options: Any) -> nn.Module:
        own._models.append(model)
        return model

    def clip_grad_norm_(own: Any, parameters: object, max_norm: float, norm_type: float = 2) -> Tensor:
        if norm_type != 2:
            raise ConfigError(f"a pipeline clips gradients by their 2-norm, not by norm_type={norm_type!r}")
        return clip(max_norm)

    def itself(own: Any, tensor: Any, *others: Any, **options: Any) -> Any:
        return tensor

    accelerator.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "distributed_type": property(lambda own: DistributedType.NO),
            "num_processes": property(lambda own: 1),
            "use_distributed": property(lambda own: False),
            "gather": itself,
            "reduce": itself,
            "pad_across_processes": itself,
            "prepare_model": prepare_model,
            "clip_grad_norm_": clip_grad_norm_,
        },
    )
    accelerator.rng_types = []  # the same seed gives every process the same order of rows


class FilledSampler:
    """A sampler that repeats its first rows until the last batch is full, as Accelerate does for several processes.

    Args:
        sampler: sampler of the rows.
        batch: rows of a batch of all replicas.
    """

    def __init__(self, sampler: Any, batch: int) -> None:
        self.sampler, self.batch = sampler, batch

    def __len__(self) -> int:
        return len(self.sampler) + -len(self.sampler) % self.batch

    def __iter__(self) -> Iterator[int]:
        rows = iter(self.sampler)
        first = list(islice(rows, self.batch))
        if first:
            missing = -len(self.sampler) % self.batch
            yield from chain(first, rows, islice(cycle(first), missing))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the sampler, such as ``set_epoch``."""
        return getattr(self.__dict__["sampler"], name)
