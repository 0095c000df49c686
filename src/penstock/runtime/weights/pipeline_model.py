"""The model of a pipeline as users know it from ``nn.Module``: parameters, state and modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from torch import nn

from penstock.runtime.weights.parameters import LocalParameters
from penstock.stage.module import StageModule


class PipelineModel:
    """Parameters, state and modes of the stages of one process.

    Args:
        parameters: parameters and buffers by name.
        modules: function that returns the modules of all stages of this process.
        wait: function that waits until the parameters have their final values.
    """

    def __init__(
        self,
        parameters: LocalParameters,
        modules: Callable[[], list[StageModule]],
        wait: Callable[[], None],
    ) -> None:
        self._parameters, self._modules, self._wait = parameters, modules, wait

    def wait(self) -> None:
        """Wait until the weights are final, since with ``flow=True`` the last update may still be undone.

        Raises:
            PenstockError: if a rank failed; the weights are those after the last step that all ranks completed.
        """
        self._wait()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name in the whole model, parameter) pairs in model order; in processes, of this rank's stages."""
        self.wait()
        return self._parameters.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this process holds; in threads, all of the model's."""
        for _, parameter in self.named_parameters():
            yield parameter

    def rank_parameters(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs that one of the `local_ranks` updates; exactly one rank updates each parameter."""
        self.wait()
        return self._parameters.of_rank(rank)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by their names in the whole model; in processes, of this rank's stages."""
        self.wait()
        return self._parameters.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers by whole-model name; entries of stages held elsewhere are left alone.

        Raises:
            ConfigError: if an entry is missing, misshapen or of no layer; then nothing is loaded.
        """
        self.wait()
        self._parameters.load_state_dict(state)

    def zero_grad(self) -> None:
        """Set the gradients of this process's parameters to None."""
        for _, parameter in self._parameters.named_parameters():
            parameter.grad = None

    def stage_modules(self) -> list[StageModule]:
        """Return the modules of all stages that run in this process, copies included."""
        return self._modules()

    def train(self, mode: bool = True) -> Self:
        """Set the stages' training mode, as ``nn.Module.train`` does."""
        for module in self.stage_modules():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode, as ``nn.Module.eval`` does."""
        return self.train(False)


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context in which modules and all within them are in evaluation mode."""
    modes = [(inner, inner.training) for module in modules for inner in module.modules()]
    for inner, _ in modes:
        inner.training = False
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode
