"""Proof of a model's training at a layout: it is trained with and without a pipeline, and both recordings are compared.

The same few steps are trained by plain PyTorch, unsplit with gradient accumulation, and through pipelines, as threads or as
gloo processes. Where sums have one order, every tensor must have the same bits. Schedules with copies of a stage,
replicas and divided samples or matrices differ in the order of sums alone: a tensor may be four times as far from plain
PyTorch's as that is from the same training in float64.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.base.current_folder import current_folder_last
from penstock.base.errors import ConfigError, DataError
from penstock.base.scratch import Scratch
from penstock.parallel.mesh import MeshShape
from penstock.recordings.compare import Comparison, compare
from penstock.runtime.batch.loss_weights import loss_weights
from penstock.runtime.model.given_model import given_model
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.validation import resolve_schedule
from penstock.runtime.workers.pool import LocalProcesses, require_processes
from penstock.schedule.families import FAMILIES, require_family
from penstock.schedule.residency import Shard
from penstock.schedule.text import is_csv
from penstock.stage.compute.runner import LossFunction
from penstock.stage.microbatches import split_batch
from penstock.stage.module import StageModule
from penstock.stage.named import Context, within
from penstock.verify.record import record

# With the usual eps of 1e-8, Adam takes the sign of a gradient that is rounding alone, and weights drift apart by it.
LEARNING_RATE, EPS, MAX_NORM = 1e-2, 1e-3, 1.0
DTYPES = {"bf16": torch.bfloat16}
"""Dtypes of autocast, by the names of the option."""


@dataclass(frozen=True)
class VerifyTarget:
    """A model to verify, with its loss and data.

    Attributes:
        model: anything that `Pipeline` takes; it must be the same each time it is made.
        loss_fn: ``loss_fn(output, target)``, the mean over its microbatch; None for the loss that the model computes.
        batch: ``batch(step, microbatches)`` → (x, y), the same each time, of a size divisible by the microbatches.
    """

    model: object
    loss_fn: LossFunction | None
    batch: Callable[[int, int], tuple[object, object]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Division of a run among ranks, and what they do beside the pipeline.

    Attributes:
        dp, tp, ep, cp: processes that share a batch, matrices, experts and samples (default 1); more than one of any needs
            processes. Each of the dp replicas has so many microbatches. With ep alone, there are ep replicas.
        shard: what replicas divide, one of "none" (default), "optimizer", "gradients" and "weights".
        recompute: what of the forward is run again, "none" (default) or "full".
        autocast: "bf16" or "none" (default).
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    shard: Shard = "none"
    recompute: str = "none"
    autocast: str = "none"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("shard", get_args(Shard)),
            ("recompute", ("none", "full")),
            ("autocast", ("none", *DTYPES)),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if self.shard != "none" and self.replicas == 1:
            raise ConfigError(f"shard {self.shard!r} divides what replicas have, and there is one; take dp 2")

    @property
    def replicas(self) -> int:
        """Pipelines that share a batch."""
        return self.dp if self.dp > 1 else self.ep

    @property
    def processes(self) -> int:
        """Processes of one rank of the pipeline."""
        return self.replicas * self.tp * self.cp

    def __str__(self) -> str:
        axes = [
            f"{name} {getattr(self, name)}" for name in ("dp", "tp", "ep", "cp") if getattr(self, name) > 1
        ]
        others = {"shard": self.shard, "recompute": self.recompute, "autocast": self.autocast}
        return ", ".join([*axes, *(f"{name} {value}" for name, value in others.items() if value != "none")])


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result for one schedule, transport and number of ranks and microbatches.

    Attributes:
        layout: what is beside the pipeline, in words; empty if nothing is.
        same: number of tensors with plain PyTorch's bits.
        rounded: number of tensors that differ by no more than another order of sums explains; 0 where there is one order.
        different: number of tensors that differ by more.
        first: the first of these, and how it differs; empty if there is none.
    """

    schedule: str
    transport: str
    ranks: int
    microbatches: int
    layout: str
    same: int
    rounded: int
    different: int
    first: str

    @property
    def good(self) -> bool:
        """True if no tensor differs by more than rounding explains."""
        return not self.different


@dataclass(frozen=True, kw_only=True)
class _Case:
    target: str
    schedule: str
    ranks: int
    virtual_stages: int
    microbatches: int
    steps: int
    layout: Layout

    @property
    def processes(self) -> int:
        return self.ranks * self.layout.processes


def load_target(name: str) -> VerifyTarget:
    """Return the result of ``module:function``."""
    module, _, function = name.partition(":")
    try:
        with current_folder_last():
            make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot find {name!r} ({error}); give MODULE:FUNCTION, a function without arguments that "
            "returns a penstock.verify.VerifyTarget"
        ) from error
    target = make()
    if not isinstance(target, VerifyTarget):
        raise ConfigError(f"{name} returned a {type(target).__name__}, not a penstock.verify.VerifyTarget")
    return target


def verify(
    target: str,
    schedules: Sequence[tuple[str, int]],
    ranks: Sequence[int],
    microbatches: Sequence[int],
    *,
    transports: Sequence[str] = ("threads", "processes"),
    steps: int = 3,
    layout: Layout | None = None,
) -> Iterator[Row]:
    """Train a model with each schedule, number of ranks and number of microbatches, and compare.

    Args:
        target: ``module:function`` that returns a `VerifyTarget`.
        schedules: pairs of a family, MODULE:FUNCTION or CSV path, and a number of virtual stages.
        ranks, microbatches: numbers of ranks and of microbatches to combine.
        transports: "threads", "processes" or both (default both).
        steps: number of optimizer steps, with AdamW and clipping (default 3).
        layout: what is beside the pipeline (default: nothing).
    """
    layout = Layout() if layout is None else layout
    if layout.processes > 1 and "threads" in transports:
        raise ConfigError(
            f"{layout} divides a run over processes, which threads are not; take the transport processes"
        )
    for name, virtual in schedules:
        for p, m in product(ranks, microbatches) if not is_csv(name) else ():
            require_family(name).require_counts(p, m, virtual)
    if "processes" in transports:
        require_processes(max(ranks) * layout.processes)
    return _rows(
        [
            _Case(
                target=target,
                schedule=name,
                ranks=p,
                virtual_stages=virtual,
                microbatches=m,
                steps=steps,
                layout=layout,
            )
            for (name, virtual), p, m in product(schedules, ranks, microbatches)
        ],
        transports,
    )


def _rows(cases: Sequence[_Case], transports: Sequence[str]) -> Iterator[Row]:
    # The number of threads changes the order of sums, and so the last bits.
    torch.set_num_threads(1)
    with (
        Scratch() as scratch,
        LocalProcesses(max(case.processes for case in cases)) as pool,
    ):
        references: dict[tuple[int, torch.dtype | None], Path] = {}

        def reference(case: _Case, dtype: torch.dtype | None) -> Path:
            key = case.microbatches, dtype
            if key not in references:
                references[key] = scratch.path / f"reference-{len(references)}"
                _plain(references[key], case, dtype)
            return references[key]

        for n, (case, transport) in enumerate(product(cases, transports)):
            run = scratch.path / f"run-{n}"
            if transport == "processes":
                pool.run(case.processes, _pipelined, str(run), case)
            else:
                _pipelined(0, str(run), case)
            one_order = case.layout.processes == 1 and _in_order(case)
            exact = None if one_order else reference(case, torch.float64)
            found = compare(reference(case, None), run, exact=exact, bits=one_order)
            if found.incomplete:
                raise DataError(
                    f"what {case.schedule} computed was not recorded whole: {'; '.join(found.incomplete)}"
                )
            yield _row(case, transport, found)


def _row(case: _Case, transport: str, found: Comparison) -> Row:
    return Row(
        schedule=case.schedule,
        transport=transport,
        ranks=case.ranks,
        microbatches=case.microbatches,
        layout=str(case.layout),
        same=found.same,
        rounded=found.rounded,
        different=len(found.differences),
        first="" if found.first is None else str(found.first),
    )


def _in_order(case: _Case) -> bool:
    """Return whether a schedule sums every stage's gradients in the order of the microbatches, on one rank."""
    if case.schedule in FAMILIES:
        return FAMILIES[case.schedule].in_order
    counts = case.ranks, case.microbatches, case.virtual_stages
    return resolve_schedule(case.schedule, *counts, None).in_order


def _plain(folder: Path, case: _Case, dtype: torch.dtype | None) -> None:
    """Record the training of the unsplit model, in float64 without autocast if `dtype` says so."""
    target = load_target(case.target)
    microbatches = case.microbatches * case.layout.replicas
    given = given_model(target.model, target.loss_fn)
    model = StageModule(given.layers).to(dtype)
    parameters = [p for _, p in model.whole_model_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPS)
    cast = DTYPES.get(case.layout.autocast) if dtype is None else None
    with record(folder, model, steps=case.steps) as recording:
        for step in range(case.steps):
            optimizer.zero_grad()
            x, y = target.batch(step, microbatches)
            (inputs_of, _), (labels_of, rows) = (
                split_batch(_as(v, dtype), microbatches, "a batch") for v in (x, y)
            )
            weights = loss_weights(labels_of, rows, given.reduction)
            for n, (inputs, labels, weight) in enumerate(zip(inputs_of, labels_of, weights, strict=True)):
                context = Context({}, {}, model.gives, microbatch=n)
                with within(context), _GroupsInFloat64(), torch.autocast("cpu", cast, enabled=bool(cast)):
                    output = model.run(inputs, context, 0, len(model.layers))
                    returned = given.loss_fn(output, labels)
                terms = [returned] if isinstance(returned, Tensor) else [*returned.values()]
                loss = reduce(torch.add, [*terms, *context.losses.values()])
                weight.apply(loss).backward()
                recording.note("loss", loss, microbatch=n)
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()


class _GroupsInFloat64(TorchFunctionMode):
    """Mode that multiplies matrices of float64 group by group: torch's product of groups, by experts, has no float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._grouped_mm or args[0].dtype != torch.float64:
            return func(*args, **(kwargs or {}))
        rows, matrices = args
        parts = rows.tensor_split(kwargs["offs"][:-1].long().cpu())
        return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def _as(value: object, dtype: torch.dtype | None) -> object:
    """Convert a batch to another dtype if it is of floating-point numbers."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _pipelined(rank: int, folder: str, case: _Case) -> None:
    """Record the training through a pipeline, as one of its processes or as all of its threads."""
    target, layout = load_target(case.target), case.layout
    mesh = MeshShape(case.ranks, layout.replicas, layout.tp, ep=layout.ep, cp=layout.cp)
    with Pipeline(
        target.model,
        target.loss_fn,
        microbatches=case.microbatches,
        schedule=case.schedule,
        ranks=case.ranks,
        mesh=mesh if layout.processes > 1 else None,
        virtual_stages=case.virtual_stages,
        recompute=layout.recompute,
        autocast=DTYPES.get(layout.autocast),
        parallel=ParallelOptions(shard=layout.shard),
    ) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=LEARNING_RATE, eps=EPS, clip=MAX_NORM)
        with record(folder, pipe, steps=case.steps) as recording:
            for step in range(case.steps):
                optimizer.zero_grad()
                result = pipe.step(*target.batch(step, case.microbatches * layout.replicas))
                assert result.losses is not None
                for n, loss in enumerate(result.losses):
                    recording.note("loss", loss, microbatch=n)
                optimizer.step()
