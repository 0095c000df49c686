"""Checkpoints of a trainer whose ranks are processes: the first writes what all have, and each loads its part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.base.errors import PenstockError, describe_error
from penstock.huggingface.one_process import WholeOptimizer
from penstock.runtime.model.pipeline_model import gather_state
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.run_group import RunGroup

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:  # a subclass of Trainer has it behind this class
    Base = object


class TrainerSaves(Base):  # type: ignore[misc]  # transformers is untyped here
    """Saves and loads of a trainer whose pipeline is in one process or in several."""

    pipe: Pipeline
    args: Any
    data_collator: Any
    optimizer: Any
    _in_processes: bool
    _rank: int
    _whole_optimizer: WholeOptimizer | None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Trainer does; in processes all give their weights, where transformers 5.21 asks the first one alone."""
        if self._in_processes and not self.args.should_save:
            self._save(output_dir or self.args.output_dir)
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model; in processes the first one writes all of it."""
        if not self._in_processes:
            super()._save(output_dir, state_dict)
            return
        world = self.pipe.world
        assert world is not None, "the ranks are processes"
        own = {name: value for name, value in self.model.state_dict().items() if not value.is_meta}
        whole = gather_state(
            {name: value.detach().cpu() for name, value in own.items()}, world, keeps=self._rank == 0
        )
        # Tied weights come from two processes; one tensor under both names is written once.
        for name, tied_to in getattr(self.model, "all_tied_weights_keys", {}).items():
            if name in whole and tied_to in whole:
                whole[name] = whole[tied_to]
        self._lead(partial(super()._save, output_dir, whole))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        whole = self._whole_optimizer
        if whole is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        saved = _Saved(whole.state(keep=self._rank == 0))
        optimizer, self.optimizer = self.optimizer, saved
        try:
            self._lead(partial(super()._save_optimizer_and_scheduler, output_dir))
        finally:
            self.optimizer = optimizer

    def _save_rng_state(self, output_dir: str) -> None:
        self._lead(partial(super()._save_rng_state, output_dir))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with _parts_of_a_file():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with _parts_of_a_file():
            super()._load_best_model()

    def _lead(self, job: Callable[[], None]) -> None:
        """Run a job on the first process while the others wait for it; its error is raised on all of them."""
        if not self._in_processes:
            job()
            return

        def run() -> None:
            try:
                job()
            except (PenstockError, OSError):
                raise
            except Exception as error:  # of torch, safetensors or the tokenizer
                raise PenstockError(describe_error(error)) from error

        RunGroup.of(self.pipe.world).decide(run)


class _Saved:
    """A state in the place of an optimizer that is saved."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


@contextmanager
def _parts_of_a_file() -> Iterator[None]:
    """Return a context in which torch does not warn that weights of other processes are left alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*to a meta parameter in the current model", category=UserWarning
        )
        yield
