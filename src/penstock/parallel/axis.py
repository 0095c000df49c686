"""An axis of the mesh beside the pipeline's: what its processes divide, and how layers, steps and losses follow.

A new axis is a folder of `penstock.parallel` with an `Axis`, its class in `penstock.parallel.axes.AXES`, and its size in
`MeshShape`: with `_DIVIDES_SAMPLES` if its processes have the same parameters and a part of each sample; in `mesh.SHARED` if
they share the parameters of a stage; or, as the size of expert parallelism, one that divides the ranks of a stage once more.
What the planner, the configs of ``penstock train`` and the trainer of Hugging Face know of an axis stands in their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch import distributed as dist

from penstock.parallel.mesh import Mesh, MeshShape
from penstock.parallel.participant import Participant
from penstock.parallel.replicas.reducer import GroupReducer
from penstock.parallel.sample_parts import SampleDivision
from penstock.stage.compute.runner import LossFunction
from penstock.trace.expert_load import ProcessLoad

Layers = Sequence[tuple[str, nn.Module]]
"""(Name in the whole model, layer) pairs of the layers that a process holds."""

Over = Literal["pipeline", "replicas", "stage", "run"]
"""Processes whose values are gathered: the ranks of this pipeline; those with this process's parameters; those with its rank
in their pipelines; or all of the run."""


class Collectives(Protocol):
    """Collectives whose waits end early if a process has ended."""

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup | None, action: str) -> None:
        """Sum a tensor over the processes of a group, in place."""

    def start(
        self,
        start: Callable[[], Any],
        values: Tensor,
        group: dist.ProcessGroup | None,
        action: str,
        look: Callable[[], None],
    ) -> Callable[[], object]:
        """Start a collective, and return a function that waits for it, and calls `look` meanwhile, which may raise."""


class Processes(Protocol):
    """The processes of a run, as the axes of its mesh use them; all of them make the same calls in the same order."""

    @property
    def collectives(self) -> Collectives:
        """The collectives of the run."""

    @property
    def device_type(self) -> str:
        """Type of the devices that have the weights."""

    def lines(self, line_of: Callable[[int], list[int]]) -> list[list[int]]:
        """Return the lines of the mesh that a function gives by rank, as ranks in ``torch.distributed``."""

    def open_group(self, lines: list[list[int]]) -> dist.ProcessGroup:
        """Make a communicator for each line, and return the one of this process; it ends with the run's."""

    def end_group(self, group: dist.ProcessGroup) -> None:
        """End a communicator of `open_group`."""

    def named_group(self, name: str, ranks: list[int]) -> dist.ProcessGroup:
        """Return the one communicator of some ranks for DTensors, which only they ask for; it is not ended."""

    def open_reducer(self, group: dist.ProcessGroup) -> GroupReducer:
        """Return this process's end of sums of gradients over a group."""

    def open_store(self) -> Any:
        """Return a connection of its own to the rendezvous store."""

    def on_release(self, release: Callable[[], None]) -> None:
        """Have a function called when all communicators end."""

    def gather(self, value: Any, over: Over = "pipeline", action: str = "exchange values") -> list[Any]:
        """Return the values of some processes, by rank."""

    def sum_over_stage(self, values: Tensor, action: str) -> None:
        """Sum a tensor over the processes with this one's rank in their pipelines, in place."""


@dataclass(frozen=True)
class AxisOptions:
    """Options of a pipeline for its axes.

    Attributes:
        family: model family whose matrices are sharded.
        sequence_parallel: whether activations between the blocks are sharded, too.
        compile: what ``torch.compile`` gets: "none", or else "block" or "stage".
    """

    family: str
    sequence_parallel: bool
    compile: str


class GivenLoss(NamedTuple):
    """The loss function of a pipeline.

    Attributes:
        function: called with an output and, unless it takes none, its target.
        reduction: how the losses of microbatches are joined; see `Pipeline`.
        shifts: whether targets are shifted before the batch is cut, since the function no longer does it.
    """

    function: LossFunction
    reduction: Any
    shifts: bool = False


class Axis:
    """One axis, once its processes have met. Methods do nothing unless they are overridden.

    Attributes:
        name: name of its size in `MeshShape`.
        exchanges: whether layers exchange values within a step, so that all processes run the same ones.
        divides_parameters: whether each process has a part of some parameters.
    """

    name: ClassVar[str]
    exchanges = False
    divides_parameters = False

    def __init__(self, processes: Processes, mesh: Mesh) -> None:
        """Open what the axis needs; every process of the run calls it."""
        self.processes, self.mesh = processes, mesh

    @staticmethod
    def take_loss(shape: MeshShape, loss: GivenLoss, dims: Mapping[str, object] | None) -> GivenLoss:
        """Return the loss function to use in place of another one, or raise ConfigError if it does not fit the axis.

        Args:
            dims: the argument of `Pipeline` of that name.
        """
        return loss

    @property
    def division(self) -> SampleDivision | None:
        """The division of samples among its processes; None if each has whole samples."""
        return None

    @property
    def participants(self) -> Sequence[Participant]:
        """Participants in the steps of this process, within the messages of its pipeline."""
        return ()

    def prepare(self, layers: Layers, options: AxisOptions) -> None:
        """Have the layers of this process compute on its part of the axis; every process of the run calls it.

        Raises:
            ConfigError: on every process, if a layer or an option does not fit; names it.
        """

    def wrap_loss(
        self, loss_fn: Callable[..., Any], weight: Callable[[Any], object] | None
    ) -> Callable[..., Any]:
        """Return what computes the loss of this process's part in place of a loss function.

        Args:
            weight: function from a target to its weight in the loss; None for a sum.
        """
        return loss_fn

    def require_known(self, layers: Layers) -> None:
        """Raise ConfigError on every process if the first step has shown that layers do not know their part."""

    def open_reducer(self) -> GroupReducer | None:
        """Return this process's end of the sums of gradients of parameters that the axis divides.

        None if it divides none, or each process has its own part of them, so that its gradients are complete.
        """
        return None

    def sum_norms(self, squares: Mapping[str, Tensor], present: Tensor, over_replicas: bool) -> None:
        """Sum, in place, what the processes of the axis know of the norms of parameters that they divide.

        Args:
            squares: by axis, squares of the norms of this process's parts, by position of the parameter, float64.
            present: which gradients there are.
            over_replicas: whether replicas divide them, too (ZeRO).
        """

    def record_kept(self) -> AbstractContextManager[None]:
        """Return a context with other steps, after which what is recorded is of the step before it."""
        return nullcontext()

    def load(self) -> ProcessLoad | None:
        """Return the work that the axis gave this process in the last step, if it divides work unequally."""
        return None

    def undo(self, layers: Layers) -> None:
        """Give the user's layers back what `prepare` has replaced, once the pipeline is closed."""
