"""Steps with weights in a store: those of plain PyTorch, bit for bit, and no op reads a weight that is not there."""

from __future__ import annotations

import copy
import itertools
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.parallel.host_store.memory import HostMemory
from penstock.parallel.host_store.participant import StoreParticipant
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.train.model.llama import next_token_loss
from tests.support import plain, tied
from tests.support.lanes import exhaustive, slow
from tests.support.sharded import GROUPS, half_frozen, in_bf16, parts, tokens
from tests.support.states import assert_equal

STEPS = 5
DISK = {"store": "disk", "window": 1}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


def plain_run(optimizer: str, accumulate: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    net = plain.model(4)
    make, options = OPTIMIZERS[optimizer]
    updates = make(net.parameters(), **options)
    losses = []
    for n in range(STEPS * accumulate):
        losses.append(plain.step(net, nn.functional.mse_loss, *plain.batch(n, 8), 4)[0])
        if (n + 1) % accumulate == 0:
            for p in net.parameters():
                if accumulate > 1:
                    p.grad.div_(accumulate)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            updates.step()
            updates.zero_grad()
    return losses, net.state_dict()


@pytest.mark.parametrize("update", [("adamw", 1), ("sgd", 2)], ids=["adamw", "sgd accumulated"])
@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual_stages", "window"),
    [
        ("breadth-first", 1, 4, 1),
        ("zb-v", 2, None, 1),
        *slow(("interleaved-1f1b", 2, 2, 1)),
        *exhaustive(
            ("gpipe", 1, 1, None),
            ("1f1b", 4, None, 1),
            ("breadth-first", 2, 2, 2),
            ("interleaved-1f1b", 2, 2, None),
            ("zb-h1", 2, None, 1),
            ("zb-v", 2, None, None),
            ("v-half", 2, None, 1),
            ("dualpipe-v", 2, None, 2),
        ),
    ],
)
def test_steps_are_those_of_plain_pytorch(schedule, ranks, virtual_stages, window, store, update):
    optimizer, accumulate = update
    options = ParallelOptions(store=store, window=window, reduce_every=2)
    settings = {"schedule": schedule, "ranks": ranks, "virtual_stages": virtual_stages}
    make, defaults = OPTIMIZERS[optimizer]
    net = plain.model(4)
    with Pipeline(net, nn.functional.mse_loss, microbatches=4, parallel=options, **settings) as pipe:
        updates = PipelineOptimizer(pipe, make, clip=0.5, accumulate=accumulate, **defaults)
        losses = []
        for n in range(STEPS * accumulate):
            losses.append(pipe.step(*plain.batch(n, 8)).losses)
            updates.step()
    expected, weights = plain_run(optimizer, accumulate)
    assert all(map(torch.equal, losses, expected))
    assert_equal(dict(net.state_dict()), dict(weights))


@pytest.mark.parametrize("store", ["disk", *slow("host")])
@pytest.mark.parametrize(("schedule", "every"), [("zb-h2", 2), *slow(("zb-h1", 1), ("zb-v", 1))])
def test_weight_halves_add_to_sums_that_have_left_since_their_input_half(schedule, every, store):
    net, twin = plain.model(4), plain.model(4)
    options = ParallelOptions(store=store, window=1, reduce_every=every)
    settings = {"microbatches": 6, "schedule": schedule, "ranks": 2}
    with (
        Pipeline(net, nn.functional.mse_loss, parallel=options, **settings) as pipe,
        Pipeline(twin, nn.functional.mse_loss, **settings) as whole,
    ):
        for each in (pipe, whole):
            each.step(*plain.batch(0, 12))
        plain.require_equal_gradients(net, twin)
        # The halves are computed where they are placed, as what they read is held until then.
        one, other = pipe.trace(), whole.trace()
        for rank in range(2):
            assert one.held[one.rank == rank].tolist() == other.held[other.rank == rank].tolist()


@pytest.mark.parametrize("store", ["host", "disk"])
def test_copies_run_beside_ops_and_ops_wait_for_their_own(monkeypatch, store):
    """With two places, the fetch of the second stage ends only when an op of the first one, before which it began, runs."""
    net, ran = plain.model(4), Event()
    fetched: list[bool] = []

    def slow_copy(self: HostMemory, target: Tensor, source: Tensor) -> None:
        if source.data_ptr() == home and not fetched:
            fetched.append(ran.wait(60))
        copy_of_torch(self, target, source)

    options = ParallelOptions(store=store, window=2)
    settings = {"microbatches": 2, "schedule": "breadth-first", "virtual_stages": 2}
    with Pipeline(net, nn.functional.mse_loss, parallel=options, **settings) as pipe:
        copy_of_torch, home = HostMemory.copy, net[2][0].weight.data_ptr()
        monkeypatch.setattr(HostMemory, "copy", slow_copy)
        calls = itertools.count()
        net[1].register_forward_hook(lambda *_: ran.set() if next(calls) == 1 else None)
        x, y = plain.batch(0, 8)
        pipe.step(x, y)
    twin = plain.model(4)
    plain.step(twin, nn.functional.mse_loss, x, y, 2)
    assert fetched == [True]
    plain.require_equal_gradients(net, twin)


def trained(
    given: Any, parallel: ParallelOptions, optimizer: dict[str, Any] | None = None, **built: Any
) -> dict[str, dict[Any, Any]]:
    """Losses, weights and the optimizer's state after some steps."""
    settings = {"microbatches": 4, "schedule": "interleaved-1f1b", "ranks": 2, "virtual_stages": 2, **built}
    loss_fn = settings.pop("loss_fn", next_token_loss)
    batch = settings.pop("batch", tokens)
    with Pipeline(given(), loss_fn, parallel=parallel, **settings) as pipe:
        chosen = {"lr": 0.01, "clip": 0.5, **(optimizer or {})}
        updates = PipelineOptimizer(pipe, torch.optim.AdamW, **chosen)
        losses = {}
        for n in range(STEPS):
            losses[n] = pipe.step(*batch(n)).losses
            updates.step()
        losses[-1] = pipe.evaluate(*batch(100)).loss
        state = copy.deepcopy(updates.state_dict())
        return {"losses": losses, "weights": dict(pipe.full_state_dict()), "state": state}


class MaxNorm(nn.Module):
    """A table that is written when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(tied.WORDS, plain.WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


def written_when_read() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MaxNorm(), *plain.model(3), nn.Linear(plain.WIDTH, tied.WORDS))


def last_first() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
    )


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randn(8, 3, generator=generator)


TABLE = {"loss_fn": tied.loss_fn, "batch": tied.batch}
TWICE = {"schedule": "chimera", "virtual_stages": None}
PICTURES = {"loss_fn": nn.functional.mse_loss, "batch": images}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "groups and a schedule": (parts, {"groups": GROUPS, "lr_factor": lambda n: 1 / (n + 1)}, {}),
    "frozen": (half_frozen, {}, {}),
    "all layers recomputed": (parts, {}, {"recompute": "full"}),
    "16 bits": (in_bf16, {}, {}),
    "main weights": (in_bf16, {"main_weights": True}, {}),
    "autocast and a scaler": (parts, {"scaler": True}, {"autocast": torch.bfloat16}),
    "tied over stages": (tied.model, {}, TABLE),
    "tied in a stage": (tied.model, {}, {**TABLE, "ranks": 1, "virtual_stages": 1}),
    "written when read": (written_when_read, {}, TABLE),
    "another memory format": (last_first, {}, PICTURES),
    "Muon beside AdamW": (
        parts,
        {"groups": [{"match": lambda _, p: p.dim() == 2, "optimizer": torch.optim.Muon, "lr": 0.02}]},
        {},
    ),
    "few layers recomputed": (parts, {}, {"recompute": 2}),
    "zero bubble": (parts, {}, {"schedule": "zb-h1", "virtual_stages": None}),
    "on two ranks": (half_frozen, {"accumulate": STEPS}, TWICE),
    "on two ranks, main weights": (in_bf16, {"main_weights": True}, TWICE),
    "on two ranks, tied over stages": (tied.model, {}, {**TABLE, **TWICE}),
    "on all ranks": (parts, {}, {"schedule": "round-trip", "ranks": 4, "virtual_stages": 1}),
    "on two ranks, pairs of ops": (parts, {}, {"schedule": "dualpipe", "virtual_stages": None, "ranks": 2}),
}


FAST = ["tied over stages", "tied in a stage", "written when read", "on two ranks"]


@pytest.mark.parametrize("case", [*FAST, *slow(*(case for case in CASES if case not in FAST))])
@pytest.mark.parametrize("store", ["disk", *exhaustive("host")])
def test_steps_are_those_of_a_pipeline_without_a_store(case, store):
    given, optimizer, built = CASES[case]

    def run(options: ParallelOptions) -> dict[str, dict[Any, Any]]:
        scaler = {"scaler": GradScaler(init_scale=2.0**8)} if "scaler" in optimizer else {}
        return trained(given, options, {**optimizer, **scaler}, **built)

    window = 2 if built.get("schedule") == "dualpipe" else 1  # an op of which may be of two stages
    assert_equal(run(ParallelOptions(store=store, window=window)), run(ParallelOptions()))


def test_a_weight_that_is_not_fetched_is_not_a_number(monkeypatch):
    monkeypatch.setattr(StoreParticipant, "unshard", lambda self, stage: None)
    with Pipeline(
        plain.model(2), nn.functional.mse_loss, microbatches=2, parallel=ParallelOptions(**DISK)
    ) as pipe:
        with pytest.raises(PenstockError, match="NaN"):
            pipe.step(*plain.batch(0, 4))
        assert all(p.isfinite().all() for p in pipe.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "breadth-first", "virtual_stages": 4, "microbatches": 4},
        {"schedule": "chimera", "ranks": 2, "microbatches": 2},  # a sum of two has one order
    ],
    ids=["one rank", "each stage on two"],
)
def test_between_steps_weights_and_gradients_are_those_of_a_plain_model(options):
    net, twin = plain.model(4), plain.model(4)
    with Pipeline(net, nn.functional.mse_loss, parallel=ParallelOptions(**DISK), **options) as pipe:
        updates = torch.optim.AdamW(net.parameters(), lr=0.01)
        others = torch.optim.AdamW(twin.parameters(), lr=0.01)
        for n in range(3):
            x, y = plain.batch(n, 8)
            pipe.step(x, y)
            plain.step(twin, nn.functional.mse_loss, x, y, options["microbatches"])
            plain.require_equal_gradients(net, twin)
            for model, made in ((net, updates), (twin, others)):
                with torch.no_grad():
                    next(model.parameters()).mul_(0.5)  # a program's own write
                    last = [*model.parameters()][-1]
                    last.data = last.data + 1  # other memory
                made.step()
                made.zero_grad()
            assert torch.equal(net(x), twin(x))
    assert_equal(dict(net.state_dict()), dict(twin.state_dict()))


class Writer(nn.Module):
    """A layer that writes into its weight in a way that torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(plain.WIDTH, plain.WIDTH)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.linear.weight.data.clamp_(-1e-3, 1e-3)
        return self.linear(x)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_write_that_torch_does_not_count_is_refused_and_the_weights_stay(store):
    net = nn.Sequential(*plain.model(3), Writer())
    options = ParallelOptions(store=store, window=1)
    settings = {"schedule": "breadth-first", "virtual_stages": 2, "microbatches": 2}
    with Pipeline(net, nn.functional.mse_loss, parallel=options, **settings) as pipe:
        before = copy.deepcopy(net.state_dict())
        net[3].writes = True
        for run in (pipe.step, pipe.evaluate):
            with pytest.raises(PenstockError, match=r"3\.linear\.weight was written through \.data"):
                run(*plain.batch(0, 4))
        net[3].writes = False
        assert_equal(dict(net.state_dict()), dict(before))
        assert all(p.grad is None for p in net.parameters())
        pipe.step(*plain.batch(0, 4))


class OwnForward(nn.Module):
    """A model with a forward of its own, dropout, and one weight for both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def calls_of_a_pipeline(parallel: ParallelOptions, recompute: Any) -> dict[str, Any]:
    memory = {"execution": ExecutionOptions(memory=10**7)} if recompute == "auto" else {}
    settings = {"microbatches": 4, "schedule": "interleaved-1f1b", "ranks": 2, "virtual_stages": 2}
    found: dict[str, Any] = {}
    pipe = Pipeline(
        OwnForward(), next_token_loss, parallel=parallel, recompute=recompute, **settings, **memory
    )
    updates = PipelineOptimizer(pipe, torch.optim.AdamW, lr=0.01)
    for n in range(3):
        result = pipe.step(*tokens(n), outputs=True)
        found |= {f"losses {n}": result.losses, f"outputs {n}": torch.cat([*result.outputs])}
        updates.step()
        found |= {f"evaluated {n}": pipe.evaluate(*tokens(50)).loss, f"log p {n}": pipe.log_probs(*tokens(3))}
    if recompute != "auto":  # which allows one number
        found["other microbatches"] = pipe.step(*tokens(4), microbatches=2).losses
        updates.step()
    found["weights"] = {name: value.clone() for name, value in pipe.named_weights()}
    net = pipe.unsplit().eval()
    found["alone"] = net(tokens(5)[0])
    net(tokens(5)[0]).sum().backward()  # the model remains a plain one
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_all_calls_of_a_model_with_its_own_forward_are_those_without_a_store(recompute):
    expected = calls_of_a_pipeline(ParallelOptions(), recompute)
    for store in ("host", "disk"):
        assert_equal(calls_of_a_pipeline(ParallelOptions(store=store, window=1), recompute), expected)
