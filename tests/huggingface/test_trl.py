"""TRL's `SFTTrainer` with a pipeline beside TRL alone: losses and gradient norms of chats and completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import penstock
from tests.support import hf_folders
from tests.support.lanes import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
    ),  # TRL still sets it
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n} + {n}?"},
                  {"role": "assistant", "content": f"It is {2 * n}." * (1 + n % 3)}]}
    for n in range(40)
]  # fmt: skip
PAIRS = [{"prompt": f"{n} + {n} = ", "completion": f"{2 * n} " * (1 + n % 3)} for n in range(40)]


def right_tokens(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"right": float((guesses == labels)[labels != -100].mean())}


def logged(
    folder: Path, root: Path, data: list[Any], pipeline: dict[str, Any] | None, **options: Any
) -> list:
    import datasets
    import trl

    class Piped(penstock.PipelineTrainerMixin, trl.SFTTrainer):
        pass

    torch.manual_seed(0)
    args = trl.SFTConfig(
        str(root / "out"), max_steps=2, per_device_train_batch_size=8, logging_steps=1, report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", disable_tqdm=True, max_length=128, **options,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    given = {
        "model": AutoModelForCausalLM.from_pretrained(folder), "args": args, "processing_class": tokenizer,
        "train_dataset": datasets.Dataset.from_list(data),
    }  # fmt: skip
    if measured := options.get("eval_strategy") == "steps":
        given |= {"eval_dataset": given["train_dataset"], "compute_metrics": right_tokens}
    trainer = trl.SFTTrainer(**given) if pipeline is None else Piped(**given, pipeline=pipeline)
    trainer.train()
    if measured:
        evaluated = [line for line in trainer.state.log_history if "eval_loss" in line]
        return [line[name] for line in evaluated for name in ("eval_loss", "eval_right")]
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [line[name] for line in lines for name in ("loss", "grad_norm")]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (CHATS, {"assistant_only_loss": True}),
        *exhaustive(
            (PAIRS, {"completion_only_loss": True}),
            (CHATS, {"label_smoothing_factor": 0.1}),
            (CHATS, {"loss_type": "dft"}),
        ),
    ],
    ids=["answers of chats", "completions", "smoothed", "dynamic fine-tuning"],
)
def test_the_losses_are_those_of_trl_alone(tmp_path: Path, data: list[Any], options: dict[str, Any]):
    folder = hf_folders.of_bytes(tmp_path)
    theirs = logged(folder, tmp_path, data, None, **options)
    ours = logged(folder, tmp_path, data, {"ranks": 2, "microbatches": 4, "schedule": "zb-v"}, **options)
    assert len(theirs) == 4
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.filterwarnings(
    "ignore:`return_outputs=True`, and the logits:FutureWarning"
)  # TRL alone, without a pipeline
def test_metrics_of_evaluations_are_those_of_trl_alone(tmp_path: Path):
    folder = hf_folders.of_bytes(tmp_path)
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    theirs = logged(folder, tmp_path, PAIRS, None, **options)
    ours = logged(folder, tmp_path, PAIRS, {"ranks": 2, "microbatches": 4}, **options)
    assert len(theirs) == 4
    assert ours == pytest.approx(theirs, rel=1e-6)
