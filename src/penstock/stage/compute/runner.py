"""A run of a stage's layers on one microbatch: from messages to messages, or to the loss.

What a stage takes and hands on are tuples of messages: first the value of the stage before or for the stage after, then
one for each skip, in the order of the Program's routes. Gradients travel back through the same routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from penstock.errors import PenstockError
from penstock.stage.compute.inplace import InPlace
from penstock.stage.compute.recompute import Policy, Segment, transforms_refused
from penstock.stage.module import StageModule
from penstock.stage.named import Context, Draw, enter
from penstock.stage.rng.random_state import RandomState
from penstock.stage.split_backward.deferring import defer_weight_grads
from penstock.stage.split_backward.weight_grad import Queue
from penstock.stage.values import Collecting, Message, StageState, pack, unpack

_LOSS = "(loss)"
"""Under which name the loss function draws random numbers; no layer is called so."""

LossFunction = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Settings:
    """How the stages of a pipeline compute; see `penstock.Pipeline` for what each means.

    Attributes:
        recompute: which layers drop what they saved.
        offload: keep what is saved for the backward in host memory.
        autocast: the dtype of mixed precision; None for none.
        random: the layers' random numbers; None leaves them to torch's default generators.
        strict: refuse layers whose backward cannot be split, instead of running their full backward.
    """

    recompute: Policy = "none"
    offload: bool = False
    autocast: torch.dtype | None = None
    random: RandomState | None = None
    strict: bool = False


@dataclass(frozen=True)
class StageRoutes:
    """What a stage hands on besides its output.

    Attributes:
        onward: names of the values that travel on with the output.
        skips: for each skip that begins here, the names that travel in it.
    """

    onward: frozenset[str] = frozenset()
    skips: tuple[tuple[str, ...], ...] = ()


class LossWeight(NamedTuple):
    """How much of a microbatch's loss counts.

    Attributes:
        factor: the loss is multiplied with it; 0 leaves the microbatch out.
        divisor: the loss is divided by it, as plain gradient accumulation divides.
        scale: the loss scale of half precision.
    """

    factor: float = 1.0
    divisor: int = 1
    scale: float = 1.0

    def of(self, loss: Tensor) -> Tensor:
        """The part that the backward starts from."""
        if self.divisor != 1:
            loss = loss / self.divisor
        if self.factor != 1.0:
            loss = loss * self.factor
        return loss if self.scale == 1.0 else loss * self.scale

    @property
    def weight(self) -> float:
        """What the loss is weighed with in the step's."""
        return self.factor / self.divisor


class LossReport(NamedTuple):
    """What the last stage says of a microbatch: losses are 0-d tensors without a graph.

    Attributes:
        loss: the sum of `parts`.
        parts: by name; ``"loss"`` is what a `loss_fn` without names returned.
        output: the stage's output without a graph, if it was wanted.
        has_graph: whether the loss counts and has a graph, so that its backward can start.
    """

    loss: Tensor | None
    parts: dict[str, Tensor]
    output: object
    has_graph: bool = False


class LossInputs(NamedTuple):
    """What the last stage needs to end a microbatch: its target, its share, and whether its output is wanted."""

    target: object
    share: LossWeight = LossWeight()
    keep_output: bool = False


class SegmentOutput(NamedTuple):
    """What a segment's forward made."""

    messages: Messages
    roots: tuple[Tensor, ...]
    report: LossReport | None


class Runner:
    """A stage's layers, ready to run.

    Args:
        index: the stage's number in the whole model.
        module: its layers.
        loss_fn: on the last stage ``loss_fn(output, target)``: a scalar, or scalars by name, whose sum is the loss.
        settings: how it computes.
        wiring: what it hands on besides its output.

    Attributes:
        step, first_microbatch: as `begin` was told.
        in_place: which layers write into what they are given.
    """

    def __init__(
        self,
        index: int,
        module: StageModule,
        loss_fn: LossFunction | None,
        settings: Settings,
        wiring: StageRoutes,
    ) -> None:
        self.index = index
        self.module = module
        self.loss_fn = loss_fn
        self.settings = settings
        self.wiring = wiring
        self.step = 0
        self.first_microbatch = 0
        self.in_place = InPlace()
        self._quiet: set[str] = set()
        self._device_type = "cpu"

    def begin(self, step: int, first_microbatch: int) -> None:
        """A step begins; see `Stage.begin`."""
        self.step = step
        self.first_microbatch = first_microbatch
        self._quiet.clear()
        self._device_type = next((p.device.type for p in self.module.parameters()), "cpu")

    def join(self, inputs: Messages, segment: Segment) -> tuple[StageState, Collecting]:
        """The messages put together for a segment; returns the value, and what of it collects a gradient."""
        collecting = Collecting()
        hand, training = None, self.module.training
        known = (segment.start, segment.stop, training) in self.in_place.as_they_are
        # A compiled module would be compiled once for copies, and again for what it gets from then on.
        if (not known or segment.recompute) and self.module.compiled is None:
            hand = self.in_place.handing(segment, training, inputs)
        value = unpack(inputs[0], hand, collecting)
        state = value if isinstance(value, StageState) else StageState(value, {}, {})
        for message in inputs[1:]:
            named = unpack(message, hand, collecting)
            assert isinstance(named, dict)
            state = StageState(state.value, state.named | named, state.losses)
        return state, collecting

    def advance(
        self,
        segment: Segment,
        microbatch: int,
        state: StageState,
        ends: LossInputs | None,
        queue: Queue | None,
    ) -> SegmentOutput:
        """Run a segment's layers, and at the end of the last stage the loss.

        Args:
            segment: which layers.
            microbatch: which.
            state: what `join` made.
            ends: on the last stage; None elsewhere, and where there is no target.
            queue: takes the weight gradients if the backward is split.
        """
        if queue is None:
            return self._advance(segment, microbatch, state, ends, None)
        queue.running = True
        try:
            return self._advance(segment, microbatch, state, ends, queue)
        finally:
            queue.running = False

    def _advance(
        self,
        segment: Segment,
        microbatch: int,
        state: StageState,
        ends: LossInputs | None,
        queue: Queue | None,
    ) -> SegmentOutput:
        draw = self._draw(microbatch)
        context = Context(dict(state.named), dict(state.losses), self.module.gives, draw, self._quiet)
        before = enter(context)
        try:
            if queue is None and self.settings.autocast is None:
                value = self.module.run(state.value, context, segment.start, segment.stop)
            else:
                with self._autocast(), defer_weight_grads(queue) if queue else nullcontext():
                    value = self.module.run(state.value, context, segment.start, segment.stop)
        except BaseException as error:
            self.in_place.failed(error)
            raise
        finally:
            enter(before)
        if self.in_place.watches:
            self.in_place.ran()
        if context.named:
            context.require_unwritten()
        if segment.stop < len(self.module.layers):
            message, roots = pack(StageState(value, context.named, context.losses), travels=False)
            return SegmentOutput((message,), roots, None)
        if self.loss_fn is None:
            return self._hand_on(value, context)
        if ends is None:
            return SegmentOutput((), (), LossReport(None, {}, _detached(value)))
        with self._autocast():
            if draw is None or _LOSS in self._quiet:
                parts = self._losses(value, ends.target)
            else:
                parts = draw(_LOSS, self.loss_fn, partial(self._losses, value, ends.target))
        for name, loss in context.losses.items():
            parts[name] = parts[name] + loss if name in parts else loss
        losses = list(parts.values())
        loss = losses[0] if len(losses) == 1 else reduce(torch.add, losses)
        # A microbatch that does not count (no valid token, say) may have a loss of 0/0, and has no backward.
        roots = (ends.share.of(loss),) if ends.share.factor and loss.requires_grad else ()
        report = LossReport(
            loss.detach(),
            {name: part.detach() for name, part in parts.items()},
            _detached(value) if ends.keep_output else None,
            bool(roots),
        )
        return SegmentOutput((), roots, report)

    def _draw(self, microbatch: int) -> Draw | None:
        random, step = self.settings.random, self.step
        if random is None:
            return None
        number, quiet = self.first_microbatch + microbatch, self._quiet

        def draw(name: str, layer: Any, call: Callable[[], Any]) -> Any:
            result = random.run(name, layer, step, number, call)
            if random.quiet(layer, step):
                quiet.add(name)
            return result

        return draw

    def _hand_on(self, value: object, context: Context) -> SegmentOutput:
        onward = {n: context.named[n] for n in sorted(self.wiring.onward) if n in context.named}
        whole = StageState(value, onward, context.losses) if onward or context.losses else value
        message, roots = pack(whole)
        messages = [message]
        for names in self.wiring.skips:
            if missing := [n for n in names if n not in context.named]:
                raise PenstockError(
                    f"no layer of stage {self.index} gave {', '.join(map(repr, missing))}, which a later layer takes"
                )
            skip, more = pack({n: context.named[n] for n in names})
            messages.append(skip)
            roots += more
        return SegmentOutput(tuple(messages), roots, None)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.settings.autocast
        return nullcontext() if dtype is None else torch.autocast(self._device_type, dtype=dtype)

    def offloading(self) -> AbstractContextManager[Any]:
        """Within it what is saved for the backward goes to host memory, if the settings say so."""
        return self._offloading() if self.settings.offload else nullcontext()

    @contextmanager
    def _offloading(self) -> Iterator[None]:
        with transforms_refused("offload=False"), save_on_cpu(self._device_type != "cpu"):
            yield

    def _losses(self, output: object, target: object) -> dict[str, Tensor]:
        """The microbatch's losses by name, each checked to be a scalar tensor."""
        assert self.loss_fn is not None
        found = self.loss_fn(output, target)
        parts = dict(found) if isinstance(found, Mapping) else {"loss": found}
        for name, loss in parts.items():
            if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
                given = (
                    f"a {str(loss.dtype).removeprefix('torch.')} tensor of shape {tuple(loss.shape)}"
                    if isinstance(loss, Tensor)
                    else type(loss).__name__
                )
                where = f" for {name!r}" if isinstance(found, Mapping) else ""
                raise PenstockError(
                    "loss_fn must return a scalar tensor of a real floating-point dtype, the mean over its microbatch, or "
                    f"several by name; it returned {given}{where}"
                )
        if not parts:
            raise PenstockError(
                "loss_fn returned no loss; it must return a scalar tensor, or several by name"
            )
        return parts


def _detached(value: object) -> object:
    packed = pack(value, travels=False)[0]
    return unpack(packed._replace(needs_grad=(False,) * len(packed.leaves)))
