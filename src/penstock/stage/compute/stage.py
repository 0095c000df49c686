"""One stage: a run of layers, with a forward and a backward for each microbatch.

Every microbatch has an autograd graph of its own: the stage's inputs are detached leaves, the backward starts from
the gradients that later stages hand back (or from the loss), and nothing crosses from one microbatch to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.errors import PenstockError
from penstock.stage.compute.footprint import Footprint
from penstock.stage.compute.input_hooks import follow_hooks
from penstock.stage.compute.recompute import Buffers, Segment, chosen, nothing_saved, segments
from penstock.stage.compute.runner import (
    LossFunction,
    LossInputs,
    LossReport,
    Messages,
    Runner,
    SegmentOutput,
    Settings,
    StageRoutes,
)
from penstock.stage.compute.saved import Dropped, Graph, LayerBytes, Saved, require_same
from penstock.stage.isolation import Isolation, graph_of
from penstock.stage.module import StageModule
from penstock.stage.split_backward.split_check import SplitCheck, SplitChecks
from penstock.stage.split_backward.weight_grad import GradAccumulator, Queue
from penstock.stage.values import Collecting, finite_sum, gradients


class Stage:
    """A stage at work: what it saved for each microbatch between forward and backward.

    Args:
        index: the stage's number in the whole model.
        module: its layers.
        loss_fn: on the last stage ``loss_fn(output, target)``: a scalar, or scalars by name, whose sum is the loss.
        settings: how it computes.
        wiring: what it hands on besides its output.
        isolation: what it must not share with other stages.

    Attributes:
        held_bytes: bytes that the held microbatches keep alive for their backwards, each counted as the first one of
            its kind was measured; 0 for stages that hold compiled modules or call ``torch.func.grad``.
        split_checks: whether the split backward gives what the full one does, and which layers it does not.
        suspects: for each microbatch whose backward has run, a number that is finite if the gradients it handed back are.
    """

    def __init__(
        self,
        index: int,
        module: StageModule,
        loss_fn: LossFunction | None = None,
        settings: Settings | None = None,
        wiring: StageRoutes | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.settings = settings or Settings()
        self.held_bytes = 0
        self.suspects: list[tuple[int, Tensor]] = []
        self.split_checks = SplitChecks(index, module, self.settings.strict)
        self._runner = Runner(index, module, loss_fn, self.settings, wiring or StageRoutes())
        self.isolation = isolation or Isolation()
        self._first = True  # until the first backward has run
        self._saved: dict[int, Saved] = {}
        self._waiting: dict[int, Queue] = {}
        self._deliveries: dict[tuple[int, ...], GradAccumulator] = {}
        self._saved_bytes: dict[tuple[bool, bool], int] = {}
        self._waiting_bytes: int | None = None
        self._kind: tuple[torch.dtype, torch.device] | None = None
        self._buffers: dict[Segment, Buffers] = {}
        self._layer_bytes: dict[int, LayerBytes] = {}
        self._dropped_before: set[Segment] = set()
        self._whole = Segment(0, len(module.layers), True)
        self.cut(chosen(self.settings.recompute, len(module.layers)))

    def cut(self, recomputed: Sequence[bool]) -> None:
        """Say for each layer whether it is recomputed; between two steps."""
        self._segments = segments(recomputed)
        self._saved_bytes.clear()
        self._plain = (
            len(self._segments) == 1 and not self._segments[0].recompute and not self.settings.offload
        )

    @property
    def held(self) -> int:
        """How many microbatches' activations the stage holds, those that wait for W included."""
        return len(self._saved) + len(self._waiting)

    def begin(self, step: int, first_microbatch: int = 0) -> None:
        """A step begins; random draws depend on its number, and on the microbatch's in the global batch.

        Args:
            step: its number.
            first_microbatch: the number in the global batch of what is microbatch 0 here.
        """
        self.split_checks.begin()
        self.isolation.begin()
        self._runner.begin(step, first_microbatch)
        # Between steps parameters may have got another dtype, device or shape, which a delivery keeps as it found them.
        self._deliveries.clear()
        kind = next(((p.dtype, p.device) for p in self.module.parameters()), None)
        if kind != self._kind:
            self._kind = kind
            self._saved_bytes.clear()
            self._waiting_bytes = None

    def end(self) -> None:
        """End a step, whose ops have all run.

        Raises:
            PenstockError: a forward changed what other ranks or replicas have copies of.
        """
        if not self.module.before:  # which fills in the parameters' values during the step (ZeRO)
            self.isolation.require_constant()

    def forward(self, microbatch: int, inputs: Messages, split: bool = False, drop: bool = False) -> Messages:
        """Run the layers on a microbatch, keep what its backward needs, and return the output.

        Args:
            microbatch: which.
            inputs: from earlier stages, or the batch.
            split: the backward will come in two halves, `backward_input` and `backward_weight`.
            drop: keep the inputs only; `recompute` will come before the backward.

        Raises:
            PenstockError: the microbatch is already held: used twice without a backward between.
        """
        return self._forward(microbatch, inputs, None, split, drop).messages

    def forward_with_loss(
        self, microbatch: int, inputs: Messages, ends: LossInputs, split: bool = False, drop: bool = False
    ) -> LossReport:
        """As `forward`, on the last stage: returns the microbatch's losses and, if wanted, the detached output."""
        report = self._forward(microbatch, inputs, ends, split, drop).report
        assert report is not None, "a stage with a loss_fn"
        return report

    def _forward(
        self, microbatch: int, inputs: Messages, ends: LossInputs | None, split: bool, drop: bool
    ) -> SegmentOutput:
        if microbatch in self._saved or microbatch in self._waiting:
            raise PenstockError(
                f"stage {self.index} already holds microbatch {microbatch}; its backward has to come first"
            )
        queue = None
        if split and self.split_checks.possible:
            queue = self.split_checks.queue([leaf for message in inputs for leaf in message.leaves])
        measured = self.module.compiled is not None or (queue is not None, drop) in self._saved_bytes
        saved = Saved([], tuple([sum(p.needs_grad) for p in inputs]), queue)
        if measured and not drop and self._plain:
            # The usual case, without what the others need: one segment, kept, nothing to be measured any more.
            state, collecting = self._runner.join(inputs, self._segments[0])
            found = self._runner.advance(self._segments[0], microbatch, state, ends, queue)
            saved.parts.append(self._graph(collecting, found))
        else:
            found = self._by_segments(saved, microbatch, inputs, ends, drop, measured)
        self.held_bytes += self._saved_bytes.get((queue is not None, drop), 0)
        self._saved[microbatch] = saved
        return found

    def _by_segments(
        self,
        saved: Saved,
        microbatch: int,
        inputs: Messages,
        ends: LossInputs | None,
        drop: bool,
        measured: bool,
    ) -> SegmentOutput:
        footprint = None if measured else Footprint(self.module)
        for segment in (self._whole,) if drop else self._segments:
            record, found = self._first_time(segment, microbatch, inputs, ends, saved.queue, footprint)
            saved.parts.append(record)
            inputs = found.messages
        if footprint is not None:
            self._saved_bytes[saved.queue is not None, drop] = footprint.bytes
        return found

    def _first_time(
        self,
        segment: Segment,
        microbatch: int,
        inputs: Messages,
        ends: LossInputs | None,
        queue: Queue | None,
        footprint: Footprint | None,
    ) -> tuple[Graph | Dropped, SegmentOutput]:
        if not segment.recompute:
            collecting = Collecting()

            def keep() -> SegmentOutput:
                nonlocal collecting
                state, collecting = self._runner.join(inputs, segment)
                self._runner.in_place.footprint = footprint
                with self._runner.offloading():
                    return self._runner.advance(segment, microbatch, state, ends, queue)

            if footprint is None:
                found = keep()
            else:
                if queue is not None:
                    queue.note = footprint.add
                found = footprint.run(keep)
                self._runner.in_place.footprint = None
                if queue is not None:
                    queue.note = None
                footprint.of(collecting.leaves)
            return self._graph(collecting, found), found
        found_once: list[SegmentOutput] = []

        def forward() -> None:
            with nothing_saved():
                state, _ = self._runner.join(inputs, segment)
                found_once.append(self._runner.advance(segment, microbatch, state, ends, None))

        before = self._buffers_of(segment).during(forward)
        found = found_once[0]._replace(messages=self._runner.in_place.with_originals(found_once[0].messages))
        if footprint is not None:
            footprint.of_messages(inputs)
        first = segment not in self._dropped_before
        self._dropped_before.add(segment)
        return Dropped(segment, inputs, before, ends, found if first else None), found

    def recompute(self, microbatch: int) -> None:
        """Run what a forward with `drop` dropped again, ahead of its backward (the op R).

        Raises:
            PenstockError: no activation of that microbatch is held.
        """
        saved = self._require(microbatch)
        (part,) = saved.parts
        assert isinstance(part, Dropped), "its forward was told to drop"
        split = saved.queue is not None
        if (split, False) in self._saved_bytes or self.module.compiled is not None:
            graph = self._again(part, microbatch, saved.queue)
        else:
            footprint = Footprint(self.module)
            graph = footprint.run(lambda: self._again(part, microbatch, saved.queue))
            self._saved_bytes[split, False] = footprint.of(graph.collecting.leaves)
        saved.parts[0] = graph
        self.held_bytes += self._saved_bytes.get((split, False), 0) - self._saved_bytes.get((split, True), 0)

    def _again(self, part: Dropped, microbatch: int, queue: Queue | None) -> Graph:
        at = part.segment.start
        if self.settings.recompute != "auto" or at in self._layer_bytes or part.segment == self._whole:
            return self._run_again(part, microbatch, queue)
        footprint, inputs = Footprint(self.module), Footprint(self.module)
        graph: Graph = footprint.run(lambda: self._run_again(part, microbatch, queue))
        self._layer_bytes[at] = LayerBytes(
            footprint.of(graph.collecting.leaves), inputs.of_messages(part.inputs)
        )
        return graph

    def measured(self) -> list[LayerBytes]:
        """What each layer keeps, after a step with "auto" in which every layer was recomputed."""
        return [self._layer_bytes[n] for n in range(len(self.module.layers))]

    def _run_again(self, part: Dropped, microbatch: int, queue: Queue | None) -> Graph:
        with torch.enable_grad(), self._buffers_of(part.segment).again(part.buffers):
            state, collecting = self._runner.join(part.inputs, part.segment)
            found = self._runner.advance(part.segment, microbatch, state, part.ends, queue)
            if part.found is not None:
                require_same(part.found, found, self.module.names[part.segment.start : part.segment.stop])
            return self._graph(collecting, found)

    def _graph(self, collecting: Collecting, found: SegmentOutput) -> Graph:
        collecting.ran()
        if self._first:
            graph = graph_of(found.roots)
            self.isolation.require_own_leaves(graph)
            self._runner.in_place.look_for_casts(graph)
        if found.report is not None:
            return Graph(collecting, found.roots)
        # The graph's ends are kept, not the outputs: their memory goes when the next stage is done with them.
        return Graph(collecting, tuple(map(get_gradient_edge, found.roots)))

    def _buffers_of(self, segment: Segment) -> Buffers:
        if segment not in self._buffers:
            self._buffers[segment] = Buffers(list(self.module.layers)[segment.start : segment.stop])
        return self._buffers[segment]

    def evaluate(self, microbatch: int, inputs: Messages) -> Messages:
        """Run the layers on a microbatch and keep nothing; to be called without gradients enabled."""
        return self._evaluated(microbatch, inputs, None).messages

    def evaluate_with_loss(self, microbatch: int, inputs: Messages, ends: LossInputs) -> LossReport:
        """As `evaluate`, on the last stage; the loss is None if there is no target."""
        report = self._evaluated(microbatch, inputs, None if ends.target is None else ends).report
        assert report is not None, "a stage with a loss_fn"
        return report

    def _evaluated(self, microbatch: int, inputs: Messages, ends: LossInputs | None) -> SegmentOutput:
        state, _ = self._runner.join(inputs, self._whole)
        return self._runner.advance(self._whole, microbatch, state, ends, None)

    def backward(self, microbatch: int, grads: Messages | None) -> Messages:
        """Backward of a microbatch: parameter gradients accumulate, the inputs' gradients are returned.

        Args:
            microbatch: which.
            grads: from later stages, a message for each route, with one leaf (a tensor or None) for each output leaf that
                needed a gradient; None on the last stage, where the loss is the start.

        Raises:
            PenstockError: no activation of that microbatch is held.
        """
        inputs = self.backward_input(microbatch, grads)
        self.backward_weight(microbatch)
        return inputs

    def backward_input(self, microbatch: int, grads: Messages | None) -> Messages:
        """The half of `backward` that yields the inputs' gradients (and whatever weight gradients cannot wait)."""
        parts, routes, queue = self._require(microbatch)
        del self._saved[microbatch]
        drop = len(parts) == 1 and isinstance(parts[0], Dropped) and parts[0].segment == self._whole
        given: list[Any] | None = None if grads is None else [g for p in grads for g in p.leaves]
        hooked: Sequence[bool] = () if grads is None else [h for p in grads for h in p.needs_grad]
        check = queue.check if queue is not None else None
        while parts:
            part = parts.pop()
            graph = self._again(part, microbatch, queue) if isinstance(part, Dropped) else part
            collecting = graph.collecting
            collecting.caught.clear()
            hooked = follow_hooks(graph.roots, hooked, collecting)
            if isinstance(check, SplitCheck):
                with check.capturing():
                    self._run_backward(microbatch, graph.roots, given)
            else:
                self._run_backward(microbatch, graph.roots, given)
            given = collecting.grads
            if self._first:
                self._runner.in_place.look_at_layouts(collecting)
            del part, graph
        if self._first:
            self._runner.in_place.decide()
            self._first = False
        if check is not None and queue is not None:
            self.split_checks.end(queue)
        self.held_bytes -= self._saved_bytes.get((queue is not None, drop), 0)
        if queue is not None and queue.pending:
            self._waiting[microbatch] = queue
            if self._waiting_bytes is None:
                self._waiting_bytes = Footprint(self.module).of(queue.tensors())
            self.held_bytes += self._waiting_bytes
        found = gradients(given or (), routes, hooked)
        for message in found:
            self.suspects += [(microbatch, finite_sum(g)) for g in message.leaves if g is not None]
        return found

    def _run_backward(self, microbatch: int, roots: tuple[Any, ...], given: list[Any] | None) -> None:
        if given is None:
            if roots:
                torch.autograd.backward(roots)
            return
        if len(given) != len(roots):
            raise PenstockError(
                f"stage {self.index}, microbatch {microbatch}: {len(given)} gradient(s) came back "
                f"for {len(roots)} output(s) that need one"
            )
        pairs = [(r, g) for r, g in zip(roots, given, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])

    def _require(self, microbatch: int) -> Saved:
        if microbatch not in self._saved:
            raise PenstockError(
                f"stage {self.index} holds no activation of microbatch {microbatch}; its forward has to come "
                "first, and its backward only once"
            )
        return self._saved[microbatch]

    def backward_weight(self, microbatch: int) -> None:
        """The other half: the weight gradients that `backward_input` put off."""
        queue = self._waiting.pop(microbatch, None)
        if queue is not None:
            self.held_bytes -= self._waiting_bytes or 0
            queue.work_off(self._deliveries)
        elif microbatch in self._saved:
            raise PenstockError(f"stage {self.index}, microbatch {microbatch}: W came before I")

    def drop(self) -> None:
        """Forget every microbatch, as after a failed step."""
        for queue in (*self._waiting.values(), *(saved.queue for saved in self._saved.values())):
            if queue is not None:
                queue.clear()
        self._saved.clear()
        self._waiting.clear()
        self.suspects.clear()
        self.held_bytes = 0
