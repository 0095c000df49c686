"""Gradients that are not dense or not real: sparse embeddings, complex weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.parallel.mesh import MeshShape
from penstock.runtime.optim.grad_scaler import GradScaler
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import plain
from tests.support.groups import outcome
from tests.support.plain import require_equal_gradients

WIDTH, M = 6, 4


def words(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 20, (2 * M, 5), generator=generator)
    return ids, torch.randn(2 * M, 5, WIDTH, generator=generator)


def sparse(is_sparse: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, WIDTH, sparse=is_sparse), nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("gpipe", torch.optim.SparseAdam), ("1f1b", torch.optim.SGD), ("zb-h1", torch.optim.SGD)],
)
def test_sparse_gradients_of_a_single_copy_have_the_bits_of_plain_pytorch(schedule, kind):
    net, other = sparse(), sparse()
    for each in (net, other):
        each[1].requires_grad_(kind is torch.optim.SGD)
    with Pipeline(net, mse_loss, microbatches=M, schedule=schedule, ranks=2) as pipe:
        optimizers = [
            kind([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (net, other)
        ]
        for step in range(3):
            pipe.step(*words(step))
            plain.step(other, mse_loss, *words(step), M)
            assert net[0].weight.grad.is_sparse
            assert torch.equal(net[0].weight.grad.to_dense(), other[0].weight.grad.to_dense())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_sparse_gradients_are_clipped_scaled_and_looked_at_as_dense_ones_are():
    net, other = sparse(), sparse(False)
    with Pipeline(net, mse_loss, microbatches=M, ranks=2) as pipe:
        scaler = GradScaler(init_scale=8.0)
        optimizer = PipelineOptimizer(pipe, torch.optim.SGD, lr=0.1, clip=0.01, scaler=scaler)
        for step in range(2):
            pipe.step(*words(step))
            done = optimizer.step()
            plain.step(other, mse_loss, *words(step), M)
            want = nn.utils.clip_grad_norm_(other.parameters(), 0.01)
            with torch.no_grad():
                for p in other.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
            torch.testing.assert_close(done.grad_norm, want)
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            net[1].weight[0] = float("inf")
        pipe.step(*words(2))
        assert optimizer.step().skipped


def test_a_sparse_gradient_that_is_not_finite_is_refused():
    net = sparse()
    net[0].weight.register_hook(lambda grad: grad * float("inf"))
    with Pipeline(net, mse_loss, microbatches=M, ranks=2) as pipe:
        assert "a weight of stage 0 is NaN or infinite" in outcome(pipe.step, *words(0))
        assert pipe.steps == 0


def copies_refuse(rank: int, schedule: str, mesh: MeshShape, tied: bool) -> str:
    net = sparse()
    if tied:
        net = nn.Sequential(*net[:2], nn.Linear(WIDTH, 20, bias=False))
        net[2].weight = net[0].weight
    loss = (lambda out, y: out.square().mean()) if tied else mse_loss
    with Pipeline(net, loss, microbatches=M, schedule=schedule, mesh=mesh, timeout=300) as pipe:
        text = outcome(pipe.step, *(torch.cat([v, v]) for v in words(0)))
        assert pipe.steps == 0
        return text


@pytest.mark.parametrize(
    ("schedule", "mesh"), [("1f1b", MeshShape(1, 2, 1)), ("dualpipe", MeshShape(2, 1, 1))]
)
def test_copies_refuse_sparse_gradients_by_name(processes: LocalProcesses, schedule, mesh):
    told = processes.run(mesh.ranks, copies_refuse, schedule, mesh, False)
    if mesh.dp == 1:
        told.append(copies_refuse(0, schedule, mesh, False))
    for text in told:
        assert "parameter '0.weight'" in text
        assert "sparse=False (nn.Embedding)" in text


def test_weights_tied_over_ranks_refuse_sparse_gradients_by_name():
    text = copies_refuse(0, "1f1b", MeshShape(2, 1, 1), True)
    assert "parameter '0.weight' got a sparse gradient" in text


class Spectrum(nn.Module):
    """A complex weight, and complex values between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.weight


def complex_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Spectrum(), Spectrum(), Spectrum())


def size_loss(out: Tensor, y: Tensor) -> Tensor:
    return (out.abs() - y).square().mean()


@pytest.mark.parametrize("bad", [0, 2])
def test_complex_gradients_are_checked_in_both_parts(bad):
    net = complex_model()
    net[bad].weight.register_hook(lambda grad: torch.complex(grad.real, grad.imag * float("inf")))
    with Pipeline(net, size_loss, microbatches=M, ranks=3) as pipe:
        text = outcome(pipe.step, torch.randn(2 * M, WIDTH), torch.randn(2 * M, WIDTH))
        assert f"a weight of stage {bad} is NaN or infinite" in text


def test_complex_gradients_have_the_bits_of_plain_pytorch_and_are_clipped():
    net, other = complex_model(), complex_model()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2 * M, WIDTH, generator=generator) for _ in range(2))
    with Pipeline(net, size_loss, microbatches=M, ranks=3) as pipe:
        pipe.step(x, y)
        plain.step(other, size_loss, x, y, M)
        require_equal_gradients(net, other)
        want = nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        torch.testing.assert_close(pipe.clip_grad_norm_(0.1), want)
        require_equal_gradients(net, other, exactly=False)


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.complex(grad.real, torch.full_like(grad.imag, float("nan")))


class Bad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Back.apply(x)


def test_a_complex_gradient_that_a_stage_hands_back_is_checked_in_both_parts():
    net = nn.Sequential(Spectrum(), nn.Sequential(Bad(), Spectrum()))
    with Pipeline(net, size_loss, microbatches=M, ranks=2) as pipe:
        text = outcome(pipe.step, torch.randn(2 * M, WIDTH), torch.randn(2 * M, WIDTH))
        assert text.startswith("NonFiniteError: ")
        assert "the input gradient of stage 1 for microbatch 0" in text


def test_numbers_that_only_float64_has_are_finite():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    with Pipeline(net, lambda out, y: (out * 1e60).square().mean(), microbatches=M, ranks=2) as pipe:
        result = pipe.step(torch.randn(M, WIDTH, dtype=torch.float64), torch.randn(M, WIDTH))
        assert result.losses.dtype == torch.float64
        assert float(result.loss) > 1e100


@pytest.mark.parametrize(
    "dtypes", [("bfloat16",), ("float64",), ("float64", "float32"), ("complex64", "float32")]
)
def test_norms_have_the_bits_of_torch_for_gradients_of_other_dtypes(dtypes: tuple[str, ...]):
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*[nn.Linear(7, 7) for _ in range(6)])
    with Pipeline(net, mse_loss, microbatches=1, ranks=2) as pipe:
        for n, layer in enumerate(net):
            dtype = getattr(torch, dtypes[n % len(dtypes)])
            for p in layer.parameters():
                p.data = p.data.to(dtype)
                p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
        other = copy.deepcopy(net)
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        want = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        found = pipe.clip_grad_norm_(0.5)
    assert found.dtype == want.dtype
    assert torch.equal(found, want)
    require_equal_gradients(net, other)
