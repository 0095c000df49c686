"""An update whose gradient is rounding alone is explained, with what follows from it; nothing else hides behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.recordings.compare import Comparison
from penstock.recordings.files import Kind

MICROBATCHES, STEPS = 4, 3
Change = Callable[[nn.Module, int], None]


class Uneven(nn.Module):
    """Two shifts; the gradient of the second is smaller by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.large, self.small, self.factor = (
            nn.Parameter(torch.zeros(16)),
            nn.Parameter(torch.zeros(16)),
            factor,
        )

    def forward(self, value: Tensor) -> Tensor:
        return value + self.large + self.factor * self.small


def make(factor: float) -> nn.Sequential:
    """A model whose biases 2.bias and 6.bias come before a normalization."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8, bias=False),
        nn.Identity(),
        *(nn.Linear(8, 16), nn.Identity(), nn.BatchNorm1d(16), nn.ReLU()),
        *(nn.Linear(16, 16), nn.Identity(), nn.BatchNorm1d(16), Uneven(factor)),
        nn.Linear(16, 4),
    )


def nothing(model: nn.Module, step: int) -> None:
    pass


def train(
    folder: Path,
    *,
    turned: bool = False,
    change: Change = nothing,
    before: Change = nothing,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adagrad,
    wrong: str = "",
    wrongly: float = 1.0,
    factor: float = 1e-3,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    **options: Any,
) -> Path:
    """Record some steps.

    Args:
        turned: whether the microbatches' gradients are added up in the other order.
        change: changes gradients before the update, and `before` the model before the forwards.
        wrong: name of a parameter with `wrongly` times the learning rate.
        factor: of `Uneven`.
    """
    model = make(factor).to(dtype)
    rate = options.pop("lr", 0.05)
    groups = [
        {"params": [p], "lr": rate * (wrongly if name == wrong else 1.0)}
        for name, p in model.named_parameters()
    ]
    stepper = optimizer(groups, **options)
    with penstock.record(folder, model, steps=STEPS):
        for step in range(STEPS):
            before(model, step)
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randn(32, width, generator=generator).to(dtype) for width in (8, 4))
            terms = []
            for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    loss = nn.functional.mse_loss(model(part).to(dtype), target)
                (loss / MICROBATCHES).backward()
                terms.append([p.grad for p in model.parameters()])
                model.zero_grad()
            for p, of in zip(model.parameters(), zip(*terms, strict=True), strict=True):
                p.grad = sum(reversed(of)) if turned else sum(of)
            change(model, step)
            stepper.step()
    return folder


def compared(tmp_path: Path, wrong: dict[str, Any], **both: Any) -> Comparison:
    """The comparison of a run with the reference."""
    return penstock.compare(train(tmp_path / "right", **both), train(tmp_path / "run", **both, **wrong))


def shifted(name: str, size: float | Tensor) -> Change:
    """Shifts what a module returns in the last step."""

    def change(model: nn.Module, step: int) -> None:
        if step == STEPS - 1:
            model.get_submodule(name).register_forward_hook(lambda module, args, output: output + size)

    return change


def gradient(name: str, size: float, of_step: int) -> Change:
    """Changes the gradient of a parameter in a step, by a factor."""

    def change(model: nn.Module, step: int) -> None:
        if step == of_step:
            model.get_parameter(name).grad *= size

    return change


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
def test_an_update_of_a_bias_before_a_normalization_is_explained(
    optimizer: type[torch.optim.Optimizer], tmp_path: Path
):
    found = compared(tmp_path, {"turned": True}, optimizer=optimizer)
    assert found.good, str(found)
    (note,) = [note for note in found.notes if "rounding alone" in note]
    assert note.endswith(": 2.bias, 6.bias")
    (other,) = [note for note in found.notes if "updates have other bits" in note]
    rounded = [
        key for key, verdict in found.verdicts.items() if verdict == "rounded" and key.kind == Kind.PARAMETER
    ]
    assert 0 < int(other.split()[0]) < len(rounded)
    bits = penstock.compare(tmp_path / "right", tmp_path / "run", bits=True)
    sizes = {d.key: d.size for d in bits.differences}
    # What follows is far larger than rounding, and explained with it.
    assert max(size for key, size in sizes.items() if (key.kind, key.name) == (Kind.OUTPUT, "7")) > 1e-3
    assert max(size for key, size in sizes.items() if key.name == "8.running_mean") > 1e-3
    assert "rounding alone" not in str(bits)


@pytest.mark.parametrize(
    ("optimizer", "right", "wrong"),
    [
        (torch.optim.Adagrad, {}, {"wrong": "6.weight", "wrongly": 1.1}),
        (torch.optim.Adagrad, {}, {"wrong": "9.small", "wrongly": 2.0}),
        (torch.optim.Adagrad, {"lr": 0.05}, {"lr": 0.1}),
        (torch.optim.Adam, {"betas": (0.9, 0.999)}, {"betas": (0.5, 0.999)}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5}, {"lr": 0.01, "weight_decay": 0.0}),
    ],
    ids=["rate", "rate of a small gradient", "rate of all", "beta", "decay"],
)
def test_a_wrong_optimizer_beside_it_is_found(
    optimizer: type[torch.optim.Optimizer], right: dict[str, Any], wrong: dict[str, Any], tmp_path: Path
):
    reference = train(tmp_path / "right", optimizer=optimizer, **right)
    found = penstock.compare(
        reference, train(tmp_path / "run", turned=True, optimizer=optimizer, **{**right, **wrong})
    )
    assert found.first is not None
    assert found.first.key.kind == Kind.PARAMETER
    name = found.first.key.name
    assert name == wrong.get("wrong", name)
    assert name not in ("2.bias", "6.bias")


def test_a_wrong_rate_of_a_gradient_that_does_not_differ_is_found(tmp_path: Path):
    found = compared(tmp_path, {"wrong": "2.bias", "wrongly": 1.5})
    assert found.first is not None
    assert (found.first.key.step, found.first.key.name) == (0, "2.bias")


@pytest.mark.parametrize(
    ("factor", "size", "rate"),
    [(1e-3, 1.5, 1.0), (1e-3, 1.02, 1.2), (1e-4, 1.7, 1.0)],
    ids=["small", "small, with a rate", "nearly rounding"],
)
def test_a_wrong_gradient_that_is_small_beside_others_is_found(
    factor: float, size: float, rate: float, tmp_path: Path
):
    wrong = {"turned": True, "change": gradient("9.small", size, 1), "wrong": "9.small", "wrongly": rate}
    found = compared(tmp_path, wrong, factor=factor, optimizer=torch.optim.SGD)
    assert found.first is not None
    assert found.first.key.name == "9.small"


def test_a_wrong_gradient_beside_it_is_found(tmp_path: Path):
    found = compared(tmp_path, {"turned": True, "change": gradient("6.weight", 1.01, 2)})
    assert str(found).startswith("step 2: 6.weight, gradient as the optimizer sees it, is 1.01 of the ref")


@pytest.mark.parametrize(
    ("name", "size", "first"),
    [("6", torch.eye(8, 16) * 0.1, "7"), ("0", 0.02, "1"), ("6", 3.0, "7")],
    ids=["with an effect", "before it", "too large"],
)
def test_another_change_of_an_output_is_found(name: str, size: float | Tensor, first: str, tmp_path: Path):
    found = compared(tmp_path, {"turned": True, "before": shifted(name, size)})
    assert str(found).startswith(f"step 2, microbatch 0: {first}, output, "), str(found)


def test_another_change_of_the_bias_itself_is_found(tmp_path: Path):
    def change(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.get_parameter("6.bias").add_(3.0 * (step == 2))

    found = compared(tmp_path, {"turned": True, "before": change})
    assert str(found).startswith("step 2, microbatch 0: 6, output, "), str(found)


def test_another_change_of_a_buffer_is_found(tmp_path: Path):
    def change(model: nn.Module, step: int) -> None:
        model.get_buffer("8.running_var").mul_(1.0 + (step == 2))

    found = compared(tmp_path, {"turned": True, "change": change})
    assert str(found).startswith("step 2: 8.running_var, buffer after the step")


@pytest.mark.parametrize("size", [0.0, 1.0], ids=["without a gradient", "with another one"])
def test_a_bias_keeps_its_difference_once_its_gradient_is_more_than_rounding(size: float, tmp_path: Path):
    def change(model: nn.Module, step: int) -> None:
        bias = model.get_parameter("6.bias")
        if step == 2:
            bias.grad = torch.full_like(bias, size) if size else None

    assert compared(tmp_path, {"turned": True}, change=change).good

    def not_in_the_run(model: nn.Module, step: int) -> None:
        change(model, step)
        if step == 2:
            with torch.no_grad():
                model.get_parameter("6.bias").add_(1e-2)

    run = train(tmp_path / "wrong", turned=True, change=not_in_the_run)
    found = penstock.compare(tmp_path / "right", run)
    assert str(found).startswith("step 2: 6.bias, value after the update"), str(found)


def test_an_optimizer_has_the_rounding_of_earlier_gradients(tmp_path: Path):
    def change(sign: float) -> Change:
        def of_step(model: nn.Module, step: int) -> None:
            bias = model.get_parameter("6.bias")
            bias.grad = torch.linspace(-1e-7, 1e-7, 16) * (sign if step == 0 else 1.0)

        return of_step

    options: dict[str, Any] = {"optimizer": torch.optim.Adam}
    right = train(tmp_path / "right", change=change(1.0), **options)
    found = penstock.compare(right, train(tmp_path / "run", change=change(-1.0), **options))
    assert found.good, str(found)


def test_float64_tells_a_small_gradient_from_rounding(tmp_path: Path):
    def change(sign: float) -> Change:
        def of_step(model: nn.Module, step: int) -> None:
            bias = model.get_parameter("6.bias")
            bias.grad = torch.linspace(-1e-7, 1e-7, 16, dtype=bias.dtype) * sign

        return of_step

    right, run = (train(tmp_path / str(sign), change=change(sign)) for sign in (1.0, -1.0))
    assert penstock.compare(right, run).good
    exact = train(tmp_path / "exact", change=change(1.0), dtype=torch.float64)
    found = penstock.compare(right, run, exact=exact)
    assert found.first is not None
    assert found.first.key.name == "6.bias"
    assert penstock.compare(
        train(tmp_path / "clean"),
        train(tmp_path / "turned", turned=True),
        exact=train(tmp_path / "double", dtype=torch.float64),
    ).good


@pytest.mark.parametrize("others", [0.0, 3e-3], ids=["in the same order", "rounded"])
def test_in_16_bits_the_other_gradients_tell_how_much_is_rounding(others: float, tmp_path: Path):
    def change(model: nn.Module, step: int) -> None:
        for name, p in model.named_parameters() if step == 1 else ():
            p.grad += others * torch.randn(p.shape) * (name != "9.small")
        if step == 1:
            model.get_parameter("9.small").grad *= 1.3

    options: dict[str, Any] = {"factor": 0.03, "autocast": True, "optimizer": torch.optim.SGD}
    found = compared(tmp_path, {"change": change}, **options)
    small = [d for d in found.differences if d.key.step == 1 and d.key.name == "9.small"]
    assert bool(small) == (others == 0.0), str(found)


def test_other_bits_of_equal_numbers_are_not_explained(tmp_path: Path):
    for name, zero in (("right", 0.0), ("run", -0.0)):
        with penstock.record(tmp_path / name, make(1.0), steps=1) as recording:
            recording.note("value", torch.tensor([zero, 1.0]), microbatch=0)
            recording.note("later", 1.0, microbatch=0)
    assert penstock.compare(tmp_path / "right", tmp_path / "run").good
    found = penstock.compare(tmp_path / "right", tmp_path / "run", bits=True)
    assert str(found).startswith("step 0, microbatch 0: value, output, has other bits")
