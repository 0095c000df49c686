"""Masked language models, and models for question answering and image classification, beside plain transformers."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

import penstock
from penstock.base.errors import ConfigError, SplitError, StageError
from penstock.huggingface.small_config import small_config
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models
from tests.support.hf_models import Step, assert_same, taken
from tests.support.hf_trainer import PIPELINE, arguments, assert_as_plain, assert_trained_alike, run, trainer
from tests.support.lanes import exhaustive, slow

MASKED, ANSWERS, IMAGES = "MaskedLM", "QuestionAnswering", "ImageClassification"
NAMES = "start_positions", "end_positions"


def model(head: str, family: str, **changes: Any) -> Any:
    config = small_config(CONFIG_MAPPING[family](num_labels=2 if head == ANSWERS else 3, **changes))
    torch.manual_seed(0)
    return hf_models.moved(getattr(transformers, f"AutoModelFor{head}").from_config(config))


def rows_of(head: str, net: Any, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    if head == IMAGES:
        vision = getattr(net.config, "vision_config", net.config)
        pixels = torch.randn(count, 3, vision.image_size, vision.image_size, generator=generator)
        return [{"pixel_values": pixels[n], "labels": torch.tensor(n % 3)} for n in range(count)]
    ids = torch.randint(3, 60, (count, 12), generator=generator)
    mask = (torch.arange(12)[None] < 12 - torch.arange(count)[:, None] % 5).long()
    rows = [{"input_ids": ids[n] * mask[n], "attention_mask": mask[n]} for n in range(count)]
    for n, row in enumerate(rows):
        if head == ANSWERS:
            row |= {NAMES[0]: torch.tensor(n % 3), NAMES[1]: torch.tensor(n % 3 + n % 4)}
        else:
            chosen = (torch.arange(12) % (2 + n % 3) == 0) & (mask[n] == 1)
            row["labels"] = torch.where(chosen, ids[n], -100)
    return rows


def batch(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def logits_of(output: Any) -> Tensor:
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits


def plainly(net: Any, parts: list[dict[str, Tensor]], targets: list[int]) -> Step:
    losses, logits, loss = [], [], 0.0
    for part, count in zip(parts, targets, strict=True):
        output = net(**part)
        (output.loss * (count / sum(targets))).backward()
        losses.append(output.loss.item())
        logits.append(logits_of(output).detach())
        loss += losses[-1] * (count / sum(targets))
    return Step(loss, losses, taken(net), torch.cat(logits))


FAST = [(MASKED, "bert"), (ANSWERS, "llama"), (IMAGES, "vit")]
MORE = [(MASKED, "modernbert"), (ANSWERS, "bert"), (IMAGES, "dinov2")]
REST = [
    *((MASKED, family) for family in ("roberta", "distilbert", "electra", "deberta-v2", "eurobert")),
    *((ANSWERS, family) for family in ("roberta", "modernbert", "gpt2", "qwen3", "electra")),
    *((IMAGES, family) for family in ("beit", "vit_msn", "dinov2_with_registers", "siglip", "ijepa")),
]


@pytest.mark.parametrize(("head", "family"), [*FAST, *slow(*MORE), *exhaustive(*REST)])
def test_a_model_trains_with_the_bits_of_plain_transformers(head: str, family: str):
    net = model(head, family)
    rows = rows_of(head, net, 8)
    parts = [batch(rows[n : n + 2]) for n in range(0, 8, 2)]
    targets = [int((part["labels"] != -100).sum()) if head == MASKED else 2 for part in parts]
    expected = plainly(net, parts, targets)
    whole = batch(rows)
    x = whole.pop("pixel_values" if head == IMAGES else "input_ids")
    y = torch.stack([whole.pop(name) for name in NAMES], 1) if head == ANSWERS else whole.pop("labels")
    with penstock.Pipeline(net, ranks=2, microbatches=4, schedule="zb-v") as pipe:
        result = pipe.step(x, y, outputs=True, **whole)
    found = Step(float(result.loss), result.losses.tolist(), taken(net), torch.cat(list(result.outputs)))
    uses = Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
    assert_same(found, expected, [name for name, p in net.named_parameters() if uses[id(p)] > 1])


@pytest.mark.parametrize(
    ("head", "family"), [(IMAGES, "vit"), *slow((MASKED, "modernbert"), (ANSWERS, "llama"))]
)
def test_a_folder_is_read_and_written_with_its_head(tmp_path: Path, head: str, family: str):
    net = model(head, family)
    net.save_pretrained(tmp_path / "given")
    whole = batch(rows_of(head, net, 4))
    named = {name: whole[name] for name in whole.keys() & {"attention_mask"}}
    with penstock.Pipeline(penstock.from_transformers(tmp_path / "given"), ranks=2, microbatches=2) as pipe:
        found = pipe.evaluate(whole["pixel_values" if head == IMAGES else "input_ids"], outputs=True, **named)
        penstock.save_transformers(pipe, tmp_path / "saved", like=tmp_path / "given")
    assert torch.allclose(torch.cat(list(found.outputs)), logits_of(net.eval()(**whole)), atol=1e-5)
    again = getattr(transformers, f"AutoModelFor{head}").from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("head", "family", "reason"),
    [
        (MASKED, "albert", "its forward calls block 0 where block 1 is due"),
        (IMAGES, "swin", "SwinForImageClassification cannot be cut"),
        (IMAGES, "convnext", "it says of no module that it embeds its input"),
        (IMAGES, "siglip2", "no image_size, num_channels or hidden_size"),
    ],
)
def test_families_that_cannot_be_cut_are_refused_by_name(head: str, family: str, reason: str):
    with pytest.raises(SplitError, match=reason):
        penstock.from_transformers(model(head, family))


def test_an_answer_outside_of_its_row_is_refused():
    net = model(ANSWERS, "bert")
    whole = batch(rows_of(ANSWERS, net, 4))
    with (
        penstock.Pipeline(net, ranks=2, microbatches=2) as pipe,
        pytest.raises(StageError, match="an answer begins or ends at 12, outside of its row of 12 tokens"),
    ):
        pipe.step(whole["input_ids"], torch.tensor([[1, 2], [1, 2], [1, 2], [1, 12]]))


def counted(found: Any) -> dict[str, int]:
    return {"rows": len(found.predictions[0])}


def trainer_of(head: str, family: str, folder: Path, pipeline: dict[str, Any] | None, **changes: Any) -> Any:
    net = model(head, family)
    data = {
        "train_dataset": rows_of(head, net, 20),
        "eval_dataset": rows_of(head, net, 10),
        "compute_metrics": counted,
    }
    args = arguments(folder, **{"optim": "sgd", "learning_rate": 0.1, **changes})
    return trainer(net, args, pipeline, **data)


# A masked model divides by the targets of all accumulated batches, or by its own batch's (bert), by its code.
TRAINED = [(MASKED, "modernbert"), (ANSWERS, "bert"), (IMAGES, "vit")]


@pytest.mark.parametrize(
    ("head", "family"),
    [*TRAINED, *slow((MASKED, "bert")), *exhaustive((IMAGES, "dinov2"), (ANSWERS, "llama"))],
)
def test_it_trains_and_evaluates_as_trainer_does(tmp_path: Path, head: str, family: str):
    """7 rows do not divide into 4 microbatches, and the last batch has 6."""
    changes = {"per_device_train_batch_size": 7, "gradient_accumulation_steps": 2}
    theirs, ours = (trainer_of(head, family, tmp_path, pipeline, **changes) for pipeline in (None, PIPELINE))
    assert_trained_alike(ours, theirs)
    found, wanted = (each.predict(each.eval_dataset).predictions for each in (ours, theirs))
    for one, other in zip(*map(_tuple, (found, wanted)), strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-5)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_label_smoothing_is_refused_where_trainer_leaves_it_out(tmp_path: Path):
    with pytest.raises(ConfigError, match="label_smoothing_factor must be 0 with a model for question"):
        trainer_of(ANSWERS, "bert", tmp_path, PIPELINE, label_smoothing_factor=0.1)


@pytest.mark.parametrize(
    ("head", "family"), [*slow((ANSWERS, "bert"), (IMAGES, "vit")), *exhaustive((MASKED, "modernbert"))]
)
def test_processes_train_as_trainer_does(tmp_path: Path, processes: LocalProcesses, head: str, family: str):
    make = partial(trainer_of_rows, head, family)
    plain = run(0, make, tmp_path / "plain", None, {})
    pipeline = {"ranks": 2, "microbatches": 2, "report": False}
    assert_as_plain(tmp_path, processes.run(2, run, make, tmp_path / "piped", pipeline, {}), plain)


def trainer_of_rows(
    head: str, family: str, folder: Path, pipeline: dict[str, Any] | None, **changes: Any
) -> Any:
    net = model(head, family)
    data = {"train_dataset": rows_of(head, net, 32), "eval_dataset": rows_of(head, net, 10)}
    return trainer(net, arguments(folder, optim="sgd", learning_rate=0.1, **changes), pipeline, **data)
