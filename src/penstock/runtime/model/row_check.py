"""Check after a first step that the rows of a batch do not depend on each other, so that it may be cut into microbatches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.base.encoding import sendable
from penstock.base.errors import PeerError, SplitError, StageError, first_line
from penstock.forward.loss_reach import modules_called, parts_of
from penstock.parallel.dtensor import local
from penstock.parallel.opened import open_parameters
from penstock.parallel.participant import Losses
from penstock.runtime.batch.work import LocalBatch, Work
from penstock.runtime.engine import Probe
from penstock.runtime.local_stages import Modules
from penstock.runtime.model.python_state import python_state_kept
from penstock.runtime.workers.world import World
from penstock.schedule.ops import Op
from penstock.stage.compute.postponed_logits import PostponedLogits
from penstock.stage.layers import source_of
from penstock.stage.values import leaves_of

_SAMPLE = 4096
"""Most numbers of one row that are compared."""

_NEAR_ROWS = {8: 1e-8, 4: 1e-3, 2: 2e-2, 1: 1.0}
"""By bytes of an element, the difference that another order of sums explains in a row, of the row's norm."""

_CLEAR = 0.05
"""The difference from which rows surely depend on each other: of nn.LSTM it is about 0.6, of nn.TransformerEncoderLayer 0.2
for 2 rows and 0.04 for 64. Numbers of 8 bits with one scale for a whole tensor differ by up to 0.04."""

_NEAR_LOSS = {8: 1e-9, 4: 2e-5, 2: 1e-2, 1: 1.0}
"""The same of losses, which are means of many numbers."""


class RowCheck:
    """Comparison of two microbatches that run alone and together, in evaluation mode, after a first step.

    Every layer's output for both together must have the rows that it has for each alone, and the loss must be the one that
    the pipeline makes from the two. Parameters that begin at a constant have other values meanwhile (see `opened`).

    Args:
        modules: modules of the stages of this process, by rank and stage.
        loss_fn: the loss function.
        itemsize: bytes of an element of the lowest precision that layers compute in.
    """

    def __init__(
        self,
        modules: Modules,
        loss_fn: object,
        *,
        world: World | None,
        reduction: object,
        itemsize: int,
    ) -> None:
        self._modules, self._loss_fn = modules, loss_fn
        self._world, self._reduction, self._itemsize = world, reduction, itemsize
        self._step, self._warned = "step", False
        self._versions: dict[int, int | None] = {}

    def before(self) -> None:
        """Remember the parameters as they are before a step, to see which of them its forwards write into."""
        self._versions = {id(p): _version(p) for p in self._parameters()}

    def _parameters(self) -> list[nn.Parameter]:
        every = (p for module in self._modules.values() for p in module.parameters())
        return [*{id(p): p for p in every}.values()]

    def run(
        self,
        together: Sequence[LocalBatch],
        forwards: Callable[[LocalBatch, Probe], list[Work]],
        warned: bool,
        step: str,
    ) -> None:
        """Check the rows; every process of the run calls it.

        Args:
            together: three microbatches: two, and both as one.
            forwards: function that runs the forwards of some of them.
            warned: whether this rank has said already that the loss is not that of the whole batch.
            step: what the first step is called: a step or an evaluation.

        Raises:
            SplitError: if rows depend on each other; names the first layer.
        """
        self._step, warned = step, warned or self._warned
        with ExitStack() as stack:
            of_layers = [inner for module in self._modules.values() for inner in module.modules()]
            of_loss = [inner for module in modules_called(self._loss_fn) for inner in module.modules()]
            every = [*of_layers, *map(source_of, of_layers), *of_loss, *parts_of(self._loss_fn)]
            stack.enter_context(python_state_kept(every))
            # A table with max_norm, say: other rows than the step's are looked up with opened parameters.
            written = [p for p in self._parameters() if self._versions.get(id(p)) != _version(p)]
            stack.enter_context(_values_kept(written))
            stack.enter_context(_uncompiled(self._modules))
            opens = True
            found = self._compare(together, forwards, warned, opens)
            if found.failure is not None:  # a layer may not take other values
                opens = False
                found = self._compare(together, forwards, warned, opens)
            if found.failure is not None:
                self._warn_of_failure(found.failure)
                return
            if found.depends is None and found.problem is None:
                return
            # Does a microbatch have the same outputs twice?
            twice = [_repeated(batch, together[0]) for batch in together[: 2 if len(together) == 3 else 1]]
            steady = self._compare(twice, forwards, warned, opens)
        one, other = steady.losses or (0.0, 0.0)
        if abs(one - other) > _NEAR_LOSS[self._itemsize] * abs(one):
            found = found._replace(problem=None)  # of a loss that draws, or counts its calls
        self._judge(found, steady.unsteady)

    def _compare(
        self,
        batches: Sequence[LocalBatch],
        forwards: Callable[[LocalBatch, Probe], list[Work]],
        warned: bool,
        opens: bool,
    ) -> _Found:
        """Run microbatches, with opened parameters or the layers' own, and return what all ranks found."""
        recorder = _Recorder(self._itemsize)
        losses: dict[int, tuple[Losses, int]] = {}
        failure, start = None, 0
        with recorder.recording(self._modules, opens):
            try:
                for batch in batches:
                    recorder.start = start
                    joined = Losses()
                    for work in forwards(batch, recorder.probe):
                        joined.update(work.losses)
                    losses |= {start + n: (joined, batch.first + n) for n in range(len(batch.weights))}
                    # With two microbatches a step, the second runs again beside both as one.
                    start += len(batch.weights) - (len(batches) == 2 and len(batch.weights) == 2)
            except (StageError, PeerError) as error:
                failure = first_line(error)
        if opens and recorder.infinite:
            failure = "opened parameters give numbers that are not finite"
        problem = None if failure or len(losses) < 3 else self._loss_problem(losses)
        values = [v for n in range(2) if n in losses and (v := _value(*losses[n])) is not None]
        first_two = (values[0], values[1]) if len(values) == 2 else None
        unsteady = recorder.unsteady()
        own = _Found(failure, recorder.depends, recorder.last, unsteady, warned, problem, first_two)
        every = self._gather(own)
        return _Found(
            next((f.failure for f in every if f.failure is not None), None),
            min((f.depends for f in every if f.depends is not None), default=None),
            max(f.last for f in every),
            min((f.unsteady for f in every if f.unsteady is not None), default=None),
            any(f.warned for f in every),
            next((f.problem for f in every if f.problem is not None), None),
            next((f.losses for f in every if f.losses is not None), None),
        )

    def _gather(self, value: Any) -> list[Any]:
        if self._world is None:
            return [value]
        return self._world.gather(value, "run", "check that rows do not depend on each other")

    def _judge(self, found: _Found, unsteady: _Place | None) -> None:
        depends = found.depends
        matters = found.problem is not None or found.last.depends
        if unsteady is not None and (depends is None or unsteady <= depends):
            return  # a layer that draws, or counts its calls, so that nothing after it can be compared
        if depends is not None and matters:
            text = (
                f"in the first {self._step}, layer {depends.name} ({depends.kind}) gave the rows of two microbatches other "
                "values when both ran as one than when each ran alone, in evaluation mode: its rows depend on each other, "
                "so loss and gradients of microbatches are not those of the batch. If dimension 0 is not the batch "
                "(nn.TransformerEncoderLayer, nn.MultiheadAttention and nn.LSTM take (time, batch, width) unless "
                "batch_first=True), give the Pipeline the one that is, dims={'x': 1, 'y': 1}, or dims={NAME: None} for a "
                "keyword input that every microbatch needs whole. If it is meant, use "
                "ExecutionOptions(check_split=False). "
            )
            if depends.distance >= _CLEAR:
                raise SplitError(f"{text}No weight was changed")
            self._warn(f"{text}The values differ little, as with one scale for a whole tensor (8 bits)")
        # A reduction that was chosen is not questioned.
        questions = self._reduction == "mean" and not found.warned
        if found.problem is not None and depends is None and questions:
            self._warned = True
            self._warn(found.problem)

    def _warn_of_failure(self, failure: str) -> None:
        self._warn(
            f"the first {self._step} did not check that the rows of a batch do not depend on each other, since two "
            f"microbatches as one, in evaluation mode, failed: {failure}. A keyword input that does not "
            "have a value for each row needs dims={NAME: None}. ExecutionOptions(check_split=False) leaves the check out"
        )

    def _warn(self, text: str) -> None:
        """Warn on one rank of the run."""
        if self._world is None or (self._world.is_first and self._world.rank == 0):
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _loss_problem(self, losses: Mapping[int, tuple[Losses, int]]) -> str | None:
        """Return how the loss of both microbatches differs from what the pipeline makes of the two; None if equal."""
        values = [_value(*losses[n]) for n in range(3)]
        weights = [found.weights.get(number, 0.0) for found, number in losses.values()]
        known = [v for v in values if v is not None and math.isfinite(v)]
        if len(known) < 3 or not all(weights):
            return None
        expected, together = weights[0] * known[0] + weights[1] * known[1], known[2]
        near = _NEAR_LOSS[self._itemsize] * max(map(abs, known)) + 1e-2 * _NEAR_LOSS[self._itemsize]
        if abs(expected - together) <= near:
            return None
        way = (
            "It weighs its targets, or uses the rows of a batch beside each other. For a mean over weighted targets, give "
            "the Pipeline as reduction a function from a microbatch's target to the sum of its weights; a loss of rows "
            "beside each other (in-batch negatives) is that of each microbatch"
        )
        if abs(known[0] + known[1] - together) <= near:
            way = "It is a sum: with reduction='sum' the loss and gradients are those of the whole batch"
        return (
            f"the loss of two microbatches as one is {together:.6g}, and reduction='mean' makes "
            f"{expected:.6g} from {known[0]:.6g} and {known[1]:.6g}, so that loss and gradients are not those of the "
            f"whole batch. {way}. This is said once; ExecutionOptions(check_split=False) leaves the check out"
        )


def _value(losses: Losses, number: int) -> float | None:
    """Return the loss of a microbatch; terms that layers add to it are of a microbatch by their definition."""
    if number not in losses.total or losses.total[number].dim():  # of log probabilities
        return None
    return float(losses.parts.get(number, {}).get("loss", losses.total[number]))


@sendable
class _Place(NamedTuple):
    """Place of a layer in the model, what it is called, and how far its rows are from what they are alone."""

    stage: int
    number: int
    name: str
    kind: str
    distance: float = 0.0


@sendable
class _Last(NamedTuple):
    """The last layer whose outputs could be compared, and whether its rows depend on each other."""

    stage: int = -1
    number: int = -1
    depends: bool = False


@sendable
class _Found(NamedTuple):
    """Results of a comparison, of one rank or of all.

    Attributes:
        failure: the error of a forward.
        depends: first layer whose rows depend on each other.
        unsteady: first layer whose outputs for the first two microbatches differ.
        warned: whether it was said already that the loss is not that of the whole batch.
        problem: how the loss differs.
        losses: those of the first two microbatches.
    """

    failure: str | None
    depends: _Place | None
    last: _Last
    unsteady: _Place | None
    warned: bool
    problem: str | None
    losses: tuple[float, float] | None


class _Leaf(NamedTuple):
    """Samples of one tensor that a layer returned: by dimension, of its first and its last index."""

    shape: torch.Size
    ends: list[tuple[Tensor, Tensor]]


class _Recorder:
    """Outputs of layers for three microbatches, compared layer by layer.

    Attributes:
        start: number among the three of the microbatch that the next step calls 0.
        depends: first layer whose rows depend on each other.
        infinite: whether a layer of this process gave numbers that are not finite.
    """

    def __init__(self, itemsize: int) -> None:
        self.start = 0
        self.depends: _Place | None = None
        self.last = _Last()
        self.infinite = False
        self._itemsize = itemsize
        self._current: dict[int, int] = {}
        self._outputs: dict[tuple[_Place, int], list[_Leaf]] = {}
        self._restore: dict[int, Callable[[], None]] = {}  # by rank, of the layer that runs

    def probe(self, rank: int, op: Op, run: Callable[[], None]) -> Callable[[], None]:
        """Return an op that first notes which of the three microbatches it is of."""

        def noted() -> None:
            self._current[rank] = self.start + op.microbatch
            run()

        return noted

    @contextmanager
    def recording(self, modules: Modules, opens: bool) -> Iterator[None]:
        """Return a context in which the outputs of all layers are recorded, and their parameters opened if it says so."""
        waits = [(module, module.before) for module in modules.values()]
        for (rank, stage), module in modules.items():
            places = [
                _Place(stage, n, name, type(source_of(layer)).__name__)
                for n, (name, layer) in enumerate(module.named_layers())
            ]
            module.after = partial(self._record, rank, places)
            if opens:
                layers = list(module.named_layers())
                none: list[Callable[[], None] | None] = [None] * len(layers)
                module.before = [
                    partial(self._open, rank, wait, *layer)
                    for wait, layer in zip(module.before or none, layers, strict=True)
                ]
        try:
            yield
        finally:
            for restore in self._restore.values():  # of layers that failed
                restore()
            for module, before in waits:
                module.after, module.before = None, before

    def _open(self, rank: int, wait: Callable[[], None] | None, name: str, layer: nn.Module) -> None:
        if wait is not None:
            wait()  # for the layer's parameters
        self._restore[rank] = open_parameters(name, layer)

    def unsteady(self) -> _Place | None:
        """Return the first layer whose outputs for the first two microbatches differ, where these are the same."""
        # The same kernels have the same shapes here, so the bound is tighter than that of rows.
        near = _NEAR_ROWS[self._itemsize] / 20
        differ = [
            place
            for (place, number), leaves in self._outputs.items()
            if number == 0 and (others := self._outputs.get((place, 1))) is not None
            for one, other in zip(leaves, others, strict=False)
            for pair, other_pair in zip(one.ends, other.ends, strict=False)
            if max(_distance(a, b) for a, b in zip(pair, other_pair, strict=True)) > near
        ]
        return min(differ, default=None)

    def _record(self, rank: int, places: Sequence[_Place], n: int, output: object) -> None:
        self._restore.pop(rank, _nothing)()
        place, number = places[n], self._current[rank]
        # Postponed logits would be made by a look at them; their rows are those of the head's input.
        leaves = [x.hidden if isinstance(x, PostponedLogits) else x for x in leaves_of(output)]
        tensors = [
            local(x.detach())
            for x in leaves
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() and not x.is_nested
        ]
        if number < 2:
            self._outputs[place, number] = [_leaf(x) for x in tensors]
            return
        alone = [self._outputs.get((place, n), []) for n in range(2)]
        if not all(len(leaves) == len(tensors) for leaves in alone):
            return
        for one, other, both in zip(*alone, tensors, strict=True):
            self.infinite |= not bool(both.isfinite().all())
            distance = _distance_of_rows(one, other, both)
            if distance is None:
                continue
            verdict = distance > _NEAR_ROWS[min(self._itemsize, both.element_size())]
            self.last = max(self.last, _Last(place.stage, place.number, verdict))
            if verdict and (self.depends is None or place < self.depends):
                self.depends = place._replace(distance=distance)


def _nothing() -> None:
    pass


def _version(parameter: nn.Parameter) -> int | None:
    """Return the number of writes into a parameter; None where torch does not count them."""
    return None if parameter.is_inference() else parameter._version


@contextmanager
def _values_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Return a context after which parameters have the values that they had before it."""
    before = [(p, p._version, p.detach().clone()) for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, version, value in before:
                if parameter._version != version:
                    parameter.copy_(value)


def _repeated(batch: LocalBatch, of: LocalBatch) -> LocalBatch:
    """Return a batch with the first microbatch of another one in all places."""
    count = len(batch.weights)
    return replace(
        batch,
        inputs=list(of.inputs[:1]) * count,
        targets=list(of.targets[:1]) * count,
        weights=list(of.weights[:1]) * count,
        rows_in=of.rows_in[:1] * count,
        rows_out=of.rows_out[:1] * count,
    )


def _leaf(tensor: Tensor) -> _Leaf:
    ends = [(_thin(tensor.select(d, 0)), _thin(tensor.select(d, -1))) for d in range(tensor.dim())]
    return _Leaf(tensor.shape, ends)


def _thin(tensor: Tensor) -> Tensor:
    """Return a copy of numbers that are spread over a tensor; the same ones for tensors of one shape."""
    return tensor.reshape(-1)[:: tensor.numel() // _SAMPLE + 1].clone()


def _distance_of_rows(one: _Leaf, other: _Leaf, both: Tensor) -> float | None:
    """Return how far two tensors in a row are from another tensor; None if its shape is not that of two in a row."""
    if not len(one.shape) == len(other.shape) == both.dim():
        return None
    differs = [d for d in range(both.dim()) if not both.shape[d] == one.shape[d] == other.shape[d]]
    if len(differs) != 1 or not both.numel():
        return None
    (dim,) = differs
    size = one.shape[dim]
    if both.shape[dim] != size + other.shape[dim]:
        return None
    pairs = zip((*one.ends[dim], *other.ends[dim]), (0, size - 1, size, both.shape[dim] - 1), strict=True)
    return max(_distance(row, _thin(both.select(dim, index))) for row, index in pairs)


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the norm of a difference, of the norm of the first; infinity if other numbers are finite."""
    # Ranks that hold one stage may have a device each.
    one, other = one.double(), other.to(one.device).double()
    odd = ~one.isfinite()
    if not torch.equal(odd, ~other.isfinite()):
        return math.inf
    one, other = one.masked_fill(odd, 0), other.masked_fill(odd, 0)
    return float((one - other).norm() / one.norm().clamp(min=1e-6))


@contextmanager
def _uncompiled(modules: Modules) -> Iterator[None]:
    """Return a context in which layers run as Python, since a compiler would make them again for other shapes."""
    stages = [module for module in modules.values() if module.compiled_layers is not None]
    whole = [(module, module.compiled_layers) for module in stages]
    single = [
        (inner, inner._compiled_call_impl)
        for module in modules.values()
        for inner in module.modules()
        if inner._compiled_call_impl is not None
    ]
    for module, _ in whole:
        module.compiled_layers = None
    for inner, _ in single:
        inner._compiled_call_impl = None
    try:
        yield
    finally:
        for module, layers in whole:
            module.compiled_layers = layers
        for inner, call in single:
            inner._compiled_call_impl = call
