"""Layers that torch's own parts shard, beside a pipeline on a slice of the mesh: the numbers of plain PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.base.errors import ConfigError, PenstockError
from penstock.parallel.fully_sharded import FullyShardedLayers
from penstock.parallel.participant import StepFailure
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import outcome, run_cases

M, STEPS, CLIP = 4, 3, 0.2  # two of the three steps clip


def model() -> nn.Sequential:
    torch.manual_seed(0)
    width = plain.WIDTH
    blocks = [nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(4)]
    return nn.Sequential(*blocks)


def plain_losses(every: int = 1) -> list[Tensor]:
    """Losses of all microbatches in each step, with an update after `every` steps."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    history = []
    for step in range(STEPS):
        losses, _ = plain.step(net, nn.functional.mse_loss, *plain.batch(step, 2 * M), M)
        if (step + 1) % every == 0:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        history.append(losses)
    return history


def mesh_of(kind: str) -> DeviceMesh:
    if kind in ("hsdp", "2d"):
        names = ("pp", "copies", "dp") if kind == "hsdp" else ("pp", "dp", "tp")
        return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp" if kind == "tp" else "dp"))


def placed(kind: str, mesh: DeviceMesh) -> nn.Sequential:
    """The model, each block placed on the mesh's other dimensions."""
    net = model()
    if kind in ("tp", "2d"):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in net:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind == "ddp":
        group = mesh["dp"].get_group()
        net = nn.Sequential(*[nn.parallel.DistributedDataParallel(b, process_group=group) for b in net])
    elif kind != "tp":
        policy = MixedPrecisionPolicy()
        if kind == "16 bits":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in net:
            shards = mesh["copies", "dp"] if kind == "hsdp" else mesh["dp"]
            fully_shard(block[0], mesh=shards, mp_policy=policy)
            fully_shard(block, mesh=shards, mp_policy=policy)
    return net


class Counter(TorchDispatchMode):
    """Counts the gathers and reductions of weights in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> tuple[int, int]:
        """(gathers, reductions)"""
        return self.names.count("c10d::_allgather_base_"), self.names.count("c10d::_reduce_scatter_base_")


class Case(NamedTuple):
    """A training.

    Attributes:
        kind: what the layers are placed by; see `placed`.
        every: steps before an update.
        fails: "forward" or "backward" of the last layer that fails, in a step before the second.
    """

    kind: str
    schedule: str = "1f1b"
    own_optimizer: bool = True
    every: int = 1
    recompute: Literal["none", "full"] = "none"
    fails: str = ""


def train(rank: int, case: Case) -> tuple[int, list[Tensor], list[tuple[int, int]]]:
    """Train; return the replica, its losses, and (gathers, reductions) of each step and of the evaluation after it."""
    kind, fails = case.kind, case.fails
    mesh = mesh_of(kind)
    replicas = 1 if kind == "tp" else 4 if kind == "hsdp" else 2
    replica = 0 if kind == "tp" else mesh["dp"].get_local_rank()
    if kind == "hsdp":
        replica += 2 * mesh["copies"].get_local_rank()
    rows = slice(replica * 2 * M // replicas, (replica + 1) * 2 * M // replicas)
    net = placed(kind, mesh)
    failing = Failing(net[-1])
    with Pipeline(
        net, nn.functional.mse_loss, schedule=case.schedule, microbatches=M // replicas, mesh=mesh["pp"],
        recompute=case.recompute, timeout=60,
        # The first step's comparison of rows gathers weights, too.
        execution=ExecutionOptions(check_split=False),
    ) as pipe:  # fmt: skip
        if case.own_optimizer:
            optimizer: Any = PipelineOptimizer(pipe, torch.optim.SGD, clip=CLIP, lr=0.1)
        else:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        history, counts = [], []
        for step in range(STEPS):
            x, y = plain.batch(step, 2 * M)
            if fails and step == 1:
                failing.begin(fails)
                with pytest.raises(PenstockError, match="it has to fail"):
                    pipe.step(x[rows], y[rows])
                failing.begin("")
            with Counter() as counter:
                history.append(pipe.step(x[rows], y[rows]).losses)
            counts.append(counter.counts)
            with Counter() as counter:
                pipe.evaluate(x[rows], y[rows])
            counts.append(counter.counts)
            pipe.state_dict()
            if (step + 1) % case.every == 0:
                if not case.own_optimizer:
                    pipe.clip_grad_norm_(CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return replica, history, counts


class Failing:
    """Makes a layer fail in its second forward or backward from when `begin` is called."""

    def __init__(self, layer: nn.Module) -> None:
        self.begin("")
        layer.register_forward_hook(self._after)

    def begin(self, where: str) -> None:
        self._where, self._calls = where, 0

    def _after(self, layer: nn.Module, args: object, output: Tensor) -> None:
        if self._where == "forward":
            self._count()
        elif self._where == "backward":
            output.register_hook(lambda _: self._count())

    def _count(self) -> None:
        self._calls += 1
        if self._calls == 2:
            raise ValueError("it has to fail")


def refused(rank: int, kind: str, whole: bool, schedule: str = "1f1b") -> str:
    mesh = mesh_of("fsdp")
    with pytest.raises(ConfigError) as error:
        Pipeline(
            placed(kind, mesh), nn.functional.mse_loss, schedule=schedule, microbatches=2,
            mesh=mesh if whole else mesh["pp"], timeout=60,
        )  # fmt: skip
    return str(error.value)


def refused_in_a_step(rank: int) -> str:
    mesh = mesh_of("fsdp")
    with Pipeline(
        placed("fsdp", mesh), nn.functional.mse_loss, schedule="tests.support.own_schedules:split_from_six",
        microbatches=2, mesh=mesh["pp"], timeout=60,
    ) as pipe:  # fmt: skip
        for number in (2, 5):
            pipe.step(*plain.batch(0, 12), microbatches=number)
        with pytest.raises(ConfigError) as error:
            pipe.step(*plain.batch(0, 12), microbatches=6)
    return str(error.value)


class Skipping(nn.Module):
    """Uses its layer in all calls but each second, so that the last of two microbatches does not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layer(x)
        return output if self.calls % 2 else x + output.detach()


def refused_unreached(rank: int) -> str:
    mesh = mesh_of("fsdp")
    layers = [Skipping(layer) for layer in placed("fsdp", mesh)]
    with (
        Pipeline(layers, nn.functional.mse_loss, microbatches=2, mesh=mesh["pp"], timeout=60) as pipe,
        pytest.raises(PenstockError) as error,
    ):
        pipe.step(*plain.batch(0, M))
    return str(error.value)


def clipped_by_torch(rank: int, own_clip: bool) -> str:
    """What a training says that clips by the norm of all gradients, or by that of one stage."""
    mesh = mesh_of("fsdp")
    with Pipeline(
        placed("fsdp", mesh), nn.functional.mse_loss, microbatches=2, mesh=mesh["pp"], timeout=60
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
        for step in range(3):
            if (told := outcome(pipe.step, *plain.batch(step, M))) != "ok":
                return told
            pipe.clip_grad_norm_(0.01) if own_clip else nn.utils.clip_grad_norm_(pipe.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return "ok"


@pytest.mark.slow
def test_layers_sharded_by_torch_train_as_plain_pytorch_or_are_refused():
    """In processes of its own, as torch's cache of operations on DTensors outlives a mesh's groups."""
    cases = [
        Case("fsdp"),
        Case("fsdp", "gpipe", own_optimizer=False),
        Case("fsdp", "interleaved-1f1b"),
        Case("fsdp", every=2),
        Case("fsdp", own_optimizer=False, recompute="full"),
        Case("hsdp", "gpipe"),
        Case("2d", "gpipe"),
        Case("tp"),
    ]
    with LocalProcesses(4) as own:
        for case, results in zip(cases, run_cases(own, 4, train, [(case,) for case in cases]), strict=True):
            wanted = plain_losses(case.every)
            # Each block is two groups, and a rank has two of the four blocks, or all where pp is 1.
            groups = {"fsdp": 4, "tp": 0}.get(case.kind, 8)
            for replica, history, counts in results:
                for losses, all_losses in zip(history, wanted, strict=True):
                    part = all_losses[replica * len(losses) :][: len(losses)]
                    torch.testing.assert_close(losses, part, rtol=1e-5, atol=1e-6, msg=str(case))
                assert counts == STEPS * [(groups, groups), (groups, 0)], case
        cases_refused = [("ddp", False), ("fsdp", True), ("fsdp", False, "zb-h1")]
        ddp, sharded, split = run_cases(own, 4, refused, cases_refused)
        in_a_step = own.run(4, refused_in_a_step)
        unreached = own.run(4, refused_unreached)
        clipped, by_stage = run_cases(own, 4, clipped_by_torch, [(True,), (False,)])
    assert all("has a DistributedDataParallel, which expects one backward for each" in text for text in ddp)
    assert all("the schedule zb-h1 splits backwards; take one without W ops" in text for text in split)
    assert all("splits backwards; take one without W ops" in text for text in in_a_step)
    assert all("is a DTensor already, but the mesh (tp 1 x pp 2 x dp 2" in text for text in sharded)
    assert all("in the step did not reach" in text for text in unreached)
    assert clipped == 4 * ["ok"]
    assert all("step 2: since the last step, the gradients were scaled by another" in t for t in by_stage)


def abandoned(rank: int) -> tuple[list[bool], Tensor, Tensor]:
    """Return whether each weight is sharded after a step that ends in its forwards, and outputs in it and after it."""
    net = placed("fsdp", init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")))
    named = [(str(n), layer) for n, layer in enumerate(net)]
    layers = FullyShardedLayers(
        [SimpleNamespace(index=0, module=SimpleNamespace(named_layers=lambda: named))]
    )
    x, error = plain.batch(0, 4)[0], ValueError("it has to fail")
    layers.begin(None)
    out = net(x)
    layers.abandon(StepFailure(error, error, ran=True, told=False))
    sharded = [isinstance(p, DTensor) for p in net.parameters()]
    layers.begin(None)
    return sharded, out.detach(), net(x).detach()


def test_layers_within_layers_drop_their_weights_once_where_a_step_ends_early(processes: LocalProcesses):
    for sharded, out, again in processes.run(2, abandoned):
        assert all(sharded)
        assert torch.equal(out, again)


@pytest.mark.slow
def test_a_failed_step_leaves_no_gradient_in_sharded_layers():
    """Neither in the parameters' dtype nor in that of the reduction."""
    # Of older versions, a layer whose backward failed does not reduce again.
    places = ["forward", "backward"] if hasattr(FSDPModule, "reset_iter_state") else ["forward"]
    with LocalProcesses(4) as own:
        for kind in ("fsdp", "16 bits"):
            cases = [Case(kind, fails=fails) for fails in ("", *places)]
            without, *failed = run_cases(own, 4, train, [(case,) for case in cases])
            for case, results in zip(cases[1:], failed, strict=True):
                for (_, history, counts), (_, wanted, wanted_counts) in zip(results, without, strict=True):
                    torch.testing.assert_close(history, wanted, rtol=0, atol=0, msg=str(case))
                    assert counts == wanted_counts, case
