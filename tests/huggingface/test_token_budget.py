"""`PipelineTrainer` with microbatches by a number of tokens, beside plain Trainer on examples of unequal length."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

import penstock
from penstock.huggingface.token_budget import TokenBudget, attention_share
from penstock.runtime.workers.pool import LocalProcesses
from tests.support import hf_models, hf_trainer
from tests.support.hf_trainer import arguments, assert_trained_alike, trainer
from tests.support.lanes import exhaustive, slow

TOKENS = 48
PIPELINE = {"ranks": 2, "tokens_per_microbatch": TOKENS, "report": False}


def rows(count: int) -> list[dict[str, Tensor]]:
    """Rows of log-normal lengths, from 3 to 48, with labels on all but the first token of some."""
    generator = torch.Generator().manual_seed(3)
    lengths = (torch.randn(count, generator=generator) * 0.8 + 2.4).exp().clamp(3, TOKENS).long()
    ids = [torch.randint(2, hf_trainer.VOCABULARY, (int(n),), generator=generator) for n in lengths]
    return [
        {"input_ids": each, "labels": torch.where(torch.arange(len(each)) < n % 3, -100, each)}
        for n, each in enumerate(ids)
    ]


def padded(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids, labels = ([example[name] for example in examples] for name in ("input_ids", "labels"))
    masks = [torch.ones_like(each) for each in ids]
    return {
        "input_ids": pad_sequence(ids, True, 0), "attention_mask": pad_sequence(masks, True, 0),
        "labels": pad_sequence(labels, True, -100),
    }  # fmt: skip


class Preferring(Trainer):
    """How much likelier each row is than without the adapters."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")[:, 1:]

        def log_probs(logits: Tensor) -> Tensor:
            chosen = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            return (chosen * (labels != -100)).sum(1)

        outputs = model(**inputs)
        with torch.no_grad(), model.disable_adapter():
            before = log_probs(model(**inputs).logits)
        loss = -F.logsigmoid(0.1 * (log_probs(outputs.logits) - before)).mean()
        return (loss, outputs) if return_outputs else loss


def make(
    folder: Path,
    pipeline: dict[str, Any] | None,
    *,
    own: bool = False,
    count: int = 24,
    replicas: int = 1,
    **changes: Any,
) -> Any:
    sizes = {f"per_device_{name}_batch_size": 8 // replicas for name in ("train", "eval")}
    given = {"train_dataset": rows(count), "eval_dataset": rows(16), "data_collator": padded}
    kind = Preferring if own else None
    if own and pipeline is not None:
        kind = type("Piped", (penstock.PipelineTrainerMixin, Preferring), {})
    net = hf_trainer.adapted() if own else hf_trainer.model()
    made = trainer(net, arguments(folder, **sizes, **changes), pipeline, kind, **given)
    made.loss_is_scaled_for_ga = False if own else made.loss_is_scaled_for_ga
    return made


@pytest.mark.parametrize(
    ("own", "schedule", "changes"),
    [
        # The last batch has one example, fewer than ranks.
        (False, "1f1b", {"count": 17}),
        *slow((True, "zb-v", {"count": 17}), (False, "zb-h1", {"gradient_accumulation_steps": 2})),
        *exhaustive((True, "1f1b", {}), (False, "chimera", {}), (False, "interleaved-1f1b", {})),
    ],
)
def test_it_trains_as_trainer_does(
    tmp_path: Path, own: bool, schedule: str, changes: Any, monkeypatch: pytest.MonkeyPatch
):
    ours = make(tmp_path / "piped", PIPELINE | {"schedule": schedule}, own=own, **changes)
    theirs = make(tmp_path / "plain", None, own=own, **changes)
    numbers: list[int] = []
    step = ours.pipe.step

    def counted(x: Any, *args: Any, microbatches: int, **named: Any) -> Any:
        numbers.append(microbatches)
        assert all(part.numel() <= TOKENS for part in getattr(x, "parts", ()))
        return step(x, *args, microbatches=microbatches, **named)

    monkeypatch.setattr(ours.pipe, "step", counted)
    assert_trained_alike(ours, theirs)
    assert len(set(numbers)) > 1
    assert min(numbers) >= 2


@pytest.mark.parametrize("own", [*slow(True), *exhaustive(False)])
def test_processes_and_replicas_train_as_trainer_does(tmp_path: Path, processes: LocalProcesses, own: bool):
    job = partial(make, own=own)
    plain = hf_trainer.run(0, job, tmp_path / "plain", None, {})
    name = "adapter_model.safetensors" if own else "model.safetensors"
    for size in (2, 4):
        changes = {"replicas": size // 2}
        told = processes.run(size, hf_trainer.run, job, tmp_path / "piped", PIPELINE, changes, timeout=300)
        hf_trainer.assert_as_plain(tmp_path, told, plain, name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatches": 4}, r"pipeline\['microbatches'\] or pipeline\['tokens_per_microbatch'\], not both"),
        ({"tokens_per_microbatch": 0}, "must be a positive whole number of tokens, got 0"),
        ({"tokens_per_microbatch": "48"}, "must be a positive whole number of tokens, got '48'"),
        ({"collate": "batch"}, r"pipeline\['collate'\] cannot be used with it: the data collator makes each"),
        ({"recompute": "auto"}, r"pipeline\['recompute'\] cannot be used with it: .*give 'full'"),
        ({"schedule": "mine.csv"}, r"pipeline\['schedule'\] cannot be used with it: a schedule or a file"),
        ({"schedule": "1f2b"}, "no schedule family '1f2b'"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], said: str):
    with pytest.raises(penstock.ConfigError, match=said):
        make(tmp_path, PIPELINE | options)


def test_neither_option_is_refused(tmp_path: Path):
    with pytest.raises(penstock.ConfigError, match='"microbatches": 8}, or how many tokens each'):
        make(tmp_path, {"ranks": 2})


@pytest.mark.slow
def test_divided_samples_are_refused(tmp_path: Path, processes: LocalProcesses):
    assert processes.run(2, refused_with_cp, tmp_path) == [True] * 2


def refused_with_cp(rank: int, folder: Path) -> bool:
    with pytest.raises(penstock.ConfigError, match=r"pipeline\['cp'\] cannot be used with it"):
        make(folder, PIPELINE | {"ranks": 1, "cp": 2})
    return True


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ({"input_ids": [1] * 9}, r"has 9 tokens, and pipeline\['tokens_per_microbatch'\] is 8; give at least 9"),
        ({"prompt_ids": [1] * 2, "chosen_ids": [1], "rejected_ids": [1] * 3}, r"has 10 tokens \(2 rows of up to 5\)"),
        ({"text": "a", "position_ids": [0]}, "has the columns text, position_ids, and no list of tokens"),
        ("a", "is a str, and no list of tokens"),
    ],
)  # fmt: skip
def test_examples_that_no_microbatch_can_have_are_refused(example: Any, said: str):
    with pytest.raises(penstock.BatchError, match=said):
        budget().groups([example], padded)


def budget(tokens: int = 8, schedule: str = "1f1b", **changes: Any) -> TokenBudget:
    return TokenBudget(tokens, schedule, None, **{"ranks": 1, "replicas": 1, **changes})


def test_a_longer_example_is_refused_in_the_run(tmp_path: Path):
    longest = max(len(row["input_ids"]) for row in rows(24))
    made = make(tmp_path, PIPELINE | {"tokens_per_microbatch": longest - 1})
    with pytest.raises(penstock.BatchError, match=f"has {longest} tokens, .* is {longest - 1}"):
        made.train()


def test_a_data_loader_of_ones_own_is_refused(tmp_path: Path):
    made = make(tmp_path, PIPELINE)
    made.get_train_dataloader = partial(torch.utils.data.DataLoader, rows(8), 8, collate_fn=padded)
    with pytest.raises(penstock.ConfigError, match=r"make yours of super\(\).get_train_dataloader\(\)"):
        made.train()


def test_pairs_take_the_tokens_of_both_rows():
    pairs = [{"prompt_ids": [1] * 2, "chosen_ids": [1] * n, "rejected_ids": [1]} for n in (3, 2, 3, 1)]
    groups, count = budget(20).groups(pairs, padded)
    assert (groups, count) == ([[0, 2], [1, 3]], 2)


def test_lengths_are_those_that_the_collator_pads_to():
    class Multiple:
        pad_to_multiple_of = 4

    groups, _ = budget().groups([{"input_ids": [1] * n} for n in (3, 2, 5)], Multiple())
    assert groups == [[2], [0, 1]]


def in_fours(ranks: int, microbatches: int) -> Any:
    if microbatches % 4:
        raise ValueError("a multiple of 4")
    return penstock.build_schedule("1f1b", ranks, microbatches)


def never(ranks: int, microbatches: int) -> Any:
    raise ValueError("none at all")


def test_a_schedule_of_ones_own_chooses_the_number():
    examples = [{"input_ids": [1] * 8} for _ in range(5)]
    own = budget(schedule=f"{__name__}:in_fours", ranks=2)
    assert own.least == 4
    groups, count = own.groups(examples, padded)
    assert (len(groups), count) == (5, 8)  # three fill up the step
    with pytest.raises(penstock.ConfigError, match="takes no number of microbatches from 5 to 18"):
        budget(schedule=f"{__name__}:never", ranks=2).groups(examples, padded)


def test_the_cost_of_attention_is_of_the_config():
    net = hf_models.model("llama")
    config = net.config
    layers = penstock.from_transformers(net)
    weights = sum(p.numel() for p in net.model.layers.parameters() if p.dim() > 1)
    width = config.num_attention_heads * config.head_dim
    assert attention_share(layers, config) == pytest.approx(2 * config.num_hidden_layers * width / weights)
