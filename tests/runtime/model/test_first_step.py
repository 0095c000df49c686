"""The first training step compares a model's layers with the model: refused where they differ, and otherwise unseen."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import penstock
from penstock.base.errors import SplitError
from penstock.parallel.dtensor import is_dtensor, local
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model import llama
from tests.support import mixtures, own_models, unsplittable
from tests.support.groups import run_cases
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal
from tests.zoo.case import KINDS as LAYERS
from tests.zoo.kind import WIDTH

OFF = penstock.ExecutionOptions(check_split=False)


def size(output: object, target: object = None) -> dict[str, Tensor]:
    """Losses of any output."""
    leaves = torch.utils._pytree.tree_leaves(output)
    total = torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()
    return {"size": total, "half": total / 2}


def pipeline(net: nn.Module, loss_fn: object, ranks: int | None = 2, **options: object) -> penstock.Pipeline:
    return penstock.Pipeline(net, loss_fn, ranks=ranks, microbatches=2, timeout=60, **options)


def refused(rank: int, gate: float, dp: int, lean: bool) -> tuple[str, bool]:
    """What a step over a wrongly split model says on a process, and whether a weight or the count of steps changed."""
    net = own_models.made(lambda: unsplittable.WithNotes(gate))
    mesh = penstock.MeshShape(pp=2, dp=dp) if dp > 1 else None
    with pipeline(net, size, None if mesh else 2, mesh=mesh) as pipe:
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        x, y = own_models.batch(2 * 2 * dp)
        if lean and not pipe.holds_first:
            x = None
        if lean and not pipe.holds_last:
            y = None
        with pytest.raises(SplitError) as refusal:
            pipe.step(x, y)
        same = all(torch.equal(p, before[name]) for name, p in pipe.named_parameters())
        return str(refusal.value), same and pipe.steps == 0


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_values_that_blocks_leave_for_each_other_are_refused_in_threads(gate: float):
    text, unchanged = refused(0, gate, 1, False)
    assert "the layers" in text
    assert unchanged


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, [(1.0, 1, False), (0.0, 1, True)]), *slow((4, [(1.0, 2, False)]))]
)
def test_every_process_refuses_by_the_same_name(processes: LocalProcesses, ranks: int, cases: list):
    for by_rank in run_cases(processes, ranks, refused, cases):
        texts = {text for text, _ in by_rank}
        assert len(texts) == 1
        assert "the layers" in texts.pop()
        assert all(unchanged for _, unchanged in by_rank)


def test_blocks_of_one_stage_may_leave_values_for_each_other():
    net = own_models.made(unsplittable.WithNotes)
    x, y = own_models.batch()
    expected = [size(net(part))["size"] * 1.5 for part in x.chunk(2)]
    with pipeline(net, size, ranks=1) as pipe:
        assert torch.equal(pipe.step(x, y).losses, torch.stack(expected).detach())


def test_a_weight_of_another_block_in_the_same_stage_is_right():
    net = own_models.made(own_models.WithUnused)
    net.blocks[2] = unsplittable.Sly([net.blocks[0]])
    x, y = own_models.batch()
    with pipeline(net, size, ranks=1) as pipe:
        pipe.step(x, y)


def test_it_can_be_left_out():
    net = own_models.made(unsplittable.WithNotes)
    with pipeline(net, size, execution=OFF) as pipe:
        pipe.step(*own_models.batch())


CALLS: list[int] = []


class Counted(own_models.Block):
    def forward(self, x):
        CALLS.append(1)
        return super().forward(x)


def counted() -> nn.Module:
    net = own_models.made(own_models.WithUnused)
    net.blocks = nn.ModuleList([Counted() for _ in range(4)])
    return net


def test_it_runs_once_and_not_after_a_sample():
    x, y = own_models.batch()
    # A step of two microbatches calls four blocks for each; the comparison of two microbatches with both as one, four times.
    # Of the comparison with the model, the first stage's two run with another microbatch, too.
    for checked, expected in ((False, 8 + 8 + 2 + 16), (True, 8 + 16)):
        net = counted()
        layers = penstock.split(net, x) if checked else net
        with pipeline(layers, size) as pipe:
            for calls in (expected, 8):
                CALLS.clear()
                pipe.step(x, y)
                assert len(CALLS) == calls


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(own_models.WIDTH, own_models.WIDTH, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


def changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    """A model whose blocks were changed."""

    def make() -> nn.Module:
        net = own_models.WithUnused()
        for block in net.blocks:
            change(block)
        return net

    return make


def hooked(block: nn.Module) -> None:
    block.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    block.inner.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))


def recurrent() -> nn.Module:
    net = own_models.WithUnused()
    net.blocks = nn.ModuleList([Recurrent() for _ in range(4)])
    return net


def sparse() -> nn.Module:
    net = own_models.WithUnused()
    net.embedding = nn.Embedding(own_models.VOCABULARY, own_models.WIDTH, sparse=True)
    return net


KINDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "recurrent": (recurrent, False),
    "sparse gradients": (sparse, False),
    "hooks": (changed(hooked), False),
    "weight_norm": (changed(lambda block: parametrizations.weight_norm(block.inner)), False),
    "spectral_norm": (changed(lambda block: nn.utils.spectral_norm(block.inner)), False),
    "pruned": (changed(lambda block: prune.random_unstructured(block.inner, "weight", 0.3)), False),
    "statistics": (own_models.Statistics, False),
    "draws": (own_models.Random, False),
    "tied": (lambda: own_models.NanoGPT(dropout=0.1), True),
    "skips": (own_models.UNet, False),
    "one module in three places": (own_models.OneBlockInThreePlaces, False),
    "several outputs": (own_models.AllOutputs, False),
    "a dictionary": (own_models.Dictionaries, False),
}


def steps(
    rank: int, kind: str, check: bool, ranks: int, **options: object
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Losses, gradients and state after two steps, and the state of torch's generator."""
    make, own_loss = KINDS[kind]
    net = own_models.made(make)
    first = next(net.parameters())
    first.requires_grad_(own_loss or kind == "sparse gradients")  # frozen, where no other name has it
    [*net.parameters()][-1].register_hook(lambda g: 2 * g)
    torch.manual_seed(5)
    execution = penstock.ExecutionOptions(check_split=check)
    with pipeline(net, None if own_loss else size, ranks, execution=execution, **options) as pipe:
        optimizer = torch.optim.SGD([p for p in pipe.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for n in range(2):
            optimizer.zero_grad()
            losses.append(pipe.step(*own_models.batch(4, n)).loss)
            optimizer.step()
        gradients = {n: p.grad.to_dense() for n, p in pipe.named_parameters() if p.grad is not None}
        return losses, gradients, pipe.full_state_dict(), torch.get_rng_state()


def assert_same(one: tuple, other: tuple) -> None:
    assert torch.equal(torch.stack(one[0]), torch.stack(other[0]))
    for these, those in zip(one[1:3], other[1:3], strict=True):
        assert_equal(these, those)
    assert torch.equal(one[3], other[3])


@pytest.mark.parametrize(
    ("kind", "autocast"),
    [
        *(
            (kind, None)
            for kind in ("tied", "one module in three places", "draws", "a dictionary", "sparse gradients")
        ),
        *((kind, torch.bfloat16) for kind in ("skips", "statistics", "recurrent", "spectral_norm", "hooks")),
        *exhaustive(*((kind, None) for kind in ("weight_norm", "pruned", "several outputs"))),
    ],
)
def test_no_number_shows_it_in_threads(kind: str, autocast: torch.dtype | None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(*[steps(0, kind, check, 2, autocast=autocast) for check in (True, False)])


@pytest.mark.slow
def test_no_number_shows_it_in_processes(processes: LocalProcesses):
    kinds = ("tied", "draws", "statistics", "sparse gradients", "hooks", "one module in three places")
    cases = [(kind, check, 2) for kind in kinds for check in (True, False)]
    results = run_cases(processes, 2, steps, cases)
    for checked, unchecked in zip(results[::2], results[1::2], strict=True):
        for one, other in zip(checked, unchecked, strict=True):
            assert_same(one, other)


def keyword_inputs(rank: int) -> float:
    net = own_models.made(own_models.Masked)
    x, y = own_models.batch()
    with pipeline(net, size) as pipe:
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) if pipe.holds_first else None
        named = {} if mask is None else {"mask": mask}
        return float(pipe.step(x if pipe.holds_first else None, y, **named).loss)


def test_keyword_inputs_come_from_the_rank_that_has_them(processes: LocalProcesses):
    assert len({keyword_inputs(0), *processes.run(2, keyword_inputs)}) == 1


SIZE = 1009  # of no other test's tensors


def alive() -> int:
    """Number of tensors, weights, gradients and activations, that have this size."""
    gc.collect()
    return sum(isinstance(o, Tensor) and not o.is_meta and SIZE in o.shape for o in gc.get_objects())


def kept(rank: int) -> list[int]:
    """Tensors of this process after a step without the check, and with it."""
    found = []
    for check in (False, True):
        net = own_models.made(own_models.WithUnused)
        net.embedding, net.head = nn.Embedding(SIZE, own_models.WIDTH), nn.Linear(own_models.WIDTH, SIZE)
        execution = penstock.ExecutionOptions(check_split=check)
        with pipeline(net, size, execution=execution) as pipe:
            pipe.step(*own_models.batch())
            found.append(alive())
        del net, pipe
    return found


@pytest.mark.parametrize("transport", slow("threads", "processes"))
def test_it_keeps_no_memory(request: pytest.FixtureRequest, transport: str):
    in_threads = transport == "threads"
    for without, with_check in [kept(0)] if in_threads else request.getfixturevalue("processes").run(2, kept):
        assert with_check == without > 0


def too_large(rank: int) -> tuple[list[str], list[float]]:
    net = own_models.made(own_models.WithUnused)
    net.extra.weight = nn.Parameter(
        torch.zeros(1).expand(1 << 44)
    )  # of one number, but its gradient has them all
    x, y = own_models.batch()
    with warnings.catch_warnings(record=True) as caught, pipeline(net, size) as pipe:
        warnings.simplefilter("always")
        losses = [float(pipe.step(x, y).loss) for _ in range(2)]
    return [str(w.message) for w in caught if w.category is RuntimeWarning], losses


def test_what_does_not_fit_is_not_compared_and_said_so(processes: LocalProcesses):
    in_processes = processes.run(2, too_large)
    for texts, losses in (too_large(0), in_processes[0]):
        (text,) = texts
        assert "WithUnused" in text
        assert "check_split=False" in text
        assert len(set(losses)) == 1
    assert not in_processes[1][0]


class Peeking(nn.Module):
    """A block that adds what another one has left in an attribute."""

    def __init__(self, block: nn.Module, others: list[nn.Module]) -> None:
        super().__init__()
        self.block, self.others = block, others

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x) + getattr(self.others[0], "seen", 0.0)
        return out


class InLoop(nn.Module):
    """Layers of another model behind a forward of its own; the last block may read from the first one."""

    def __init__(self, net: nn.Sequential, peeks: bool) -> None:
        super().__init__()
        self.embedding, *blocks, self.head = net
        self.blocks = nn.ModuleList(blocks)
        if peeks:
            self.blocks[0].register_forward_hook(
                lambda module, args, out: setattr(module, "seen", out.mean())
            )
            self.blocks[-1] = Peeking(self.blocks[-1], [self.blocks[0]])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def divided(rank: int, sizes: dict[str, int], peeks: bool) -> tuple[str, list[str], bool, bool]:
    """What a process's first step says, whether weights are as before, and whether it has parts of them."""
    torch.manual_seed(1)
    if "ep" in sizes:
        net, loss_fn, (x, y) = mixtures.mixture(), mixtures.loss_of, mixtures.batch()
    else:
        config = ModelConfig(vocabulary=32, width=16, layers=4, heads=4, kv_heads=2, hidden=32)
        net = nn.Sequential(*(layer.build() for layer in llama.layers(config)))
        loss_fn, (x, y) = mixtures.loss_of, torch.randint(0, 32, (2, 8, 16))
    mesh = penstock.MeshShape(pp=2, **sizes)
    with (
        warnings.catch_warnings(record=True) as caught,
        pipeline(InLoop(net, peeks), loss_fn, None, mesh=mesh) as pipe,
    ):
        warnings.simplefilter("always")
        before = {name: local(p).detach().clone() for name, p in pipe.named_parameters()}
        refusal = ""
        try:
            pipe.step(x, y)
        except SplitError as error:
            refusal = str(error)
        same = all(torch.equal(local(p), before[name]) for name, p in pipe.named_parameters())
        told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        return refusal, told, same, any(map(is_dtensor, pipe.parameters()))


@pytest.mark.slow
def test_divided_layers_are_compared_as_they_were_before(processes: LocalProcesses):
    cases = [
        (sizes, peeks) for sizes in ({"tp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}) for peeks in (False, True)
    ]
    for (sizes, peeks), by_rank in zip(cases, run_cases(processes, 4, divided, cases), strict=True):
        for refusal, told, unchanged, in_parts in by_rank:
            assert unchanged
            assert in_parts == ("cp" not in sizes)
            assert not told, (sizes, told)
            if peeks:
                assert "The first tensor that differs from the model's: blocks.3, output, " in refusal, (
                    sizes,
                    refusal,
                )
            else:
                assert not refusal, (sizes, refusal)


class Tired(own_models.Block):
    """A block that fails after two calls, which are those of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        if self.calls == 2:
            raise ValueError("no more")
        self.calls += 1
        return super().forward(x)


def test_a_model_that_fails_by_itself_is_refused():
    net = own_models.made(own_models.WithUnused)
    net.blocks[3] = Tired()
    with pipeline(net, size) as pipe, pytest.raises(SplitError, match=r"no more.*check_split=False"):
        pipe.step(*own_models.batch())


class CalledTwice(nn.Module):
    """Its part has a parameter that two layers take as their input, so that its gradient is a sum already."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([LAYERS["weights_as_inputs"].build()])

    def run(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(-self.run(self.stem(x))))


def test_sums_within_a_layer_that_is_called_twice_may_have_another_order():
    for seed in range(6):
        torch.manual_seed(seed)
        net, x = CalledTwice(), torch.randn(4, WIDTH)
        with penstock.Pipeline(net, nn.functional.mse_loss, ranks=2, microbatches=1) as pipe:
            pipe.step(x, torch.zeros_like(x))
