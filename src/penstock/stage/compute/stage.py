"""One stage: a range of layers, with a forward and a backward for each microbatch.

Every microbatch has its own autograd graph: the stage's inputs are detached leaves, the backward starts from the gradients
that later stages return (or from the loss), and nothing passes from one microbatch to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from penstock.base.errors import PenstockError
from penstock.stage.compute.footprint import Footprint
from penstock.stage.compute.gradient_hooks import follow_hooks, graph_nodes
from penstock.stage.compute.isolation import Isolation
from penstock.stage.compute.recompute import Buffers, Segment, make_segments, nothing_saved, recomputed_layers
from penstock.stage.compute.runner import (
    LayerBytes,
    LossFunction,
    LossInputs,
    LossReport,
    Messages,
    Runner,
    SavedGraph,
    SavedInputs,
    SavedMicrobatch,
    SegmentOutput,
    Settings,
    StageRoutes,
    require_same,
)
from penstock.stage.input_grads import InputGrads
from penstock.stage.module import StageModule
from penstock.stage.split_backward.split_check import SplitCheck, SplitChecks
from penstock.stage.split_backward.weight_grad import GradAccumulator, WeightGradQueue
from penstock.stage.values import grad_messages


class Stage:
    """A stage and the state that it keeps for each microbatch between forward and backward.

    Attributes:
        held_bytes: bytes that the held microbatches keep alive for their backwards, each counted as the first one of
            its kind was measured; 0 for stages that hold compiled modules or call ``torch.func.grad``.
        finite_sums: (microbatch, 0-d tensor) of each returned gradient so far; the sum is finite only if the gradient is.
    """

    def __init__(
        self,
        index: int,
        module: StageModule,
        loss_fn: LossFunction | None = None,
        settings: Settings | None = None,
        routes: StageRoutes | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        self.index = index
        self.module = module
        self.settings = settings or Settings()
        self.held_bytes = 0
        self.finite_sums: list[tuple[int, Tensor]] = []
        self.split_checks = SplitChecks(index, module, self.settings.strict)
        self._runner = Runner(index, module, loss_fn, self.settings, routes or StageRoutes())
        self.isolation = isolation or Isolation()
        self._begun = 0  # steps, failed ones included
        self._first = True  # until the first backward has run
        self._saved: dict[int, SavedMicrobatch] = {}
        self._waiting: dict[int, WeightGradQueue] = {}
        self._accumulators: dict[tuple[int, ...], GradAccumulator] = {}
        self._saved_bytes: dict[tuple[bool, bool], int] = {}  # by (split, dropped)
        self._waiting_bytes: int | None = None
        self._dtype_device: tuple[torch.dtype, torch.device] | None = None
        self._buffers: dict[Segment, Buffers] = {}
        self._layer_bytes: dict[int, LayerBytes] = {}
        self._batch: Sequence[object] = ()
        self._dropped_before: set[Segment] = set()
        # Compared by identity: of a stage with one layer, the segment of a policy may be equal.
        self._all_layers = Segment(0, len(module.layers), True)
        self.set_recompute(recomputed_layers(self.settings.recompute, len(module.layers)))

    def set_recompute(self, recomputed: Sequence[bool]) -> None:
        """Choose for each layer whether it is recomputed; only between two steps."""
        # The loss would run again with the last layer.
        if getattr(self._runner.loss_fn, "runs_once", False):
            recomputed = [*recomputed[:-1], False]
        self._segments = make_segments(recomputed)
        self._saved_bytes.clear()
        self._one_kept_segment = (
            len(self._segments) == 1 and not self._segments[0].recompute and not self.settings.offload
        )

    @property
    def held(self) -> int:
        """Number of microbatches whose activations the stage holds, those that wait for W included."""
        return len(self._saved) + len(self._waiting)

    def begin(self, step: int, first_microbatch: int = 0, batch: Sequence[object] = ()) -> None:
        """Begin a step; random draws depend on its number, and on the microbatch's in the global batch.

        Args:
            batch: values of the step that microbatches may be views of, for the count of what a microbatch holds.
        """
        self._begun += 1
        self._batch = batch
        self.isolation.begin()
        self._runner.begin(step, first_microbatch)
        # Between steps parameters may have changed dtype, device or shape, which an accumulator keeps from when it was made.
        self._accumulators.clear()
        dtype_device = next(((p.dtype, p.device) for p in self.module.parameters()), None)
        if dtype_device != self._dtype_device:
            self._dtype_device = dtype_device
            self._saved_bytes.clear()
            self._waiting_bytes = None

    def end(self) -> None:
        """End a step, after all its ops."""
        self._batch = ()
        self.isolation.require_constant()

    def forward(
        self, microbatch: int, inputs: Messages, split: bool = False, inputs_only: bool = False
    ) -> Messages:
        """Run the layers on a microbatch, keep the state for its backward, and return the output.

        Args:
            split: whether the backward comes in two halves, `backward_input` and `backward_weight` (default False).
            inputs_only: whether to keep only the inputs; `recompute` must come before the backward (default False).
        """
        return self._forward(microbatch, inputs, None, split, inputs_only).messages

    def wrap_loss(self, wrap: Callable[[LossFunction], LossFunction]) -> None:
        """Replace the loss function, if the stage has one that takes logits."""
        function = self._runner.loss_fn
        if function is not None and not getattr(function, "postpones_logits", False):
            self._runner.loss_fn = wrap(function)

    def forward_with_loss(
        self,
        microbatch: int,
        inputs: Messages,
        loss_inputs: LossInputs,
        split: bool = False,
        inputs_only: bool = False,
    ) -> LossReport:
        """Run `forward` on the last stage; return the microbatch's losses and, if requested, the detached output."""
        report = self._forward(microbatch, inputs, loss_inputs, split, inputs_only).report
        assert report is not None, "a stage with a loss_fn"
        return report

    def _forward(
        self,
        microbatch: int,
        inputs: Messages,
        loss_inputs: LossInputs | None,
        split: bool,
        inputs_only: bool,
    ) -> SegmentOutput:
        if microbatch in self._saved or microbatch in self._waiting:
            raise PenstockError(
                f"stage {self.index} already holds microbatch {microbatch}; its backward has to come first"
            )
        queue = None
        if split and self.split_checks.possible:
            leaves = [leaf for message in inputs for leaf in message.leaves]
            queue = self.split_checks.queue(self._begun, leaves)
        measured = self.module.compiled is not None or (queue is not None, inputs_only) in self._saved_bytes
        saved = SavedMicrobatch([], tuple([sum(p.needs_grad) for p in inputs]), queue)
        if measured and not inputs_only and self._one_kept_segment:
            # The usual case, without the work of the others: one segment, kept, and already measured.
            state, input_grads = self._runner.join(inputs, self._segments[0])
            output = self._runner.advance(self._segments[0], microbatch, state, loss_inputs, queue)
            saved.segments.append(self._graph(input_grads, output))
        else:
            footprint = None if measured else self._footprint()
            for segment in (self._all_layers,) if inputs_only else self._segments:
                run = self._forward_dropped if segment.recompute else self._forward_kept
                record, output = run(segment, microbatch, inputs, loss_inputs, queue, footprint)
                saved.segments.append(record)
                inputs = output.messages
            if footprint is not None:
                self._saved_bytes[queue is not None, inputs_only] = footprint.bytes
        self.held_bytes += self._saved_bytes.get((queue is not None, inputs_only), 0)
        self._saved[microbatch] = saved
        return output

    def _forward_kept(
        self,
        segment: Segment,
        microbatch: int,
        inputs: Messages,
        loss_inputs: LossInputs | None,
        queue: WeightGradQueue | None,
        footprint: Footprint | None,
    ) -> tuple[SavedGraph | SavedInputs, SegmentOutput]:
        input_grads = InputGrads()

        def forward() -> SegmentOutput:
            nonlocal input_grads
            state, input_grads = self._runner.join(inputs, segment)
            self._runner.in_place.footprint = footprint
            with self._runner.offloading():
                return self._runner.advance(segment, microbatch, state, loss_inputs, queue)

        if footprint is None:
            output = forward()
        else:
            if queue is not None:
                queue.on_input = footprint.add
            output = footprint.run(forward)
            self._runner.in_place.footprint = None
            if queue is not None:
                queue.on_input = None
            footprint.of(input_grads.leaves)
        return self._graph(input_grads, output), output

    def _forward_dropped(
        self,
        segment: Segment,
        microbatch: int,
        inputs: Messages,
        loss_inputs: LossInputs | None,
        _: WeightGradQueue | None,
        footprint: Footprint | None,
    ) -> tuple[SavedGraph | SavedInputs, SegmentOutput]:
        outputs: list[SegmentOutput] = []

        def forward() -> None:
            with nothing_saved():
                state, _ = self._runner.join(inputs, segment)
                outputs.append(self._runner.advance(segment, microbatch, state, loss_inputs, None))

        buffers = self._buffers_of(segment).run_first(forward)
        output = outputs[0]._replace(messages=self._runner.in_place.with_originals(outputs[0].messages))
        if footprint is not None:
            footprint.of_messages(inputs)
        first = segment not in self._dropped_before
        self._dropped_before.add(segment)
        return SavedInputs(segment, inputs, buffers, loss_inputs, output if first else None), output

    def recompute(self, microbatch: int) -> None:
        """Run a dropped forward again, ahead of its backward (the op R)."""
        saved = self._require(microbatch)
        (record,) = saved.segments
        assert isinstance(record, SavedInputs), "its forward had inputs_only=True"
        split = saved.queue is not None
        if (split, False) in self._saved_bytes or self.module.compiled is not None:
            graph = self._recompute(record, microbatch, saved.queue)
        else:
            footprint = self._footprint()
            graph = footprint.run(lambda: self._recompute(record, microbatch, saved.queue))
            self._saved_bytes[split, False] = footprint.of(graph.input_grads.leaves)
        saved.segments[0] = graph
        self.held_bytes += self._saved_bytes.get((split, False), 0) - self._saved_bytes.get((split, True), 0)

    def _recompute(self, record: SavedInputs, microbatch: int, queue: WeightGradQueue | None) -> SavedGraph:
        layer = record.segment.start
        measured = layer in self._layer_bytes or record.segment is self._all_layers
        if self.settings.recompute != "auto" or measured:
            return self._forward_again(record, microbatch, queue)
        footprint, inputs = self._footprint(), self._footprint()
        graph: SavedGraph = footprint.run(lambda: self._forward_again(record, microbatch, queue))
        kept = footprint.of(graph.input_grads.leaves)
        self._layer_bytes[layer] = LayerBytes(kept, inputs.of_messages(record.inputs))
        return graph

    def _forward_again(
        self, record: SavedInputs, microbatch: int, queue: WeightGradQueue | None
    ) -> SavedGraph:
        segment = record.segment
        with torch.enable_grad(), self._buffers_of(segment).restored(record.buffers):
            state, input_grads = self._runner.join(record.inputs, segment)
            output = self._runner.advance(segment, microbatch, state, record.loss_inputs, queue)
            if record.output is not None:
                require_same(record.output, output, self.module.names[segment.start : segment.stop])
            return self._graph(input_grads, output)

    def layer_bytes(self) -> list[LayerBytes]:
        """Return the memory of each layer, after a step with "auto" in which every layer was recomputed."""
        return [self._layer_bytes[n] for n in range(len(self.module.layers))]

    def _graph(self, input_grads: InputGrads, output: SegmentOutput) -> SavedGraph:
        input_grads.after_forward()
        if self._first:
            nodes = graph_nodes(root.grad_fn for root in output.roots)
            self.isolation.require_own_leaves(nodes)
            self._runner.in_place.record_casts(nodes)
        if output.report is not None:
            return SavedGraph(input_grads, output.roots)
        # Gradient edges instead of the outputs, so that the outputs are freed when the next stage is done with them.
        return SavedGraph(input_grads, tuple(map(get_gradient_edge, output.roots)))

    def _buffers_of(self, segment: Segment) -> Buffers:
        if segment not in self._buffers:
            self._buffers[segment] = Buffers(list(self.module.layers)[segment.start : segment.stop])
        return self._buffers[segment]

    def evaluate(self, microbatch: int, inputs: Messages) -> Messages:
        """Run the layers on a microbatch and keep nothing; call it with gradients disabled."""
        return self._evaluate(microbatch, inputs, None).messages

    def evaluate_with_loss(self, microbatch: int, inputs: Messages, loss_inputs: LossInputs) -> LossReport:
        """Run `evaluate` on the last stage; the loss is None if there is no target."""
        inputs_if_target = None if loss_inputs.target is None else loss_inputs
        report = self._evaluate(microbatch, inputs, inputs_if_target).report
        assert report is not None, "a stage with a loss_fn"
        return report

    def _evaluate(self, microbatch: int, inputs: Messages, loss_inputs: LossInputs | None) -> SegmentOutput:
        state, _ = self._runner.join(inputs, self._all_layers)
        return self._runner.advance(self._all_layers, microbatch, state, loss_inputs, None)

    def backward(self, microbatch: int, grads: Messages | None) -> Messages:
        """Run the backward of a microbatch: accumulate parameter gradients, and return the inputs' gradients.

        Args:
            grads: gradients from later stages, a message for each route, with one leaf (a tensor or None) for each
                output leaf that needs one; None on the last stage, where the backward starts from the loss.
        """
        inputs = self.backward_input(microbatch, grads)
        self.backward_weight(microbatch)
        return inputs

    def backward_input(self, microbatch: int, grads: Messages | None) -> Messages:
        """Run the backward, but for the weight gradients that a split backward queued, which `backward_weight` computes."""
        records, grad_counts, queue = self._require(microbatch)
        del self._saved[microbatch]
        inputs_only = isinstance(records[0], SavedInputs) and records[0].segment is self._all_layers
        output_grads: list[Any] | None = None if grads is None else [g for p in grads for g in p.leaves]
        hooked: Sequence[bool] = () if grads is None else [h for p in grads for h in p.hooked]
        check = queue.check if queue is not None else None
        while records:
            record = records.pop()
            graph = self._recompute(record, microbatch, queue) if isinstance(record, SavedInputs) else record
            input_grads = graph.input_grads
            input_grads.caught.clear()
            hooked = follow_hooks(graph.roots, hooked, input_grads)
            if isinstance(check, SplitCheck):
                with check.capturing():
                    graph.backward(output_grads, self.index, microbatch)
            else:  # without a context manager, which would cost more than the call
                graph.backward(output_grads, self.index, microbatch)
            output_grads = input_grads.grads
            if self._first:
                self._runner.in_place.record_layouts(input_grads)
            del record, graph
        if self._first:
            self._runner.in_place.decide_views()
            self._first = False
        if check is not None and queue is not None:
            self.split_checks.end(queue)
        self.held_bytes -= self._saved_bytes.get((queue is not None, inputs_only), 0)
        if queue is not None and queue.pending:
            self._waiting[microbatch] = queue
            if self._waiting_bytes is None:
                self._waiting_bytes = self._footprint().of(queue.tensors())
            self.held_bytes += self._waiting_bytes
        messages = grad_messages(output_grads or (), grad_counts, hooked)
        for message in messages:
            self.finite_sums += [(microbatch, _finite_sum(g)) for g in message.leaves if g is not None]
        return messages

    def _footprint(self) -> Footprint:
        return Footprint(self.module, self._batch)

    def _require(self, microbatch: int) -> SavedMicrobatch:
        if microbatch not in self._saved:
            raise PenstockError(
                f"stage {self.index} holds no activation of microbatch {microbatch}; its forward has to come "
                "first, and its backward only once"
            )
        return self._saved[microbatch]

    def backward_weight(self, microbatch: int) -> None:
        """Run the second half of `backward`: the weight gradients that `backward_input` deferred."""
        queue = self._waiting.pop(microbatch, None)
        if queue is not None:
            self.held_bytes -= self._waiting_bytes or 0
            queue.accumulate(self._accumulators)
        elif microbatch in self._saved:
            raise PenstockError(f"stage {self.index}, microbatch {microbatch}: W came before I")

    def drop(self) -> None:
        """Drop the state of every microbatch, as after a failed step."""
        for queue in (*self._waiting.values(), *(saved.queue for saved in self._saved.values())):
            if queue is not None:
                queue.clear()
        self._saved.clear()
        self._waiting.clear()
        self._batch = ()
        self.finite_sums.clear()
        self.held_bytes = 0


def _finite_sum(gradient: Tensor) -> Tensor:
    """Return a real sum that is finite only if the whole gradient is; half precision, which would overflow, in float32."""
    if gradient.dtype is torch.float32:
        return gradient.sum()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.sum(dtype=torch.float32 if gradient.element_size() < 4 else None)
