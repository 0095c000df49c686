"""Models, and training runs that mutants are planted in, each with its reference in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.stage.named import Context, within
from penstock.stage.rng.isolated_rng import seed_of

MICROBATCHES, STEPS, WIDTH, TOKENS = 4, 2, 16, 32
IGNORED, RATE, DECAY, CLIP = -100, 1e-2, 0.1, 0.5


class Block(nn.Module):
    """A residual block; with a buffer that counts, an auxiliary loss or dropout where the subject has them."""

    def __init__(self, drop: float, auxiliary: bool) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)
        self.auxiliary = auxiliary

    def forward(self, value: Tensor) -> Tensor:
        inner = self.down(self.act(self.up(self.norm(value))))
        if self.auxiliary:
            penstock.add_loss(inner.square().mean())
        return value + self.drop(inner)


class Mix(nn.Module):
    """Tokens take in the mean of those before them that a mask allows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        weights = mask[:, None, :].float().tril()
        return value + self.inner(weights @ value / weights.sum(-1, keepdim=True).clamp(min=1))


class Average(nn.Module):
    """A value less a running mean, which its buffer has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * value.detach().mean((0, 1))
        return value + self.inner(value - self.mean)


class Model(nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(
        self, tied: bool = False, drop: float = 0.0, auxiliary: bool = False, buffers: bool = False
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            Average() if buffers and n in (1, 2) else Block(drop, auxiliary and n == 1) for n in range(4)
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        value = self.table(ids)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class Masked(nn.Module):
    """A model whose inner layers take a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Mix() for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor, *, mask: Tensor) -> Tensor:
        value = self.table(ids)
        for block in self.blocks:
            value = block(value, mask)
        return self.head(value)


def loss_of(output: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of a microbatch, ignored tokens left out."""
    return F.cross_entropy(output.flatten(0, 1), ids.flatten(), ignore_index=IGNORED)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A training run, whose reference is the same model in plain PyTorch.

    Attributes:
        model: options of the model; with ``masked`` it is one whose layers take a mask.
        pipe: arguments of the pipeline.
        run: "pipe", or what trains in its place: "ddp" (DistributedDataParallel) or "stages" (torch.distributed.pipelining).
        processes: number of processes; with 1, ranks are threads.
        clip: largest norm of all gradients.
        accumulate: steps that make one update.
        zero: whether replicas divide the update.
        ragged: whether microbatches have different numbers of tokens that count, by which their losses weigh.
        scale: factor by which losses are larger than the reference's before their backward.
    """

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    pipe: Mapping[str, Any] = field(default_factory=dict)
    run: str = "pipe"
    processes: int = 1
    clip: float | None = CLIP
    accumulate: int = 1
    zero: bool = False
    ragged: bool = False
    scale: float = 1.0

    @property
    def reference(self) -> tuple[object, ...]:
        """What decides the numbers of the reference: subjects that have it in common have one reference."""
        autocast = self.pipe.get("autocast")
        return tuple(self.model.items()), autocast, self.clip, self.accumulate, self.ragged

    def build(self) -> nn.Module:
        """Return the model, with the same values each time."""
        torch.manual_seed(0)
        options = dict(self.model)
        return Masked() if options.pop("masked", False) else Model(**options)

    def batch(self, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return inputs, targets and keyword inputs of a step."""
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, TOKENS, (8, 12), generator=generator)
        target = ids.roll(-1, 1)
        target[:, -1] = IGNORED
        if self.ragged:
            for row in range(8):
                target[row, : row + 1] = IGNORED
        mask = torch.rand(8, 12, generator=generator) < 0.7
        return ids, target, {"mask": mask} if "masked" in self.model else {}


SUBJECTS = [
    Subject(name="1f1b", pipe={"schedule": "1f1b"}),
    Subject(name="gpipe", pipe={"schedule": "gpipe"}),
    Subject(name="zb-h1", pipe={"schedule": "zb-h1"}),
    Subject(name="zb-v", pipe={"schedule": "zb-v"}),
    Subject(name="interleaved", pipe={"schedule": "interleaved-1f1b", "virtual_stages": 2}),
    Subject(name="chimera", pipe={"schedule": "chimera"}),
    Subject(name="recompute", model={"drop": 0.2}, pipe={"recompute": "full"}),
    Subject(name="dropout", model={"drop": 0.2}),
    Subject(name="tied", model={"tied": True}),
    Subject(
        name="tied processes", model={"tied": True}, pipe={"mesh": penstock.MeshShape(2, 1)}, processes=2
    ),
    Subject(name="mask", model={"masked": True}),
    Subject(name="auxiliary", model={"auxiliary": True}),
    Subject(name="buffers", model={"buffers": True}),
    Subject(name="bf16", pipe={"autocast": torch.bfloat16}),
    Subject(name="ragged", pipe={"reduction": "valid"}, ragged=True),
    Subject(name="accumulate", clip=None, accumulate=2),
    Subject(name="dp", pipe={"mesh": penstock.MeshShape(1, 2)}, processes=2),
    Subject(name="dp unclipped", pipe={"mesh": penstock.MeshShape(1, 2)}, processes=2, clip=None),
    Subject(name="dp 4", pipe={"mesh": penstock.MeshShape(1, 4)}, processes=4),
    Subject(name="dp bf16", pipe={"mesh": penstock.MeshShape(1, 2), "autocast": torch.bfloat16}, processes=2),
    Subject(name="dp dropout", model={"drop": 0.2}, pipe={"mesh": penstock.MeshShape(1, 2)}, processes=2),
    Subject(name="pp x dp", pipe={"mesh": penstock.MeshShape(2, 2)}, processes=4),
    Subject(name="zero", pipe={"mesh": penstock.MeshShape(1, 2)}, processes=2, zero=True),
    Subject(name="ddp", run="ddp", processes=2, scale=2.0),
    Subject(name="ddp unclipped", run="ddp", processes=2, scale=2.0, clip=None),
    Subject(name="stages", run="stages", processes=2, scale=4.0, clip=None),
]


def plain(subject: Subject, folder: Path) -> None:
    """Record the reference: the whole model in plain PyTorch, microbatch after microbatch."""
    model = subject.build()
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, weight_decay=DECAY)
    at = [0, 0]
    if isinstance(model, Model):
        for n, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda module, args, n=n: draw_as_a_layer(*at, f"blocks.{n}"))
    autocast = subject.pipe.get("autocast")
    with penstock.record(folder, model, steps=STEPS):
        for step in range(STEPS * subject.accumulate):
            at[0] = step
            ids, target, named = subject.batch(step)
            parts = zip(ids.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
            masks = named["mask"].chunk(MICROBATCHES) if named else None
            for n, (part, wanted) in enumerate(parts):
                at[1] = n
                inputs = {} if masks is None else {"mask": masks[n]}
                with (
                    torch.autocast("cpu", autocast) if autocast else nullcontext(),
                    within(Context({}, {})) as context,
                ):
                    loss = sum(context.losses.values(), loss_of(model(part, **inputs), wanted))
                share = (wanted != IGNORED).sum().item() / (target != IGNORED).sum().item()
                (loss * share if subject.ragged else loss / MICROBATCHES).backward()
            if (step + 1) % subject.accumulate:
                continue
            for parameter in model.parameters() if subject.accumulate > 1 else ():
                parameter.grad.div_(subject.accumulate)
            end(model, optimizer, subject.clip)


def draw_as_a_layer(step: int, microbatch: int, name: str) -> None:
    """Seed torch's generator so that it draws what a pipeline's layer draws there."""
    torch.default_generator.manual_seed(seed_of(0, step, microbatch, name))


def is_small(name: str) -> bool:
    """Return whether a parameter is of the group without weight decay."""
    return "bias" in name or "norm" in name


def groups(model: nn.Module, share: Callable[[str], bool] = lambda name: True) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer."""
    named = [(name, p) for name, p in model.named_parameters() if share(name)]
    return [
        {"params": [p for name, p in named if is_small(name)], "lr": RATE / 2, "weight_decay": 0.0},
        {"params": [p for name, p in named if not is_small(name)]},
    ]


def end(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    """Clip and update."""
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def piped(subject: Subject, folder: Path) -> None:
    """Record a run in a pipeline, in threads or as one of several processes."""
    given: dict[str, Any] = {"microbatches": MICROBATCHES, **subject.pipe}
    mesh = given.get("mesh")
    given |= {"ranks": 2} if mesh is None else {"microbatches": MICROBATCHES // mesh.dp}
    with penstock.Pipeline(subject.build(), loss_of, timeout=30, **given) as pipe:
        optimizer = penstock.PipelineOptimizer(
            pipe,
            torch.optim.AdamW,
            groups=[{"match": r"bias|norm", "lr": RATE / 2, "weight_decay": 0.0}],
            lr=RATE,
            weight_decay=DECAY,
            clip=subject.clip,
            accumulate=subject.accumulate,
            zero=subject.zero,
        )
        with penstock.record(folder, pipe, steps=STEPS):
            for step in range(STEPS * subject.accumulate):
                ids, target, named = subject.batch(step)
                pipe.step(ids, target, **named)
                optimizer.step()


def replicated(subject: Subject, folder: Path) -> None:
    """Record a run with DistributedDataParallel, each of two processes with two of four microbatches."""
    rank = dist.get_rank()
    model = DistributedDataParallel(subject.build())
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, weight_decay=DECAY)
    with penstock.record(folder, model, steps=STEPS, first_microbatch=2 * rank):
        for step in range(STEPS):
            ids, target, _ = subject.batch(step)
            parts = list(zip(*(whole.chunk(2)[rank].chunk(2) for whole in (ids, target)), strict=True))
            for n, (part, wanted) in enumerate(parts):
                with model.no_sync() if n + 1 < len(parts) else nullcontext():
                    (loss_of(model(part), wanted) / len(parts)).backward()
            end(model, optimizer, subject.clip)


def staged(subject: Subject, folder: Path) -> None:
    """Record a run with ``torch.distributed.pipelining``, one stage in each of two processes."""
    rank, model = dist.get_rank(), subject.build()
    example = subject.batch(0)[0].chunk(MICROBATCHES)[0]
    cut = pipeline(model, (example,), split_spec={"blocks.2": SplitPoint.BEGINNING})
    stage = cut.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(groups(stage.submod), lr=RATE, weight_decay=DECAY)
    with penstock.record(folder, stage.submod, steps=STEPS):
        for step in range(STEPS):
            ids, target, _ = subject.batch(step)
            schedule.step(ids) if rank == 0 else schedule.step(target=target)
            end(stage.submod, optimizer, None)


RUNS: dict[str, Callable[[Subject, Path], None]] = {"pipe": piped, "ddp": replicated, "stages": staged}
