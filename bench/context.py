"""Context parallelism over a slow link: how much of the gathers of keys and values a step waits for, and their bytes.

Two hosts divide a sample (cp 2). Attention sleeps, so that its time is known and takes no core: for each group of heads a
share of it, in the backward twice as long. The time of a group's gather, and of the sum of its gradients, is measured alone
on the same link. From these the step is simulated: a gather runs under the attention of the group before, the sums under
the backwards that are left, one at a time on the link. Bytes are those that the network card of a host has sent.

The hosts are namespaces of this machine (`tests.support.hosts`). At last the built-in model trains on one long sample in
processes that may not get more memory than a limit: one process, which fails, and two that divide it.

    python -m bench.context [--rounds N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.support.hosts.hosts import Hosts, every, missing
from torch import Tensor, nn
from torch import distributed as dist

import penstock
from bench.compare import Figures, main
from penstock.base.errors import PenstockError
from penstock.parallel.context import attention as context
from penstock.parallel.context.attention import current_division
from penstock.parallel.context.exchange import TokenExchange
from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

TOKENS, HEADS, WIDTH, LAYERS, BACKWARD = 2048, 4, 64, 1, 2.0
RATE = 16e6
"""Bytes a second of the link in each direction."""
ATTENTION = (0.05, 0.2, 0.4)
"""Seconds of a layer's attention in the forward; its gathers take 0.13 s on the link, which stores what takes it 0.25 s."""


_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LONG, LIMIT = 4096, 1000 << 20
MODEL = ModelConfig(vocabulary=64, width=512, layers=6, heads=8, kv_heads=8, hidden=2048)


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD * ctx.seconds)
        return grad, None


class Attention(nn.Module):
    """Gathers keys and values, and takes a known time for a mean of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(())), 0.0

    def forward(self, x: Tensor) -> Tensor:
        def attention(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
            out = _Slept.apply(
                query + key.mean(-2, True) + value.mean(-2, True), self.seconds * key.shape[-3] / HEADS
            )
            slept: Tensor = out
            return slept

        penstock.sequence_positions(x.shape[1])  # asked for, since a model that never asks is refused
        division = current_division()
        heads = (self.scale * x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        if division is None:  # the first step compares a few tokens
            out = attention(heads, heads, heads, None)
        else:
            out = division.attend(heads, heads, heads, None, attention, 1)
        return out.transpose(1, 2).flatten(2)


def sent() -> int:
    """Return the bytes that this host has sent to others."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    card = next(line for line in lines if line.strip().startswith("eth0:"))
    return int(card.partition(":")[2].split()[8])


def rank(seconds: list[float], rounds: int) -> None:
    """Time steps with each time of attention, grouped or not; print seconds and bytes of each, and the collectives alone."""
    torch.set_num_threads(1)
    x, y = torch.randn(1, TOKENS, HEADS * WIDTH), torch.zeros(1, TOKENS, HEADS * WIDTH)
    net = nn.Sequential(*[Attention() for _ in range(LAYERS)])
    told: dict[str, Any] = {"steps": [], "alone": {}}
    with Pipeline(
        net, nn.functional.mse_loss, microbatches=1, mesh=MeshShape(cp=2), timeout=120,
        execution=ExecutionOptions(check_finite=False),
    ) as pipe:  # fmt: skip
        assert pipe.world is not None, "started as one of two processes"

        def step() -> tuple[float, int]:
            dist.barrier()
            before, begun = sent(), time.perf_counter()
            pipe.step(x, y)
            dist.barrier()
            return time.perf_counter() - begun, sent() - before

        apart = {
            "start_gather": lambda _, part: partial(torch.stack, [part, part]),
            "start_sum": lambda _, whole: (whole[0] + whole[1], lambda: None),
        }
        for groups, least in ((4, 0), (1, 1 << 40)):
            context._LEAST = least
            for each in (0.0, *seconds):
                for layer in net:
                    layer.seconds = each
                found: dict[str, list[tuple[float, int]]] = {"with": [], "without": []}
                for _ in range(rounds + 1):
                    found["with"].append(step())
                    with patch.multiple(TokenExchange, **apart):
                        found["without"].append(step())
                told["steps"].append((groups, each, {name: times[1:] for name, times in found.items()}))
    group = dist.new_group()

    def alone(groups: int, one_by_one: bool, start: Callable[[], Any]) -> float:
        """Return the seconds of one of the collectives of a layer, run as in a step but with nothing between them."""
        found = []
        for _ in range(rounds + 1):
            dist.barrier()
            begun, works = time.perf_counter(), []
            for _ in range(groups):
                works.append(start())
                if one_by_one:
                    works.pop().wait()
            for work in works:
                work.wait()
            dist.barrier()  # as a step ends: when all processes have ended it
            found.append(time.perf_counter() - begun)
        return min(found[1:]) / groups

    for groups in (4, 1):
        own = torch.randn(HEADS // groups, TOKENS // 2, 2 * WIDTH)
        whole, out = torch.randn(2, *own.shape), torch.empty(2, *own.shape)
        gather = partial(dist.all_gather_into_tensor, out.flatten(0, 1), own, group=group, async_op=True)
        told["alone"][f"gather {groups}"] = alone(groups, True, gather)
        add = partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group, async_op=True)
        told["alone"][f"sum {groups}"] = alone(groups, False, add)
    os.write(1, json.dumps(told).encode())


def exposed(groups: int, attention: float, gather: float, total: float) -> float:
    """Return the seconds of a layer's forward and backward beyond its attention.

    Args:
        attention: seconds of the forward's attention.
        gather, total: seconds of a group's gather, and of the sum of its gradients.
    """
    each = attention / groups
    forward = gather + (groups - 1) * max(0.0, gather - each)
    free = 0.0
    for n in range(groups):
        free = max(free, (n + 1) * BACKWARD * each) + total
    return forward + free - BACKWARD * attention


def limited(rank: int, processes: int, limit: int | None) -> str:
    """Take two steps on a long sample in processes that get at most `limit` bytes more; return what happened."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(
        _M_MMAP_THRESHOLD, 1 << 20
    )  # freed tensors go back at once, so the limit counts those in use
    before = resource.getrlimit(resource.RLIMIT_DATA)
    ids = torch.randint(64, (1, LONG + 1), generator=torch.Generator().manual_seed(1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    mesh: dict[str, Any] = {"mesh": MeshShape(cp=processes)} if processes > 1 else {"ranks": 1}
    try:
        with Pipeline(
            layers(MODEL), next_token_loss, microbatches=1, timeout=120,
            execution=ExecutionOptions(check_split=False), **mesh,
        ) as pipe:  # fmt: skip
            optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1)
            pipe.step(x[:, :64].contiguous(), y[:, :64].contiguous())  # imports what steps need
            optimizer.zero_grad()
            status = Path("/proc/self/status").read_text().splitlines()
            has = 1024 * int(next(line for line in status if line.startswith("VmData")).split()[1])
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (has + limit, before[1]))
            for _ in range(2):
                loss = pipe.step(x, y).loss
                optimizer.step()
            assert loss is not None
            return f"loss {loss.item():.5f}"
    except (PenstockError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every time of attention, with four groups of heads and with one."""
    if missing():
        raise SystemExit(missing())
    seconds = list(ATTENTION[1:2] if options.quick else ATTENTION)
    with Hosts(2, apart=False, imports=("torch._dynamo", "bench.context")) as hosts:
        hosts.link(delay=0.0005, rate=RATE)
        jobs = hosts.spread("bench.context:rank", seconds, options.rounds, per_host=1)
        if any(every(jobs, timeout=500)):
            raise SystemExit("\n".join(f"{job.code} {job.err[-2000:]}" for job in jobs))
        told = json.loads(jobs[0].out)
    yield (
        f"{'groups':>6}{'attention, ms':>15}{'waits for, ms':>15}{'simulated':>11}{'differs':>9}{'hidden':>8}{'bytes':>12}"
        f"{'formula':>9}"
    )
    rows: list[dict[str, float]] = []
    # Keys and values of a layer: this process sends its half in the forward, and the other half's gradients back.
    formula = LAYERS * 2 * 2 * (TOKENS // 2) * HEADS * WIDTH * 4
    for groups, each, found in told["steps"]:
        seconds_of = {name: min(t for t, _ in steps) for name, steps in found.items()}
        gather, total = (told["alone"][f"{name} {groups}"] for name in ("gather", "sum"))
        simulated = LAYERS * exposed(groups, seconds_of["without"] / LAYERS / (1 + BACKWARD), gather, total)
        measured = seconds_of["with"] - seconds_of["without"]
        moved = statistics.median(n for _, n in found["with"])
        row = {
            "groups": groups, "attention": each, "exposed": measured, "simulated": simulated,
            "difference": measured / simulated - 1, "hidden": 1 - measured / LAYERS / groups / (gather + total),
            "bytes": moved / formula - 1,
        }  # fmt: skip
        rows.append(row)
        yield (
            f"{groups:6}{1e3 * each:15.0f}{1e3 * measured:15.1f}{1e3 * simulated:11.1f}{row['difference']:9.1%}"
            f"{row['hidden']:8.0%}{moved:12,.0f}{row['bytes']:9.1%}"
        )
    yield f"largest difference {max(abs(row['difference']) for row in rows):.1%}; quickest of {options.rounds} steps"
    runs = {}
    sizes: list[tuple[int, int | None]] = [(1, LIMIT), (2, LIMIT)]
    for processes, limit in sizes if options.quick else [(1, None), *sizes]:
        with LocalProcesses(processes) as pool:  # new ones, which have no freed memory to use again
            size = f"{limit >> 20} MiB" if limit else "any size"
            runs[f"{processes} of {size}"] = pool.run(processes, limited, processes, limit, timeout=600)[0]
    yield f"{LONG:,} tokens on " + "; ".join(f"{name}: {what}" for name, what in runs.items())
    return {"rows": rows, "limited": runs}


if __name__ == "__main__":
    main(measure, __doc__, rounds=7)
