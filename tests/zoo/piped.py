"""A case run by Penstock."""

from __future__ import annotations

import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock
from penstock.base.errors import NonFiniteError, PeerError, PenstockError, WaitTimeoutError
from penstock.parallel.mesh import MeshShape
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from tests.zoo.case import Case, read
from tests.zoo.habits import HABITS
from tests.zoo.record import Raised, Run, Step, copied, same
from tests.zoo.subject import (
    as_model,
    counts,
    layer_names,
    loss_of,
    make_batch,
    make_layers,
    make_optimizer,
    own_model,
)

TIMEOUT = 120.0


class Piped:
    """A pipeline in training, for one process; what `tests.zoo.habits.Trainee` asks."""

    def __init__(
        self, case: Case, pipe: penstock.Pipeline, layers: list[nn.Module], model: nn.Module | None
    ) -> None:
        self.case, self.pipe, self.layers, self.model = case, pipe, layers, model
        self.given = layers if model is None else [model]
        self.evaluated: Tensor | None = None
        self.before: dict[str, Tensor] = {}
        self.own = {
            f"{name}.{inner}"
            for name, layer in zip(layer_names(case, len(layers)), layers, strict=True)
            for inner, _ in layer.named_parameters(remove_duplicate=False)
        }
        if model is not None:
            self.own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        make, options = make_optimizer(case)
        self.optimizer: torch.optim.Optimizer | None = None
        self.wrapped: penstock.PipelineOptimizer | None = None
        if case.wrapped:
            clip = case.clip or None
            self.wrapped = penstock.PipelineOptimizer(
                pipe, make, accumulate=case.accumulate, clip=clip, **options
            )
        else:
            self.optimizer = make(list(pipe.parameters()) or [nn.Parameter(torch.zeros(1))], **options)

    def evaluate(self, step: int) -> None:
        batch = make_batch(self.case, step)
        self.evaluated = self.pipe.evaluate(batch.x, batch.y, **batch.inputs).losses

    def train(self, mode: bool) -> None:
        self.pipe.train(mode)

    def reload(self) -> None:
        self.pipe.load_state_dict({name: value.clone() for name, value in self.pipe.state_dict().items()})

    def weights(self) -> dict[str, Tensor]:
        if self.case.shard == "weights":
            self.pipe.gather_weights()
        return {name: copied(p) for name, p in self.pipe.named_parameters()}

    def step(self, number: int) -> Step:
        case, pipe = self.case, self.pipe
        self.evaluated = None
        self.before = self.weights()
        if case.own is not None:
            case.own.change(number, self.model)
        HABITS[case.habit].before(number, self)
        self.before = self.weights()
        batch = make_batch(case, number)
        losses = pipe.step(batch.x, batch.y, **batch.inputs).losses
        gradients = self.gradients()
        buffers = {
            n: copied(b) for n, b in pipe.state_dict().items() if n not in self.own and isinstance(b, Tensor)
        }
        if self.wrapped is not None:
            self.wrapped.step()
        elif (number + 1) % case.accumulate == 0:
            self.update()
        return Step(losses, self.evaluated, gradients, buffers, self.weights())

    def gradients(self) -> dict[str, Tensor | None]:
        """Those of whole parameters, which replicas join if they divide them."""
        named = list(self.pipe.named_parameters())
        shards = self.wrapped.shards if self.wrapped is not None else None
        if shards is None:
            return {name: copied(p.grad) for name, p in named}
        grads = {id(each.entry.parameter): each.shard for each in shards.sharded}
        joined = {
            id(parameter): state["grad"]
            for parameter, state in shards.join(
                lambda each: (
                    None if each.shard is None or each.shard.grad is None else {"grad": each.shard.grad}
                )
            )
        }
        return {n: joined.get(id(p)) if id(p) in grads else copied(p.grad) for n, p in named}

    def update(self) -> None:
        assert self.optimizer is not None
        if self.case.clip:
            self.pipe.clip_grad_norm_(self.case.clip)
        self.optimizer.step()
        if HABITS[self.case.habit].zero != "never":
            self.optimizer.zero_grad(set_to_none=HABITS[self.case.habit].zero == "none")


def piped(rank: int, case: Case, folder: Path | None = None) -> Run:
    """Run a case: all ranks of this process; recorded into a folder if there is one."""
    run = Run()
    trainee: Piped | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layers = make_layers(case)
            model = own_model(case, layers)
            with penstock.Pipeline(
                as_model(case, layers) if model is None else model,
                loss_of(case, model),
                microbatches=case.microbatches,
                schedule=case.schedule,
                virtual_stages=case.virtual_stages,
                ranks=None if case.dp > 1 else case.ranks,
                mesh=MeshShape(case.ranks, case.dp, 1) if case.dp > 1 else None,
                recompute=case.recompute,
                autocast=torch.bfloat16 if case.autocast else None,
                reduction=counts if case.reduction == "count" else case.reduction,
                seed=case.seed,
                timeout=TIMEOUT,
                execution=ExecutionOptions(
                    first_timeout=TIMEOUT, check_split=not any(kind.mixes for kind in case.entries)
                ),
                parallel=ParallelOptions(bucket_bytes=1000, shard=case.shard),
            ) as pipe:
                trainee = Piped(case, pipe, layers, model)
                with nullcontext() if folder is None else penstock.record(folder, pipe, steps=case.steps):
                    for number in range(case.steps):
                        run.steps.append(trainee.step(number))
    except Exception as error:
        run.raised = raised(error, trainee, len(run.steps))
    return run


def raised(error: Exception, trainee: Piped | None, steps: int) -> Raised:
    """What is to be known of an error."""
    untouched = True
    if trainee is not None:
        untouched = trainee.pipe.steps == steps
        elsewhere = trainee.case.shard == "weights"  # where the pipeline that failed has left them
        if not elsewhere and not any(kind.writes for kind in trainee.case.entries):
            now = trainee.weights()
            untouched = untouched and all(same(now[name], value) for name, value in trainee.before.items())
    known = isinstance(error, PenstockError)
    told = isinstance(error, PeerError | WaitTimeoutError)
    message = str(error) if known else "".join(traceback.format_exception(error))[-1500:]
    kind = "NonFiniteError" if isinstance(error, NonFiniteError) else type(error).__name__
    return Raised(kind, known, told, message, untouched)


def piped_many(rank: int, cases: list[str]) -> list[Run]:
    """Several cases, one after the other, in one group of processes; a rank that has nothing to do waits."""
    torch.set_num_threads(1)
    return [piped(rank, read(text)) for text in cases]
