"""`PipelineTrainer` with a ``compute_loss`` of its own, beside plain Trainer."""

from __future__ import annotations

import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer

import penstock
from penstock.huggingface.part_collator import EXAMPLES, PARTS, TOGETHER, PartCollator, divided_by_rows
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models, hf_trainer, own_losses
from tests.support.hf_trainer import arguments, assert_same_weights, assert_trained_alike, trainer
from tests.support.lanes import exhaustive, slow

PIPELINE = {"ranks": 2, "microbatches": own_losses.MICROBATCHES, "report": False}


@pytest.mark.filterwarnings("ignore:.*neither a mean over examples")
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        # The second one disables adapters.
        ("weighted", "1f1b"),
        ("against base", "1f1b"),
        *slow(("distilled", "zb-v")),
        *exhaustive(("contrastive", "zb-h1"), ("against base", "chimera"), ("weighted", "dualpipe-v")),
    ],
)
def test_a_loss_of_its_own_trains_as_in_trainer(tmp_path: Path, kind: str, schedule: str):
    ours = own_losses.make(tmp_path / "piped", PIPELINE | {"schedule": schedule}, kind=kind)
    theirs = own_losses.make(tmp_path / "plain", None, kind=kind)
    assert_trained_alike(ours, theirs)
    logged = [
        [line["distance"] for line in t.state.log_history if "distance" in line] for t in (ours, theirs)
    ]
    assert bool(logged[1]) == (kind == "distilled")
    # Of each microbatch, and of each batch.
    assert [sum(logged[0][:4]) / 4] == pytest.approx(logged[1][:1] or [0], rel=1e-5)


def test_a_function_of_outputs_and_labels_is_the_loss(tmp_path: Path):
    def above(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        right = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))
        return -(right[..., 0] * (labels[:, 1:] != -100)).sum() / num_items_in_batch

    made = [
        trainer(hf_trainer.model(), arguments(tmp_path / str(n)), each, compute_loss_func=above)
        for n, each in enumerate((PIPELINE, None))
    ]
    for each in made:
        each.train()
    assert_same_weights(made[0].model, made[1].model)


def test_the_first_batches_tell_a_loss_that_is_no_mean_over_examples(tmp_path: Path):
    for kind, told in (("contrastive", 1), ("mean of tokens", 1), ("against mean", 1), ("weighted", 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            own_losses.make(tmp_path, PIPELINE, kind=kind, max_steps=2).train()
        messages = [str(w.message) for w in seen if "neither a mean over examples" in str(w.message)]
        assert len(messages) == told
        # Its gains are 0 as long as the model is as it was without adapters.
        assert any("for other logits than" in message for message in messages) == (kind == "against mean")


def test_later_batches_are_compared_now_and_then():
    collate = PartCollator(lambda rows: {"input_ids": torch.stack(rows)}, 2, "input_ids", compares=True)
    rows = list(torch.arange(12).reshape(6, 2))
    found = [collate(rows).get(TOGETHER) for _ in range(40)]
    assert [n for n, whole in enumerate(found, 1) if whole is not None] == [1, 2, 3, 4, 8, 16, 32]
    assert found[0]["input_ids"].tolist() == torch.arange(12).reshape(6, 2).tolist()
    of_four = PartCollator(collate.collator, 3, "input_ids", compares=True)(rows)
    assert len(of_four[TOGETHER]["input_ids"]) == 4  # the first two microbatches alone


def test_metrics_that_the_loss_keeps_are_not_kept_twice(tmp_path: Path):
    class Counting(own_losses.Weighted):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen: list[int] = []

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(len(inputs["input_ids"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    kind = type("Piped", (penstock.PipelineTrainerMixin, Counting), {})
    given = {"train_dataset": own_losses.rows_of("weighted")}
    made = trainer(own_losses.classifier(), arguments(tmp_path, max_steps=2), PIPELINE, kind, **given)
    made.train()
    assert made.seen == [2] * 4 * 2


class Stateful(own_losses.Weighted):
    """Counts classes in a tensor and batches in a module, and writes into its inputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.classes, self.calls = torch.zeros(3), 0
        self.norm = torch.nn.BatchNorm1d(3)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.calls += 1
        self.classes += torch.bincount(inputs["labels"], minlength=3)
        inputs["labels"].add_(1).remainder_(3)
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        self.norm(outputs.logits.detach())
        return (loss * (1 + 0.1 * self.calls), outputs) if return_outputs else loss * (1 + 0.1 * self.calls)


@pytest.mark.filterwarnings("ignore:.*neither a mean over examples")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_the_loss_writes_is_written_once_a_microbatch(tmp_path: Path, recompute: str):
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    made = []
    for pipeline in (PIPELINE | {"recompute": recompute}, None):
        kind = Stateful if pipeline is None else type("Piped", (penstock.PipelineTrainerMixin, Stateful), {})
        changes = accumulated if pipeline is None else {}
        args = arguments(tmp_path, **changes)
        made.append(
            trainer(
                own_losses.classifier(), args, pipeline, kind, train_dataset=own_losses.rows_of("weighted")
            )
        )
        made[-1].loss_is_scaled_for_ga = False
        made[-1].train()
    ours, theirs = made
    assert ours.calls == theirs.calls == 12
    assert torch.equal(ours.classes, theirs.classes)
    assert ours.norm.num_batches_tracked == theirs.norm.num_batches_tracked
    assert_same_weights(ours.model, theirs.model)


class Prepared(own_losses.Weighted):
    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        inputs["input_ids"][:, 0] = 42
        return inputs

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs["labels"].clone()
        loss, outputs = super().compute_loss(model, {**inputs}, True, **kwargs)
        again = F.cross_entropy(outputs.logits, labels)
        return (loss + again, outputs) if return_outputs else loss + again


def test_inputs_are_prepared_as_those_of_accumulated_batches(tmp_path: Path):
    data = {"train_dataset": own_losses.rows_of("weighted"), "eval_dataset": own_losses.rows_of("weighted")}
    kinds = (type("Piped", (penstock.PipelineTrainerMixin, Prepared), {}), Prepared)
    assert_trained_alike(
        *(
            trainer(own_losses.classifier(), arguments(tmp_path), each, kind, **data)
            for kind, each in zip(kinds, (PIPELINE, None), strict=True)
        )
    )


class Doubled(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss


def test_labels_reach_the_head_of_an_encoder_with_a_pooler(tmp_path: Path):
    def bert() -> Any:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=hf_trainer.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
            num_attention_heads=4, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    data = {"train_dataset": own_losses.rows_of("weighted"), "eval_dataset": own_losses.rows_of("weighted")}
    kinds = (type("Piped", (penstock.PipelineTrainerMixin, Doubled), {}), Doubled)
    assert_trained_alike(
        *(
            trainer(bert(), arguments(tmp_path), each, kind, **data)
            for kind, each in zip(kinds, (PIPELINE, None), strict=True)
        )
    )


def calls_twice(model: Any, inputs: Any) -> Tensor:
    return model(**inputs).loss + model(**inputs).loss


def calls_never(model: Any, inputs: Any) -> Tensor:
    return model.score.weight.sum()


def draws(model: Any, inputs: Any) -> Tensor:
    mask = torch.rand(inputs["input_ids"].shape) < 0.9
    return model(**{**inputs, "attention_mask": mask.long()}).loss


def asks_of_the_middle(model: Any, inputs: Any) -> Tensor:
    return model(**inputs, output_hidden_states=True).hidden_states[1].mean()


def depends(model: Any, inputs: Any) -> Tensor:
    first = model(**inputs)
    with torch.no_grad():
        mask = (first.logits[:, :1] > 0) * torch.ones_like(inputs["input_ids"]) * first.logits[:, :1]
        again = model(input_ids=inputs["input_ids"], attention_mask=mask)
    return first.loss + again.logits.mean()


def returns_rows(model: Any, inputs: Any) -> Tensor:
    labels = inputs.pop("labels")
    return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="none")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (calls_twice, "calls the model twice with gradients"),
        (calls_never, "returns without a call of the model with gradients"),
        (draws, "draws random numbers before it calls the model"),
        (asks_of_the_middle, "calls the model with output_hidden_states=True"),
        (depends, "on what its call with gradients has returned"),
        (returns_rows, r"must return the loss, .* got a tensor of shape \(2,\)"),
    ],
)
def test_what_no_pipeline_can_compute_is_refused_in_the_first_step(tmp_path: Path, loss: Any, said: str):
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return loss(model, inputs)

    kind = type("Piped", (penstock.PipelineTrainerMixin, Own), {})
    net = own_losses.classifier()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    made = trainer(net, arguments(tmp_path), PIPELINE, kind, train_dataset=own_losses.rows_of("weighted"))
    with pytest.raises(penstock.PenstockError, match=said):
        made.train()
    assert hf_models.distance(before, net.state_dict()) == 0


def test_a_batch_that_is_collated_whole_is_divided_by_rows(tmp_path: Path):
    made = [
        own_losses.make(tmp_path, PIPELINE | {"collate": "batch"}, kind="weighted"),
        own_losses.make(tmp_path, None, kind="weighted"),
    ]
    assert_trained_alike(*made)
    with pytest.raises(penstock.ConfigError, match=r"pipeline\['collate'\] must be 'parts'"):
        own_losses.make(tmp_path, PIPELINE | {"collate": "rows"}, kind="weighted")


def test_a_batch_that_is_collated_whole_has_a_row_for_each_microbatch():
    batch = {"labels": torch.arange(3), "length": 7}
    divided = divided_by_rows(batch, 3)
    assert divided[PARTS] == [{"labels": torch.tensor([n]), "length": 7} for n in range(3)]
    assert divided[EXAMPLES] == [1, 1, 1]
    with pytest.raises(penstock.BatchError, match="a batch of 3 rows, too few for 4 microbatches"):
        divided_by_rows(batch, 4)


def alone(rows: list[Any], least: int) -> Any:
    if len(rows) < least:
        raise ValueError(f"{len(rows)} rows are no batch")
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_a_collator_that_cannot_make_a_part_is_told_of_the_other_way(tmp_path: Path):
    given = {"data_collator": partial(alone, least=4)}
    made = trainer(hf_trainer.model(), arguments(tmp_path), PIPELINE, **given)
    with pytest.raises(
        penstock.BatchError, match=r"2 of its examples: .*2 rows are no batch.*'collate': 'batch'"
    ):
        made.train()
    trainer(hf_trainer.model(), arguments(tmp_path), PIPELINE | {"collate": "batch"}, **given).train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*neither a mean over examples")
@pytest.mark.parametrize("kind", ["distilled", *exhaustive("against base", "weighted")])
def test_processes_and_replicas_train_as_trainer_does(tmp_path: Path, processes: LocalProcesses, kind: str):
    make = partial(own_losses.make, kind=kind)
    plain = hf_trainer.run(0, make, tmp_path / "plain", None, {})
    name = "adapter_model.safetensors" if kind == "against base" else "model.safetensors"
    for ranks, size in ((2, 2), (2, 4)):
        pipeline = PIPELINE | {"ranks": ranks, "microbatches": own_losses.MICROBATCHES * ranks // size}
        changes = {"replicas": size // ranks}
        told = processes.run(size, hf_trainer.run, make, tmp_path / "piped", pipeline, changes, timeout=300)
        hf_trainer.assert_as_plain(tmp_path, told, plain, name)


@pytest.mark.filterwarnings("ignore:.*neither a mean over examples")
def test_the_model_is_itself_after_training(tmp_path: Path):
    made = own_losses.make(tmp_path, PIPELINE, kind="against base")
    made.train()
    made.evaluate()
    own = {*vars(made.model), *vars(made.model.get_base_model())}
    assert not own & {"forward", "disable_adapter", "set_adapter"}
    again = pickle.loads(pickle.dumps(made.model))
    ids = own_losses.rows_of("against base")[0]["input_ids"][None]
    with torch.no_grad():
        made.model.base_model.model.model.embed_tokens.weight.zero_()
        assert not torch.equal(again(input_ids=ids).logits, made.model(input_ids=ids).logits)
