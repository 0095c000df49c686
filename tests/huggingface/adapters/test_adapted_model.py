"""LoRA through the pipeline, against peft alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.base.errors import ConfigError
from penstock.huggingface.adapters.adapted_model import adapters_of
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.split_backward.deferring import defer_weight_grads
from penstock.stage.split_backward.weight_grad import WeightGradQueue
from tests.support import hf_models, peft_models
from tests.support.lanes import exhaustive, slow


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("bases")
    return cache(lambda family: peft_models.base_folder(root, family, tied=family == "gemma2"))


CONFIGS = {
    "plain": {},
    "rslora": {"use_rslora": True, "init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "biases": {"bias": "all"},
    "own biases": {"bias": "lora_only"},
    "whole modules": {"modules_to_save": ["norm", "lm_head"], "target_modules": ["q_proj", "v_proj"]},
    "last block": {"target_modules": ["q_proj"], "layers_to_transform": [3]},
    "ranks by name": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", "dora"),
        ("gpt2", "biases"),
        *slow(("llama", "whole modules"), ("gemma2", "ranks by name")),
        *exhaustive(*(("llama", name) for name in CONFIGS if name not in ("dora", "whole modules"))),
        *exhaustive(*((family, "plain") for family in ("gpt2", "gpt_neox", "gemma2", "qwen2", "phi3"))),
        *exhaustive(("gpt2", "dora"), ("qwen2", "own biases")),
    ],
)
def test_loss_and_gradients_are_those_of_peft_bit_for_bit(family: str, changes: str, bases, tmp_path: Path):
    base = bases(family)
    with peft_models.adapted(base, 4, family, **CONFIGS[changes]) as pipe:
        peft_models.move(pipe)
        seen = peft_models.step(pipe)
        penstock.save_adapters(pipe, tmp_path)
    peft_models.assert_same_step(seen, peft_models.with_peft(base, tmp_path))


@pytest.mark.parametrize(
    "changes",
    [*slow({"use_dora": True, "lora_dropout": 0.2, "modules_to_save": ["norm"]}), *exhaustive({})],
    ids=["dora", "plain"],
)
def test_weights_dropout_and_gradients_depend_on_no_layout(changes: dict, bases):
    def run(ranks: int, schedule: str, **options) -> list[tuple[float, dict[str, torch.Tensor]]]:
        config = peft_models.config(**changes)
        layers = penstock.from_transformers(bases("llama"), adapters=config, seed=7)
        with hf_models.pipeline(layers, ranks, schedule=schedule, **options) as pipe:
            first = {name: p.detach().clone() for name, p in pipe.named_parameters()}
            peft_models.move(pipe)
            return [(0.0, first), *(peft_models.step(pipe, n) for n in range(2))]

    expected = run(1, "gpipe")
    for ranks, schedule, options in (
        (4, "1f1b", {}),
        (2, "zb-h1", {}),
        (2, "zb-v", {}),
        (2, "1f1b", {"recompute": "full"}),
        (4, "zb-h2", {"recompute": 2}),
    ):
        seen = run(ranks, schedule, **options)
        for (loss, tensors), (expected_loss, wanted) in zip(seen, expected, strict=True):
            assert loss == expected_loss
            assert peft_models.same(tensors, wanted)


def test_stages_with_copies_sum_to_the_same_gradients(bases):
    layers = [penstock.from_transformers(bases("llama"), adapters=peft_models.config()) for _ in range(2)]
    seen = []
    for given, schedule in zip(layers, ("1f1b", "dualpipe"), strict=True):
        with hf_models.pipeline(given, schedule=schedule) as pipe:
            peft_models.move(pipe)
            seen.append(peft_models.step(pipe))
    assert seen[0][0] == pytest.approx(seen[1][0], abs=1e-6)
    assert all(torch.allclose(seen[0][1][name], g, atol=1e-6) for name, g in seen[1][1].items())


def test_another_seed_gives_other_adapters_and_the_second_matrix_begins_at_zero(bases):
    def weights(seed: int) -> dict[str, torch.Tensor]:
        layers = penstock.from_transformers(bases("llama"), adapters=peft_models.config(), seed=seed)
        return hf_models.parameters(layers)

    one, same, other = weights(0), weights(0), weights(1)
    assert peft_models.same(one, same)
    for name, value in one.items():
        if "lora_B" in name:
            assert not value.any()
        elif "lora_A" in name:
            assert not torch.equal(value, other[name])
            # kaiming_uniform with a = sqrt(5), as peft initialises
            assert value.abs().max() <= 1 / value.shape[1] ** 0.5
        else:
            assert not value.requires_grad
            assert torch.equal(value, other[name])


def test_only_adapters_wait_for_the_weight_half_of_a_split_backward(bases):
    layers = penstock.from_transformers(bases("llama"), adapters=peft_models.config())
    block = layers[1].build()
    trained = {id(p) for p in block.parameters() if p.requires_grad}
    queue = WeightGradQueue()
    hidden = torch.randn(1, 4, 16, requires_grad=True)
    with defer_weight_grads(queue, list(block.parameters())):
        output = block(hidden)
    output.sum().backward()
    assert all(p.grad is None for p in block.parameters())
    waiting = {id(formula.args[0]) for formula, *_ in queue.pending}
    assert waiting == trained


def test_the_optimizer_keeps_state_for_adapters_alone(bases):
    with peft_models.adapted(bases("llama")) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        for n in range(2):
            peft_models.step(pipe, n)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        for name, parameter in pipe.named_parameters():
            assert (name in state) == parameter.requires_grad
            assert torch.equal(parameter, before[name]) != parameter.requires_grad


def test_adapters_of_a_bf16_base_are_fp32_as_in_peft(tmp_path: Path):
    base = tmp_path / "base"
    hf_models.model("llama").to(torch.bfloat16).save_pretrained(base)
    with peft_models.adapted(base) as pipe:
        peft_models.move(pipe)
        dtypes = {p.requires_grad: p.dtype for p in pipe.parameters()}
        loss, gradients = peft_models.step(pipe)
        penstock.save_adapters(pipe, tmp_path / "saved")
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    expected_loss, expected = peft_models.accumulated(peft_models.with_peft(base, tmp_path / "saved"))
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    assert peft_models.same(gradients, expected)


@pytest.mark.parametrize(
    "changes", [{"use_dora": True, "modules_to_save": ["lm_head"], "bias": "all"}, *exhaustive({})]
)
def test_a_peft_model_is_taken_as_it_is(changes: dict, bases, tmp_path: Path):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = bases("llama")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft_models.config(**changes)).train()
    with hf_models.pipeline(model, 4) as pipe:
        peft_models.move(pipe)
        seen = peft_models.step(pipe)
        pipe.zero_grad()
        peft_models.assert_same_step(seen, model)
        penstock.save_adapters(pipe, tmp_path)
    again = peft_models.with_peft(base, tmp_path, trainable=False)
    assert torch.equal(peft_models.logits(again), peft_models.logits(model))


def test_a_line_says_what_is_trained(bases):
    adapters = adapters_of(penstock.from_transformers(bases("llama"), adapters=peft_models.config()))
    assert adapters is not None
    assert str(adapters) == "LoRA of rank 4 on 28 matrices: 3,712 of 13,488 weights are trained (27.52%)"
    assert adapters_of(penstock.from_transformers(bases("llama"))) is None


def peft_model(**changes: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(hf_models.model("llama"), peft_models.config(**changes))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("embed_tokens", r"model.embed_tokens cannot have an adapter.* modules_to_save"),
        ("lm_head", "lm_head cannot have an adapter"),
    ],
)
def test_adapters_on_tables_are_refused_by_name(table: str, said: str):
    with pytest.raises(ConfigError, match=said):
        penstock.from_transformers(peft_model(target_modules=[table, "q_proj"]))


def test_a_tied_table_that_is_saved_as_a_whole_is_refused(tmp_path: Path):
    base = peft_models.base_folder(tmp_path, tied=True)
    config = peft_models.config(modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="lm_head in modules_to_save is tied"):
        penstock.from_transformers(base, adapters=config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.merge_adapter(), "merged into the base; call unmerge_adapter"),
        (lambda model: model.base_model.disable_adapter_layers(), "disabled; call enable_adapter_layers"),
        (
            lambda model: model.add_adapter("second", peft_models.config()),
            "must have one adapter, got default, second",
        ),
    ],
)
def test_merged_disabled_and_several_adapters_are_refused(change: Callable[[Any], object], said: str):
    model = peft_model()
    change(model)
    with pytest.raises(ConfigError, match=said):
        penstock.from_transformers(model)


def test_adapters_need_a_folder_and_modules_that_exist(bases):
    with pytest.raises(ConfigError, match=r"peft\.get_peft_model\(model, config\)"):
        penstock.from_transformers(hf_models.model("llama"), adapters=peft_models.config())
    with pytest.raises(ConfigError, match="peft cannot add these adapters: "):
        penstock.from_transformers(bases("llama"), adapters=peft_models.config(target_modules="q_projection"))
    with pytest.raises(ConfigError, match="must be peft's LoraConfig or a folder, got int"):
        penstock.from_transformers(bases("llama"), adapters=3)


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_a_name_of_no_module_is_refused_also_beside_one_that_exists(key: str, bases):
    config = peft_models.config(**{key: ["norm", "q_prj"]})
    with pytest.raises(ConfigError, match=rf"{key} has 'q_prj', which no module .* \(did you mean 'q_proj'"):
        penstock.from_transformers(bases("llama"), adapters=config)


def test_a_rank_above_that_of_every_matrix_is_refused(bases):
    with pytest.raises(ConfigError, match=r"must be at most that of the largest matrix, 16, got 17"):
        penstock.from_transformers(bases("llama"), adapters=peft_models.config(r=17))
    penstock.from_transformers(bases("llama"), adapters=peft_models.config(r=16))


def test_a_model_with_modules_of_its_own_has_no_adapters():
    model = hf_models.model("llama")
    model.model.layers[0].mlp.up_proj = nn.Linear(16, 24, bias=False)
    assert adapters_of(penstock.from_transformers(model)) is None


def refused(rank: int, base: Path) -> str:
    layers = penstock.from_transformers(base, adapters=peft_models.config())
    options = {"mesh": penstock.MeshShape(tp=2), "parallel": penstock.ParallelOptions(family="llama")}
    with pytest.raises(ConfigError) as error:
        hf_models.pipeline(layers, None, **options)
    return str(error.value)


@pytest.mark.slow
def test_tensor_parallelism_is_refused_by_name(processes: LocalProcesses, bases):
    for text in processes.run(2, refused, bases("llama"), timeout=300):
        assert "q_proj has an adapter (peft)" in text
