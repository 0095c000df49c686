from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import ConfigError, ProfileError, SplitError
from penstock.profile.measured import Effort
from penstock.runtime.model import measured_split
from penstock.runtime.model.measured_split import blocks_by_cost
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss
from tests.support.lanes import exhaustive, slow

CONFIG = ModelConfig(vocabulary=96, width=32, layers=4, heads=4, kv_heads=2, hidden=64)
TOKENS = torch.arange(2 * 2 * 8).reshape(4, 8)
EXAMPLE = (TOKENS[:2], TOKENS[:2])


def pipeline(model: object = None, **options: Any) -> Pipeline:
    options = {"split": {"measured": EXAMPLE}, "ranks": 2, **options}
    return Pipeline(model or layers(CONFIG), next_token_loss, microbatches=2, **options)


def loss_and_split(rank: int) -> tuple[float, list[str]]:
    with pipeline(ranks=None) as pipe:
        loss = pipe.step(TOKENS, TOKENS).loss
        trace = pipe.gather_trace()
        assert trace is not None
        return float(loss), [str(trace.info["split"]), *(layer.name for layer in pipe.layers)]


def test_a_measured_split_trains_as_any_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured_split, "_EFFORT", Effort(seconds=0.05, rounds=2))
    x, y = torch.randn(2, 4, 4)
    options = {"ranks": 2, "microbatches": 2, "split": {"measured": (x[:2], y[:2])}}
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    with Pipeline(net, nn.functional.mse_loss, **options) as pipe:
        torch.testing.assert_close(pipe.step(x, y).loss, nn.functional.mse_loss(net(x), y).detach())
        assert sum(len(stage.module.layers) for stage in pipe.stages.values()) == 4


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "split", "recompute"),
    [
        ("1f1b", 1, [4, 0], "full"),
        ("interleaved-1f1b", 2, [0, 2, 2, 0], "none"),
        ("dualpipe-v", None, [0, 3, 1, 0], "none"),
        *exhaustive(
            ("gpipe", 1, [0, 4], "none"),
            ("zb-v", None, [0, 2, 2, 0], "full"),
            ("chimera", None, [0, 4], "none"),
        ),
    ],
)
def test_an_embedding_and_a_head_may_be_stages_of_their_own(
    schedule: str, virtual_stages: int | None, split: list[int], recompute: str
):
    with (
        pipeline(schedule=schedule, split=split, recompute=recompute, virtual_stages=virtual_stages) as pipe,
        pipeline(split="even", ranks=1) as whole,
    ):
        assert torch.equal(pipe.step(TOKENS, TOKENS).losses, whole.step(TOKENS, TOKENS).losses)
        ends = [len(pipe.stages[s].module.layers) for s in (0, len(split) - 1)]
        assert ends == [1 + split[0], 1 + split[-1]]
        for each in (pipe, whole):
            torch.optim.SGD(each.parameters(), lr=0.5).step()
        for name, weight in whole.state_dict().items():
            assert torch.allclose(pipe.state_dict()[name], weight, rtol=0, atol=1e-6), name


@pytest.mark.parametrize(
    ("vocabulary", "splits"), [*slow((96, {3: (1, 2, 1)})), (60_000, {3: (2, 2, 0), 6: (0, 1, 1, 1, 1, 0)})]
)
def test_a_head_that_costs_more_than_the_blocks_gets_a_stage_of_its_own(vocabulary: int, splits: dict):
    model = layers(replace(CONFIG, vocabulary=vocabulary))
    profile = penstock.profile_layers(model, TOKENS, target=TOKENS, loss_fn=next_token_loss, measure=False)
    assert {stages: blocks_by_cost(profile, stages, len(TOKENS)) for stages in splits} == splits


@pytest.mark.slow
def test_processes_choose_the_same_split(processes: LocalProcesses):
    (first, split), (second, other) = processes.run(2, loss_and_split)
    assert first == second
    assert split == other


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:layer '0' has")
def test_a_heavy_layer_gets_a_stage_of_its_own():
    wide = nn.Sequential(nn.Linear(4, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 4))
    model = nn.Sequential(wide, *[nn.Linear(4, 4) for _ in range(3)])
    x = torch.randn(64, 4)
    with Pipeline(model, nn.functional.mse_loss, microbatches=2, ranks=2, split={"measured": (x, x)}) as pipe:
        assert [len(pipe.stages[s].module.layers) for s in range(2)] == [1, 3]


def test_a_profile_splits_its_layers_without_measuring(tmp_path: Path):
    light = [nn.Linear(4, 4) for _ in range(6)]
    model = nn.Sequential(*light, nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 4))
    x = torch.randn(8, 4)
    profile = penstock.profile_layers(model, x, target=x, loss_fn=nn.functional.mse_loss, measure=False)
    profile.save(tmp_path / "profile.json")
    for given in (profile, tmp_path / "profile.json", str(tmp_path / "profile.json")):
        with Pipeline(
            model, nn.functional.mse_loss, microbatches=2, ranks=2, split={"measured": given}
        ) as pipe:
            first, second = (len(pipe.stages[s].module.layers) for s in range(2))
            assert (first, second) == (7, 2)  # the product of 512 x 512 outweighs all before it
            loss = pipe.step(x, x).loss
        torch.testing.assert_close(loss, nn.functional.mse_loss(model(x), x).detach())
    with pytest.raises(
        SplitError, match="of other layers than the model's, 9 layers for 4; profile this model"
    ):
        Pipeline(model[:4], nn.functional.mse_loss, microbatches=2, ranks=2, split={"measured": profile})
    with pytest.raises(ConfigError, match="cannot read the profile"):
        pipeline(split={"measured": str(tmp_path / "none.json")})


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(SplitError, match=r"give it as split=\{'measured': \(x, y\)\}"):
        pipeline(split="measured")
    with pytest.raises(ProfileError, match="layer '1' cannot be profiled"):
        pipeline([nn.Embedding(96, 4), lambda x: x * float(x.sum())], ranks=2)


@pytest.mark.slow
def test_layers_are_profiled_with_and_without_measuring():
    profile_layers = partial(penstock.profile_layers, layers(CONFIG), TOKENS[:2])
    traced = profile_layers(measure=False, microbatches=(1, 2))
    assert (traced.source, [size for size, _ in traced.kinds[0].points]) == ("traced", [1, 2])
    measured = profile_layers(microbatches=(2,))
    assert measured.source == "measured"
    assert measured.layers == traced.layers
