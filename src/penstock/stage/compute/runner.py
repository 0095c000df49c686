"""One run of a stage's layers on a microbatch, from input messages to output messages or the loss, and what it leaves.

A stage takes and returns tuples of messages: first the value from the previous stage (or for the next one), then one
message for each skip, in the order of the Program's routes. Gradients travel back through the same routes. Until then the
stage keeps the graph of every run (`SavedGraph`), or its inputs (`SavedInputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.stage.compute.inplace import InPlace
from penstock.stage.compute.linear_cross_entropy import CHUNKS, log_probs
from penstock.stage.compute.offload import offloaded
from penstock.stage.compute.postponed_logits import PostponedLogits, postponing
from penstock.stage.compute.recompute import Policy, Segment, transforms_refused
from penstock.stage.input_grads import InputGrads
from penstock.stage.memory_groups import Watched, require_unwritten, storage_of
from penstock.stage.module import StageModule
from penstock.stage.named import Context, IsolatedCall, set_context
from penstock.stage.rng.random_state import RandomState
from penstock.stage.same_values import same_values
from penstock.stage.split_backward.deferring import defer_weight_grads
from penstock.stage.split_backward.weight_grad import WeightGradQueue
from penstock.stage.values import Message, StageState, leaves_of, pack, unpack

_LOSS = "(loss)"
"""Name under which the loss function draws random numbers; no layer has it."""

LossFunction = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
Messages = tuple[Message, ...]


@dataclass(frozen=True)
class Settings:
    """Compute settings that all stages of a pipeline share; see `penstock.Pipeline`.

    Attributes:
        every_backward: whether a microbatch that does not count has a backward all the same, since layers of other replicas
            wait for this one's.
    """

    recompute: Policy = "none"
    offload: bool = False
    autocast: torch.dtype | None = None
    random: RandomState | None = None
    strict: bool = False
    every_backward: bool = False


@dataclass(frozen=True)
class StageRoutes:
    """Named values that a stage sends on besides its output.

    Attributes:
        skips: for each skip that begins here, the names that travel in it.
    """

    onward: frozenset[str] = frozenset()
    skips: tuple[tuple[str, ...], ...] = ()


class LossWeight(NamedTuple):
    """Weight of a microbatch's loss in the loss of the step.

    Attributes:
        factor: multiplier of the loss; 0 leaves the microbatch out.
    """

    factor: float = 1.0
    divisor: int = 1
    scale: float = 1.0

    def apply(self, loss: Tensor) -> Tensor:
        """Return the weighted loss, from which the backward starts."""
        # A division, as in accumulation by hand: a product with 1 / divisor may differ in the last bit.
        if self.divisor != 1:
            loss = loss / self.divisor
        if self.factor != 1.0:
            loss = loss * self.factor
        return loss if self.scale == 1.0 else loss * self.scale

    @property
    def weight(self) -> float:
        """Weight of the loss in the step's loss, without the loss scale."""
        return self.factor / self.divisor


class LossReport(NamedTuple):
    """Losses of a microbatch, as 0-d tensors without a graph.

    Attributes:
        loss: their sum; or the logarithms of the targets' probabilities, of the target's shape.
        parts: losses by name; ``"loss"`` is the one of a `loss_fn` that returns a single tensor.
        has_graph: whether the loss counts and has a graph, so that its backward can start.
    """

    loss: Tensor | None
    parts: dict[str, Tensor]
    output: object
    has_graph: bool = False


class LossInputs(NamedTuple):
    """Inputs of the loss on the last stage.

    Attributes:
        log_probs: whether the logarithms of the targets' probabilities are computed in place of the loss.
    """

    target: object
    loss_weight: LossWeight = LossWeight()
    keep_output: bool = False
    log_probs: bool = False


class SegmentOutput(NamedTuple):
    """Result of a segment's forward."""

    messages: Messages
    roots: tuple[Tensor, ...]
    report: LossReport | None


class Runner:
    """A stage's layers, ready to run."""

    def __init__(
        self,
        index: int,
        module: StageModule,
        loss_fn: LossFunction | None,
        settings: Settings,
        routes: StageRoutes,
    ) -> None:
        self.index = index
        self.module = module
        self.loss_fn = loss_fn
        self.settings = settings
        self.routes = routes
        self.step = 0
        self.first_microbatch = 0
        self.in_place = InPlace()
        self._watched: list[Watched] = []  # inputs of the segment that share memory
        self._modes = 0  # number of the modules' modes among those seen so far
        self._seen_modes: dict[tuple[bool, ...], int] = {}
        self._rng_free: set[str] = set()
        self._trained: list[nn.Parameter] = []
        self._device_type = "cpu"

    def begin(self, step: int, first_microbatch: int) -> None:
        """Begin a step; see `Stage.begin`."""
        self.step = step
        self.first_microbatch = first_microbatch
        self._rng_free.clear()
        self._modes = self._seen_modes.setdefault(self.module.modes, len(self._seen_modes))
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        self._device_type = next((p.device.type for p in self.module.parameters()), "")

    def join(self, inputs: Messages, segment: Segment) -> tuple[StageState, InputGrads]:
        """Assemble the input messages of a segment; return the state, and the tensors that collect a gradient."""
        input_grads = InputGrads()
        if not self._device_type:  # layers without parameters compute where their input is
            leaves = (leaf for message in inputs for leaf in message.leaves)
            self._device_type = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        transform = None
        known = (segment.start, segment.stop, self._modes) in self.in_place.passthrough
        # A compiled module would be compiled once for copies, and again for its later inputs.
        if (not known or segment.recompute) and self.module.compiled is None:
            transform = self.in_place.input_transform(segment, self._modes, inputs)
        watched: list[Watched] = []
        self._watched = watched
        value = unpack(inputs[0], transform, input_grads, watched)
        state = value if isinstance(value, StageState) else StageState(value, {}, {})
        for message in inputs[1:]:
            named = unpack(message, transform, input_grads, watched)
            assert isinstance(named, dict)
            state = StageState(state.value, state.named | named, state.losses)
        return state, input_grads

    def advance(
        self,
        segment: Segment,
        microbatch: int,
        state: StageState,
        loss_inputs: LossInputs | None,
        queue: WeightGradQueue | None,
    ) -> SegmentOutput:
        """Run a segment's layers and, after the last layer of the last stage, the loss."""
        isolated_call = self._isolated_call(microbatch)
        context = Context(
            dict(state.named),
            dict(state.losses),
            self.module.gives,
            isolated_call,
            self._rng_free,
            self.first_microbatch + microbatch,
        )
        if queue is not None:
            queue.running = True
        try:
            last = segment.stop == len(self.module.layers)
            if last and loss_inputs is not None and self._postpones_logits(loss_inputs):
                with postponing(self.module.layers[-1]):
                    value = self._run_layers(segment, state.value, context, queue)
            else:
                value = self._run_layers(segment, state.value, context, queue)
            linked = self._require_unwritten() if self._watched else {}
            if not last:
                state = StageState(value, context.named, context.losses)
                message, roots = pack(state, travels=False, linked=linked)
                return SegmentOutput((message,), roots, None)
            if self.loss_fn is None:
                return self._stage_output(value, context, linked)
            if loss_inputs is None:
                return SegmentOutput((), (), LossReport(None, {}, _detached(value)))
            if loss_inputs.log_probs:
                found = self._log_probs(value, loss_inputs.target)
                return SegmentOutput((), (), LossReport(found, {}, None))
            return self._loss_output(value, context, loss_inputs)
        finally:
            if queue is not None:
                queue.running = False

    def _postpones_logits(self, loss_inputs: LossInputs) -> bool:
        asked = loss_inputs.log_probs or getattr(self.loss_fn, "postpones_logits", False)
        return asked and self.module.compiled is None

    def _log_probs(self, value: object, target: object) -> Tensor:
        assert isinstance(target, Tensor), "what a Pipeline takes"
        with self._autocast():
            return log_probs(value, target, getattr(self.loss_fn, "chunks", CHUNKS))

    def _isolated_call(self, microbatch: int) -> IsolatedCall | None:
        random, step = self.settings.random, self.step
        if random is None:
            return None
        number, rng_free = self.first_microbatch + microbatch, self._rng_free

        def isolated_call(name: str, layer: Any, call: Callable[[], Any]) -> Any:
            result = random.run(name, layer, step, number, call)
            if random.is_rng_free(layer, step):
                rng_free.add(name)
            return result

        return isolated_call

    def _run_layers(
        self, segment: Segment, value: Any, context: Context, queue: WeightGradQueue | None
    ) -> Any:
        previous = set_context(context)
        try:
            if queue is None and self.settings.autocast is None:
                value = self.module.run(value, context, segment.start, segment.stop)
            else:
                with self._autocast(), defer_weight_grads(queue, self._trained) if queue else nullcontext():
                    value = self.module.run(value, context, segment.start, segment.stop)
        except BaseException as error:
            self.in_place.on_error(error)
            raise
        finally:
            set_context(previous)
        if self.in_place.watching:
            self.in_place.after_forward()
        if context.named:
            context.require_unwritten()
        return value

    def _require_unwritten(self) -> dict[int, Hashable]:
        """Check the inputs that share memory, and return their storages with the keys of their groups."""
        watched, self._watched = self._watched, []
        require_unwritten(watched)
        return {s: one.group for one in watched if (s := storage_of(one.tensor)) is not None}

    def _stage_output(self, value: object, context: Context, linked: Mapping[int, Hashable]) -> SegmentOutput:
        onward = {n: context.named[n] for n in sorted(self.routes.onward) if n in context.named}
        output = StageState(value, onward, context.losses) if onward or context.losses else value
        if not self.routes.skips:
            message, roots = pack(output, linked=linked)
            return SegmentOutput((message,), roots, None)
        parts = [output]
        for names in self.routes.skips:
            if missing := [n for n in names if n not in context.named]:
                raise PenstockError(
                    f"no layer of stage {self.index} gave {', '.join(map(repr, missing))}, which a later layer takes"
                )
            parts.append({n: context.named[n] for n in names})
        tensors = [[leaf for leaf in leaves_of(part) if isinstance(leaf, Tensor)] for part in parts]
        packed = [
            pack(part, linked=linked, outside=[*chain.from_iterable(tensors[:n] + tensors[n + 1 :])])
            for n, part in enumerate(parts)
        ]
        return SegmentOutput(
            tuple(m for m, _ in packed), tuple(r for _, roots in packed for r in roots), None
        )

    def _loss_output(self, value: object, context: Context, loss_inputs: LossInputs) -> SegmentOutput:
        isolated_call = context.isolated_call
        with self._autocast():
            if loss_inputs.keep_output and isinstance(value, PostponedLogits):
                value = value.logits()
            if isolated_call is None or _LOSS in self._rng_free:
                parts = self._losses(value, loss_inputs.target)
            else:
                parts = isolated_call(_LOSS, self.loss_fn, partial(self._losses, value, loss_inputs.target))
        for name, loss in context.losses.items():
            parts[name] = parts[name] + loss if name in parts else loss
        losses = list(parts.values())
        loss = losses[0] if len(losses) == 1 else reduce(torch.add, losses)
        # A microbatch that does not count (no valid token, say) may have a loss of 0/0, and has no backward.
        counts = loss_inputs.loss_weight.factor and loss.requires_grad
        roots: tuple[Tensor, ...] = (loss_inputs.loss_weight.apply(loss),) if counts else ()
        if self.settings.every_backward and not counts:
            roots = _zeros_of(value)
        report = LossReport(
            loss.detach(),
            {name: part.detach() for name, part in parts.items()},
            _detached(value) if loss_inputs.keep_output else None,
            bool(roots),
        )
        return SegmentOutput((), roots, report)

    def _losses(self, output: object, target: object) -> dict[str, Tensor]:
        assert self.loss_fn is not None
        returned = self.loss_fn(output, target)
        parts = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        for name, loss in parts.items():
            if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
                kind = (
                    f"a {str(loss.dtype).removeprefix('torch.')} tensor of shape {tuple(loss.shape)}"
                    if isinstance(loss, Tensor)
                    else type(loss).__name__
                )
                where = f" for {name!r}" if isinstance(returned, Mapping) else ""
                raise PenstockError(
                    "loss_fn must return a scalar tensor of a real floating-point dtype, the mean over its microbatch, or "
                    f"several by name; it returned {kind}{where}"
                )
        if not parts:
            raise PenstockError(
                "loss_fn returned no loss; it must return a scalar tensor, or several by name"
            )
        return parts

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.settings.autocast
        return nullcontext() if dtype is None else torch.autocast(self._device_type, dtype=dtype)

    def offloading(self) -> AbstractContextManager[Any]:
        """Return a context that keeps tensors saved for the backward in host memory, if the settings ask for it."""
        return self._offloading() if self.settings.offload else nullcontext()

    @contextmanager
    def _offloading(self) -> Iterator[None]:
        with transforms_refused("offload=False"), offloaded(self.module.parameters()):
            yield


def _detached(value: object) -> object:
    packed = pack(value, travels=False)[0]
    return unpack(packed._replace(needs_grad=(False,) * len(packed.leaves)))


def _zeros_of(value: object) -> tuple[Tensor, ...]:
    """Return a root of the graph whose backward gives a last layer's output the gradient 0, whatever its loss is."""
    leaves = [value.logits()] if isinstance(value, PostponedLogits) else leaves_of(value)
    sums = [(x * 0).sum() for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    return (reduce(torch.add, sums),) if sums else ()


class SavedGraph(NamedTuple):
    """A segment whose graph is kept: the collectors of its input gradients, and the roots of its backward."""

    input_grads: InputGrads
    roots: tuple[Any, ...]  # gradient edges; on the last stage the weighted loss

    def backward(self, grads: Sequence[Tensor | None] | None, stage: int, microbatch: int) -> None:
        """Run the backward of the segment.

        Args:
            grads: gradient of each root, None for a root without one; None instead of the list to start from the loss.
        """
        if grads is None:
            if self.roots:
                torch.autograd.backward(self.roots)
            return
        if len(grads) != len(self.roots):
            raise PenstockError(
                f"stage {stage}, microbatch {microbatch}: {len(grads)} gradient(s) came back for {len(self.roots)} "
                "output(s) that need one"
            )
        pairs = [(r, g) for r, g in zip(self.roots, grads, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])


class SavedInputs(NamedTuple):
    """A segment that runs again before its backward.

    Attributes:
        buffers: values of its changing buffers before the first forward.
        output: result of the first forward, to compare with; None after the first microbatch.
    """

    segment: Segment
    inputs: Messages
    buffers: list[Tensor]
    loss_inputs: LossInputs | None
    output: SegmentOutput | None


class SavedMicrobatch(NamedTuple):
    """State for the backward of one microbatch."""

    segments: list[SavedGraph | SavedInputs]
    grad_counts: tuple[int, ...]  # number of leaves in each input message that collect a gradient
    queue: WeightGradQueue | None


class LayerBytes(NamedTuple):
    """Memory that one layer keeps for one microbatch.

    Attributes:
        kept: bytes from its forward to its backward if it is not recomputed.
        inputs: bytes of its inputs, all that it keeps if it is recomputed.
    """

    kept: int
    inputs: int


def require_same(first: SegmentOutput, again: SegmentOutput, layers: Sequence[str]) -> None:
    """Compare the first output of a recomputed segment with its second."""
    one, other = _tensors(first), _tensors(again)
    if len(one) == len(other) and all(same_values(a, b) for a, b in zip(one, other, strict=True)):
        return
    names = ", ".join(map(repr, layers))
    raise PenstockError(
        f"layer {names} returns something else when it runs again for its backward: it keeps state in Python, or draws from "
        "its own generator, which a second forward changes again. Keep that state in buffers and draw by torch's "
        "functions, or use recompute='none'"
    )


def _tensors(output: SegmentOutput) -> list[Tensor]:
    leaves = [x for message in output.messages for x in message.leaves if isinstance(x, Tensor) and x.numel()]
    if output.report is not None and output.report.loss is not None:
        leaves.append(output.report.loss)
    return leaves
