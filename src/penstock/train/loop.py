"""A training run from start to end: data, pipeline and optimizer, steps, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from penstock.base.atomic import write_text
from penstock.base.counts import plural
from penstock.base.errors import ConfigError, StoppedError
from penstock.base.host import to_stderr
from penstock.base.run_lock import locked, may_be_restart
from penstock.huggingface.save import save_transformers
from penstock.huggingface.weights import own_state, save_together
from penstock.plan.cluster import rated_flops
from penstock.runtime.health.hang import Timeout
from penstock.runtime.kept_traces import KeptTraces
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.launch_environment import host_advice, unused_nodes
from penstock.runtime.start.place import current_place
from penstock.runtime.start.start_record import keep_start, start_of
from penstock.runtime.workers.run_group import RunGroup
from penstock.show.run_page import RunPage
from penstock.stage.split import Split
from penstock.trace.folder import drop_after
from penstock.trace.metrics_writer import MetricsWriter, go_back
from penstock.train import run_folder
from penstock.train.callbacks.callback import Callback, EndEvent, StartEvent, values_of
from penstock.train.callbacks.callback_list import CallbackList
from penstock.train.callbacks.receivers import find_callbacks, require_loggers
from penstock.train.config.config import Config
from penstock.train.config.optim import build_optimizer
from penstock.train.config.optimizers import fine_tuning_note
from penstock.train.config.resolve import describe, resolve, shape_of
from penstock.train.data.run_data import RunData, bigram_baseline, open_data, steps_of, training_batch
from penstock.train.device import choose_device, sharing_cores
from penstock.train.model.precision import autocast_of
from penstock.train.model.sampling import sample_run
from penstock.train.model.trainable import TrainableModel, build_model, default_text_note
from penstock.train.resume import RunCheckpointer
from penstock.train.run_log import LoggedReporter, Reporter, level_of, run_log, tokenizing_bar
from penstock.train.step_profiler import StepProfiler
from penstock.train.trainer import Result, Stopping, Trainer, TrainingRun

MakeReporter = Callable[[int, bool], Reporter]

_PRECISION = {
    "bf16": "fp32 weights, bf16 autocast",
    "bf16-weights": "bf16 weights; fp32 gradients and main weights",
    "fp16": "fp32 weights, fp16 autocast and a scaled loss",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        loss: loss of the last step that was not skipped, in nats per token; None if there is none or it is unknown.
        held_out_bits: the model's mean bits per token (a byte, where tokens are bytes) on the held-out samples.
        bigram_bits: a bigram table's mean bits per byte on the same samples; None where tokens are not bytes.
        seconds: duration of the steps and evaluations, without start and end of the run.
    """

    folder: str
    steps: int
    loss: float | None
    held_out_bits: float
    bigram_bits: float | None
    seconds: float
    tokens_per_second: float
    unit: str
    sample: str
    report: str | None


def train(
    config: Config,
    make_reporter: MakeReporter,
    *,
    profile: bool = False,
    stopping: Stopping | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome | None:
    """Train a model in threads, or as one of several processes, and leave a run folder.

    Args:
        stopping: function that returns True if this process shall stop, called before every step; for every process or for
            none (default None). If one shall stop, all stop at the same step. After a signal,
            `penstock.train.signals.Interrupts` does so.

    Returns:
        The outcome on the leading process, None on the others.
    """
    place = current_place()
    in_processes = place is not None
    group = RunGroup.meet(Timeout(config.runtime.timeout, config.runtime.first_timeout))
    prepared: list[_Prepared] = []
    group.each(lambda: prepared.append(_prepare(config, place.size if place else None)))
    config, path, model, level, device, data = prepared[0]
    group.require_same({"the data (data.path must name the same files on every host)": data.digest.short})
    with (
        sharing_cores(shape_of(config.parallel).ranks, config.runtime.threads, in_processes=in_processes),
        build_pipeline(config, model, device, data) as pipe,
        ExitStack() as lock_held,
    ):
        # Clipping and the optimizer are many small operations: with more threads a busy machine waits longer for the last
        # thread of each than it computes.
        torch.set_num_threads(pipe.threads)
        run_group = RunGroup.of(pipe.world)
        found: list[Callback] = []
        run_group.decide(lambda: found.extend([*find_callbacks(config), *callbacks]))
        path = Path(run_group.decide(lambda: str(_create(path, config, lock_held))))
        optimizer = build_optimizer(pipe, config)
        with make_reporter(config.train.steps, run_group.leads) as shown:
            reporter, calls = LoggedReporter(shown), CallbackList(found, shown.say)
            with RunCheckpointer(
                path,
                config,
                data=data.digest,
                pipe=pipe,
                optimizer=optimizer,
                run_group=run_group,
                reporter=reporter,
                callbacks=calls,
            ) as checkpointer:
                first_lines = [_opening(config, path, pipe, device, data)]
                notes = (
                    *_update_notes(config, data),
                    default_text_note(config, model),
                    host_advice(),
                    unused_nodes(),
                )
                first_lines += [line for line in notes if line]
                for line in first_lines if run_group.leads else ():
                    shown.say(line)
                progress = checkpointer.resume()
                if progress.final is None:
                    run_group.decide(lambda: _begin(path, config, progress.done))
                if run_group.leads:
                    start = start_of(
                        step=progress.done,
                        layout=pipe.layout,
                        device=device,
                        processes=place.size if place else 1,
                        threads=pipe.threads,
                        dtype=config.runtime.precision,
                        rated=rated_flops,
                    )
                    keep_start(path, reporter.say, start)
                with (
                    run_log(path, run_group.rank, level, shown.say, first_lines),
                    MetricsWriter(path if run_group.leads else None, reporter.say) as metrics,
                    RunPage(
                        path if run_group.leads and config.train.report else None,
                        config.train.steps,
                        reporter.say,
                    ) as page,
                ):
                    steps = config.train.steps
                    run = TrainingRun(
                        config=config,
                        model=model,
                        data=data,
                        pipe=pipe,
                        optimizer=optimizer,
                        run_group=run_group,
                        reporter=reporter,
                        metrics=metrics,
                        checkpointer=checkpointer,
                        traces=KeptTraces(
                            path, steps, config.train.trace_every, metrics.writes, reporter.say, api="train"
                        ),
                        profiles=StepProfiler(path if profile else None, steps, run_group.rank),
                        callbacks=calls,
                        page=page,
                        stopping=stopping,
                    )
                    trainer = Trainer(run, progress)
                    with _reporting_end(trainer, calls, page):
                        event = StartEvent(path, asdict(config), progress.done, steps)
                        run_group.decide(lambda: calls.on_start(event))
                        result = trainer.train()
                        if progress.has_state:
                            _save(config, model, pipe, path, run_group)
                        pipe.close()
                        if not run_group.leads:
                            return None
                        return _finish(run, path, result, writes_metrics=progress.final is None)


class _Prepared(NamedTuple):
    """Parts of a run that a process has before its pipeline; `level` is the level of its log."""

    config: Config
    path: Path
    model: TrainableModel
    level: int
    device: torch.device
    data: RunData


def _prepare(config: Config, processes: int | None) -> _Prepared:
    """Resolve the config, and find the run's folder, model, device and data; nothing is written but tokens."""
    config = resolve(config, processes)
    path = run_folder.choose(config.train)
    model = build_model(config)
    model.tokenizer.encode(config.sample.prompt or "")
    require_loggers(config)
    level = level_of(config.train.log_level)
    device = choose_device(config.runtime.device, in_processes=processes is not None)
    with tokenizing_bar() as watch:
        data = open_data(config, model, watch)
    return _Prepared(with_steps(config, data), path, model, level, device, data)


@contextmanager
def _reporting_end(trainer: Trainer, calls: CallbackList, page: RunPage) -> Iterator[None]:
    """Tell the callbacks and the reader of the page of an error that ends the run."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError):
            error.begun = True
        outcome: Literal["stopped", "failed"] = "stopped" if isinstance(error, StoppedError) else "failed"
        text, done = str(error) or type(error).__name__, trainer.progress.done
        calls.on_end(EndEvent(outcome=outcome, step=done, error=text))
        page.finish(
            f"The run {text}" if outcome == "stopped" else f"The run failed after step {done:,}: {text}"
        )
        raise


def _create(path: Path, config: Config, lock: ExitStack) -> Path:
    """Lock the folder until `lock` is closed, and create it; for the leader alone."""
    # A process that has lost its peers notices it only when a wait between ranks times out, and then has to end.
    wait = 2 * config.runtime.timeout if may_be_restart() else 0.0
    lock.enter_context(locked(path, wait=wait, say=to_stderr))
    return run_folder.create(path, config)


def _begin(path: Path, config: Config, done: int) -> None:
    """Delete metrics and traces of steps that will be repeated; for the leader alone."""
    go_back(path, done, evaluates=done == config.train.steps)
    drop_after(path, done)


def _finish(run: TrainingRun, path: Path, result: Result, *, writes_metrics: bool) -> Outcome:
    """Write the sample, the last metrics and the page, once the weights are written; for the leader alone."""
    model, reporter = run.model, run.reporter
    sample = sample_run(path)
    bigram = bigram_baseline(run.data, model)
    try:
        write_text(path / "sample.txt", sample + "\n")
    except OSError as error:
        reporter.say(f"cannot write {path / 'sample.txt'}: {error.strerror}")
    end = EndEvent(outcome="done", step=run.config.train.steps, bigram_bits=bigram, **vars(result))
    if writes_metrics:
        run.metrics.write("final", **values_of(end))
    run.checkpointer.wait()
    run.callbacks.on_end(end)
    page = run.page.finish()
    return Outcome(
        folder=str(path),
        steps=run.config.train.steps,
        bigram_bits=bigram,
        unit=model.tokenizer.unit,
        sample=sample,
        report=str(page) if page else None,
        **vars(result),
    )


def _save(config: Config, model: TrainableModel, pipe: Pipeline, path: Path, run_group: RunGroup) -> None:
    """Write the weights into the run's folder; every process calls this and writes its own."""
    if model.source is not None:
        save_transformers(pipe, path, model.source)
        return
    save_together(run_group, pipe, own_state(pipe), path)


def with_steps(config: Config, data: RunData) -> Config:
    """Return a config whose ``train.steps`` is the number of steps of ``train.epochs``, if that is set."""
    train = config.train
    if not train.epochs:
        return config
    steps = steps_of(train.epochs, train.batch * train.accumulate, data)
    return replace(config, train=replace(train, steps=steps))


def build_pipeline(
    config: Config, model: TrainableModel, device: torch.device, data: RunData | None
) -> Pipeline:
    """Return the pipeline of a resolved config; with ``parallel.dp``, the replica of this process.

    Args:
        data: data of the run, whose first batch has the microbatch that ``schedule.split = "measured"`` runs. None for an
            evaluation, where targets may be -100: the loss is then the mean over all other targets of the batch.
    """
    masked = data is None
    parallel, runtime, reduction = config.parallel, config.runtime, config.train.reduction
    assert parallel.virtual_stages is not None, "resolved"
    split: Split = config.schedule.split
    if split == "measured" and data is not None:
        batch = training_batch(data, config, model, 0)
        rows = slice(config.train.batch // config.schedule.microbatches)
        split = {"measured": (batch.x[rows], batch.y[rows], {})}
    elif split == "measured":
        split = "even"
    return Pipeline(
        model.layers,
        model.masked_loss_fn if masked else model.loss_fn,
        microbatches=config.schedule.microbatches // parallel.dp,
        schedule=config.schedule.name,
        virtual_stages=parallel.virtual_stages,
        split=split,
        recompute=runtime.recompute,
        autocast=autocast_of(runtime.precision),
        seed=config.train.seed,
        # With cp, the parts of a sample have other numbers of labels where these are shifted.
        reduction=model.valid_tokens if masked or parallel.cp > 1 else reduction,
        device=device,
        timeout=runtime.timeout,
        mesh=shape_of(parallel),
        parallel=ParallelOptions(
            bucket_bytes=parallel.bucket_bytes,
            buffers=parallel.buffers,
            check_replicas=parallel.check_replicas,
            family=model.family,
            sequence_parallel=parallel.sequence_parallel,
            shard=parallel.shard,
            window=parallel.window,
            reduce_every=parallel.reduce_every,
            store=parallel.store,
        ),
        execution=ExecutionOptions(
            first_timeout=runtime.first_timeout,
            threads=runtime.threads,
            memory=runtime.memory or None,
            offload=runtime.offload,
            compile=runtime.compile,
            check_finite=runtime.check_finite,
            strict=runtime.strict,
        ),
    )


def _opening(config: Config, path: Path, pipe: Pipeline, device: torch.device, data: RunData) -> str:
    ranks = describe(shape_of(config.parallel))
    threads = f"{pipe.threads} CPU thread{'s' if pipe.threads > 1 else ''} per rank"
    return (
        f"run {path}: {config.schedule.name} on {ranks} ({device.type}, {threads}), "
        f"{plural(config.schedule.microbatches, 'microbatch')}; {data.summary}; "
        f"learning rate up to {config.optim.lr:g}"
    )


def _update_notes(config: Config, data: RunData) -> list[str]:
    """Return sentences about the precision, the samples of a step and the optimizer; none for the defaults."""
    train, runtime, optim = config.train, config.runtime, config.optim
    notes = []
    samples = train.batch * train.accumulate
    if train.accumulate > 1:
        notes.append(f"{train.accumulate} batches of {train.batch} samples per step, {samples} in all")
    if train.epochs:
        notes.append(f"{train.epochs:g} epochs of {data.per_epoch:,} samples are {train.steps:,} steps")
    if runtime.precision in _PRECISION:
        notes.append(f"precision {runtime.precision} ({_PRECISION[runtime.precision]})")
    if runtime.recompute != "none":
        notes.append(f"recompute {runtime.recompute}")
    if runtime.compile != "none":
        notes.append(f"each {runtime.compile} compiled")
    if not config.model.path and optim.name != "AdamW":
        arguments = "".join(f", {key} {value}" for key, value in optim.arguments.items())
        notes.append(f"{optim.name} with weight decay {optim.weight_decay:g}{arguments}")
    if optim.matrices:
        notes.append(f"matrices of blocks: {optim.matrices}, learning rate up to {optim.matrices_lr:g}")
    lines = ["; ".join(notes)] if notes else []
    return [*lines, fine_tuning_note(optim)] if config.model.path else lines
