"""Trainers of TRL with a pipeline beside TRL alone: losses, gradient norms and metrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import penstock
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_folders
from tests.support.lanes import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
    ),  # TRL still sets it
    pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated in `SFTTrainer`:FutureWarning"),
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


def made(
    folder: Path, pipeline: dict[str, Any] | None, *, name: str, tiny: Path, replicas: int = 1, **options: Any
) -> Any:
    """Make a trainer of TRL; the plain one accumulates the microbatches of a batch, so that its metrics are of as many."""
    import datasets
    import peft
    import trl

    kind = getattr(trl, name)
    sizes: dict[str, Any] = {"per_device_train_batch_size": 8 // replicas}
    if pipeline is None:
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    else:
        kind = type(f"Piped{name}", (penstock.PipelineTrainerMixin, kind), {})
    adapted = options.pop("adapted", "")
    args = getattr(trl, name.replace("Trainer", "Config"))(
        str(folder / "out"), max_steps=2, logging_steps=1, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, lr_scheduler_type="constant",
        **{"max_length": 128, **sizes, **options},
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tiny / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    torch.manual_seed(0)
    if name == "RewardTrainer":
        pad = tokenizer.pad_token_id
        net = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, pad_token_id=pad)
    else:
        net = AutoModelForCausalLM.from_pretrained(tiny)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)
    if adapted == "before":
        net = peft.get_peft_model(net, lora)
    return kind(
        model=net, args=args, processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(DATA[name]),
        **({"peft_config": lora} if adapted == "by TRL" else {}), **({} if pipeline is None else {"pipeline": pipeline}),
    )  # fmt: skip


def told(trainer: Any, evaluates: bool = False) -> list[dict[str, float]]:
    """Train, and return every line with a loss, and the tokens that an evaluation after it says were seen."""
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    if evaluates:
        lines.append({"tokens": trainer.evaluate(trainer.train_dataset)["eval_num_tokens"]})
    return [{name: value for name, value in line.items() if name not in ("epoch", "step")} for line in lines]


def told_of_rank(
    rank: int, make: Any, folder: Path, pipeline: dict[str, Any] | None
) -> list[dict[str, float]]:
    return told(make(folder, pipeline), evaluates=True)


PREFERRED = [
    {"prompt": f"{n} + {n} = ", "chosen": f"{2 * n} " * (1 + n % 3), "rejected": f"{n} "} for n in range(40)
]
DATA: dict[str, Any] = {
    "SFTTrainer": PAIRS,
    "RewardTrainer": [{"chosen": row["chosen"], "rejected": row["rejected"]} for row in PREFERRED],
    "DPOTrainer": PREFERRED,
    "KTOTrainer": [{**row, "label": bool(n % 2)} for n, row in enumerate(PAIRS)],
}


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("RewardTrainer", "1f1b", {}),
        ("DPOTrainer", "zb-v", {"adapted": "before"}),
        ("SFTTrainer", "1f1b", {"packing": True, "max_length": 32}),
        *exhaustive(
            ("DPOTrainer", "1f1b", {"precompute_ref_log_probs": True}),
            ("DPOTrainer", "zb-h1", {"loss_type": ["ipo"], "adapted": "by TRL"}),
            ("KTOTrainer", "1f1b", {"loss_type": "apo_zero_unpaired"}),
            ("SFTTrainer", "1f1b", {"padding_free": True, "max_length": None}),
        ),
    ],
)
def test_losses_norms_and_metrics_are_those_of_trl_alone(
    tmp_path: Path, name: str, schedule: str, options: dict[str, Any]
):
    make = partial(made, name=name, tiny=hf_folders.of_bytes(tmp_path), **options)
    theirs = told(make(tmp_path, None))
    ours = told(make(tmp_path, {"ranks": 2, "microbatches": 4, "schedule": schedule, "report": False}))
    assert len(theirs) == 2
    assert ours == [pytest.approx(line, rel=1e-5, abs=1e-6) for line in theirs]


@pytest.mark.parametrize(
    ("name", "options"),
    [("RewardTrainer", {}), *exhaustive(("DPOTrainer", {"adapted": "by TRL"}), ("SFTTrainer", {}))],
)
def test_processes_and_replicas_log_the_metrics_of_trl_alone(
    tmp_path: Path, processes: LocalProcesses, name: str, options: dict[str, Any]
):
    make = partial(made, name=name, tiny=hf_folders.of_bytes(tmp_path), **options)
    theirs = told(make(tmp_path, None), evaluates=True)
    for size in (2, 4):
        pipeline = {"ranks": 2, "microbatches": 8 // size, "report": False}
        of_ranks = processes.run(
            size, told_of_rank, partial(make, replicas=size // 2), tmp_path, pipeline, timeout=300
        )
        for ours in of_ranks:
            assert ours == [pytest.approx(line, rel=1e-5, abs=1e-6) for line in theirs]


@pytest.mark.parametrize(
    ("name", "loss", "options"),
    [("KTOTrainer", "kto", {}), ("DPOTrainer", "aot", {"loss_type": ["sigmoid", "aot"]})],
)
def test_a_loss_of_a_whole_batch_is_told_by_name(
    tmp_path: Path, name: str, loss: str, options: dict[str, Any]
):
    make = partial(made, name=name, tiny=hf_folders.of_bytes(tmp_path), **options)
    with pytest.warns(UserWarning, match=f"{name}'s loss '{loss}' compares the examples of a batch"):
        make(tmp_path, {"ranks": 2, "microbatches": 4, "report": False})


def test_a_trainer_that_generates_is_refused():
    import trl

    class Piped(penstock.PipelineTrainerMixin, trl.GRPOTrainer):
        pass

    with pytest.raises(penstock.ConfigError, match=r"GRPOTrainer generates answers"):
        Piped(pipeline={"ranks": 2, "microbatches": 4})
