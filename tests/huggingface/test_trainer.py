"""`penstock.PipelineTrainer` beside transformers' own Trainer: losses, gradient norms and weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import penstock
from tests.support import hf_models
from tests.support.hf_trainer import (
    CONSTANT,
    OWN,
    PIPELINE,
    TOKENS,
    VOCABULARY,
    Both,
    accuracy,
    adapted,
    arguments,
    assert_close,
    assert_same_weights,
    assert_trained_alike,
    logged,
    model,
    rows,
    trainer,
)
from tests.support.lanes import exhaustive, slow
from tests.support.states import assert_equal


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # 7 rows do not divide into 4 microbatches, and the last batch has 6.
        ("gpt2", {"per_device_train_batch_size": 7, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}),
        *slow(
            ("llama", {"optim": "sgd", "lr_scheduler_type": "cosine", "num_train_epochs": 1, "max_steps": -1})
        ),
        *exhaustive(("llama", {"per_device_train_batch_size": 6}), ("gpt2", {"label_smoothing_factor": 0.2})),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_it_trains_as_trainer_does(tmp_path: Path, family: str, changes: dict[str, Any]):
    theirs, ours = (trainer(model(family), arguments(tmp_path, **changes), each) for each in (None, PIPELINE))
    assert_trained_alike(ours, theirs)


def test_groups_have_optimizers_of_their_own(tmp_path: Path):
    theirs = trainer(model(), arguments(tmp_path, **CONSTANT), None, Both)
    ours = trainer(model(), arguments(tmp_path, **CONSTANT), PIPELINE | {"optimizer": OWN})
    assert_trained_alike(ours, theirs)


SGD = {"optimizer": torch.optim.SGD}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"match": "mlp", "lr": 0.1}], r"groups\[0\] \(match 'mlp'\) has no 'optimizer'"),
        ([{"match": "mpl", **SGD}], r"\(match 'mpl'\) takes no parameter that is trained"),
        (
            [{"match": "norm", "optimizer": torch.optim.Muon}],
            "Muon cannot be made with these options and groups: Muon only supports 2D",
        ),
        ([{"match": "mlp", "beta": 1, **SGD}], r"groups\[0\] has 'beta', which is not an option of SGD"),
        ([{"names": ["x"], **SGD}], r"groups\[0\] names 'x', which the model does not have"),
        ("Muon", "groups must be a list"),
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path: Path, groups: Any, said: str):
    with pytest.raises(penstock.ConfigError, match=said):
        trainer(model(), arguments(tmp_path), PIPELINE | {"optimizer": groups}).train()


def test_groups_and_an_optimizer_are_not_taken_together(tmp_path: Path):
    net, groups = model(), [{"match": "mlp", **SGD}]
    given = {"optimizers": (torch.optim.SGD(net.parameters(), lr=0.1), None)}
    with pytest.raises(penstock.ConfigError, match=r"give pipeline\['optimizer'\] or optimizers=, not both"):
        trainer(net, arguments(tmp_path), PIPELINE | {"optimizer": groups}, **given)


@pytest.mark.parametrize("smoothing", [0.2, *slow(0.0)])
def test_a_large_vocabulary_trains_without_its_logits(
    tmp_path: Path, smoothing: float, monkeypatch: pytest.MonkeyPatch
):
    changes = {"label_smoothing_factor": smoothing, "max_steps": 1, "gradient_accumulation_steps": 2}
    theirs, ours = (
        trainer(model("gemma2", vocab_size=32_000, tied=True), arguments(tmp_path, **changes), each)
        for each in (None, PIPELINE)
    )
    expected, other = logged(theirs), theirs.evaluate()
    largest = hf_models.watch_logits(monkeypatch, 32_000)
    seen, one = logged(ours), ours.evaluate()
    # A batch of 8 rows in 4 microbatches, of which the first step also runs two as one; each in 8 chunks.
    assert 0 < max(largest) == 2 * 2 * TOKENS // 8 * 32_000
    assert_close(seen, expected)
    assert_same_weights(ours.model, theirs.model)
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)


def test_metrics_of_an_evaluation_get_all_logits(tmp_path: Path):
    found = []
    for pipeline in (PIPELINE, None):
        each = trainer(model(), arguments(tmp_path), pipeline, compute_metrics=accuracy)
        found.append((each.evaluate(), each.predict(rows(10)).predictions))
    (one, logits), (other, expected) = found
    assert one["eval_accuracy"] == other["eval_accuracy"]
    assert torch.allclose(torch.tensor(logits), torch.tensor(expected), atol=1e-5)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_predictions_of_more_than_logits_are_refused(tmp_path: Path, name: str):
    net = model(attn_implementation="eager")
    setattr(net.config, name, True)
    ours = trainer(net, arguments(tmp_path), PIPELINE)
    with pytest.raises(penstock.ConfigError, match=f"{name} is set.*logits alone"):
        ours.predict(rows(8))
    ours.args.prediction_loss_only = True
    assert ours.evaluate(rows(8))["eval_loss"] > 0


def test_an_evaluation_of_the_loss_alone_makes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours = trainer(model(), arguments(tmp_path), PIPELINE)
    asked: list[bool] = []
    evaluate = ours.pipe.evaluate
    monkeypatch.setattr(
        ours.pipe,
        "evaluate",
        lambda *args, outputs, **named: asked.append(outputs) or evaluate(*args, **named),
    )
    ours.evaluate()
    assert asked == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [2, *exhaustive(1)])
def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path: Path, accumulated: int):
    """In the middle of an epoch, and with dropout."""

    def run(steps: int, name: str, resume: bool = False) -> Any:
        args = arguments(
            tmp_path / name, max_steps=steps, lr_scheduler_type="constant", save_strategy="steps", save_steps=2,
            gradient_accumulation_steps=accumulated,
        )  # fmt: skip
        net = model("gpt2", resid_pdrop=0.2, embd_pdrop=0.2)
        ours = trainer(net, args, {"ranks": 2, "microbatches": 4}, train_dataset=rows(44))
        ours.train(resume_from_checkpoint=resume)
        return net.state_dict()

    whole = run(4, "whole")
    run(2, "parts")
    assert_equal(run(4, "parts", resume=True), whole)


class Numbered(penstock.PipelineTrainer):
    """Notes the number by which each batch draws its dropout."""

    def training_step(self, *args: Any) -> Tensor:
        loss = super().training_step(*args)
        self.numbers = [*getattr(self, "numbers", []), self.pipe.steps]
        return loss


@pytest.mark.parametrize("accumulated", [1, 2])
def test_every_batch_draws_dropout_of_its_own(tmp_path: Path, accumulated: int):
    args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=accumulated)
    ours = trainer(model(), args, PIPELINE, Numbered, train_dataset=rows(44))
    ours.train()
    first = ours.numbers[0]
    assert ours.numbers == list(range(first, first + 2 * accumulated))


@pytest.mark.slow
def test_adapters_are_trained_alone(tmp_path: Path):
    theirs, ours = (trainer(adapted(), arguments(tmp_path), each) for each in (None, PIPELINE))
    assert_trained_alike(ours, theirs)
    ours.save_model(str(tmp_path / "adapters"))
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


def test_activation_checkpointing_is_recompute_and_what_is_saved_loads_in_transformers(tmp_path: Path):
    # The second is its name before transformers 5.23.
    name = next(
        n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n)
    )
    args = arguments(tmp_path, **{name: True}, max_steps=1)
    ours, theirs = trainer(model(), args, PIPELINE), trainer(model(), arguments(tmp_path, max_steps=1), None)
    assert_close(logged(ours), logged(theirs))
    assert getattr(args, name)  # of the caller's own arguments
    ours.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    x = torch.arange(2, 2 + TOKENS)[None]
    assert torch.equal(again(x).logits, ours.model.eval()(x).logits)


def test_bf16_is_autocast_and_a_model_of_an_earlier_run_trains_again(tmp_path: Path):
    net, args = model(), arguments(tmp_path, bf16=True, max_steps=1)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    (theirs,) = logged(trainer(net, args, None))
    assert "forward" in vars(net)  # of Accelerate
    net.load_state_dict(weights)
    (seen,) = logged(trainer(net, args, PIPELINE))
    (full,) = logged(trainer(model(), arguments(tmp_path, max_steps=1), None))
    assert seen["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
    assert seen["loss"] != pytest.approx(full["loss"], rel=1e-7)


class OwnLog(penstock.PipelineTrainerMixin, Trainer):
    """A subclass of one's own."""

    def log(self, logs: dict[str, float], *more: Any) -> None:
        super().log({**logs, "own": 1.0}, *more)


def test_the_wrong_order_of_bases_says_so():
    class Logs(transformers.Trainer):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    class WithArguments(transformers.Trainer):
        def __init__(self, model: Any, args: Any, factor: float = 1.0) -> None:
            super().__init__(model, args)

    for bases in ((Logs, penstock.PipelineTrainerMixin), (WithArguments, penstock.PipelineTrainer)):
        with pytest.raises(penstock.ConfigError, match=r"Write class Mine\(PipelineTrainerMixin, \.\.\.\)"):
            type("Mine", bases, {})
    type("Mine", (Logs, penstock.PipelineTrainer), {})  # a method that calls super() comes before


def test_the_mixin_serves_subclasses(tmp_path: Path):
    (seen,) = logged(trainer(model(), arguments(tmp_path, max_steps=1), PIPELINE, OwnLog))
    assert seen["own"] == 1.0


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class OverOwnStep(penstock.PipelineTrainerMixin, OwnStep):
    """The pipeline's step would be run, not the other class's."""


def mean_square(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
    return logits.float().square().mean()


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
            {"net": None, "model_init": lambda: model()},
            "model_init makes a new model when training begins",
        ),
        ({"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha=5.0 cannot be used"),
        ({}, {"pipeline": {"ranks": 2}}, "how many microbatches"),
        ({}, {"pipeline": 4}, "how many microbatches"),
        ({}, {"pipeline": {"microbatches": 2, "seed": 1}}, r"pipeline\['seed'\] cannot be given"),
        ({}, {"pipeline": {"ranks": 2, "microbatch": 4}}, "no option 'microbatch' .*'microbatches'"),
        (
            {},
            {"pipeline": PIPELINE | {"cp": 2}},
            r"pipeline\['cp'\] is 2, and samples are divided over processes",
        ),
        ({}, {"kind": OverOwnStep}, "OwnStep has a training_step of its own"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], said: str
):
    given = {"net": model(), "args": arguments(tmp_path, **changes), "pipeline": PIPELINE, **more}
    with pytest.raises(penstock.ConfigError, match=said):
        trainer(**given)


def test_a_trainer_without_ranks_says_that_nothing_is_divided(tmp_path: Path):
    with pytest.warns(UserWarning, match="pipeline has no 'ranks', so one rank has the whole model"):
        trainer(model(), arguments(tmp_path), {"microbatches": 2, "report": False})


def test_a_trainer_without_options_says_which_it_needs(tmp_path: Path):
    with pytest.raises(penstock.ConfigError, match="how many microbatches"):
        penstock.PipelineTrainer(model(), arguments(tmp_path))


def with_its_forward_replaced(net: Any) -> None:
    forward = net.forward
    net.forward = lambda *args, **kwargs: forward(*args, **kwargs)


HOOKED = r"lm_head.weight has a hook.*on_pre_optimizer_step"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda net: net.lm_head.weight.register_hook(torch.sign), HOOKED),
        (lambda net: net.lm_head.weight.register_post_accumulate_grad_hook(print), HOOKED),
        (with_its_forward_replaced, r"the forward of .* was replaced"),
    ],
    ids=["a hook of a gradient", "a late one", "a forward"],
)
def test_a_model_that_does_more_is_refused(tmp_path: Path, change: Callable[[Any], object], said: str):
    """Trainer runs hooks of gradients once a batch: a clamp of each microbatch's gradient is not that of the batch's."""
    net = model()
    change(net)
    with pytest.raises((penstock.ConfigError, penstock.SplitError), match=said):
        trainer(net, arguments(tmp_path), PIPELINE)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.loss_function", mean_square, "loss_function of the Llama"),
        ("compute_loss_func", mean_square, "compute_loss_func needs"),
        ("compute_loss", mean_square, r"trainer.compute_loss needs"),
        ("label_smoother", LabelSmoother(0.3), "label_smoother was changed"),
    ],
)
def test_another_loss_set_after_the_trainer_is_made_is_refused(
    tmp_path: Path, name: str, value: object, said: str
):
    ours = trainer(model(), arguments(tmp_path), PIPELINE)
    owner = ours.model if name.startswith("model.") else ours
    setattr(owner, name.removeprefix("model."), value)
    with pytest.raises(penstock.ConfigError, match=said):
        ours.train()


def collated(features: list[dict[str, Tensor]], **changes: Any) -> dict[str, Any]:
    return {**transformers.default_data_collator(features), **changes}


def test_positions_of_one_row_are_those_of_every_row(tmp_path: Path):
    collator = partial(collated, position_ids=torch.arange(TOKENS)[None] // 2 + 3)
    args = arguments(tmp_path, max_steps=1)
    assert_close(*(logged(trainer(model(), args, each, data_collator=collator)) for each in (PIPELINE, None)))


BEYOND = {"input_ids": torch.full((TOKENS,), VOCABULARY + 7), "labels": torch.ones(TOKENS, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"data_collator": partial(collated, weights=torch.ones(8))},
            r"gives 'weights', and the stages take .*attention_mask",
        ),
        (
            {"train_dataset": [{"input_ids": row["input_ids"]} for row in rows(8)]},
            r"gives input_ids.* and no labels; take one that makes labels",
        ),
        ({"train_dataset": [BEYOND] * 8}, r"(?s)^(?!.*cannot be cut).*Token ids must be below 64.* up to 71"),
    ],
    ids=["a key that the stages do not take", "no labels", "token ids beyond the table"],
)
def test_a_batch_that_does_not_fit_is_refused(tmp_path: Path, given: dict[str, Any], said: str):
    with pytest.raises(penstock.PenstockError, match=said):
        trainer(model(), arguments(tmp_path), PIPELINE, **given).train()
