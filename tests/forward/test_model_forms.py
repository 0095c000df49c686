"""Models in the forms of known libraries and papers, as layers: the numbers of the model itself, and sensible blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import penstock
from tests.support import model_forms as forms
from tests.support import own_models

MICROBATCHES = 2


def size(output: Tensor, target: object = None) -> Tensor:
    return output.square().mean()


def parts(value: Tensor) -> tuple[Tensor, ...]:
    return value.chunk(MICROBATCHES)


@pytest.mark.slow
@pytest.mark.parametrize("make", forms.FORMS, ids=lambda make: make.__name__)
def test_they_train_as_plain_pytorch(make):
    net = own_models.made(make)
    expected = copy.deepcopy(net)
    x, named = forms.named_inputs(make)
    assert len(penstock.split(net, x, loss=False, **named)) >= 4
    losses = []
    for n, part in enumerate(parts(x)):
        loss = size(expected(part, **{name: parts(value)[n] for name, value in named.items()}))
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    with penstock.Pipeline(net, size, ranks=2, microbatches=MICROBATCHES) as pipe:
        assert torch.equal(pipe.step(x, x, **named).losses, torch.stack(losses))
        for name, p in pipe.named_parameters():
            gradient = expected.get_parameter(name).grad
            if gradient is None or p.grad is None:
                assert all(g is None or not g.any() for g in (gradient, p.grad)), name
            else:  # a value that travels to several layers gets its gradient in parts
                torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
        state = pipe.full_state_dict()
    assert list(state) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (
            forms.ResNet,
            ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1", "layer4.0", "layer4.1"],
        ),
        (forms.VisionTransformer, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (forms.Segmenter, [f"backbone.blocks.{n}" for n in range(4)]),
        (forms.ConvStem, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (forms.UNet, ["downs.0", "downs.1", "mid.0", "mid.1", "ups.0", "ups.1"]),
        (forms.UNetWithALoneMiddle, ["downs.0", "downs.1", "mid", "ups.0", "ups.1"]),
        (forms.StagesWithForwards, ["layers.0.blocks.0", *(f"layers.1.blocks.{n}" for n in range(3))]),
        (forms.SequentialOfStages, ["layers.0.0", "layers.2.0", "layers.2.1"]),
        (forms.Experts, ["blocks.0", "blocks.1", "blocks.2"]),
        (forms.AroundABackbone, [f"backbone.layers.{n}" for n in range(3)]),
        (forms.Child, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_blocks_are_what_has_the_depth(make, blocks: list[str]):
    layers = penstock.split(own_models.made(make))
    assert [layer.name.partition("+")[0] for layer in layers if layer.role == "block"] == blocks


def test_a_middle_of_single_modules_is_blocks_of_its_own():
    layers = penstock.split(own_models.made(forms.DenoisingUNet))
    names = [layer.name for layer in layers if layer.role == "block"]
    assert any(name.startswith("mid_block1") for name in names)
    assert any(name.startswith("mid_block2") for name in names)


def test_both_towers_are_divided():
    names = " ".join(
        layer.name for layer in penstock.split(own_models.made(forms.TwoTowers)) if layer.role == "block"
    )
    assert all(f"visual.layers.{n}" in names and f"text.blocks.{n}" in names for n in range(3))


def test_a_loss_in_a_method_is_the_loss_function():
    net = own_models.made(forms.LossInAMethod)
    expected = copy.deepcopy(net)
    x, y = own_models.batch()
    layers = penstock.split(net, x, y)
    assert layers.loss_fn is not None
    losses = [expected(a, b)[1] for a, b in zip(parts(x), parts(y), strict=True)]
    (torch.stack(losses).mean()).backward()
    with penstock.Pipeline(net, ranks=2, microbatches=MICROBATCHES) as pipe:
        assert torch.equal(pipe.step(x, y).losses, torch.stack(losses).detach())
        for name, p in pipe.named_parameters():
            torch.testing.assert_close(p.grad, expected.get_parameter(name).grad)
