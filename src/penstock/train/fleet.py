"""The processes of a run as the trainer needs them: one that leads, what it decides, sums over all.

With threads there is one process, and everything here is what it seems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from penstock.errors import ConfigError
from penstock.runtime.pipeline import Pipeline
from penstock.train import weights

_REFUSED = "\0"


class Fleet:
    """This process among those of the run.

    Args:
        size: number of processes; with more than one, ``torch.distributed`` is initialised.
        rank: this one's number.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    @staticmethod
    def of(pipe: Pipeline) -> Fleet:
        """All processes of a pipeline's run, those of the pipelines beside it included."""
        return Fleet(dist.get_world_size(), dist.get_rank()) if pipe.in_processes else Fleet(1, 0)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    def decide(self, choose: Callable[[], str]) -> str:
        """Let the leader do something that ends in a text, and tell all the others; every process calls it.

        Raises:
            ConfigError: on every process, if `choose` raises one on the leader.
        """
        if self.size == 1:
            return choose()
        said = ""
        refusal: ConfigError | None = None
        if self.leads:
            try:
                said = choose()
            except ConfigError as error:
                said, refusal = _REFUSED + str(error), error
        said = self._broadcast(said)
        if refusal is not None:
            raise refusal
        if said.startswith(_REFUSED):
            raise ConfigError(said.removeprefix(_REFUSED))
        return said

    def _broadcast(self, text: str) -> str:
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([len(text.encode()), len(data)])
        dist.broadcast(size, 0)
        content = data if self.leads else torch.empty(int(size[1]), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return bytes(content[: int(size[0])].tolist()).decode()

    def total(self, value: float) -> float:
        """The sum over all processes; every process calls it."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values)
        return float(values)

    def gather_point(self) -> None:
        """Go on once every process is here."""
        self.total(0.0)

    def save(self, pipe: Pipeline, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the weights of every pipeline rank, each once, and their index; every process calls it with its own."""
        parts, part = (pipe.ranks, pipe.rank) if pipe.in_processes else (1, 0)
        if pipe.is_first:
            weights.save_part(folder, state, part, parts)
        self.gather_point()
        if self.leads:
            weights.write_index(folder, parts)
