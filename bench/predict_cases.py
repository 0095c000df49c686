"""Models and layouts of `bench.predict`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.sleep import Sleeper, oversleep
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

ROWS = {"decoder": 1, "gpt2": 1, "conv": 2, "sleep": 1}
"""Samples of a microbatch."""
SEQUENCE = 32


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout of one model; the fields are those of a `Pipeline`."""

    model: str
    mode: str
    pp: int
    schedule: str = "1f1b"
    microbatches: int = 8
    virtual: int = 1
    split: str = "even"
    recompute: str | int = "none"
    dp: int = 1

    @property
    def stages(self) -> int:
        return self.pp * (2 if self.schedule == "zb-v" else self.virtual)

    @property
    def batch(self) -> int:
        """Microbatches of all replicas."""
        return self.dp * self.microbatches

    def __str__(self) -> str:
        return (
            f"{self.model:8}{self.mode:10}{self.pp:3}{self.dp:3}  {self.schedule:17}{self.stages // self.pp:2}"
            f"{self.microbatches:4}  {self.split:9}{self.recompute!s:5}"
        )


def cases(model: str, mode: str) -> list[Case]:
    """Return the layouts of a model on two ranks, or in processes on two replicas of one."""

    def case(schedule: str, microbatches: int = 8, virtual: int = 1, **other: Any) -> Case:
        return Case(
            model=model,
            mode=mode,
            pp=other.pop("pp", 2),
            schedule=schedule,
            microbatches=microbatches,
            virtual=virtual,
            **other,
        )

    return [
        case("1f1b", 2),
        case("1f1b"),
        case("1f1b", 16),
        case("gpipe"),
        case("zb-h1"),
        case("zb-v"),
        case("interleaved-1f1b", 8, 2),
        case("interleaved-1f1b", 8, 4),
        case("breadth-first", 8, 2),
        case("interleaved-1f1b", 4, 3),
        case("1f1b", split="measured"),
        case("zb-h1", 4, split="measured"),
        case("1f1b", recompute="full"),
        case("1f1b", recompute=2),
        *([case("1f1b", 4, pp=1, dp=2)] if mode == "processes" else []),
    ]


def alone(model: str) -> list[Case]:
    """Return the layouts of a model on one rank."""
    return [
        Case(model=model, mode="threads", pp=1, microbatches=4),
        Case(model=model, mode="threads", pp=1, microbatches=8, recompute="full"),
    ]


def asleep(ranks: int, mode: str) -> list[Case]:
    """Return the layouts of sleeping layers, two a rank."""
    kinds = [
        ("1f1b", 1),
        ("zb-h1", 1),
        ("interleaved-1f1b", 2),
        ("zb-v", 1),
        ("gpipe", 1),
        ("breadth-first", 2),
    ]
    return [
        Case(
            model="sleep", mode=mode, pp=ranks, schedule=schedule, microbatches=count * ranks, virtual=virtual
        )
        for schedule, virtual in kinds
        for count in (2, 4)
    ]


class _Residual(nn.Module):
    """A convolution block, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def model_of(name: str, ranks: int) -> object:
    """Return the layers of a model, the same on every call."""
    torch.manual_seed(0)
    if name == "decoder":
        return layers(ModelConfig(vocabulary=256, width=128, layers=8, heads=4, kv_heads=4, hidden=352))
    if name == "conv":
        blocks = [_Residual(24) for _ in range(6)]
        return nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            *blocks,
            nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(24 * 36, 10)),
        )
    if name == "sleep":
        oversleep()  # measured once, before anything sleeps
        return [partial(Sleeper, 2)] * (2 * ranks)  # built, since copies have no hooks on weights
    return _gpt2()


def _gpt2() -> object:
    from transformers import GPT2Config, GPT2LMHeadModel

    from penstock import from_transformers

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_embd=128, n_layer=8, n_head=4, vocab_size=256, n_positions=SEQUENCE, **ends)
    return from_transformers(GPT2LMHeadModel(config))


def first_element(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that costs almost nothing."""
    return output.view(-1)[0]


def loss_of(name: str) -> Any:
    """Return a model's loss function."""
    return {"conv": nn.functional.cross_entropy, "sleep": first_element}.get(name, next_token_loss)


@cache
def batch_of(name: str, microbatches: int) -> tuple[Tensor, Tensor]:
    """Return input and target of so many microbatches."""
    rows, draws = ROWS[name] * microbatches, torch.Generator().manual_seed(1)
    if name == "conv":
        return torch.randn(rows, 3, 24, 24, generator=draws), torch.randint(0, 10, (rows,), generator=draws)
    if name == "sleep":
        return torch.zeros(rows, 1024), torch.zeros(rows, 1024)
    tokens = torch.randint(0, 256, (rows, SEQUENCE + 1), generator=draws)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
