"""What `test_trainer_launches` starts in processes: a script with a trainer, as a user writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

import penstock
from tests.support import hf_models

VOCABULARY, TOKENS = 64, 12


class Rows(list[dict[str, Tensor]]):
    """Rows with labels on a part of each.

    Args:
        broken: process that cannot read its fifth row; -1 for none.
    """

    def __init__(self, count: int, broken: int = -1) -> None:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(2, VOCABULARY, (count, TOKENS), generator=generator)
        labels = torch.where(torch.arange(TOKENS) < torch.arange(count)[:, None] % 7, -100, ids)
        super().__init__({"input_ids": ids[n], "labels": labels[n]} for n in range(count))
        self.broken = broken

    def __getitem__(self, n: Any) -> Any:
        if n == 5 and torch.distributed.is_initialized() and torch.distributed.get_rank() == self.broken:
            raise OSError(f"the disk of process {self.broken} is gone")
        return super().__getitem__(n)


class Stream(IterableDataset[dict[str, Tensor]]):
    """The rows of a stream, of other lengths in each batch."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for n, row in enumerate(Rows(60)):
            yield {name: value[: TOKENS - n // 8] for name, value in row.items()}


def run(
    folder: Path,
    pipeline: dict[str, Any] | None,
    changes: dict[str, Any],
    broken: int = -1,
    streamed: bool = False,
) -> Trainer:
    """Train a small model with plain Trainer, or with a pipeline; the leading process writes what was logged."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": hf_models.model("llama", vocab_size=VOCABULARY),
        "args": TrainingArguments(
            str(folder), max_steps=6, per_device_train_batch_size=8, logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, seed=5, **changes,
        ),
        "train_dataset": Stream() if streamed else Rows(44, broken),
    }  # fmt: skip
    trainer = Trainer(**given) if pipeline is None else penstock.PipelineTrainer(**given, pipeline=pipeline)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    if trainer.is_world_process_zero():
        (folder / "logged.json").write_text(json.dumps(trainer.state.log_history))
        if pipeline is not None:
            ranks = trainer.pipe.ranks if trainer.pipe.in_processes else 0
            (folder / "mesh.json").write_text(json.dumps([ranks, trainer.pipe.replicas]))
    return trainer


if __name__ == "__main__":
    root, told = sys.argv[1:]
    run(Path(root), **json.loads(told))
