"""On CUDA devices: ranks in threads, each on a stream of its own, and in processes over NCCL. Skipped where there is none.

What would be wrong if a stream did not wait shows as a wrong number here only if the value is late, so `Late` makes it
late: before it passes a value on it keeps the device busy for much longer than the host needs to queue everything.
"""

from __future__ import annotations

import copy
from time import perf_counter

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock.base.errors import ConfigError, PenstockError
from penstock.runtime.model.stage_memory import free_memory
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.families import FAMILIES
from penstock.schedule.ops import Kind
from tests.support import plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")


def keep_busy(rounds: int = 4) -> None:
    """Products that take the device some milliseconds each and the host none."""
    matrix = torch.ones(4096, 4096, device="cuda")
    for _ in range(rounds):
        matrix @ matrix


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        keep_busy()
        return x + 0.0

    @staticmethod
    def backward(ctx, grad):
        keep_busy()
        return grad + 0.0


class Late(nn.Module):
    """Passes its value on late, forward and back."""

    def forward(self, x):
        return _Late.apply(x)


def late_model(blocks: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(block, Late()) for block in plain.model(blocks)])


def equal_to_plain(pipe: Pipeline, other: nn.Module) -> None:
    for (name, ours), theirs in zip(pipe.named_parameters(), other.parameters(), strict=True):
        assert ours.is_cuda
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7), name
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_the_device_equals_plain_pytorch_there(family):
    net, other = plain.model(8), plain.model(8).cuda()
    x, y = plain.batch(0, 16)
    losses, _ = plain.step(other, mse_loss, x.cuda(), y.cuda(), 8)
    with Pipeline(net, mse_loss, microbatches=8, ranks=4, schedule=family, device="cuda") as pipe:
        result = pipe.step(x, y)
        assert torch.allclose(result.losses.cpu(), losses.cpu(), rtol=1e-6)
        equal_to_plain(pipe, other)
        assert pipe.clip_grad_norm_(0.1).item() == pytest.approx(
            nn.utils.clip_grad_norm_(other.parameters(), 0.1).item(), rel=1e-5
        )


def test_every_rank_has_a_stream_of_its_own():
    found = {}

    class Where(nn.Module):
        def __init__(self, name: int) -> None:
            super().__init__()
            self.name = name

        def forward(self, x):
            found[self.name] = torch.cuda.current_stream().cuda_stream
            return x

    net = nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), Where(n)) for n in range(4)])
    with Pipeline(net, mse_loss, microbatches=4, ranks=4, device="cuda") as pipe:
        pipe.step(*plain.batch(0, 8))
    assert len({*found.values(), torch.cuda.current_stream().cuda_stream}) == 5


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "zb-v", "chimera"])
def test_late_values_are_waited_for_over_several_steps(family):
    """The caller is late, too: it makes inputs and updates parameters just before a step, and spoils the input after."""
    ours, theirs = late_model(8), plain.model(8).cuda()
    with Pipeline(ours, mse_loss, microbatches=8, ranks=4, schedule=family, device="cuda") as pipe:
        optimizers = [torch.optim.SGD(p, lr=0.1) for p in (list(pipe.parameters()), theirs.parameters())]
        for n in range(4):
            x, y = (part.cuda() for part in plain.batch(n, 16))
            with torch.cuda.stream(torch.cuda.Stream()) if n % 2 else torch.cuda.stream(None):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                optimizers[0].zero_grad()
                late = torch.full_like(x, float("nan"))
                keep_busy()
                late.copy_(x)
                result = pipe.step(late, y, outputs=True, input_grads=True)
                late.fill_(float("nan"))
                outputs, grads = torch.cat(result.outputs).clone(), torch.cat(result.input_grads).clone()
                optimizers[0].step()
                torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
            optimizers[1].zero_grad()
            expected = theirs(x)
            losses, input_grads = plain.step(theirs, mse_loss, x, y, 8)
            optimizers[1].step()
            torch.cuda.synchronize()
            assert torch.allclose(result.losses, losses, rtol=1e-5), n
            assert torch.allclose(outputs, expected, rtol=1e-4, atol=1e-6), n
            assert torch.allclose(grads, torch.cat(input_grads), rtol=1e-4, atol=1e-8), n
            equal_to_plain(pipe, theirs)


def test_freed_memory_is_not_used_again_before_every_stream_is_done_with_it():
    """Every stage fills what memory is free with NaN before it computes; a value freed too early would turn to NaN."""

    class Greedy(nn.Module):
        def forward(self, x):
            for _ in range(8):
                torch.full_like(x, float("nan"))
            return x

    net = nn.Sequential(*[nn.Sequential(block, Greedy()) for block in late_model(8)])
    other = plain.model(8).cuda()
    x, y = (part.cuda() for part in plain.batch(0, 64))
    losses, _ = plain.step(other, mse_loss, x, y, 32)
    with Pipeline(net, mse_loss, microbatches=32, ranks=4, schedule="zb-v", device="cuda") as pipe:
        for _ in range(3):
            for parameter in pipe.parameters():
                parameter.grad = None
            assert torch.allclose(pipe.step(x, y).losses, losses, rtol=1e-5)
        equal_to_plain(pipe, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_in_threads_does_not_wait_for_the_device():
    x, y = (part.cuda() for part in plain.batch(0, 16))
    execution = ExecutionOptions(check_finite=False)  # checking for NaN synchronizes
    with Pipeline(
        plain.model(8), mse_loss, microbatches=8, ranks=4, device="cuda", execution=execution
    ) as pipe:
        pipe.step(x, y)
        try:
            torch.cuda.set_sync_debug_mode("error")
            pipe.step(x, y)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_steps_leave_the_memory_flat():
    x, y = (part.cuda() for part in plain.batch(0, 16))
    found = []
    with Pipeline(plain.model(8), mse_loss, microbatches=8, ranks=4, schedule="zb-v", device="cuda") as pipe:
        for _ in range(20):
            pipe.step(x, y)
            torch.cuda.synchronize()
            found.append(torch.cuda.memory_allocated())
    assert len(set(found[2:])) == 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_trace_tells_when_ops_ran_on_the_device(ranks):
    net = late_model(4)
    with Pipeline(net, mse_loss, microbatches=8, ranks=ranks, device="cuda") as pipe:
        pipe.step(*plain.batch(0, 16))
        with pytest.raises(PenstockError, match="the last step was not timed"):
            pipe.trace()
        pipe.tracing = True
        for _ in range(3):
            began = perf_counter()
            pipe.step(*plain.batch(0, 16))
            trace = pipe.trace()
            ended = perf_counter()
    slack = 5e-6  # twice the resolution of an event, and more
    assert began - slack <= trace.info["origin"]
    assert trace.info["origin"] + trace.end.max() <= ended + slack
    ends = {}
    for n in range(len(trace)):
        ends[trace.stage[n], trace.kind[n], trace.microbatch[n]] = trace.end[n]
    for rows in trace.rank_slices():
        assert (trace.end[rows] >= trace.start[rows]).all()
        assert (
            trace.start[rows][1:] >= trace.end[rows][:-1] - slack
        ).all()  # one stream runs one op at a time
    for n in range(len(trace)):
        stage, kind, microbatch = trace.stage[n], trace.kind[n], trace.microbatch[n]
        before = stage - 1 if kind == Kind.F else stage + 1
        if (before, kind, microbatch) in ends:
            assert trace.start[n] >= ends[before, kind, microbatch] - slack
    # The device is busy with each op for far longer than the host needs to queue it.
    assert trace.end.max() > (trace.end - trace.start).max()
    assert trace.held.max() > 0


def over_nccl(rank: int, family: str):
    net = plain.model(8)
    for block in net:
        block.append(Late())
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with Pipeline(net, mse_loss, microbatches=8, ranks=2, schedule=family, device=device) as pipe:
        pipe.tracing = True
        for _ in range(3):
            for parameter in pipe.parameters():
                parameter.grad = None
            losses = pipe.step(*plain.batch(0, 16)).losses
        trace = pipe.trace()
        assert (trace.end >= trace.start).all()
        return losses.cpu(), {name: p.grad.cpu() for name, p in pipe.named_parameters()}


@two_devices
@pytest.mark.parametrize("family", ["1f1b", "zb-v", "dualpipe"])
def test_processes_over_nccl_equal_plain_pytorch(processes, family):
    other = plain.model(8).cuda()
    x, y = plain.batch(0, 16)
    losses, _ = plain.step(other, mse_loss, x.cuda(), y.cuda(), 8)
    expected = {name: p.grad.cpu() for name, p in other.named_parameters()}
    for found, gradients in processes.run(2, over_nccl, family, timeout=300):
        assert torch.allclose(found, losses.cpu(), rtol=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-7), name


def test_clipping_gives_the_bits_that_torch_gives_on_the_device():
    x, y = plain.batch(0, 16)
    with Pipeline(plain.model(8), mse_loss, microbatches=8, ranks=4, schedule="zb-v", device="cuda") as pipe:
        pipe.step(x, y)
        others = [nn.Parameter(p.detach().clone()) for p in pipe.parameters()]
        for other, p in zip(others, pipe.parameters(), strict=True):
            other.grad = p.grad.clone()
        wanted = nn.utils.clip_grad_norm_(others, 0.1)
        assert torch.equal(pipe.clip_grad_norm_(0.1).cpu(), wanted.cpu())
        for other, p in zip(others, pipe.parameters(), strict=True):
            assert torch.equal(p.grad, other.grad)


class Scaled(nn.Module):
    """A stage without parameters."""

    def forward(self, x):
        return torch.tanh(x) @ x.new_ones(x.shape[-1], x.shape[-1])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_without_parameters_computes_under_autocast(recompute):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), Scaled(), Scaled())
    x, y = plain.batch(0, 16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = [
            mse_loss(net.cuda()(a), b) for a, b in zip(x.cuda().chunk(8), y.cuda().chunk(8), strict=True)
        ]
    with Pipeline(
        net.cpu(), mse_loss, microbatches=8, ranks=4, schedule="zb-h1", device="cuda",
        autocast=torch.bfloat16, recompute=recompute,
    ) as pipe:  # fmt: skip
        assert torch.equal(pipe.step(x, y).losses, torch.stack(expected).detach())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_draws_the_same_for_any_split(recompute):
    def losses(ranks: int, schedule: str, recompute: str) -> torch.Tensor:
        net = nn.Sequential(*[nn.Sequential(block, nn.Dropout(0.3)) for block in plain.model(8)])
        with Pipeline(
            net, mse_loss, microbatches=8, ranks=ranks, schedule=schedule, device="cuda", seed=3,
            recompute=recompute,
        ) as pipe:  # fmt: skip
            return pipe.step(*plain.batch(0, 16)).losses

    assert torch.equal(losses(4, "zb-v", recompute), losses(1, "1f1b", "none"))


def on_one_gpu(rank: int) -> None:
    with Pipeline(plain.model(4), mse_loss, microbatches=4, ranks=2, device="cuda:0"):
        pass


def test_two_processes_of_a_pipeline_on_one_gpu_are_refused(processes):
    with pytest.raises(ConfigError, match=r"ranks 0, 1 of a pipeline compute on one GPU .* LOCAL_RANK"):
        processes.run(2, on_one_gpu, timeout=300)


def test_offloading_has_the_same_bits_and_holds_less():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])
    x, y = torch.randn(8192, 512), torch.randn(8192, 512)
    found = []
    for offload in (False, True):
        with Pipeline(
            copy.deepcopy(net), mse_loss, microbatches=8, ranks=1, schedule="gpipe", device="cuda",
            execution=ExecutionOptions(offload=offload),
        ) as pipe:  # fmt: skip
            pipe.step(x, y)
            pipe.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            losses = pipe.step(x, y).losses
            found.append(
                (losses, [p.grad.clone() for p in pipe.parameters()], torch.cuda.max_memory_allocated())
            )
    (losses, gradients, peak), (others, offloaded, lower) = found
    assert torch.equal(losses, others)
    assert all(torch.equal(a, b) for a, b in zip(gradients, offloaded, strict=True))
    # Input and activation of every block but the last microbatch's, 2 MB each.
    assert peak - lower > 7 * 8 * 2 * 2**20 * 0.8


# The CPU beside one GPU, both ways, and two GPUs where there are so many.
PLACES = [["cpu", "cuda:0"], ["cuda:0", "cpu"], pytest.param(["cuda:0", "cuda:1"], marks=two_devices)]


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("family", ["1f1b", "zb-v", "dualpipe"])
def test_ranks_with_a_device_each_equal_plain_pytorch(family, devices):
    net, other = plain.model(4), plain.model(4)
    x, y = plain.batch(0, 16)
    losses, _ = plain.step(other, mse_loss, x, y, 8)
    with Pipeline(net, mse_loss, microbatches=8, schedule=family, device=devices) as pipe:
        for _ in range(2):  # the second step reuses events and memory
            pipe.zero_grad()
            found = pipe.step(x, y)
        assert torch.allclose(found.losses.cpu(), losses, rtol=1e-5)
        assert {str(p.device) for p in pipe.parameters()} == set(devices)
        for one, theirs in zip(pipe.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("devices", PLACES)
def test_a_tied_weight_of_two_devices_gets_the_sum_of_its_gradients(devices):
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        first, last = nn.Linear(12, 12), nn.Linear(12, 12)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), nn.Tanh(), last)

    net, other = tied(), tied()
    x, y = plain.batch(0, 16)
    with Pipeline(net, mse_loss, microbatches=8, device=devices) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(3):
            pipe.zero_grad()
            pipe.step(x, y)
            optimizer.step()
    plain_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        plain_optimizer.zero_grad()
        plain.step(other, mse_loss, x, y, 8)
        plain_optimizer.step()
    assert str(net[0].weight.device) == devices[0]
    assert net[3].weight is net[0].weight
    assert torch.allclose(net[0].weight.cpu(), other[0].weight, rtol=1e-4, atol=1e-6)


def test_memory_is_shared_by_ranks_of_a_device_and_what_the_model_has_is_free():
    gpu = torch.device("cuda:0")
    ((_, alone),) = free_memory([gpu], []).items()
    model = nn.Linear(1 << 12, 1 << 12, device=gpu)
    found = free_memory([torch.device("cpu"), gpu, gpu], [model])
    assert found.keys() == {1, 2}
    # To the megabytes in which the allocator takes memory, and those that other processes take meanwhile.
    assert found[1] == found[2] == pytest.approx(alone / 2, abs=1 << 28)
    ((_, without),) = free_memory([gpu], []).items()
    assert without == pytest.approx(alone - (1 << 26), abs=1 << 28)
