"""Models that a device map has dispatched: taken without its hooks, on the devices where they are, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.base.errors import ConfigError
from penstock.huggingface.run_report import plan_line
from tests.support import hf_trainer


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    given = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "attn_implementation": "eager", **changes,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**given))


def places(model: LlamaForCausalLM, second: str) -> dict[str, str]:
    """All on the CPU, but the second block."""
    names = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    return {**dict.fromkeys(names, "cpu"), "model.layers.1": second}


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with penstock.Pipeline(penstock.from_transformers(model), ranks=2, microbatches=2) as pipe:
        return pipe.step(ids, ids).loss


def test_hooks_on_one_device_are_taken_off():
    ids = torch.randint(0, 32, (4, 8))
    plain, model = llama(), llama()
    dispatched = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model.model.layers[0], "_hf_hook")
    assert torch.equal(loss_of(dispatched, ids), loss_of(plain, ids))
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_is_on_the_disk_is_refused(tmp_path: Path):
    model = llama()
    accelerate.dispatch_model(model, places(model, "disk"), main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"leaves 'model.layers.1' \(1 of 6 entries\) on the disk"):
        penstock.from_transformers(model)


def spread(device: str, tied: bool) -> Any:
    """A model that is spread, with hooks: a tied head stays beside the embedding, and the last blocks are elsewhere."""
    model = llama(num_hidden_layers=4, tie_word_embeddings=tied)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu"}
    places |= dict.fromkeys([*(f"model.layers.{n}" for n in (1, 2, 3)), "model.norm"], device)
    places["lm_head"] = "cpu" if tied else device
    dispatched = accelerate.dispatch_model(model, places, main_device="cpu")
    assert hasattr(model.model.layers[1], "_hf_hook")
    return dispatched


def spread_equal(device: str, tied: bool) -> list[int]:
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    model, other = spread(device, tied), llama(num_hidden_layers=4, tie_word_embeddings=tied)
    found = []
    for net in (model, other):
        with penstock.Pipeline(
            penstock.from_transformers(net), microbatches=2, ranks=2 if net is other else None
        ) as pipe:
            found.append(pipe.step(ids, ids, attention_mask=mask).loss.cpu())
            if net is model:
                split = [len(names) for names in pipe.trace().info["split"]]
    assert torch.equal(*found)
    for (name, one), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        # Functions that are one kernel on the CPU, as a norm, are several on the other device.
        torch.testing.assert_close(one.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-7, msg=name)
    return split


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_several_devices_trains_where_it_is(with_device, tied):
    first, last = with_device(spread_equal, tied)
    assert first < last


class Smoothed:
    """A loss of the user's own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(input_ids=inputs["input_ids"])
        logits, labels = output.logits[:, :-1], inputs["labels"][:, 1:]
        assert logits.device == labels.device
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return (loss, output) if return_outputs else loss


class SmoothedTrainer(Smoothed, penstock.PipelineTrainer):
    pass


class PlainSmoothedTrainer(Smoothed, transformers.Trainer):
    pass


def trained(device: str, folder: Path) -> None:
    kinds = {
        "a list": (hf_trainer.model, penstock.PipelineTrainer, transformers.Trainer),
        "adapters": (hf_trainer.adapted, penstock.PipelineTrainer, transformers.Trainer),
        "own loss": (hf_trainer.model, SmoothedTrainer, PlainSmoothedTrainer),
    }
    # As many labels in each part, so that the mean of the user's loss is that of the batch.
    rows = [{**row, "labels": row["input_ids"]} for row in hf_trainer.rows(20)]
    data = {"train_dataset": rows, "eval_dataset": rows}
    for make, ours, theirs in kinds.values():
        args = hf_trainer.arguments(folder, optim="adamw_torch", eval_strategy="steps", eval_steps=3)
        plain = hf_trainer.trainer(make(), args, None, theirs, **data)
        expected = hf_trainer.logged(plain)
        for devices in (["cpu", device], [device, "cpu"]):
            options = {"devices": devices, "microbatches": 4, "report": False}
            trainer = hf_trainer.trainer(make(), args, options, ours, **data)
            assert f"(threads on {devices[0]}, {devices[1]})" in plan_line(trainer.pipe)
            hf_trainer.assert_close(hf_trainer.logged(trainer), expected)
            assert {str(p.device) for p in trainer.model.parameters()} == {"cpu", device}
            (loss,), (other,) = (
                [line["eval_loss"] for line in each.state.log_history if "eval_loss" in line]
                for each in (trainer, plain)
            )
            assert loss == pytest.approx(other, rel=1e-6)
    by_hand = hf_trainer.model()
    by_hand.model.layers[-1].to(device)
    trainer = hf_trainer.trainer(by_hand, args, {"microbatches": 4, "report": False}, **data)
    assert [*map(str, trainer.pipe.devices)] == ["cpu", device]
    hf_trainer.logged(trainer)
    assert str(by_hand.model.layers[-1].mlp.up_proj.weight.device) == device
    one = {"devices": [device, device], "microbatches": 4, "report": False}
    trainer = hf_trainer.trainer(hf_trainer.model(), args, one, SmoothedTrainer, **data)
    hf_trainer.assert_close(hf_trainer.logged(trainer), expected)
    model = spread(device, tied=True)
    args = hf_trainer.arguments(folder, optim="adamw_torch")
    rows = [{name: value % 32 for name, value in row.items()} for row in hf_trainer.rows(20)]
    trainer = hf_trainer.trainer(model, args, {"microbatches": 4, "report": False}, train_dataset=rows)
    plain = hf_trainer.trainer(
        llama(num_hidden_layers=4, tie_word_embeddings=True), args, None, train_dataset=rows
    )
    hf_trainer.assert_close(hf_trainer.logged(trainer), hf_trainer.logged(plain))
    trainer.save_model(str(folder / "saved"))
    saved = LlamaForCausalLM.from_pretrained(folder / "saved")
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)


@pytest.mark.slow
def test_a_trainer_with_a_device_for_each_rank_trains_as_plain_trainer(with_device, tmp_path: Path):
    with_device(trained, tmp_path)
