"""`penstock.PipelineTrainer` beside transformers' own Trainer: losses, gradient norms and weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import penstock
from tests.support import hf_models

VOCABULARY, TOKENS = 64, 12
PIPELINE = {"ranks": 2, "microbatches": 4, "schedule": "zb-v", "report": False}


def rows(count: int) -> list[dict[str, Tensor]]:
    """Rows of padded lengths, with labels on a part of each, so that microbatches have other numbers of targets."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (count, TOKENS), generator=generator)
    labels = ids.clone()
    for n in range(count):
        labels[n, : n % 7] = -100
    return [{"input_ids": ids[n], "labels": labels[n]} for n in range(count)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "max_steps": 6, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 5, "use_cpu": True,
        **changes,
    }  # fmt: skip
    return TrainingArguments(str(folder), **given)


def model(family: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    return hf_models.model(family, vocab_size=VOCABULARY, **changes)


def trained(
    kind: type[Trainer], net: Any, args: TrainingArguments, **more: Any
) -> tuple[Trainer, list[dict]]:
    trainer = kind(model=net, args=args, train_dataset=rows(44), eval_dataset=rows(10), **more)
    trainer.train()
    return trainer, [line for line in trainer.state.log_history if "loss" in line]


def assert_close(ours: list[dict], theirs: list[dict]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one["learning_rate"] == other["learning_rate"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Compare all weights but the biases of keys: their gradient is 0, and what rounding leaves of it Adam makes a step."""
    ours, theirs = (
        torch.cat([value.flatten() for name, value in net.state_dict().items() if "c_attn.bias" not in name])
        for net in (one, other)
    )
    assert (ours - theirs).norm() / theirs.norm() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"optim": "sgd", "lr_scheduler_type": "cosine"},
        {"num_train_epochs": 1, "max_steps": -1},  # 44 rows: the last batch has 4
        {"per_device_train_batch_size": 6},  # does not divide into 4 microbatches
        {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2},
    ],
    ids=lambda changes: ", ".join(changes) or "plain",
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_trains_as_trainer_does(tmp_path: Path, family: str, changes: dict[str, Any]):
    theirs, logged = trained(Trainer, model(family), arguments(tmp_path, **changes))
    ours, seen = trained(
        penstock.PipelineTrainer, model(family), arguments(tmp_path, **changes), pipeline=PIPELINE
    )
    assert_close(seen, logged)
    assert_same_weights(ours.model, theirs.model)
    one, other = ours.evaluate(), theirs.evaluate()
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)


class Both(Trainer):
    """A plain trainer in which SGD has the matrices of the blocks."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        taken = [p for name, p in self.model.named_parameters() if is_of_sgd(name, p)]
        ids = {id(p) for p in taken}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        sgd = torch.optim.SGD(taken, lr=0.05, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: sgd.step())
        return optimizer


def is_of_sgd(name: str, parameter: Tensor) -> bool:
    return "mlp" in name and parameter.dim() == 2


OWN = [{"match": is_of_sgd, "optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9}]
CONSTANT = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}


def test_groups_have_optimizers_of_their_own(tmp_path: Path):
    theirs, logged = trained(Both, model(), arguments(tmp_path, **CONSTANT))
    pipeline = PIPELINE | {"optimizer": OWN}
    ours, seen = trained(
        penstock.PipelineTrainer, model(), arguments(tmp_path, **CONSTANT), pipeline=pipeline
    )
    assert_close(seen, logged)
    assert_same_weights(ours.model, theirs.model)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"match": "mlp", "lr": 0.1}], r"groups\[0\] \(match 'mlp'\) has no 'optimizer'"),
        (
            [{"match": "mpl", "optimizer": torch.optim.SGD}],
            r"\(match 'mpl'\) takes no parameter that is trained",
        ),
        (
            [{"match": "norm", "optimizer": torch.optim.Muon}],
            "Muon cannot be made with these options and groups: Muon only supports 2D",
        ),
        (
            [{"match": "mlp", "optimizer": torch.optim.SGD, "beta": 1}],
            r"groups\[0\] has 'beta', which is not an option of SGD",
        ),
        (
            [{"names": ["x"], "optimizer": torch.optim.SGD}],
            r"groups\[0\] names 'x', which the model does not have",
        ),
        ("Muon", "groups must be a list"),
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path: Path, groups: Any, said: str):
    with pytest.raises(penstock.ConfigError, match=said):
        trained(
            penstock.PipelineTrainer, model(), arguments(tmp_path), pipeline=PIPELINE | {"optimizer": groups}
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_large_vocabulary_trains_without_its_logits(
    tmp_path: Path, smoothing: float, monkeypatch: pytest.MonkeyPatch
):
    def net() -> Any:
        torch.manual_seed(0)
        return hf_models.model("gemma2", vocab_size=32_000, tied=True)

    changes = {"label_smoothing_factor": smoothing, "max_steps": 2, "gradient_accumulation_steps": 2}
    theirs, logged = trained(Trainer, net(), arguments(tmp_path, **changes))
    other = theirs.evaluate()
    ours = penstock.PipelineTrainer(
        model=net(),
        args=arguments(tmp_path, **changes),
        train_dataset=rows(44),
        eval_dataset=rows(10),
        pipeline=PIPELINE,
    )
    largest = hf_models.watch_logits(monkeypatch, 32_000)
    ours.train()
    seen = [line for line in ours.state.log_history if "loss" in line]
    one = ours.evaluate()
    # A batch of 8 rows in 4 microbatches, each in 8 chunks.
    assert 0 < max(largest) == 2 * TOKENS // 8 * 32_000
    assert_close(seen, logged)
    assert_same_weights(ours.model, theirs.model)
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_metrics_of_an_evaluation_get_all_logits(tmp_path: Path):
    kinds = [(Trainer, {}), (penstock.PipelineTrainer, {"pipeline": PIPELINE})]
    found = []
    for kind, more in kinds:
        trainer = kind(
            model=model(), args=arguments(tmp_path), eval_dataset=rows(10), compute_metrics=accuracy, **more
        )
        found.append((trainer.evaluate(), trainer.predict(rows(10)).predictions))
    (one, logits), (other, expected) = found
    assert one["eval_accuracy"] == other["eval_accuracy"]
    assert torch.allclose(torch.tensor(logits), torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_predictions_of_more_than_logits_are_refused(tmp_path: Path, name: str):
    net = model(attn_implementation="eager")
    setattr(net.config, name, True)
    trainer = penstock.PipelineTrainer(model=net, args=arguments(tmp_path), pipeline=PIPELINE)
    with pytest.raises(penstock.ConfigError, match=f"{name} is set.*logits alone"):
        trainer.predict(rows(8))
    trainer.args.prediction_loss_only = True
    assert trainer.evaluate(rows(8))["eval_loss"] > 0


def test_an_evaluation_of_the_loss_alone_makes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = penstock.PipelineTrainer(
        model=model(), args=arguments(tmp_path), eval_dataset=rows(10), pipeline=PIPELINE
    )
    asked: list[bool] = []
    evaluate = trainer.pipe.evaluate
    monkeypatch.setattr(
        trainer.pipe,
        "evaluate",
        lambda *args, outputs, **named: asked.append(outputs) or evaluate(*args, **named),
    )
    trainer.evaluate()
    assert asked == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path: Path, accumulated: int):
    """In the middle of an epoch, and with dropout."""
    changes = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": accumulated}

    def trainer(steps: int, folder: Path) -> Any:
        net = model("gpt2", resid_pdrop=0.2, embd_pdrop=0.2)
        args = arguments(folder, max_steps=steps, lr_scheduler_type="constant", **changes)
        return penstock.PipelineTrainer(
            model=net, args=args, train_dataset=rows(44), pipeline={"ranks": 2, "microbatches": 4}
        )

    whole = trainer(4, tmp_path / "whole")
    whole.train()
    trainer(2, tmp_path / "parts").train()
    second = trainer(4, tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name


class Numbered(penstock.PipelineTrainer):
    """Notes the number by which each batch draws its dropout."""

    def training_step(self, *args: Any) -> Tensor:
        loss = super().training_step(*args)
        self.numbers = [*getattr(self, "numbers", []), self.pipe.steps]
        return loss


@pytest.mark.parametrize("accumulated", [1, 2])
def test_every_batch_draws_dropout_of_its_own(tmp_path: Path, accumulated: int):
    args = arguments(tmp_path, max_steps=4, gradient_accumulation_steps=accumulated)
    trainer, _ = trained(Numbered, model(), args, pipeline=PIPELINE)
    first = trainer.numbers[0]
    assert trainer.numbers == list(range(first, first + 4 * accumulated))


def test_what_is_saved_loads_in_transformers(tmp_path: Path):
    ours, _ = trained(penstock.PipelineTrainer, model(), arguments(tmp_path, max_steps=1), pipeline=PIPELINE)
    ours.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    x = torch.arange(2, 2 + TOKENS)[None]
    assert torch.equal(again(x).logits, ours.model.eval()(x).logits)


def adapted() -> Any:
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(
        model(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )


@pytest.mark.slow
def test_adapters_are_trained_alone(tmp_path: Path):
    theirs, logged = trained(Trainer, adapted(), arguments(tmp_path))
    ours, seen = trained(
        penstock.PipelineTrainer, adapted(), arguments(tmp_path), pipeline={"ranks": 2, "microbatches": 4}
    )
    assert_close(seen, logged)
    assert_same_weights(ours.model, theirs.model)
    ours.save_model(str(tmp_path / "adapters"))
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


def test_activation_checkpointing_is_recompute(tmp_path: Path):
    args = arguments(tmp_path, activation_checkpointing=True)
    _, seen = trained(penstock.PipelineTrainer, model(), args, pipeline=PIPELINE)
    _, logged = trained(Trainer, model(), arguments(tmp_path))
    assert_close(seen, logged)
    assert args.activation_checkpointing  # of the caller's own arguments


def test_bf16_is_autocast(tmp_path: Path):
    _, logged = trained(Trainer, model(), arguments(tmp_path, bf16=True))
    _, seen = trained(penstock.PipelineTrainer, model(), arguments(tmp_path, bf16=True), pipeline=PIPELINE)
    _, full = trained(Trainer, model(), arguments(tmp_path))
    assert [line["loss"] for line in seen] == pytest.approx([line["loss"] for line in logged], rel=2e-3)
    assert [line["loss"] for line in seen] != pytest.approx([line["loss"] for line in full], rel=1e-7)


class OwnLoss(penstock.PipelineTrainerMixin, Trainer):
    """A subclass of one's own."""

    def log(self, logs: dict[str, float], *more: Any) -> None:
        super().log({**logs, "own": 1.0}, *more)


def test_the_mixin_serves_subclasses(tmp_path: Path):
    _, seen = trained(OwnLoss, model(), arguments(tmp_path, max_steps=1), pipeline=PIPELINE)
    assert seen[0]["own"] == 1.0


def all_logits(outputs: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        ({"torch_compile": True}, {}, "torch_compile=True cannot be used with a pipeline"),
        ({"fp16": True}, {}, "fp16=True cannot be used"),
        ({"optim": "lomo"}, {}, "optim='lomo' cannot be used"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True cannot be used"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel=True cannot be used"),
        (
            {},
            {"model": None, "model_init": lambda: model()},
            "model_init makes a new model when training begins",
        ),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha=5.0 cannot be used"),
        ({}, {"compute_loss_func": all_logits}, "compute_loss_func needs the logits of the whole batch"),
        ({}, {"pipeline": {"ranks": 2}}, "how many microbatches"),
        ({}, {"pipeline": {"microbatches": 2, "seed": 1}}, r"pipeline\['seed'\] cannot be given"),
        ({}, {"pipeline": {"ranks": 2, "microbatch": 4}}, "no option 'microbatch' .*'microbatches'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], said: str
):
    with pytest.raises(penstock.ConfigError, match=said):
        penstock.PipelineTrainer(
            args=arguments(tmp_path, **changes), **{"model": model(), "pipeline": PIPELINE, **more}
        )


class OwnLogits(penstock.PipelineTrainerMixin, Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_loss_of_a_subclass_is_refused(tmp_path: Path):
    with pytest.raises(penstock.ConfigError, match="OwnLogits computes a loss of its own"):
        OwnLogits(model=model(), args=arguments(tmp_path), pipeline=PIPELINE)


def mean_square(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
    return logits.float().square().mean()


LOSSES = {
    "the model's": (
        lambda trainer: setattr(trainer.model, "loss_function", mean_square),
        "loss_function of the Llama",
    ),
    "Trainer's function": (
        lambda trainer: setattr(trainer, "compute_loss_func", mean_square),
        "compute_loss_func needs",
    ),
    "Trainer's method": (
        lambda trainer: setattr(trainer, "compute_loss", mean_square),
        r"trainer.compute_loss needs",
    ),
    "a smoother": (
        lambda trainer: setattr(trainer, "label_smoother", LabelSmoother(0.3)),
        "label_smoother was changed",
    ),
}


@pytest.mark.parametrize("change", LOSSES)
def test_another_loss_set_after_the_trainer_is_made_is_refused(tmp_path: Path, change: str):
    trainer = penstock.PipelineTrainer(
        model=model(),
        args=arguments(tmp_path),
        train_dataset=rows(8),
        eval_dataset=rows(8),
        pipeline=PIPELINE,
    )
    made, said = LOSSES[change]
    made(trainer)
    with pytest.raises(penstock.ConfigError, match=said):
        trainer.train()


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_gradients_are_refused(tmp_path: Path, late: bool):
    """Trainer runs them once a batch: a clamp of each microbatch's gradient is not that of the batch's."""
    net = model()
    weight = net.lm_head.weight
    _ = weight.register_post_accumulate_grad_hook(print) if late else weight.register_hook(torch.sign)
    with pytest.raises(penstock.ConfigError, match=r"lm_head.weight has a hook.*on_pre_optimizer_step"):
        penstock.PipelineTrainer(model=net, args=arguments(tmp_path), pipeline=PIPELINE)


def test_token_ids_beyond_the_table_are_named(tmp_path: Path):
    net = model()
    data = [
        {"input_ids": torch.full((TOKENS,), VOCABULARY + 7), "labels": torch.ones(TOKENS, dtype=torch.int64)}
    ]
    trainer = penstock.PipelineTrainer(
        model=net, args=arguments(tmp_path), train_dataset=data * 8, pipeline=PIPELINE
    )
    with pytest.raises(penstock.StageError, match=r"Token ids must be below 64.* up to 71") as caught:
        trainer.train()
    assert "cannot be cut" not in str(caught.value)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class OverOwnStep(penstock.PipelineTrainerMixin, OwnStep):
    """The pipeline's step would be run, not the other class's."""


def test_a_step_of_a_class_above_the_mixin_is_refused(tmp_path: Path):
    with pytest.raises(penstock.ConfigError, match="OwnStep has a training_step of its own"):
        OverOwnStep(model=model(), args=arguments(tmp_path), pipeline=PIPELINE)


def test_a_forward_that_the_user_replaced_is_refused(tmp_path: Path):
    net = model()
    forward = net.forward
    net.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(penstock.SplitError, match=r"the forward of .* was replaced"):
        penstock.PipelineTrainer(model=net, args=arguments(tmp_path), pipeline=PIPELINE)


def test_a_model_of_an_earlier_run_trains_again(tmp_path: Path):
    """Accelerate has put a forward of its own on it."""
    net = model()
    trained(Trainer, net, arguments(tmp_path, max_steps=1, bf16=True))
    assert "forward" in vars(net)
    trained(penstock.PipelineTrainer, net, arguments(tmp_path, max_steps=1), pipeline=PIPELINE)


def collated(features: list[dict[str, Tensor]], **changes: Any) -> dict[str, Any]:
    batch = transformers.default_data_collator(features)
    return {**batch, **changes}


def test_positions_of_one_row_are_those_of_every_row(tmp_path: Path):
    positions = torch.arange(TOKENS)[None] // 2 + 3
    runs = []
    for kind, more in ((Trainer, {}), (penstock.PipelineTrainer, {"pipeline": PIPELINE})):
        collator = partial(collated, position_ids=positions)
        runs.append(trained(kind, model(), arguments(tmp_path), data_collator=collator, **more)[1])
    assert_close(*runs)


def test_a_key_that_the_stages_do_not_take_is_refused(tmp_path: Path):
    collator = partial(collated, weights=torch.ones(8))
    with pytest.raises(penstock.ConfigError, match=r"gives 'weights', and the stages take .*attention_mask"):
        trained(
            penstock.PipelineTrainer,
            model(),
            arguments(tmp_path),
            data_collator=collator,
            pipeline=PIPELINE,
        )


def test_a_batch_without_labels_is_refused(tmp_path: Path):
    data = [{"input_ids": row["input_ids"]} for row in rows(8)]
    trainer = penstock.PipelineTrainer(
        model=model(), args=arguments(tmp_path), train_dataset=data, pipeline=PIPELINE
    )
    with pytest.raises(
        penstock.ConfigError, match=r"gives input_ids.* and no labels; take one that makes labels"
    ):
        trainer.train()
