"""Models for sequence and token classification in a pipeline, and in the trainer, beside plain transformers."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, BertForMultipleChoice

import penstock
from penstock.base.errors import SplitError
from penstock.huggingface.small_config import small_config
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models
from tests.support.hf_trainer import (
    DOUBLE,
    PIPELINE,
    arguments,
    assert_as_plain,
    assert_close,
    assert_trained_alike,
    logged,
    run,
    trainer,
)
from tests.support.lanes import exhaustive, slow

KINDS = ("one label", "regression", "several labels", "tokens")


def auto(kind: str) -> Any:
    name = "Token" if kind == "tokens" else "Sequence"
    return getattr(transformers, f"AutoModelFor{name}Classification")


def model(kind: str, family: str = "llama", **changes: Any) -> Any:
    changes = {"num_labels": 1 if kind == "regression" else 3, "classifier_dropout": 0.0, **changes}
    if family in hf_models.FAMILIES:
        config = hf_models.config(family, **changes)
    else:
        config = small_config(CONFIG_MAPPING[family](), pad_token_id=0, **changes)
    torch.manual_seed(0)
    net = hf_models.moved(auto(kind).from_config(config))
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def labels_of(kind: str, ids: Tensor, mask: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    if kind == "tokens":
        return torch.where(mask == 1, ids % 3, -100)
    if kind == "regression":
        return torch.rand(len(ids), generator=generator)
    if kind == "several labels":
        return (torch.rand(len(ids), 3, generator=generator) > 0.5).float()
    return ids[:, 0] % 3


def batch(kind: str, side: str = "right") -> dict[str, Tensor]:
    ids, _, mask = hf_models.batch(side=side)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels_of(kind, ids, mask)}


def targets_in(labels: Tensor) -> Any:
    return (labels != -100).sum() if labels.dim() > 1 else len(labels)


def assert_same_step(net: Any, whole: dict[str, Tensor], **options: Any) -> None:
    expected = hf_models.assert_same_step(net, whole, count=targets_in, **options)
    assert expected.loss == pytest.approx(net(**whole, use_cache=False).loss.item(), rel=1e-6)


# Decoders find the last token of a row, padded on either side; encoders begin with the first, or with a layer before it.
FAST = {
    ("llama", "right", "one label"): {"schedule": "zb-v"},
    ("llama", "left", "several labels"): {"schedule": "interleaved-1f1b", "virtual_stages": 2},
    ("gpt2", "right", "tokens"): {"recompute": "full"},
    ("gpt2", "left", "regression"): {},
    ("bert", "left", "several labels"): {},
    ("modernbert", "right", "one label"): {},
}
MORE = [("gemma2", "left", "one label"), ("gpt_neox", "right", "tokens"), ("qwen3", "left", "regression")]
FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "gpt_neox", "bert", "modernbert")
REST = [case for case in product(FAMILIES, ("right", "left"), KINDS) if case not in [*FAST, *MORE]]


@pytest.mark.parametrize(("family", "side", "kind"), [*FAST, *slow(*MORE), *exhaustive(*REST)])
def test_a_model_trains_with_the_bits_of_plain_transformers(family: str, side: str, kind: str):
    assert_same_step(model(kind, family), batch(kind, side), **FAST.get((family, side, kind), {}))


def test_types_of_tokens_are_those_of_plain_transformers():
    whole = batch("one label")
    types = {"token_type_ids": (whole["input_ids"] % 2) * whole["attention_mask"]}
    assert_same_step(model("one label", "bert"), whole | types)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "one label"), ("bert", "tokens"), *exhaustive(("gpt2", "tokens"), ("bert", "one label"))],
)
def test_a_folder_is_read_and_written_with_its_head(tmp_path: Path, family: str, kind: str):
    net, whole = model(kind, family), batch(kind)
    net.save_pretrained(tmp_path / "given")
    layers = penstock.from_transformers(tmp_path / "given")
    with penstock.Pipeline(layers, ranks=2, microbatches=2) as pipe:
        found = pipe.evaluate(whole, outputs=True)
        penstock.save_transformers(pipe, tmp_path / "saved", like=tmp_path / "given")
        penstock.save_transformers(pipe, tmp_path / "again", like=net)
    expected = net.eval()(**whole, use_cache=False)
    assert torch.allclose(torch.cat(list(found.outputs)), expected.logits, atol=1e-6)
    assert found.loss == pytest.approx(expected.loss.item(), rel=1e-6)
    for folder in ("saved", "again"):
        again = auto(kind).from_pretrained(tmp_path / folder)
        assert type(again) is type(net)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in net.state_dict().items())


def test_a_config_asks_for_a_head_by_its_architectures():
    config = hf_models.config("llama", num_labels=5)
    config.architectures = ["LlamaForSequenceClassification"]
    with penstock.Pipeline(penstock.from_transformers(config), ranks=2, microbatches=2) as pipe:
        ids, _, mask = hf_models.batch()
        assert pipe.evaluate(ids, attention_mask=mask, outputs=True).outputs[0].shape == (4, 5)


@pytest.mark.parametrize(("kind", "task"), [("one label", "SEQ_CLS"), *slow(("tokens", "TOKEN_CLS"))])
def test_adapters_and_the_head_are_trained(tmp_path: Path, kind: str, task: str):
    import peft

    net, whole = model(kind), batch(kind)
    net.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    adapted = peft.get_peft_model(net, lora).train()
    expected = hf_models.assert_same_step(adapted, whole, count=targets_in)
    assert any("score" in name for name, gradient in expected.gradients.items() if gradient is not None)
    with penstock.Pipeline(penstock.from_transformers(adapted), ranks=2, microbatches=4) as pipe:
        penstock.save_adapters(pipe, tmp_path / "adapters", adapted)
    again = peft.PeftModel.from_pretrained(
        auto(kind).from_pretrained(tmp_path / "base"), tmp_path / "adapters"
    )
    inputs = {name: value for name, value in whole.items() if name != "labels"}
    assert torch.equal(again.eval()(**inputs).logits, adapted.eval()(**inputs).logits)


def test_what_cannot_be_split_is_refused_by_name():
    with pytest.raises(
        SplitError, match="BertForMultipleChoice is not a causal language model, nor any other"
    ):
        penstock.from_transformers(BertForMultipleChoice(small_config(CONFIG_MAPPING["bert"]())))
    net = model("one label")
    net.config.pad_token_id = None
    with pytest.raises(SplitError, match="no pad_token_id, by which"):
        penstock.from_transformers(net)
    config = hf_models.config("olmo2")
    config.architectures = ["Olmo2ForTokenClassification"]
    with pytest.raises(SplitError, match="no model for token classification of type 'olmo2'"):
        penstock.from_transformers(config)


class Critic(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.value = backbone, nn.Linear(backbone.config.hidden_size, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        states = self.backbone(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.value(states).squeeze(-1)


def squared(values: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(values.squeeze(-1), targets)


@pytest.mark.parametrize(("kind", "family"), [("tokens", "bert"), ("regression", "llama")])
def test_a_head_of_ones_own_is_told_where_to_go_and_trains_there(kind: str, family: str):
    net = model(kind, family, num_labels=1)
    backbone = net.base_model
    for refused in (backbone, Critic(backbone)):
        with pytest.raises(
            SplitError, match=r"take AutoModelForTokenClassification .* or .* put your module into"
        ):
            penstock.Pipeline(refused, squared, ranks=2, microbatches=2)
    place = "score" if family == "llama" else "classifier"
    width = net.get_submodule(place).in_features
    setattr(net, place, nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 1)))
    ids, _, mask = hf_models.batch()
    targets = torch.rand(ids.shape if kind == "tokens" else ids.shape[:1])
    expected = copy.deepcopy(net)
    loss = squared(expected(ids, attention_mask=mask).logits, targets)
    loss.backward()
    with penstock.Pipeline(net, squared, ranks=2, microbatches=2) as pipe:
        assert pipe.step(ids, targets, attention_mask=mask).loss == pytest.approx(loss.item(), rel=1e-5)
    for (name, ours), theirs in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def rows_of(kind: str, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, hf_models.VOCABULARY, (count, 12), generator=generator)
    mask = (torch.arange(12)[None] < 12 - torch.arange(count)[:, None] % 5).long()
    labels = labels_of(kind, ids := ids * mask, mask)
    return [{"input_ids": ids[n], "attention_mask": mask[n], "labels": labels[n]} for n in range(count)]


def predicted(prediction: Any) -> dict[str, float]:
    return {"labels": float(prediction.label_ids.sum()), "rows": len(prediction.predictions)}


def trainer_of(
    kind: str, folder: Path, pipeline: dict[str, Any] | None, *, count: int = 20, **changes: Any
) -> Any:
    data = {
        "train_dataset": rows_of(kind, count),
        "eval_dataset": rows_of(kind, 10),
        "compute_metrics": predicted,
    }
    return trainer(model(kind), arguments(folder, **changes), pipeline, **data)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # 7 rows do not divide into 4 microbatches, and the last batch has 6.
        ("tokens", {"per_device_train_batch_size": 7, "gradient_accumulation_steps": 2}),
        *slow(("several labels", {"per_device_train_batch_size": 3})),
        *slow(("one label", {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2})),
        *exhaustive(*((kind, {"per_device_train_batch_size": 6}) for kind in KINDS)),
        *exhaustive(*((kind, {"gradient_accumulation_steps": 2}) for kind in KINDS)),
        *exhaustive(("tokens", {"label_smoothing_factor": 0.2})),
    ],
    ids=str,
)
def test_it_trains_and_evaluates_as_trainer_does(tmp_path: Path, kind: str, changes: dict[str, Any]):
    theirs, ours = (trainer_of(kind, tmp_path, pipeline, **changes) for pipeline in (None, PIPELINE))
    one, other = assert_trained_alike(ours, theirs)
    assert (one["eval_labels"], one["eval_rows"]) == (other["eval_labels"], other["eval_rows"])
    found, wanted = (torch.tensor(each.predict(rows_of(kind, 10)).predictions) for each in (ours, theirs))
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-5)


def test_means_of_accumulated_batches_are_divided_if_the_trainer_says_so(tmp_path: Path):
    changes = {"gradient_accumulation_steps": 2, "max_steps": 1}
    pair = [trainer_of("regression", tmp_path, pipeline, **changes) for pipeline in (None, PIPELINE)]
    for each in pair:
        each.loss_is_scaled_for_ga = False
    expected, found = map(logged, pair)
    assert_close(found, expected)
    summed = logged(trainer_of("regression", tmp_path, None, **changes))
    assert summed[0]["loss"] == pytest.approx(2 * expected[0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_an_evaluation_has_no_bits_per_token(tmp_path: Path):
    ours = trainer_of("one label", tmp_path, PIPELINE | {"report": True}, max_steps=1)
    ours.train()
    ours.evaluate()
    assert "held_out" not in (tmp_path / "metrics.jsonl").read_text()


def test_pairs_of_a_reward_model_are_neighbours():
    """The loss and gradients of TRL's `RewardTrainer`, whose batch has the chosen rows before the rejected ones."""
    net = model("regression")
    chosen, rejected = hf_models.batch(step=0), hf_models.batch(step=1)
    ids, mask = (torch.cat([chosen[n], rejected[n]]) for n in (0, 2))
    better, worse = net(input_ids=ids, attention_mask=mask, use_cache=False).logits.squeeze(-1).chunk(2)
    expected = -nn.functional.logsigmoid(better - worse).mean()
    expected.backward()
    gradients = hf_models.taken(net)

    def pair_loss(rewards: Tensor, unused: Tensor) -> Tensor:
        one, other = rewards.view(-1, 2).unbind(1)
        return -nn.functional.logsigmoid(one - other).mean()

    ids, mask = (torch.stack([chosen[n], rejected[n]], 1).flatten(0, 1) for n in (0, 2))
    with penstock.Pipeline(net, pair_loss, ranks=2, microbatches=4) as pipe:
        result = pipe.step(ids, ids, attention_mask=mask)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in net.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(("kind", "replicas"), [*slow(("tokens", 2)), *exhaustive(("regression", 1))])
def test_processes_and_replicas_train_as_trainer_does(
    tmp_path: Path, processes: LocalProcesses, kind: str, replicas: int
):
    make, pipeline = partial(trainer_of, kind, count=32), {"ranks": 2, "microbatches": 2, "report": False}
    plain = run(0, make, tmp_path / "plain", None, DOUBLE if replicas == 2 else {})
    told = processes.run(2 * replicas, run, make, tmp_path / "piped", pipeline, {})
    assert_as_plain(tmp_path, told, plain)
    assert type(auto(kind).from_pretrained(tmp_path / "piped" / "saved")) is type(model(kind))


def mean_square(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
    return logits.float().square().mean()


@pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification"])
def test_a_loss_function_of_the_users_is_not_replaced_silently(kind: str):
    net = getattr(transformers, f"AutoModelFor{kind}").from_config(hf_models.config("llama"))
    net.loss_function = mean_square
    with pytest.raises(penstock.ConfigError, match="loss_fn must be given"):
        penstock.Pipeline(penstock.from_transformers(net), ranks=2, microbatches=2)
