"""LoRA through the pipeline, against peft alone; peft loads what is saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock.base.errors import ConfigError
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.split_backward.deferring import defer_weight_grads
from penstock.stage.split_backward.weight_grad import WeightGradQueue
from tests.support import hf_models, peft_models
from tests.support.lanes import exhaustive, slow


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("bases")
    return cache(lambda family, tied=False: peft_models.base_folder(root / f"{tied}", family, tied=tied))


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "init_lora_weights": "gaussian"},
    "dora": {"use_dora": True, "modules_to_save": ["lm_head", "norm"], "bias": "all"},
    "biases": {"bias": "all"},
    "own biases": {"bias": "lora_only"},
    "last block": {"target_modules": ["q_proj"], "layers_to_transform": [3]},
    "ranks by name": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    "table": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "rows of the table": {"trainable_token_indices": [1, 2]},
    "blocks twice": {"layer_replication": [(0, 4), (2, 4)]},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*tie_word_embeddings")
@pytest.mark.parametrize(
    ("family", "tied", "changes"),
    [
        ("llama", False, "dora"),
        ("gpt2", True, "biases"),
        ("llama", True, "head"),
        *slow(("gemma2", True, "ranks by name"), ("llama", True, "table"), ("llama", False, "blocks twice")),
        *exhaustive(*(("llama", tied, name) for name in CONFIGS for tied in (True, False))),
        *exhaustive(
            *((family, False, "plain") for family in ("gpt2", "gpt_neox", "gemma2", "qwen2", "phi3"))
        ),
        *exhaustive(("gpt2", True, "dora"), ("qwen2", False, "own biases")),
    ],
)
def test_loss_and_gradients_are_those_of_peft_bit_for_bit_and_so_is_its_folder(
    family: str, tied: bool, changes: str, bases, tmp_path: Path
):
    base = bases(family, tied)
    model = peft_models.adapted(base, family, **CONFIGS[changes])
    with hf_models.pipeline(model, 4) as pipe:
        peft_models.move(pipe)
        seen = peft_models.step(pipe)
        pipe.zero_grad()
        peft_models.assert_same_step(seen, model)
        penstock.save_adapters(pipe, tmp_path / "ours", model)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert peft_models.same(ours, theirs)
    again = peft_models.with_peft(base, tmp_path / "ours")
    assert torch.equal(peft_models.logits(again), peft_models.logits(model))


@pytest.mark.parametrize(
    "changes",
    [*slow({"use_dora": True, "lora_dropout": 0.2, "modules_to_save": ["norm"]}), *exhaustive({})],
    ids=["dora", "plain"],
)
def test_dropout_and_gradients_depend_on_no_layout(changes: dict, bases):
    def run(ranks: int, schedule: str, **options) -> list[tuple[float, dict[str, torch.Tensor]]]:
        layers = penstock.from_transformers(peft_models.adapted(bases("llama"), **changes))
        with hf_models.pipeline(layers, ranks, schedule=schedule, **options) as pipe:
            peft_models.move(pipe)
            return [peft_models.step(pipe, n) for n in range(2)]

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
    seen = []
    for schedule in ("1f1b", "dualpipe"):
        with hf_models.pipeline(peft_models.adapted(bases("llama")), schedule=schedule) as pipe:
            peft_models.move(pipe)
            seen.append(peft_models.step(pipe))
    assert seen[0][0] == pytest.approx(seen[1][0], abs=1e-6)
    assert all(torch.allclose(seen[0][1][name], g, atol=1e-6) for name, g in seen[1][1].items())


def test_only_adapters_wait_for_the_weight_half_of_a_split_backward(bases):
    block = penstock.from_transformers(peft_models.adapted(bases("llama")))[1].build()
    trained = {id(p) for p in block.parameters() if p.requires_grad}
    queue = WeightGradQueue()
    hidden = torch.randn(1, 4, 16, requires_grad=True)
    with defer_weight_grads(queue, list(block.parameters())):
        output = block(hidden)
    output.sum().backward()
    assert all(p.grad is None for p in block.parameters())
    assert {id(formula.args[0]) for formula, *_ in queue.pending} == trained


def test_the_optimizer_keeps_state_for_adapters_alone(bases):
    with hf_models.pipeline(peft_models.adapted(bases("llama")), 2) as pipe:
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2)
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        for n in range(2):
            peft_models.step(pipe, n)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        for name, parameter in pipe.named_parameters():
            assert (name in state) == parameter.requires_grad
            assert torch.equal(parameter, before[name]) != parameter.requires_grad


def other_kinds() -> list[tuple[Any, str]]:
    import peft

    lora = peft_models.config
    return [
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "peft's type LORA, got IA3"),
        (peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "got PROMPT_TUNING"),
        (
            lora(alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
            "alora_invocation_tokens of the LoraConfig",
        ),
        (
            lora(target_modules=["v_proj"], target_parameters=["q_proj.weight"]),
            "target_parameters of the LoraConfig is set",
        ),
    ]


@pytest.mark.parametrize("number", range(4), ids=["ia3", "prompts", "alora", "parameters"])
def test_what_is_more_than_low_rank_matrices_within_layers_is_refused(number: int):
    import peft

    config, said = other_kinds()[number]
    with pytest.raises(ConfigError, match=said):
        penstock.from_transformers(peft.get_peft_model(hf_models.model("llama"), config))


def both_active(model: Any) -> None:
    model.add_adapter("second", peft_models.config())
    model.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.merge_adapter(), "merged into the base; call unmerge_adapter"),
        (lambda model: model.base_model.disable_adapter_layers(), "disabled; call enable_adapter_layers"),
        (both_active, "one adapter of the model must be active, got default, second"),
    ],
)
def test_merged_disabled_and_several_adapters_are_refused(change: Callable[[Any], object], said: str, bases):
    model = peft_models.adapted(bases("llama"))
    change(model)
    with pytest.raises(ConfigError, match=said):
        penstock.from_transformers(model)


def test_what_cannot_be_saved_is_refused(tmp_path: Path, bases):
    model, folder = peft_models.adapted(bases("llama")), tmp_path / "saved"
    with hf_models.pipeline(hf_models.model("llama"), 2) as pipe:
        with pytest.raises(ConfigError, match=r"like must be the PeftModel .*, got a LlamaForCausalLM"):
            penstock.save_adapters(pipe, folder, hf_models.model("llama"))
        with pytest.raises(
            ConfigError, match=r"like must be .* which has no base_model.*lora_A.default.weight"
        ):
            penstock.save_adapters(pipe, folder, model)
    with hf_models.pipeline(model, 2) as pipe:
        with pytest.raises(ConfigError, match=r"these weights do not fit the llama model"):
            penstock.save_transformers(pipe, folder, bases("llama"))
        dict(pipe.named_parameters())["model.norm.weight"].requires_grad_(True)
        with pytest.raises(ConfigError, match=r"would lose them: model.norm.weight; freeze them"):
            penstock.save_adapters(pipe, folder, model)
    assert not folder.exists()


def refused(rank: int, base: Path) -> str:
    options = {"mesh": penstock.MeshShape(tp=2), "parallel": penstock.ParallelOptions(family="llama")}
    with pytest.raises(ConfigError) as error:
        hf_models.pipeline(peft_models.adapted(base), None, **options)
    return str(error.value)


@pytest.mark.slow
def test_tensor_parallelism_is_refused_by_name(processes: LocalProcesses, bases):
    for text in processes.run(2, refused, bases("llama"), timeout=300):
        assert "q_proj has an adapter (peft)" in text
