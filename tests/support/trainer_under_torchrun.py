"""What `test_trainer_launches` starts in processes: a script with a trainer, as a user writes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import hf_trainer


class Rows(list[dict[str, Tensor]]):
    """Rows of which one process cannot read the fifth."""

    def __init__(self, broken: int) -> None:
        super().__init__(hf_trainer.rows(20))
        self.broken = broken

    def __getitem__(self, n: Any) -> Any:
        if n == 5 and torch.distributed.is_initialized() and torch.distributed.get_rank() == self.broken:
            raise OSError(f"the disk of process {self.broken} is gone")
        return super().__getitem__(n)


def run(folder: Path, pipeline: dict[str, Any] | None, broken: int = -1) -> None:
    """Train a small model with plain Trainer, or with a pipeline; the leading process writes what was logged."""
    torch.set_num_threads(1)
    args = hf_trainer.arguments(folder)
    trainer = hf_trainer.trainer(hf_trainer.model(), args, pipeline, train_dataset=Rows(broken))
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    if trainer.is_world_process_zero():
        (folder / "logged.json").write_text(json.dumps(trainer.state.log_history))
        if pipeline is not None:
            ranks = trainer.pipe.ranks if trainer.pipe.in_processes else 0
            (folder / "mesh.json").write_text(json.dumps([ranks, trainer.pipe.replicas]))


if __name__ == "__main__":
    run(Path(sys.argv[1]), **json.loads(sys.argv[2]))
