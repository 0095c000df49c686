"""Arguments of a model by their names, whatever the names are, and whole batches as mappings."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.base.errors import BatchError, ConfigError
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models, named_models, own_models
from tests.support.lanes import exhaustive
from tests.support.named_models import Colliding, Diffusion, Labelled, Options, TakesAMapping

MICROBATCHES = 4


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def parts(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    split = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
    return [{name: value[n] for name, value in split.items()} for n in range(MICROBATCHES)]


def diffusion_step(rank: int = 0, way: str = "keywords", **options: Any) -> str:
    """Compare a step of a diffusion transformer with the plain model; return what differs."""
    net = own_models.made(Diffusion)
    expected = copy.deepcopy(net)
    batch = named_models.diffusion_batch()
    losses = []
    for part in parts(batch):
        target = part.pop("target")
        loss = mse(expected(**part), target)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    with penstock.Pipeline(net, mse, microbatches=MICROBATCHES, **options) as pipe:
        if way == "keywords":
            result = pipe.step(batch["x"], batch["target"], t=batch["t"], y=batch["y"])
        elif way == "mapping":
            result = pipe.step(UserDict(batch))
        else:
            result = pipe.step(**batch)
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
    if not torch.equal(result.losses, torch.stack(losses)):
        return "losses"
    for name, gradient in gradients.items():
        # The condition goes to every layer, so its gradient is a sum in another order.
        if not torch.allclose(gradient, expected.get_parameter(name).grad, rtol=1e-4, atol=1e-6):
            return name
    return ""


@pytest.mark.parametrize(
    ("way", "schedule"), [("keywords", "1f1b"), ("mapping", "zb-h1"), ("double star", "1f1b")]
)
def test_a_diffusion_transformer_trains_unmodified(way: str, schedule: str):
    assert diffusion_step(way=way, ranks=3, schedule=schedule) == ""


@pytest.mark.slow
def test_a_diffusion_transformer_trains_in_processes(processes: LocalProcesses):
    assert processes.run(2, diffusion_step, "mapping") == ["", ""]


@pytest.mark.parametrize("recompute", ["full", *exhaustive("none")])
def test_arguments_may_have_any_names(recompute: str):
    net = own_models.made(Colliding)
    ids, y = own_models.batch(8)
    names = ("value", "named", "module", "message", "inputs", "layer", "call")
    named = {name: torch.rand(8) for name in names}
    with penstock.Pipeline(
        net, cross_entropy, ranks=2, microbatches=MICROBATCHES, recompute=recompute
    ) as pipe:
        seen = pipe.step(ids, y, **named).losses
        assert torch.equal(pipe.evaluate(ids, y, **named).losses, seen)
    batch = {"ids": ids, "target": y, **named}
    expected = [cross_entropy(net(p.pop("ids"), **p), t) for p in parts(batch) for t in [p.pop("target")]]
    assert torch.equal(seen, torch.stack(expected))


def test_arguments_with_the_names_of_options_go_into_a_mapping():
    net = own_models.made(Options)
    ids, y = own_models.batch(8)
    named = {name: torch.rand(8) for name in ("outputs", "input_grads", "x")}
    batch = {"ids": ids, "target": y, **named}
    with penstock.Pipeline(net, cross_entropy, ranks=2, microbatches=MICROBATCHES) as pipe:
        result = pipe.step(batch, outputs=True)
        for name in ("outputs", "input_grads"):
            with pytest.raises(ConfigError, match=rf"{name} must be True or False, got a Tensor; .* mapping"):
                pipe.step(ids, y, **{name: named[name]})
    expected = []
    for part in parts(batch):
        target = part.pop("target")
        expected.append(cross_entropy(net(part.pop("ids"), **part), target))
    assert torch.equal(result.losses, torch.stack(expected))
    assert len(result.outputs) == MICROBATCHES


class WithNames(nn.Linear):
    """A layer of a list, with names of its own for the value and what else it takes."""

    def forward(self, input: Tensor, value: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        for extra in (value, y):
            if extra is not None:
                input = input + extra[:, None]
        return super().forward(input)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("compile", ["none", *exhaustive("stage")])
def test_layers_of_a_list_may_take_value_and_y(compile: str):
    torch.manual_seed(0)
    net = nn.Sequential(*[WithNames(4, 4) for _ in range(4)])
    x, target, value, y = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8), torch.randn(8)
    execution = penstock.ExecutionOptions(compile=compile)
    with penstock.Pipeline(net, mse, ranks=2, microbatches=MICROBATCHES, execution=execution) as pipe:
        seen = pipe.step(x, target, value=value, y=y).losses
    expected = []
    for part in parts({"x": x, "target": target, "value": value, "y": y}):
        h = part["x"]
        for layer in net:
            h = layer(h, part["value"], part["y"])
        expected.append(mse(h, part["target"]))
    assert torch.allclose(seen, torch.stack(expected))


def labelled_batch() -> dict[str, Tensor]:
    ids, labels = own_models.batch(8)
    mask = torch.ones_like(ids, dtype=torch.float32)
    mask[:, 5:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def test_a_batch_has_the_names_of_the_forwards_arguments():
    net = own_models.made(Labelled)
    batch = labelled_batch()
    expected = torch.stack([net(**part).detach() for part in parts(batch)])
    with penstock.Pipeline(net, ranks=2, microbatches=MICROBATCHES) as pipe:
        assert torch.equal(pipe.step(batch).losses, expected)
        assert torch.equal(
            pipe.step(
                batch["input_ids"], labels=batch["labels"], attention_mask=batch["attention_mask"]
            ).losses,
            expected,
        )
        assert torch.equal(pipe.evaluate(batch).losses, expected)
        del batch["labels"]
        assert pipe.evaluate(batch).loss is None
        with pytest.raises(BatchError, match="needs the target"):
            pipe.step(batch)


@pytest.mark.parametrize("as_layers", [True, *exhaustive(False)])
def test_a_batch_of_a_collator_of_hugging_face(as_layers: bool):
    from transformers import BatchEncoding

    net = hf_models.model("llama")
    tokens, labels, mask = hf_models.batch()
    batch = BatchEncoding({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    given = penstock.from_transformers(net) if as_layers else net
    with penstock.Pipeline(given, penstock.causal_lm_loss, ranks=2, microbatches=MICROBATCHES) as pipe:
        seen = pipe.step(batch).losses
        assert torch.equal(pipe.step(tokens, labels, attention_mask=mask).losses, seen)
    expected = torch.stack([net(**part).loss for part in parts(batch)])
    assert torch.allclose(seen, expected, rtol=1e-5)


def test_what_a_mapping_may_not_have_is_named():
    batch = labelled_batch()
    with penstock.Pipeline(own_models.made(Labelled), ranks=2, microbatches=MICROBATCHES) as pipe:
        with pytest.raises(BatchError, match=r"'attention_maks'.* 'attention_mask', 'input_ids', 'labels'"):
            pipe.step({**batch, "attention_maks": batch["attention_mask"]})
        with pytest.raises(BatchError, match="attention_mask is given twice"):
            pipe.step(batch, attention_mask=batch["attention_mask"])


def test_a_target_that_has_the_name_of_an_argument_is_given_by_its_place():
    batch = named_models.diffusion_batch()
    target = batch.pop("target")
    with penstock.Pipeline(
        own_models.made(Diffusion), lambda output, y: mse(output, y), ranks=2, microbatches=MICROBATCHES
    ) as pipe:
        with pytest.raises(BatchError, match=r"'target'.* second parameter"):
            pipe.step({**batch, "target": target})
        pipe.step(batch.pop("x"), target, **batch)


def test_a_mapping_is_a_value_where_the_model_has_no_names_for_it():
    a, b, target = torch.randn(3, 8, own_models.WIDTH)
    features = {"a": a, "b": b}

    class Sum(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return features["a"] + features["b"]

    linear = nn.Linear(own_models.WIDTH, own_models.WIDTH)
    for net in (nn.Sequential(Sum(), linear), own_models.made(TakesAMapping)):
        with penstock.Pipeline(net, mse, ranks=2, microbatches=MICROBATCHES) as pipe:
            pipe.step(features, target)
            outputs = pipe.evaluate(features, outputs=True).outputs
        net.eval()
        for output, x, y in zip(outputs, a.chunk(MICROBATCHES), b.chunk(MICROBATCHES), strict=True):
            assert torch.equal(output, net({"a": x, "b": y}))


def test_gradients_of_arguments_named_x_and_y_are_refused_too():
    net = own_models.made(Options)
    ids, y = own_models.batch(8)
    with (
        penstock.Pipeline(net, cross_entropy, ranks=2, microbatches=MICROBATCHES) as pipe,
        pytest.raises(BatchError, match="x requires a gradient"),
    ):
        pipe.step(ids, y, x=torch.rand(8, requires_grad=True))


META = [
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")),
    lambda: [("first", nn.Linear(4, 4)), ("second", nn.Linear(4, 4, device="meta"))],
    lambda: hf_models.model("gpt2").to("meta"),
    lambda: own_models.made(Labelled).to("meta"),
]


@pytest.mark.parametrize("make", META)
def test_a_model_on_the_meta_device_is_refused_when_it_is_given(make):
    with pytest.raises(penstock.base.errors.SplitError, match=r"\w+ is on the meta device.*to_empty"):
        penstock.Pipeline(make(), mse, ranks=2, microbatches=2)


def test_split_refuses_the_meta_device_and_takes_layers_that_are_built_later():
    with pytest.raises(penstock.base.errors.SplitError, match="on the meta device"):
        penstock.split(own_models.made(Labelled).to("meta"))
    penstock.Pipeline([lambda: nn.Linear(4, 4)] * 2, mse, ranks=2, microbatches=2).close()
