"""Ranks that are threads with a device each: equal to one device, bit for bit, in a process that has a second one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import penstock
from penstock import ParallelOptions, Pipeline
from penstock.base.errors import ConfigError, SplitError
from penstock.profile.measured import Effort
from penstock.runtime.model import measured_split
from tests.support import plain


class Steps(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    places: dict[str, str]


def steps(net: nn.Module, loss_fn: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Steps:
    """Three steps with clipping, and an evaluation."""
    losses, norms = [], []
    with Pipeline(net, loss_fn, microbatches=4, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05, foreach=False)
        for _ in range(3):
            losses.append(float(pipe.step(x, y).loss))
            norms.append(float(pipe.clip_grad_norm_(1.0)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(pipe.evaluate(x, y).loss))
        places = {name: str(p.device) for name, p in pipe.named_parameters()}
    return Steps(losses, norms, {name: value.cpu() for name, value in net.state_dict().items()}, places)


def require_equal(ours: Steps, theirs: Steps) -> None:
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    for name, value in theirs.state.items():
        assert torch.equal(ours.state[name], value), name


def equal_to_one_device(device: str, family: str, options: dict[str, Any]) -> dict[str, str]:
    x, y = plain.batch(0, 8)
    expected = steps(plain.model(4), mse_loss, x, y, ranks=2, schedule=family, **options)
    for devices in (["cpu", device], [device, "cpu"]):
        found = steps(plain.model(4), mse_loss, x, y, device=devices, schedule=family, **options)
        require_equal(found, expected)
        assert set(found.places.values()) == {"cpu", device}
    return found.places


# One schedule for each way in which a value goes from rank to rank: forwards, wrapping around, and both ways; and one where
# both ranks hold each stage, so that the first step compares what two devices have computed.
@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "zb-v", "chimera"])
def test_ranks_with_a_device_each_give_the_bits_of_one_device(with_device, family):
    with_device(equal_to_one_device, family, {})


def test_layers_that_are_recomputed_stay_on_their_device(with_device):
    places = with_device(equal_to_one_device, "gpipe", {"recompute": "full"})
    assert [places[f"{n}.0.weight"] for n in range(4)] == ["second:0", "second:0", "cpu", "cpu"]


class Head(nn.Module):
    """Tied to an embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return x @ self.weight.T


class Around(nn.Module):
    """A module that other layers use, too, and weights of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.inner(x)) + self.own(x)


def shared_model() -> nn.Sequential:
    """Ties, a module used on two ranks, and buffers that forwards change."""
    torch.manual_seed(0)
    embedding, inner = nn.Embedding(11, 8), nn.Linear(8, 8)
    return nn.Sequential(
        embedding, Around(inner), nn.Tanh(), nn.LayerNorm(8), Around(inner), nn.BatchNorm1d(5), nn.Linear(8, 8),
        Head(embedding),
    )  # fmt: skip


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def shared_equal(device: str, family: str) -> dict[str, str]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 11, (2, 8, 5), generator=generator)
    options = {"schedule": family, "reduction": "sum"}
    expected = steps(shared_model(), token_loss, x, y, ranks=2, **options)
    for devices in (["cpu", device], [device, "cpu"]):
        found = steps(shared_model(), token_loss, x, y, device=devices, **options)
        require_equal(found, expected)
    return found.places


# In the second, each stage is held by both ranks.
@pytest.mark.parametrize("family", ["1f1b", "dualpipe"])
def test_what_ranks_share_is_one_parameter_with_copies_on_other_devices(with_device, family):
    places = with_device(shared_equal, family)
    assert "7.weight" not in places  # the embedding's
    assert places["0.weight"] == places["1.inner.weight"] == "second:0"


def changes_between_steps(device: str) -> None:
    def run(**options: Any) -> list[torch.Tensor]:
        net = shared_model()
        x = torch.arange(40).reshape(8, 5) % 11
        found = []
        with Pipeline(net, token_loss, microbatches=2, reduction="sum", **options) as pipe:
            pipe.step(x, x)
            with torch.no_grad():
                net[0].weight.mul_(0.5)
            net[0].weight.requires_grad_(False)
            pipe.zero_grad()
            found.append(pipe.step(x, x).loss.cpu())
            assert net[0].weight.grad is None
            net[0].weight.requires_grad_(True)
            pipe.zero_grad()
            found.append(pipe.step(x, x).loss.cpu())
            found.append(net[0].weight.grad.cpu())
            net[0].weight.data = net[0].weight.data.flip(0)
            found.append(pipe.step(x, x).loss.cpu())
            net.double()
            pipe.zero_grad()
            found.append(pipe.step(x, x).loss.cpu())
            found.append(net[0].weight.grad.cpu())
            assert found[-1].dtype == torch.float64
        assert net[7].weight is net[0].weight
        return found

    for one, other in zip(run(device=["cpu", device]), run(ranks=2), strict=True):
        assert torch.equal(one, other)


def test_a_change_of_a_tied_weight_reaches_the_copy_on_another_device(with_device):
    with_device(changes_between_steps)


def layers_on_two_devices(device: str) -> tuple[list[str], list[list[str]]]:
    x, y = plain.batch(0, 8)
    net = plain.model(4)
    for layer in net[1:]:
        layer.to(device)
    with Pipeline(net, mse_loss, microbatches=4) as pipe:
        pipe.step(x, y)
        assert pipe.ranks == 2
        devices, split = [*map(str, pipe.devices)], pipe.trace().info["split"]
    other = plain.model(4)
    plain.step(other, mse_loss, x, y, 4)
    for one, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad.cpu(), theirs.grad)
    return devices, split


def test_layers_that_are_on_several_devices_stay_there(with_device):
    devices, split = with_device(layers_on_two_devices)
    assert devices == ["cpu", "second:0"]
    assert split == [["0"], ["1", "2", "3"]]


def refusals(device: str) -> list[str]:
    def refusal(net: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            Pipeline(net, mse_loss, microbatches=2, **options)
        return str(caught.value)

    net = plain.model(3)
    net[1].to(device)
    two = plain.model(4)
    two[3].to(device)
    stored = ParallelOptions(store="host")
    return [
        refusal(net),
        refusal(two, ranks=4),
        refusal(plain.model(4), ranks=3, device=["cpu", device]),
        refusal(plain.model(4), device=["cpu", device], parallel=stored),
    ]


def test_devices_that_do_not_fit_are_refused(with_device):
    back, more, fewer, stored = with_device(refusals)
    assert "are on cpu, second:0, cpu, in this order, and go back to a device that they have left" in back
    assert "layers are on 2 (cpu, second:0), and the schedule has 4 ranks; give ranks=2" in more
    assert "device has 2 (cpu, second:0), and the schedule has 3 ranks" in fewer
    assert "store='host' copies weights to one device, and the ranks have cpu, second:0" in stored


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ([], "must be one device, or a list with one for each rank"),
        (2.5, "must be one device, or a list with one for each rank"),
        (["cpu", None], "leaves a rank without a device"),
        (["cpu", "gpu"], "'gpu' is not a device"),
        (["cpu", "meta"], "device='meta' has no values"),
        (["cpu", "mps"], "device=.* has one that torch cannot use here"),
        (["cpu", ["cpu"]], r"\['cpu'\] is not a device"),
    ],
)
def test_what_is_no_list_of_devices_is_refused(device, message):
    with pytest.raises(ConfigError, match=message):
        Pipeline(plain.model(4), mse_loss, microbatches=2, device=device)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = plain.model(4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def unchecked(device: str) -> str:
    x, y = plain.batch(0, 8)
    with (
        pytest.warns(RuntimeWarning, match="on the devices of several ranks"),
        Pipeline(Own(), mse_loss, microbatches=4, device=["cpu", device]) as pipe,
    ):
        pipe.step(x, y)
    with Pipeline(
        Own(), mse_loss, microbatches=4, device=[device, device]
    ) as pipe:  # compared in the first step
        assert (pipe.ranks, pipe.devices) == (2, ())
        assert str(pipe.step(x, y).loss.device) == device
    with Pipeline(penstock.split(Own(), x[:2]), mse_loss, microbatches=4, device=["cpu", device]) as pipe:
        return str(pipe.step(x, y).loss.device)


def test_a_model_with_its_own_forward_is_compared_before_it_is_spread(with_device):
    assert with_device(unchecked) == "second:0"


def measured(device: str) -> list[list[int]]:
    # The quicker tenth of enough rounds: what else the machine does may stop either device for longer than ten operations.
    measured_split._EFFORT = Effort(seconds=5.0, rounds=10, quantile=0.1)
    x, y = plain.batch(0, 8)
    found = []
    for devices in (["cpu", device], [device, "cpu"]):
        net, other = plain.model(8), plain.model(8)
        with Pipeline(
            net, mse_loss, microbatches=4, device=devices, split={"measured": (x[:2], y[:2])}
        ) as pipe:
            pipe.step(x, y)
            found.append([len(names) for names in pipe.trace().info["split"]])
        plain.step(other, mse_loss, x, y, 4)
        for one, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad.cpu(), theirs.grad)
    spread = plain.model(4)
    spread[3].to(device)
    with pytest.raises(SplitError, match=r"layers on several devices .* are not measured"):
        Pipeline(spread, mse_loss, microbatches=4, split={"measured": (x[:2], y[:2])})
    return found


def test_a_measured_split_gives_the_slower_device_less(with_device):
    # Each operation of the simulated device goes through Python, and takes ten times as long as on the CPU.
    (first, second), (slow, fast) = with_device(measured)
    assert first > second
    assert slow < fast


def in_processes(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        Pipeline(plain.model(4), mse_loss, microbatches=2, device=["cpu", "cpu"])
    return str(caught.value)


def test_processes_have_a_device_of_their_own(processes):
    for message in processes.run(2, in_processes):
        assert "where each rank is a process, give device='cuda'" in message
