"""Layers are on the stages that the split names, built once, with their names in the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.base.errors import ConfigError, SplitError
from penstock.runtime.pipeline import Pipeline
from penstock.stage.layers import Layer, as_layers
from penstock.stage.module import StageModule
from penstock.stage.split import split_layers


def named(count: int) -> list[Layer]:
    ends = [Layer("embedding", nn.Identity, "embedding")], [Layer("head", nn.Identity, "head")]
    return [*ends[0], *(Layer(f"blocks.{n}", nn.Identity) for n in range(count)), *ends[1]]


def names(runs: list[list[Layer]]) -> list[str]:
    return [" ".join(layer.name.removeprefix("blocks.") for layer in run) for run in runs]


def test_embedding_and_head_ride_along_with_the_first_and_the_last_stage():
    assert names(split_layers(named(10), 3)) == ["embedding 0 1 2 3", "4 5 6", "7 8 9 head"]
    assert names(split_layers(named(2), 1)) == ["embedding 0 1 head"]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"layers_per_stage": 2}, ["embedding 0 1", "2 3", "4 head"]),
        ({"layers_per_stage": [1, 1, 3]}, ["embedding 0", "1", "2 3 4 head"]),
        ([3, 1, 1], ["embedding 0 1 2", "3", "4 head"]),
        ([0, 5, 0], ["embedding", "0 1 2 3 4", "head"]),
        ({"ranges": [(0, 1), (1, 6), (6, 7)]}, ["embedding", "0 1 2 3 4", "head"]),
        ([(0, 1), (1, 6), (6, 7)], ["embedding", "0 1 2 3 4", "head"]),
        ({"weights": [0, 1, 1, 1, 1, 1, 5]}, ["embedding 0 1", "2 3 4", "head"]),
        ({"weights": [1, 1, 1, 1, 1, 1, 2]}, ["embedding 0", "1 2 3", "4 head"]),
    ],
)
def test_a_split_by_count_range_or_weight(split, expected):
    assert names(split_layers(named(5), 3, split)) == expected


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("evenly", "did you mean 'even'"),
        ({"layers_per_stage": 1}, "make 5 stage"),
        ({"layers_per_stage": 0}, "at least 1"),
        ({"weight": [1]}, "a split must have one key, got 'weight' .did you mean 'weights'"),
        ({"weights": [1, 2]}, "2 weights for 7 layers"),
        ({"weights": "abc"}, "list of numbers"),
        ([1, 2], "add up to 3"),
        ([3, 0, 2], "every stage needs at least one block, except"),
        ([(0, 7)], "makes 1 stage"),
        ([(0, 7, 2)], "cannot read"),
        ([], "cannot read"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, message):
    with pytest.raises(SplitError, match=message):
        split_layers(named(5), 3, split)


def test_a_head_between_blocks_is_refused():
    layers = [Layer("a", nn.Identity), Layer("h", nn.Identity, "head"), Layer("b", nn.Identity)]
    with pytest.raises(SplitError, match="'h' is between"):
        split_layers(layers, 2)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        [nn.Linear(2, 2), nn.Linear(2, 2)],
        [lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2)],
        [("0", nn.Linear(2, 2)), ("1", lambda: nn.Linear(2, 2))],
    ],
    ids=["sequential", "modules", "factories", "pairs"],
)
def test_parameters_keep_the_names_of_the_whole_model(model):
    with Pipeline(model, nn.functional.mse_loss, microbatches=2, ranks=2) as pipe:
        assert [n for n, _ in pipe.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert list(pipe.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "cannot cut a Linear"),
        ([], "no layers"),
        ([("a", nn.Identity()), ("a", nn.Identity())], "more than once: a"),
        ([3], "layer '0' is a int"),
        ("abc", "cannot cut a str"),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(SplitError, match=message):
        as_layers(model)


def test_a_builder_that_returns_no_module_is_refused():
    with pytest.raises(SplitError, match="its builder returned a int"):
        StageModule([Layer("a", lambda: 3)])


def build_local(rank: int) -> list[str]:
    built: list[str] = []

    def factory(n: int) -> nn.Module:
        built.append(str(n))
        return nn.Linear(2, 2)

    layers = [(str(n), lambda n=n: factory(n)) for n in range(4)]
    with Pipeline(layers, nn.functional.mse_loss, microbatches=2, ranks=2):
        return built


@pytest.mark.slow
def test_a_process_builds_only_its_own_layers(processes):
    assert processes.run(2, build_local) == [["0", "1"], ["2", "3"]]


def test_a_model_built_on_meta_is_filled_by_load_state_dict():
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(2, 2)

    with Pipeline([meta, meta], nn.functional.mse_loss, microbatches=1, ranks=2) as pipe:
        pipe.load_state_dict(whole.state_dict())
        x = torch.randn(2, 2)
        assert torch.equal(pipe.evaluate(x, outputs=True).outputs[0], whole(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("1.bias"), "1.bias is missing"),
        (lambda s: s.update({"2.bias": torch.zeros(2)}), "2.bias is unknown"),
        (lambda s: s.update({"0.bias": torch.zeros(3)}), r"0.bias has shape \(3,\), not \(2,\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(change, message):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = {n: p.clone() for n, p in net.state_dict().items()}
    state = {n: p + 1 for n, p in net.state_dict().items()}
    change(state)
    with Pipeline(net, nn.functional.mse_loss, microbatches=1, ranks=2) as pipe:
        with pytest.raises(ConfigError, match=message):
            pipe.load_state_dict(state)
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, before[name])


class Tower(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


SPLITS = [
    ("even", "56% of the model's parameters"),
    ({"measured": (torch.ones(4, 8), torch.ones(4, 8))}, r"\d+% of the model's measured time"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("split", "share"), SPLITS, ids=["parameters", "time"])
def test_one_layer_with_more_than_half_of_the_model_is_named(split, share):
    net = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(8, 8), Tower(5 if split == "even" else 40), nn.Linear(8, 8)
    )
    net.append(nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=rf"layer '2' has {share}.* the \d+ blocks of 2\.blocks") as found:
        pipe = Pipeline(net, nn.functional.mse_loss, microbatches=2, ranks=2, split=split)
    assert len([w for w in found if "layer '2'" in str(w.message)]) == 1
    assert found[0].filename == __file__
    pipe.close()


@pytest.mark.parametrize("net", [[Tower(4), Tower(4)], [nn.Linear(8, 8), nn.Linear(8, 800)]], ids=str)
def test_nothing_is_said_of_equal_parts_and_of_what_has_no_blocks(net):
    Pipeline(net, nn.functional.mse_loss, microbatches=2, ranks=2).close()


def test_nothing_is_said_where_nothing_is_divided():
    Pipeline([Tower(4), nn.Linear(8, 8)], nn.functional.mse_loss, microbatches=2, ranks=1).close()
