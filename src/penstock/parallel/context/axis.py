"""Context parallelism as an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.base.errors import ConfigError
from penstock.parallel.axis import Axis, AxisOptions, GivenLoss, Layers, Processes
from penstock.parallel.context.attention import SequencePart
from penstock.parallel.context.divided_loss import DividedLoss
from penstock.parallel.context.exchange import TokenExchange
from penstock.parallel.context.samples import asks_for_positions, divide_samples, undo_samples
from penstock.parallel.context.tokens import TokenDivision
from penstock.parallel.mesh import Mesh, MeshShape
from penstock.parallel.participant import Participant
from penstock.parallel.replicas.exchange import run_each
from penstock.parallel.sample_parts import SampleDivision
from penstock.stage.compute.output_loss import OutputLoss
from penstock.stage.compute.shifted_loss import without_shift


class Context(Axis):
    """The processes that divide the tokens of samples (cp)."""

    name = "cp"
    exchanges = True

    def __init__(self, processes: Processes, mesh: Mesh) -> None:
        super().__init__(processes, mesh)
        self._part = SequencePart(mesh.coordinate("cp"), mesh.shape.cp)
        self._exchange = TokenExchange(processes, mesh)
        self._known = False

    @staticmethod
    def take_loss(shape: MeshShape, loss: GivenLoss, dims: Mapping[str, object] | None) -> GivenLoss:
        if isinstance(loss.function, OutputLoss):
            raise ConfigError(
                f"the loss takes no target, by whose tokens cp = {shape.cp} weighs the parts of a sample; leave cp at 1"
            )
        if dims:
            raise ConfigError(
                f"dims={dims!r} cannot be used with cp = {shape.cp}, which divides dimension 1; leave it out"
            )
        unshifted = without_shift(loss.function, loss.reduction)
        return loss if unshifted is None else GivenLoss(*unshifted, shifts=True)

    @property
    def division(self) -> SampleDivision:
        return TokenDivision(self._part.parts)

    @property
    def participants(self) -> Sequence[Participant]:
        return [self._exchange]

    def prepare(self, layers: Layers, options: AxisOptions) -> None:
        run_each(lambda: self._divide(layers, options), partial(self.processes.gather, over="run"))

    def _divide(self, layers: Layers, options: AxisOptions) -> None:
        parts = self._part.parts
        if options.compile != "none":
            raise ConfigError(
                f"compile={options.compile!r} cannot be used with cp = {parts}, whose exchange of keys and values is not "
                "compiled; leave compile out"
            )
        if options.sequence_parallel:
            raise ConfigError(
                f"sequence parallelism (with tp) cannot be used with cp = {parts}, which divides the same tokens; "
                "leave one of them out"
            )
        divide_samples(layers, self._part, self._exchange)

    def wrap_loss(
        self, loss_fn: Callable[..., Any], weight: Callable[[Any], object] | None
    ) -> Callable[..., Any]:
        """Have the first loss compared with that of whole samples."""
        return DividedLoss(loss_fn, self._part, self._exchange, weight)

    def require_known(self, layers: Layers) -> None:
        """Require that a layer of the pipeline asked for the positions of its tokens in the forwards so far.

        Other positions change little in a model that is not trained yet, so that comparing values does not find them.
        """
        if self._known:
            return
        asked = asks_for_positions(layers)
        if not any(self.processes.gather(asked, action="compare the positions of tokens")):
            raise ConfigError(
                "no layer called penstock.sequence_positions, and with cp a layer that counts its tokens itself has other "
                "positions than in whole samples; call it where the model makes positions, or leave cp at 1"
            )
        self._known = True

    def undo(self, layers: Layers) -> None:
        undo_samples(layers)
