"""Pipeline: a model, a loss function and a schedule, trained on whole batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from penstock.base.counts import plural
from penstock.base.errors import ConfigError, PenstockError, StageError
from penstock.parallel.mesh import MeshShape
from penstock.parallel.replicas.shards import Shards
from penstock.runtime.batch.arguments import Arguments, arguments_of, classes_of, require_no_graph
from penstock.runtime.batch.work import (
    Call,
    Ends,
    LocalBatch,
    Refused,
    StepOptions,
    StepResult,
    Work,
    step_result,
)
from penstock.runtime.construction import BuiltPipeline
from penstock.runtime.model.pipeline_model import evaluating
from penstock.runtime.start.start_record import start_of
from penstock.runtime.workers.run_group import RunGroup
from penstock.trace.events import Trace
from penstock.trace.expert_load import ExpertLoad

T = TypeVar("T")


class Pipeline(BuiltPipeline):
    """A model split into stages and trained by a schedule.

    In one process the ranks are threads and use the model's own parameters. If RANK and WORLD_SIZE are set (torchrun,
    Slurm), or ``torch.distributed`` is initialized, every process is a rank, and builds and holds its own stages only.

    Args:
        model: an ``nn.Sequential``; a list of layers as `penstock.stage.layers.as_layers` takes it; a model with a forward
            of its own, as `penstock.split` takes it; or a model of Hugging Face transformers.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where there is no target; returns a scalar tensor, the
            mean over its microbatch, or a dictionary of several. None for the loss that the model's own
            ``forward(x, target)`` or ``forward(x)`` returns, or Hugging Face's own (default).
        microbatches: number of microbatches that a batch is split into (see `dims`); a step may take another one.
        schedule: name of a schedule family, MODULE:FUNCTION that builds one, a `Schedule`, or path of a CSV file (default
            "1f1b"). In processes, each must find the same schedule.
        ranks: pipeline ranks; by default the schedule's own, the number of processes, or 1.
        virtual_stages: stages on each rank, for families where it can be chosen (default 1, or the default of your own
            function); V-shaped families always have two.
        split: which layers make up which stage (default "even"); see `penstock.stage.split.split_layers`. ``{"measured":
            (x, y)}`` makes stages of equal time on that microbatch, each on its rank's device; ``{"measured": profile}``, by
            `profile_layers`. If ranks have GPUs of their own, a stage gets no more layers than fit into the memory that is
            free there, with gradients, Adam's state and activations (not counted with tp, ep, offload, or sharded or stored
            weights); where no split fits, a warning says so.
        device: device of the stages and of each batch; None leaves both where they are. In processes, "cuda" is the GPU of
            LOCAL_RANK. Ranks that are threads may have a device each, as ["cuda:0", "cuda:1"]; `ranks` is then their number.
            So they have by default if the model's blocks are on several (a ``device_map``), each with one run of blocks,
            which ``split="even"`` leaves where they are if each rank has one stage. A batch may then be on any device;
            losses and outputs are on the last stage's, gradients of inputs on the first's.
        timeout: longest wait between ranks in seconds, after which a rank counts as hung (default 60).
        mesh: sizes of the axes: ``dp`` pipelines side by side, each with matrices sharded over ``tp`` processes; each rank
            is then a process. A step takes the global batch, ``dp * microbatches`` microbatches, on every process. A
            `MeshShape`; or torch's mesh with dimensions called pp, dp, cp and tp, which may be a slice, or have some of the
            processes only.
        recompute: layers that keep only their inputs and run again before their backward: "none", "full" (every layer), an
            integer k (every k-th layer of a stage, so none of a stage of fewer), or "auto" (as few as ``execution.memory``
            allows, measured in the first step).
        autocast: torch.bfloat16 or torch.float16 for mixed precision in the stages and the loss; None for none.
        seed: random seed of layers given as functions, and of random numbers that layers draw (dropout). Both depend on the
            seed and the layer's name, dropout on step and microbatch too, and neither on the split.
        reduction: how the microbatches' losses make the step's loss and gradients: "mean" weighs each by its rows, "sum"
            adds them, "valid" weighs each by its targets that are not `loss_fn`'s ``ignore_index`` (default -100), and a
            function of a microbatch's target by what it returns; the last two give the gradient of the whole batch however
            uneven the microbatches are. By default "mean", but with `causal_lm_loss`, `LinearCrossEntropy` and the own loss
            of a Hugging Face model the number of targets that they count.
        dims: dimensions along which a step's values are split, by name: "x", "y", or the name of an argument of the model;
            dimension 0 where a name is missing (default None). A structure says it for each part of a value, and None for a
            keyword input means that every microbatch gets it whole, as a mask of (time, time).
        parallel: options of replicas and tensor parallelism.
        execution: options of how stages run.

    Attributes:
        devices: device of each rank, where threads have several; otherwise empty.
        replicas, replica: number of pipelines that share the batch, and index of this one.
        world: the processes of the pipeline; None if its ranks are threads of one process.
        tensor_ranks: processes that share this one's matrices.
        holds_first, holds_last: whether this process holds the first and the last stage.
        is_first: whether this process is of the mesh's first pipeline and has the first shards.
        reduce_gradients: whether steps reduce their gradients over replicas; set it to False to accumulate locally.
        threads: CPU threads of each rank; see `ExecutionOptions`.
        tracing: whether steps note when each op ran, for `trace`, `gather_trace` and `report`; None (default) where that
            costs nothing, on CPUs. On a GPU it costs two events an op: set it to True before the steps to look at.
        steps: training steps done. Random numbers in layers depend on it, so set it when a run continues.
        scaler: a `GradScaler` for float16, or None; its ``scale`` multiplies the loss, and it checks for NaN and infinity.

    Raises:
        ConfigError: if something cannot be used; the subclass says what (`ScheduleError`, `SplitError`).
    """

    def step(
        self,
        x: object = None,
        y: object = None,
        /,
        *,
        outputs: bool = False,
        input_grads: bool = False,
        microbatches: int | None = None,
        **named: object,
    ) -> StepResult:
        """Run the forward and backward of every microbatch of a batch; gradients accumulate in ``.grad``.

        Gradients are those of the mean over microbatches of `loss_fn` (or as `reduction` says), and bit-identical (fp32,
        CPU, equal thread count) to plain PyTorch running ``(loss_fn(model(x_i), y_i) / microbatches).backward()`` in order.

        Args:
            x: input of the model: a tensor, or tensors in tuples, lists and dicts, batch first; or `Microbatches`. In
                processes only the rank of the first stage needs it. A model with a forward of its own or of Hugging Face
                also takes a whole batch as a mapping, without `y`: keys are the names of the forward's arguments, with
                the first among them, and of the target.
            y: target, likewise; in processes only the rank of the last stage needs it. In a mapping it is called like the
                forward's second argument if the forward computes the loss, ``labels`` for Hugging Face, and otherwise like
                the second parameter of `loss_fn`.
            outputs: also return the last stage's outputs, on the ranks that hold it (default False).
            input_grads: also return the gradients of the floating-point inputs, on the ranks of the first stage (default
                False).
            microbatches: number of microbatches of this step, for a schedule that was given as a family (default: the
                pipeline's own); every process gives the same. The first step of a number checks its schedule, and the last
                four numbers are kept. Not with ``recompute="auto"``, which chooses for the pipeline's own.
            named: keyword inputs, split like `x`; each goes to the layers whose forward has a parameter of that name.

        Raises:
            BatchError: if the batch cannot be split, does not fit the layers, or requires a gradient; nothing has run.
            NonFiniteError: if a loss or a gradient is NaN or infinite; names stage and microbatch.
            StageError: if a stage's own code failed on this rank.
            PeerError: if another rank failed first.
            WaitTimeoutError, HangError: if a wait exceeds the timeout, or a rank hangs.
            CallOrderError, ReplicaError: if ranks run different calls, or copies differ.
        """
        return self._result(
            self._run(Call.STEP, x, y, named, microbatches, outputs=outputs, input_grads=input_grads)
        )

    def evaluate(
        self,
        x: object = None,
        y: object = None,
        /,
        *,
        outputs: bool = False,
        microbatches: int | None = None,
        **named: object,
    ) -> StepResult:
        """Run forwards only, in eval mode and without gradients.

        `x`, `y`, `outputs`, `microbatches` and `named` are those of `step`; without `y` there is no loss.
        """
        return self._result(self._run(Call.EVALUATE, x, y, named, microbatches, outputs=outputs))

    def log_probs(
        self, x: object = None, y: object = None, /, *, microbatches: int | None = None, **named: object
    ) -> Tensor:
        """Return log p of the classes y at each position, in eval mode and without gradients; whole logits never exist.

        ``y[b, t]`` is the class that the output at position t is judged by, and is not shifted. Of a causal model with
        tokens `ids`, ``pipe.log_probs(ids[:, :-1], ids[:, 1:])`` is log p of each token but the first. A mapping's labels
        are shifted where `step` shifts them, as for causal models of Hugging Face with their own loss:
        ``pipe.log_probs({"input_ids": ids, "labels": labels})`` has log p of ``labels[b, t + 1]`` at position t, and 0 at
        the last.

        The loss function is not called. The head is the last ``nn.Linear`` of the last layer, as in `LinearCrossEntropy`,
        and the result equals that of ``log_softmax(logits.float(), -1)`` to summation order. With ``compile="stage"``, or
        where the model needs its logits, they exist for a microbatch.

        Args:
            x, microbatches, named: those of `step`; a mapping has a target only in place of `y`.
            y: int64 tensor of shape (batch, tokens); -100 where no class counts. In processes only the rank of the last
                stage needs it; with replicas each takes its rows of the global batch.

        Returns:
            Tensor of the shape of the global batch's y, in fp32; 0 where y is -100; the same on every rank.

        Raises:
            BatchError: if y is not such a tensor, does not fit the output, has a class beyond the vocabulary, or is x itself
                for a causal model.
            PenstockError: if the last layer has no head, or a step is under way; and what `step` raises.
        """
        works = self._run(Call.LOG_PROBS, x, y, named, microbatches)
        found = {n: rows for work in works for n, rows in work.losses.total.items()}
        return self._splitter.joined([found[n] for n in sorted(found)]).to(self.device)

    def updated(self, rank: int) -> list[nn.Parameter]:
        """Return the parameters of a rank that have gradients after a step: its parameters, or their shards with ZeRO."""
        shards, own = self.shards, [p for _, p in self.rank_parameters(rank)]
        if shards is None:
            return own
        shards.changes()
        return [*shards.owned(), *(p for p in own if shards.find(p) is None)]

    @property
    def shards(self) -> Shards | None:
        """Shards of the parameters that this process updates, if replicas divide the update (ZeRO); otherwise None."""
        return self._engine.shards

    def make_buckets(self, zero: bool = False, whole: Collection[nn.Parameter] = ()) -> None:
        """Make the gradient buckets again, after a change of gradient dtypes; every process calls it.

        Args:
            zero: divide the update of the parameters among the replicas (default False).
            whole: parameters that one replica updates as a whole, with `zero` (default none).
        """
        self._engine.make_buckets(zero, whole)

    def wrap_ops(self, wrap: Callable[[int, Callable[[], None]], Callable[[], None]]) -> Callable[[], None]:
        """Replace every op of a training step, to profile it.

        Args:
            wrap: ``wrap(rank, op)`` returns what runs instead of ``op()``, and must call it.

        Returns:
            A function that undoes it, between two steps.
        """
        self._require_open()
        return self._engine.wrap_ops(wrap)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Returns:
            The norm over all stages before scaling, the same number on every rank and for any split, and equal to
            ``torch.nn.utils.clip_grad_norm_`` of the unsplit model.
        """
        with self.calling("pipe.clip_grad_norm_()"):
            if self.shards is not None:
                self.shards.changes()
            return self.global_norm.clip_(max_norm, self.shards)

    def on_ranks(self, job: Callable[[int], T]) -> list[T]:
        """Call ``job(rank)`` once for each of the `local_ranks`, on that rank's own thread, and wait for all.

        Returns:
            Results of the calls, in the order of the ranks. An error in one of them is raised here.
        """
        self._require_open()
        return self._engine.on_ranks(job)

    def sum_over_ranks(self, values: Tensor, replicas: bool = False) -> Tensor:
        """Return the sum of float64 values over the processes of this pipeline, or of all replicas; all of them call it.

        With one process, the tensor itself is returned.
        """
        if self.world is None:
            return values
        total = values.clone()
        with self.calling("pipe.sum_over_ranks()"):
            self.world.all_reduce_replica(total)
            if replicas:
                self.world.all_reduce_dp(total)
        return total

    def trace(self) -> Trace | None:
        """Return what the last step did and when: all ranks in threads, this rank in processes; None before a step.

        Raises:
            PenstockError: if the step was not timed, as on a GPU without `tracing`.
        """
        return self._engine.trace()

    def gather_trace(self) -> Trace | None:
        """Return what all ranks did in the last step; every process of the pipeline calls it, between two steps.

        Returns:
            The same trace on every process, on one clock; ``info["clock_error"]`` is the largest error between the times of
            two ranks, in seconds. In threads the same as `trace`. None before the first step.
        """
        self._require_open()
        with self.calling("pipe.gather_trace()"):
            return self._engine.gather_trace(self.trace())

    def report(self, path: str | Path) -> Path:
        """Write the report page of a training loop, one HTML file; every process of the run calls it, between two steps.

        Rank 0 writes. The page shows the last step, and beside it the steps of earlier calls, the first of them and the last
        20, so that calls after several steps of a run show how it develops.

        Returns:
            Path of the page.

        Raises:
            ConfigError: if the page cannot be written, or Bokeh is missing (``pip install 'penstock-torch[report]'``).
            PenstockError: if there is no training step to report, or it was not timed (`tracing`).
        """
        self._require_open()
        with self.calling("pipe.report()"):
            trace = self._report.require_step(self._engine.gather_trace(self.trace()))
            self._report.add(self.steps, trace, self._engine.gather_expert_load())
            parameter = next(self.parameters(), torch.empty(0))
            start = start_of(
                step=0,
                layout=self.layout,
                device=parameter.device,
                processes=self.ranks * self.replicas * self.tensor_ranks if self.in_processes else 1,
                threads=self.threads,
                dtype=str(parameter.dtype).removeprefix("torch."),
                rated=lambda device, dtype: None,
            )
            return Path(RunGroup.of(self.world).decide(lambda: str(self._report.write(path, start))))

    @property
    def layout(self) -> str:
        """The layout in words, as in "1f1b on 4 ranks (pp 2 x dp 2 x tp 1), optimizer sharded"."""
        shape, shard = self.mesh or MeshShape(pp=self.ranks), self.parallel.shard
        if shard == "none" and self.shards is not None:
            shard = "optimizer"
        axes = f" ({shape})" if shape.ranks > shape.pp else ""
        sharded = f", {shard} sharded" if shard != "none" else ""
        return f"{self.schedule.name} on {plural(shape.ranks, 'rank')}{axes}{sharded}"

    def gather_expert_load(self) -> ExpertLoad | None:
        """Return the tokens of each expert in the last step, and the time of their exchange; all processes call it.

        Returns:
            The same on every process of the run, for the last call of `step` or `evaluate`. None before the first, and where
            experts are not divided over processes (``ep``).
        """
        self._require_open()
        with self.calling("pipe.gather_expert_load()"):
            return self._engine.gather_expert_load()

    def calling(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a call that all ranks make together; a rank that makes another one is named."""
        return self._engine.calling(name)

    def close(self) -> None:
        """End the threads or the connections; may be called twice. The model remains usable.

        With ``ParallelOptions(shard="weights")`` all ranks call it together, and gather their weights; after a failed step,
        or when an error leaves the ``with`` block, they do not, and these weights are NaN.

        Threads also end when the pipeline is garbage collected; connections to other processes end with this process.
        """
        self._engine.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        # Within an error the other ranks may be in a step, in which they do not give this one their part of its weights.
        self._engine.close(gathers=error[0] is None)

    def _require_open(self) -> None:
        if self._engine.closed:
            raise PenstockError("this pipeline is closed; build a new one")

    def _run(
        self,
        call: Call,
        x: object,
        y: object,
        named: Mapping[str, object],
        microbatches: int | None,
        *,
        outputs: bool = False,
        input_grads: bool = False,
    ) -> list[Work]:
        self._require_open()
        for name, value in (("outputs", outputs), ("input_grads", input_grads)):
            if not isinstance(value, bool):
                raise ConfigError(
                    f"{name} must be True or False, got a {type(value).__name__}; an argument of the model of that name "
                    "goes into a batch that is a mapping, pipe.step({...})"
                )
        scaler = self.scaler
        options = StepOptions(
            call=call,
            microbatches=self.microbatches if microbatches is None else microbatches,
            outputs=outputs,
            input_grads=input_grads,
            # A scaler looks for NaN and infinity itself, and skips the update.
            check_finite=self.execution.check_finite and scaler is None,
            number=self.steps,
            timed=self.tracing,
            reduces=self.reduce_gradients or self.parallel.sharding.comes_and_goes,
            loss_scale=scaler.scale if scaler is not None and call is Call.STEP else 1.0,
        )
        if options.trains and self.shards is not None:
            self.shards.require_used()
        if self._first_step is not None:
            self._first_step.before()
        with nullcontext() if options.trains else self._without_gradients():
            batch = self._cut(x, y, named, options)
            try:
                with self._random.watching():
                    works = self._engine.run_step(options, batch)
            except StageError as error:
                if self._first_step is not None and type(error) is StageError:
                    hint = self._splitter.hint(self._arguments(x, y, named, options)[2])
                    error.args = (f"{error}{hint}",)
                raise
        if self._first_step is not None:
            arguments = partial(self._arguments, x, y, named, options)
            if self._first_step.after(arguments, works[0], self._without_gradients):
                self._first_step = None
        self.steps += options.trains
        if self._local.axes:
            self._local.require_known()
            self._local.join(works, self._sample_parts, self.reduction == "sum")
        return works

    def _arguments(
        self, x: object, y: object, named: Mapping[str, object], options: StepOptions
    ) -> Arguments:
        """Return x, y and the keyword inputs of a step."""
        given, names = None if options.log_probs else y, self.layers[0].batch
        inputs, target, others = arguments_of(names, self._loss_fn, x, given, named)
        if options.log_probs:
            own_loss = None if names is None or names.loss is None else names.loss[0]
            target = classes_of(inputs, y, target, self._loss_fn, own_loss)
        return inputs, target, others

    def _cut(
        self, x: object, y: object, named: Mapping[str, object], options: StepOptions
    ) -> LocalBatch | Refused:
        """Return this pipeline's share of a batch, or why there is none; the engine tells the other ranks."""
        try:
            self._container.require_unchanged()
            if (
                options.trains
                and options.microbatches != self.microbatches
                and self.execution.memory is not None
            ):
                raise ConfigError(
                    f"microbatches={options.microbatches}, but recompute='auto' chooses the layers for the "
                    f"{self.microbatches} of the pipeline; give recompute='full' or a number"
                )
            inputs, target, others = self._arguments(x, y, named, options)
            if options.trains:
                self._parameters.require_same()
                if self.shards is not None:
                    self.shards.require_kept()
                without_grads = [] if options.input_grads else [("x", inputs)]
                require_no_graph([*without_grads, ("y", target), *others.items()])
            return self._splitter.split(inputs, target, others, options)
        except Exception as error:
            return Refused(error)

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        self.wait()
        self._engine.sync_modules()
        try:
            with evaluating(self.stage_modules(), self._loss_fn):
                yield
        finally:
            # With the modes that they have again, or copies would not follow a change to evaluation mode.
            self._engine.record_modules()

    def _result(self, works: list[Work]) -> StepResult:
        holders = self.schedule.placement.holders
        ends = Ends(self.local_ranks, holders[0], holders[-1])
        return step_result(works, self._splitter.microbatches(works[0].options), ends)
