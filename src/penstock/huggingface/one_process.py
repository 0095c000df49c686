"""One process as Trainer and Accelerate see a run in several: it takes the rows of all replicas.

Every process of a run takes the same batch, and the pipeline keeps the part of its own replica. So nothing is left for
Trainer to divide, gather or wrap, and it computes as one process with a batch for all replicas. The state of the
optimizer, whose parameters are on several processes, is saved and loaded as the whole model's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, cycle, islice
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.training_args import ParallelMode

from penstock.base.errors import ConfigError
from penstock.parallel.experts.layers import share_like
from penstock.runtime.model.pipeline_model import gather_state
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup


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
    # Of a stream, accelerate would read rows for every process of the launch, and give each its own.
    accelerator.dataloader_config.dispatch_batches = False


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


class WholeOptimizer:
    """Places of one process's parameters among all processes'; every process of the run makes one.

    Loading a state of the whole model into the optimizer takes this process's part of it.

    Args:
        pipe: pipeline in processes.
        model: the whole model; parameters of other processes are on the meta device.
        optimizer: optimizer of the parameters of this process; all processes have as many groups.

    Raises:
        ConfigError: if the optimizer has parameters that the model has not, or other groups than another process.
    """

    def __init__(self, pipe: Pipeline, model: nn.Module, optimizer: Any) -> None:
        self._pipe, self._optimizer = pipe, optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = [
            [names.get(id(parameter), "") for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        told = RunGroup.of(pipe.world).each(lambda: own)
        if any(not name for groups in told for names_of in groups for name in names_of):
            raise ConfigError(
                "the optimizer has parameters that are not the model's, so its state cannot be saved from several "
                "processes; run the ranks as threads of one process"
            )
        if len({len(groups) for groups in told}) > 1:
            raise ConfigError(
                f"the optimizer has {' and '.join(sorted({str(len(groups)) for groups in told}))} parameter groups on the "
                "processes; make as many on each, possibly without parameters"
            )
        places = {name: n for n, name in enumerate(names.values())}
        self._groups = [
            sorted({name for groups in told for name in groups[n]}, key=places.__getitem__)
            for n in range(len(own))
        ]
        order = {name: n for n, name in enumerate(name for group in self._groups for name in group)}
        self._own = [[order[name] for name in group] for group in own]
        optimizer.register_load_state_dict_pre_hook(self._part)

    def state(self, keep: bool) -> dict[str, Any]:
        """Return the state of all ranks, on the CPU; every process calls it.

        Args:
            keep: whether this process needs it; otherwise, the result is without state.
        """
        local = self._optimizer.state_dict()
        here = [number for group in self._own for number in group]
        entries = {
            f"{here[index]}/{key}": value.detach().cpu() if isinstance(value, Tensor) else value
            for index, values in local["state"].items()
            for key, value in values.items()
        }
        world = self._pipe.world
        assert world is not None, "the ranks are processes"
        state: dict[int, dict[str, Any]] = {}
        for name, value in gather_state(entries, world, keep).items():
            number, _, key = name.partition("/")
            state.setdefault(int(number), {})[key] = value
        return {
            **local,
            "state": dict(sorted(state.items())),
            "param_groups": self._with_params(local["param_groups"], self._whole()),
        }

    def _whole(self) -> list[list[int]]:
        """Return the numbers of all parameters by group."""
        groups, start = [], 0
        for group in self._groups:
            groups.append([*range(start, start + len(group))])
            start += len(group)
        return groups

    def _with_params(self, groups: list[dict[str, Any]], params: list[list[int]]) -> list[dict[str, Any]]:
        return [{**group, "params": numbers} for group, numbers in zip(groups, params, strict=True)]

    def _part(self, optimizer: object, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return this process's part of a state of the whole model; None for another state, which is taken as it is."""
        if [len(group["params"]) for group in state["param_groups"]] != [
            len(group) for group in self._groups
        ]:
            return None
        here = [number for group in self._own for number in group]
        numbers = iter(range(len(here)))
        local = [[next(numbers) for _ in group] for group in self._own]
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return {
            **state,
            "state": {
                index: {
                    key: share_like(value, parameters[index]) if isinstance(value, Tensor) else value
                    for key, value in state["state"][number].items()
                }
                for index, number in enumerate(here)
                if number in state["state"]
            },
            "param_groups": self._with_params(state["param_groups"], local),
        }
