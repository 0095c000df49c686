"""The routers' auxiliary loss: that of the uncut model, run over the same microbatches one after the other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, TrainingArguments

import penstock
from penstock.base.errors import ConfigError, SplitError
from penstock.huggingface.router_loss import NAME
from penstock.huggingface.small_config import small_config
from penstock.parallel.mesh import MeshShape
from penstock.runtime.workers.pool import LocalProcesses
from penstock.train.data.run_data import open_data
from penstock.train.evaluate import evaluate
from penstock.train.loop import train
from penstock.train.model.trainable import build_model
from penstock.train.run_log import Reporter
from tests.support.groups import run_cases
from tests.support.hf_curve import by_microbatches
from tests.support.hf_models import Step, assert_same, distance, moved, plainly, taken
from tests.support.lanes import exhaustive, slow
from tests.support.tiny_run import tiny
from tests.support.trainer import lines

MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
ROWS, TOKENS = 8, 8


def config(family: str, **changes: Any) -> Any:
    small = small_config(CONFIG_MAPPING[family](), **changes)
    # As large as the loss itself, so that no difference of it is lost in rounding.
    small.output_router_logits, small.router_aux_loss_coef = True, 0.9
    return small


def model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)  # routers of the initial weights choose all experts alike
    return moved(AutoModelForCausalLM.from_config(config(family, **changes)))


def batch(padded: str) -> dict[str, torch.Tensor]:
    """Rows of other lengths in each microbatch, padded on one side; "none" for full rows without a mask."""
    ids = torch.randint(3, 60, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    if padded == "none":
        return {"input_ids": ids, "labels": ids}
    lengths = TOKENS - torch.arange(ROWS)[:, None] % 6
    places = torch.arange(TOKENS)[None] if padded == "right" else torch.arange(TOKENS).flip(0)[None]
    mask = (places < lengths).long()
    return {"input_ids": ids, "labels": torch.where(mask == 1, ids, -100), "attention_mask": mask}


def piped(net: Any, given: dict[str, torch.Tensor], parts: int = 4, **options: Any) -> Step:
    """A step whose loss has the routers' part."""
    layers = penstock.from_transformers(net)
    with penstock.Pipeline(layers, penstock.causal_lm_loss, microbatches=parts, ranks=2, **options) as pipe:
        result = pipe.step(given, outputs=True)
    assert result.loss == pytest.approx(float(sum(result.parts.values())), rel=1e-6)
    assert result.parts[NAME] > 0.5
    return Step(float(result.loss), result.losses.tolist(), taken(net), torch.cat(list(result.outputs)))


LAYOUTS = [
    ("none", "1f1b", "full"),
    ("left", "zb-h1", "none"),
    ("right", "zb-v", "full"),
    ("none", "zb-v", "none"),
]
FAST = [(family, *layout) for family, layout in zip(MIXTURES, LAYOUTS, strict=True)]
REST = [case for family in MIXTURES for layout in LAYOUTS if (case := (family, *layout)) not in FAST]


@pytest.mark.parametrize(("family", "padded", "schedule", "recompute"), [*FAST, *exhaustive(*REST)])
def test_losses_and_gradients_have_the_bits_of_the_model_over_the_microbatches(
    family: str, padded: str, schedule: str, recompute: str
):
    net, given = model(family), batch(padded)
    expected = plainly(net, given)
    assert_same(piped(net, given, schedule=schedule, recompute=recompute), expected)
    net.config.output_router_logits = False
    without = plainly(net, given)
    assert without.losses != expected.losses
    routers = [name for name in expected.gradients if "gate.weight" in name or "router.weight" in name]
    assert len(routers) == 4
    assert not any(torch.equal(without.gradients[name], expected.gradients[name]) for name in routers)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # Layers without a router, the first or the last ones; tied weights; routers that give other outputs.
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
        ("ernie4_5_moe", {"moe_layer_start_index": 2}),
        ("mixtral", {"tie_word_embeddings": True}),
        ("phimoe", {}),
        *slow(("qwen3_next", {})),
        *exhaustive(
            ("jamba", dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2)
             | dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1)),
            ("qwen2_moe", {}), ("granitemoe", {}), ("minimax", {}),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_families_with_dense_layers_shared_experts_and_tied_weights(family: str, changes: dict[str, Any]):
    net, given = model(family, **changes), batch("right")
    net.train(family != "phimoe")  # whose experts are drawn at random in training
    tied = ["model.embed_tokens.weight"] if net.config.tie_word_embeddings else []
    assert_same(piped(net, given, 2, schedule="zb-h1"), plainly(net, given, 2), tied)


def test_adapters_have_the_gradients_of_peft_alone():
    adapters = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    net, given = get_peft_model(model("mixtral"), adapters).train(), batch("right")
    expected = plainly(net, given)
    assert sum(gradient is not None for gradient in expected.gradients.values()) == 16
    assert_same(piped(net, given, schedule="zb-v", recompute="full"), expected)


def test_autocast_and_a_stage_on_two_ranks():
    net, given = model("mixtral"), batch("right")
    expected = plainly(net, given, autocast=True)
    assert_same(piped(net, given, schedule="1f1b", autocast=torch.bfloat16), expected)
    expected = plainly(net, given)
    assert_same(piped(net, given, schedule="dualpipe"), expected, summed=expected.gradients)


def test_an_evaluation_has_the_loss_of_the_model_and_its_parts():
    net, given = model("olmoe").eval(), batch("right")
    with torch.no_grad():
        outputs = [net(**{name: value.chunk(2)[n] for name, value in given.items()}) for n in range(2)]
    layers = penstock.from_transformers(net)
    with penstock.Pipeline(layers, penstock.causal_lm_loss, ranks=2, microbatches=2) as pipe:
        result = pipe.evaluate(given, outputs=True)
        labels = given.pop("labels")
        logits = pipe.evaluate(**given, outputs=True).outputs
    assert result.losses is not None
    assert [float(loss) for loss in result.losses] == [float(output.loss) for output in outputs]
    for n, output in enumerate(outputs):
        assert torch.equal(result.outputs[n], output.logits)
        assert torch.equal(logits[n], output.logits)
    counts = [penstock.valid_tokens(part) for part in labels.chunk(2)]
    auxiliary = sum(float(o.aux_loss) * n for o, n in zip(outputs, counts, strict=True)) / sum(counts)
    assert float(result.parts[NAME]) == pytest.approx(0.9 * auxiliary, rel=1e-6)


def in_a_process(rank: int, folder: str, mesh: MeshShape) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    layers = penstock.from_transformers(folder)
    options = {
        "microbatches": 4 // mesh.dp,
        "schedule": "zb-v" if mesh.pp > 1 else "1f1b",
        "recompute": "full",
    }
    with penstock.Pipeline(layers, penstock.causal_lm_loss, mesh=mesh, **options) as pipe:
        losses = pipe.step(batch("right")).losses
        assert losses is not None
        gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        return [float(loss) for loss in losses], gradients


@pytest.mark.parametrize("family", [*slow("gpt_oss"), *exhaustive("mixtral", "qwen3_moe", "olmoe")])
def test_processes_and_replicas_of_a_folder(processes: LocalProcesses, family: str, tmp_path: Path):
    net = model(family)
    net.save_pretrained(tmp_path)
    expected = plainly(net, batch("right"))
    meshes = [(str(tmp_path), MeshShape(pp=2)), (str(tmp_path), MeshShape(pp=1, dp=2))]
    (first, second), replicas = run_cases(processes, 2, in_a_process, meshes)
    assert first[0] == second[0]
    assert_same(expected._replace(losses=first[0], gradients=first[1] | second[1]), expected)
    for losses, gradients in replicas:  # whose sums are added
        assert_same(expected._replace(losses=losses, gradients=gradients), expected, summed=gradients)


@pytest.mark.slow
def test_a_run_of_penstock_train_has_the_curve_of_the_model_and_evaluates_its_cross_entropy(tmp_path: Path):
    model("mixtral").save_pretrained(tmp_path / "model")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(3, 60, 1200) // 4)
    settings = tiny(
        tmp_path,
        tmp_path / "tokens.npy",
        model={"path": str(tmp_path / "model")},
        optim={"lr": 1e-3},
        schedule={"name": "zb-v"},
        runtime={"threads": 1, "recompute": "full"},
    )
    outcome = train(settings, lambda steps, leads: Reporter())
    assert outcome is not None
    losses, weights = by_microbatches(settings)
    run = tmp_path / "runs" / "tiny"
    assert [line["loss"] for line in lines(run, "train")] == pytest.approx(losses, rel=1e-6)
    trained = AutoModelForCausalLM.from_pretrained(run)
    assert trained.config.output_router_logits
    assert distance(trained.state_dict(), weights[-1]) < 1e-6
    trained.config.output_router_logits = False
    bits = []
    for held_out in open_data(settings, build_model(settings)).held_out:
        with torch.no_grad():
            bits.append(trained.eval()(held_out.x, labels=held_out.x).loss.item() / math.log(2))
    assert outcome.held_out_bits == pytest.approx(sum(bits) / len(bits), rel=1e-6)
    (evaluated,) = evaluate(run, [], []) or [None]
    assert evaluated is not None
    assert evaluated.loss < losses[-1] - 0.5


@pytest.mark.parametrize(
    ("family", "changes"),
    [("deepseek_v3", {}), ("doge", {"is_moe": True}), *exhaustive(("glm4_moe", {}), ("llama", {}))],
)
def test_models_with_another_loss_or_none_are_refused_by_name_also_without_a_check(
    family: str, changes: dict[str, Any]
):
    with pytest.raises(SplitError, match="output_router_logits is set, and how this model computes"):
        penstock.from_transformers(config(family, **changes), check=False)


def test_the_trainer_whose_loss_is_of_the_whole_batch_is_refused(tmp_path: Path):
    settings = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ConfigError, match="adds the auxiliary loss of the whole batch's routers"):
        penstock.PipelineTrainer(
            model=model("mixtral"), args=settings, pipeline={"ranks": 2, "microbatches": 2}
        )
