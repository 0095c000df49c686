"""Models of images and text in a pipeline, and in the trainer, beside plain transformers."""

from __future__ import annotations

from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, Trainer

import penstock
from penstock.base.errors import BatchError, ConfigError, SplitError, StageError
from penstock.huggingface.proof import images_refused
from penstock.huggingface.small_config import small_config
from penstock.runtime.workers.pool import LocalProcesses
from penstock.stage.layers import whole_name
from tests.support import image_models
from tests.support.hf_models import assert_same, assert_same_step, piped, plainly, plainly_each, taken
from tests.support.hf_trainer import PIPELINE, arguments, assert_as_plain, assert_trained_alike, run, trainer
from tests.support.image_models import collate
from tests.support.lanes import exhaustive, slow

# Attention in both directions over an image, several parts of one, and a tower that reads the sizes of images.
FAST = ("gemma3", "internvl", "llava_next", "mistral3")
FAMILIES = [*FAST, *slow("llava", "smolvlm"), *exhaustive(
    "aya_vision", "cohere2_vision", "got_ocr2", "idefics2", "idefics3", "lighton_ocr", "llava_next_video",
    "llava_onevision", "ovis2", "paligemma", "qianfan_ocr", "vipllava",
)]  # fmt: skip
# The tower of a small model is most of it.
pytestmark = pytest.mark.filterwarnings("ignore:layer .* of the model's parameters:UserWarning")
PARTS = 4
# Patches of all images in one tensor.
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v", "glm46v", "glm_ocr", "exaone4_5", "qwen3_5_moe")
GRID_FAMILIES = [*GRIDS[:2], *slow(*GRIDS[2:4]), *exhaustive(*GRIDS[4:])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_with_the_bits_of_plain_transformers(family: str):
    net = image_models.model(family)
    step = assert_same_step(net, image_models.batch(net), schedule="zb-v")
    of_tower = [value for name, value in step.gradients.items() if "vision" in name and value is not None]
    assert sum(bool(value.any()) for value in of_tower) > 10


@pytest.mark.parametrize("family", ["gemma3", *exhaustive("llava", "smolvlm")])
def test_recompute_and_a_batch_without_images_have_the_same_bits(family: str):
    net = image_models.model(family)
    whole = image_models.batch(net)
    assert_same_step(net, whole, recompute="full")
    assert_same_step(net, {name: whole[name] for name in ("input_ids", "attention_mask", "labels")})


def test_only_the_first_stage_has_the_tower():
    layers = penstock.from_transformers(image_models.model("llava"))
    with_tower = [n for n, layer in enumerate(layers) if any("vision" in name for name in names(layer))]
    assert with_tower == [0]


def names(layer: Any) -> list[str]:
    return [whole_name(layer.name, inner) for inner, _ in layer.build().named_parameters()]


def test_several_images_in_a_row_are_given_as_microbatches():
    net = image_models.model("llava")
    whole = image_models.batch(net, rows=4)
    twice = {
        name: torch.cat([whole[name], whole[name]], 1) for name in ("input_ids", "labels", "attention_mask")
    }
    images = torch.cat([whole["pixel_values"], whole["pixel_values"].flip(0)])
    with penstock.Pipeline(net, ranks=2, microbatches=PARTS) as pipe:
        with pytest.raises(BatchError, match=r"keyword input pixel_values has 8 rows .* the input x has 4"):
            pipe.step(twice, pixel_values=images)
        pipe.step(twice, pixel_values=penstock.Microbatches(list(images.chunk(PARTS))))
    found, expected = taken(net), plainly(net, twice | {"pixel_values": images}).gradients
    for name, gradient in expected.items():
        assert found[name] is gradient or torch.equal(found[name], gradient), name


@pytest.mark.parametrize("family", GRID_FAMILIES)
def test_patches_of_all_images_are_given_as_microbatches(family: str):
    """A row has one image, two, or none, and a microbatch no image at all; positions follow from ids and grids."""
    net = image_models.model(family)
    rows = image_models.rows_with_grids(net, 8, without=1)
    for row in rows[4:6]:
        row["input_ids"][row["mm_token_type_ids"] == 1] = 7
        row["mm_token_type_ids"][:] = 0
    takes = signature(net.forward).parameters
    rows = [{name: value for name, value in row.items() if name in {*takes}} for row in rows]
    parts = [collate(rows[n : n + 2]) for n in range(0, 8, 2)]
    del parts[2]["pixel_values"], parts[2]["image_grid_thw"]
    expected = plainly_each(net, parts)
    net.model.rope_deltas = torch.full((2, 1), 5)  # of text that was generated before
    whole: dict[str, Any] = {
        name: torch.cat([part[name] for part in parts])
        for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
        if name in takes
    }
    images = {
        name: penstock.Microbatches([part.get(name) for part in parts])
        for name in ("pixel_values", "image_grid_thw")
    }
    assert_same(piped(net, whole | images, schedule="zb-v"), expected)
    with (
        penstock.Pipeline(net, ranks=2, microbatches=PARTS) as pipe,
        pytest.raises(BatchError, match=r"keyword input \w+ has \d+ rows"),
    ):
        pipe.step(collate(rows))


def test_as_many_images_as_rows_but_not_one_in_each_are_refused():
    net = image_models.model("llava")
    whole = image_models.batch(net, rows=8)
    whole["input_ids"][3][whole["input_ids"][3] == image_models.image_token(net)] = 5
    with (
        penstock.Pipeline(net, ranks=2, microbatches=2) as pipe,
        pytest.raises(StageError, match="row 3 of a microbatch has no image"),
    ):
        pipe.step(whole)


def test_adapters_are_trained_with_images():
    import peft

    net = image_models.model("llava")
    whole = image_models.batch(net)
    lora = peft.LoraConfig(
        r=4, target_modules=r".*(language_model|vision_tower).*\.(q|v)_proj", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(net, lora).train()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    step = assert_same_step(adapted, whole)
    assert any("vision" in name and value is not None for name, value in step.gradients.items())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (
            "qwen3_vl",
            r"features to the hidden state after its first blocks, too \(deepstack_visual_indexes\)",
        ),
        ("lfm2_vl", "has no image_size, and its model takes no image_grid_thw"),
        ("mllama", "its forward calls 3 of 4 blocks"),
        ("blip-2", "Blip2ForConditionalGeneration cannot be cut"),
        ("aria", "no form of a row's image is known that it reads"),
    ],
)
def test_families_that_cannot_be_cut_are_refused_by_name(family: str, reason: str):
    with pytest.raises(SplitError, match=reason):
        penstock.from_transformers(image_models.model(family))


@pytest.mark.parametrize("family", ["qwen2_vl", *exhaustive("qwen2_5_vl")])
def test_a_model_of_full_size_is_proved_by_a_small_one(family: str):
    with torch.device("meta"):
        net = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family]())
    assert len(penstock.from_transformers(net)) == net.config.text_config.num_hidden_layers + 2


def test_configs_and_folders_are_refused_with_the_way_out(tmp_path: Path):
    net = image_models.model("llava")
    with pytest.raises(SplitError, match="give the model itself, as AutoModelForImageTextToText makes it"):
        penstock.from_transformers(net.config)
    net.save_pretrained(tmp_path)
    with pytest.raises(SplitError, match=r"AutoModelForImageTextToText\.from_pretrained"):
        penstock.from_transformers(tmp_path)


def test_a_rotary_rule_of_the_language_model_is_refused():
    net = image_models.model("llava")
    net.config.text_config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(SplitError, match="rope_type is 'dynamic'"):
        penstock.from_transformers(net)


def test_images_that_do_not_reach_the_loss_are_not_proved(monkeypatch: pytest.MonkeyPatch):
    net = image_models.model("llava")
    forward = type(net.model).forward
    monkeypatch.setattr(
        type(net.model), "forward", lambda self, *a, **k: forward(self, *a, **{**k, "pixel_values": None})
    )
    assert "they do not reach its loss" in images_refused(
        small_config(net.config, layers=2), 1, "ImageTextToText"
    )


def test_a_family_without_images_refuses_them():
    net = image_models.model("fuyu")
    with penstock.Pipeline(net, ranks=2, microbatches=2) as pipe:
        ids = torch.randint(3, 60, (4, 8))
        with pytest.raises(BatchError, match="pixel_values"):
            pipe.step({"input_ids": ids, "labels": ids, "pixel_values": torch.rand(4, 3, 8, 8)})


def rows_of(net: Any, count: int) -> list[dict[str, Tensor]]:
    if net.config.model_type in GRIDS:
        return image_models.rows_with_grids(net, count)
    whole = image_models.batch(net, rows=count)
    return [{name: value[n] for name, value in whole.items()} for n in range(count)]


def trainer_of(family: str, folder: Path, pipeline: dict[str, Any] | None, **changes: Any) -> Any:
    net = image_models.model(family)
    args = arguments(folder, **{"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, **changes})
    data = {"train_dataset": rows_of(net, 8), "eval_dataset": rows_of(net, 10), "data_collator": collate}
    return trainer(net, args, pipeline, **data)


@pytest.mark.parametrize(
    "family", ["gemma3", *slow("qwen2_5_vl", "qwen3_5"), *exhaustive("llava", "qwen2_vl")]
)
def test_it_trains_and_evaluates_as_trainer_does(tmp_path: Path, family: str):
    """7 rows do not divide into 4 microbatches, and the last batch has 1."""
    changes = {"per_device_train_batch_size": 7, "gradient_accumulation_steps": 2, "max_steps": 1}
    theirs, ours = (trainer_of(family, tmp_path, pipeline, **changes) for pipeline in (None, PIPELINE))
    assert_trained_alike(ours, theirs)


@pytest.mark.parametrize("family", ["qwen2_5_vl", *exhaustive("glm4v")])
def test_a_microbatch_may_have_no_image(tmp_path: Path, family: str):
    net = image_models.model(family)
    rows = image_models.rows_with_grids(net, 4, without=1)

    def some(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        whole = collate(examples)
        return {n: v for n, v in whole.items() if len(v) or n not in image_models.BY_IMAGE}

    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": some}
    args = arguments(tmp_path, optim="sgd", learning_rate=0.1, max_steps=2, per_device_train_batch_size=4)
    theirs, ours = (trainer(image_models.model(family), args, each, **data) for each in (None, PIPELINE))
    assert_trained_alike(ours, theirs)


def several(net: Any, count: int) -> list[dict[str, Tensor]]:
    """Return rows with one image, two or three, padded to one length."""
    whole = image_models.batch(net, rows=3 * count)
    rows = []
    for n in range(count):
        images = slice(3 * n, 3 * n + 1 + n % 3)
        row = {name: value[images].flatten() for name, value in whole.items() if value.dim() == 2}
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -100, "token_type_ids": 0}
        width = 3 * whole["input_ids"].shape[1]
        row = {name: torch.cat([v, v.new_full((width - len(v),), fills[name])]) for name, v in row.items()}
        rows.append(row | {"pixel_values": whole["pixel_values"][images]})
    return rows


def with_all_images(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: (torch.cat if name == "pixel_values" else torch.stack)([one[name] for one in examples])
        for name in examples[0]
    }


@pytest.mark.parametrize("family", ["llava", *slow("gemma3")])
def test_rows_with_several_images_train_and_evaluate_as_in_trainer(tmp_path: Path, family: str):
    net = image_models.model(family)
    data = {"train_dataset": several(net, 8), "eval_dataset": several(net, 10)}
    args = arguments(tmp_path, optim="sgd", learning_rate=0.1, max_steps=2, per_device_train_batch_size=7)
    pair = [
        trainer(image_models.model(family), args, pipeline, data_collator=with_all_images, **data)
        for pipeline in (None, PIPELINE)
    ]
    assert_trained_alike(pair[1], pair[0])


class OwnLossTrainer(penstock.PipelineTrainer):
    """A trainer with a loss of its own, of which calls of the model are replayed on the last stage."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        output = model(**inputs)
        loss = 2 * output.loss
        return (loss, output) if return_outputs else loss


class PlainOwnLossTrainer(Trainer):
    compute_loss = OwnLossTrainer.compute_loss


@pytest.mark.slow
def test_a_loss_of_ones_own_gets_patches_of_all_images(tmp_path: Path):
    net = image_models.model("qwen2_vl")
    rows = image_models.rows_with_grids(net, 8)
    for row in rows:  # as many targets in each, so that means of parts have the batch's mean
        row["labels"][:-4] = -100
        row["labels"][-4:] = row["input_ids"][-4:] = 5
    args = arguments(tmp_path, optim="sgd", learning_rate=0.1, max_steps=2)
    pair = [
        trainer(image_models.model("qwen2_vl"), args, pipeline, kind, train_dataset=rows, eval_dataset=rows,
                data_collator=collate)
        for pipeline, kind in ((None, PlainOwnLossTrainer), (PIPELINE, OwnLossTrainer))
    ]  # fmt: skip
    assert_trained_alike(pair[1], pair[0])


def test_the_trainer_refuses_label_smoothing(tmp_path: Path):
    """Trainer shifts the labels of causal language models alone, by the name of their class."""
    with pytest.raises(penstock.ConfigError, match="label_smoothing_factor must be 0 with a model of images"):
        trainer_of("llava", tmp_path, PIPELINE, label_smoothing_factor=0.1)


def test_the_trainer_refuses_another_number_of_images_than_rows(tmp_path: Path):
    ours = trainer_of("llava", tmp_path, PIPELINE | {"collate": "batch"})
    ours.data_collator = lambda rows: (whole := collate(rows)) | {"pixel_values": whole["pixel_values"][:1]}
    with pytest.raises(ConfigError, match="gives 1 images for 8 rows with"):
        ours.train()


@pytest.mark.parametrize("family", [*slow("llava_next", "qwen2_vl"), *exhaustive("smolvlm", "qwen3_5")])
def test_processes_train_as_trainer_does(tmp_path: Path, processes: LocalProcesses, family: str):
    make, pipeline = partial(trainer_of, family), {"ranks": 2, "microbatches": 2, "report": False}
    plain = run(0, make, tmp_path / "plain", None, {})
    assert_as_plain(tmp_path, processes.run(2, run, make, tmp_path / "piped", pipeline, {}), plain)
