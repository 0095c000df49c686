"""A training run from start to end: data, pipeline and optimizer, steps, weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.atomic import write_text
from penstock.errors import DataError
from penstock.host import to_stderr
from penstock.huggingface.adapters.save_adapters import save_adapters
from penstock.huggingface.save import save_transformers
from penstock.huggingface.weights import own_state, save_together
from penstock.run_lock import locked, may_be_restart
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.start.launch_environment import host_advice
from penstock.runtime.workers.run_group import RunGroup
from penstock.runtime.workers.world import current_world
from penstock.trace.folder import drop_after
from penstock.train import run_folder
from penstock.train.config.config import Config
from penstock.train.config.mesh_config import describe, shape_of
from penstock.train.config.optim import build_optimizer
from penstock.train.config.resolve import resolve
from penstock.train.data.run_data import RunData, bigram_baseline, open_data
from penstock.train.model.sampling import sample_run
from penstock.train.model.trainable import TrainableModel, build_model, default_text_note
from penstock.train.report.device import choose_device, sharing_cores
from penstock.train.report.loggers import Logger, open_loggers, require_loggers
from penstock.train.report.metrics_writer import MetricsWriter, go_back
from penstock.train.report.progress import Reporter
from penstock.train.report.step_profiler import StepProfiler
from penstock.train.report.tokenizing import tokenizing_bar
from penstock.train.report.traces import Traces, write_page
from penstock.train.resume import RunCheckpointer
from penstock.train.trainer import Result, Stopping, Trainer, TrainingRun

MakeReporter = Callable[[int, bool], Reporter]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        folder: folder of the run.
        steps: number of optimizer steps done.
        loss: loss of the last step that was not skipped, in nats a token; None if there is none or it is unknown.
        held_out_bits: the model's mean bits a token (a byte, where tokens are bytes) on the held-out samples.
        bigram_bits: a bigram table's mean bits a byte on the same samples; None where tokens are not bytes.
        seconds: duration of the steps and evaluations, without start and end of the run.
        tokens_per_second: trained tokens divided by the time of the steps alone.
        unit: name of a token: ``byte`` or ``token``.
        sample: the generated text, with its prompt.
        report: path of the run's page; None where Bokeh is not installed.
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
    lock: bool = True,
) -> Outcome | None:
    """Train a model in threads, or as one of several processes, and leave a run folder.

    Args:
        config: a checked config, not yet resolved.
        make_reporter: function of the number of steps, and of whether this process leads, that returns a reporter.
        profile: profile one step with torch's profiler (default False); see `StepProfiler`.
        stopping: function that returns True if this process shall stop, called before every step; for every process or for
            none (default None). If one shall stop, all stop at the same step. After a signal,
            `penstock.launch.signals.Interrupts` does so.
        lock: let the leading process lock the run's folder (default True); False where the launcher has locked it.

    Returns:
        The outcome on the leading process, None on the others.

    Raises:
        ConfigError: if a value cannot be used, or another run uses the folder; nothing has been written then.
        StoppedError: if the run was asked to stop; it is saved. Raised on every process.
        PenstockError: if the run failed later; the folder keeps what has been written.
    """
    world = current_world()
    config = resolve(config, world.size if world else None)
    path = run_folder.choose(config.train)
    model = build_model(config)
    model.tokenizer.encode(config.sample.prompt or "")
    require_loggers(config)
    in_processes = world is not None
    device = choose_device(config.runtime.device, in_processes=in_processes)
    with tokenizing_bar() as watch:
        data = open_data(config, model, watch)
    with (
        sharing_cores(
            shape_of(config.parallel).ranks, config.runtime.threads, in_processes=in_processes
        ) as threads,
        build_pipeline(config, model, device, data) as pipe,
        ExitStack() as lock_held,
    ):
        # Clipping and the optimizer are many small operations: with more threads a busy machine waits longer for the last
        # thread of each than it computes.
        torch.set_num_threads(threads)
        run_group = RunGroup.of(pipe)
        _require_one_data(run_group, data)
        path = Path(run_group.decide(lambda: str(_create(path, config, lock_held if lock else None))))
        optimizer = build_optimizer(
            pipe, config.optim, config.train.steps, config.parallel.zero, config.schedule.flow
        )
        with (
            make_reporter(config.train.steps, run_group.leads) as reporter,
            RunCheckpointer(path, config, data.digest, pipe, optimizer, run_group, reporter) as checkpointer,
        ):
            if run_group.leads:
                reporter.say(_opening(config, model, path, device, data))
                if model.adapters is not None:
                    reporter.say(str(model.adapters))
                if note := default_text_note(config, model):
                    reporter.say(note)
                for note in data.notes:
                    reporter.say(note)
                if advice := host_advice():
                    reporter.say(advice)
            progress = checkpointer.resume()
            loggers: list[Logger] = []
            run_group.decide(lambda: loggers.extend(_begin(path, config, progress.done)))
            with MetricsWriter(path if run_group.leads else None, loggers, reporter.say) as metrics:
                traces = Traces(path, config.train.steps, config.train.trace_every, metrics, reporter.say)
                profiles = StepProfiler(path if profile else None, config.train.steps, run_group.rank)
                run = TrainingRun(
                    config,
                    model,
                    data,
                    pipe,
                    optimizer,
                    run_group,
                    reporter,
                    metrics,
                    checkpointer,
                    traces,
                    profiles,
                    stopping,
                )
                result = Trainer(run, progress).train()
                _save(config, model, pipe, path, run_group)
                pipe.close()
                return _finish(run, path, result) if run_group.leads else None


def _require_one_data(run_group: RunGroup, data: RunData) -> None:
    """Raise on every process if they read different data, such as copies on several hosts that differ."""
    digests = run_group.each(lambda: data.digest.short)
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)
    if rank:
        raise DataError(
            f"the processes do not read the same data: rank 0 has {digests[0]}; rank {rank} has {digests[rank]}. data.path "
            "must name the same files on every host"
        )


def _create(path: Path, config: Config, lock: ExitStack | None) -> Path:
    """Lock the folder if `lock` is given, and create it; for the leader alone."""
    if lock is not None:
        # A process that has lost the others notices it only when a wait between ranks times out, and then has to end.
        wait = 2 * config.runtime.timeout if may_be_restart() else 0.0
        lock.enter_context(locked(path, wait=wait, say=to_stderr))
    return run_folder.create(path, config)


def _begin(path: Path, config: Config, done: int) -> list[Logger]:
    """Delete metrics and traces of steps that will be repeated, and open the loggers; for the leader alone."""
    go_back(path, done, evaluates=done == config.train.steps)
    drop_after(path, done)
    return open_loggers(config, path, done)


def _finish(run: TrainingRun, path: Path, result: Result) -> Outcome:
    """Write the sample, the last metrics and the page, once the weights are written; for the leader alone."""
    model, reporter = run.model, run.reporter
    sample = sample_run(path)
    bigram = bigram_baseline(run.data, model)
    try:
        write_text(path / "sample.txt", sample + "\n")
    except OSError as error:
        reporter.say(f"cannot write {path / 'sample.txt'}: {error.strerror}")
    run.metrics.write("final", step=run.config.train.steps, bigram_bits=bigram, **vars(result))
    page = write_page(path, reporter.say)
    return Outcome(
        str(path),
        run.config.train.steps,
        bigram_bits=bigram,
        unit=model.tokenizer.unit,
        sample=sample,
        report=str(page) if page else None,
        **vars(result),
    )


def _save(config: Config, model: TrainableModel, pipe: Pipeline, path: Path, run_group: RunGroup) -> None:
    """Write the weights into the run's folder; every process calls this and writes its own."""
    if model.adapters is not None and config.lora.save == "adapters":
        save_adapters(pipe, path)
        return
    if model.source is not None:
        save_transformers(pipe, path, model.source)
        return
    save_together(run_group, pipe, own_state(pipe), path)


def build_pipeline(
    config: Config, model: TrainableModel, device: torch.device, data: RunData | None
) -> Pipeline:
    """Return the pipeline of a resolved config; with ``parallel.dp``, the replica of this process.

    Args:
        config: the config.
        model: the model.
        device: device of the stages.
        data: data of the run; where targets may be -100, the loss is the mean over the others of the whole batch. None for
            data that is not known yet.
    """
    masked = data is None or data.masked
    parallel = config.parallel
    assert parallel.virtual_stages is not None, "resolved"
    return Pipeline(
        model.layers,
        model.masked_loss_fn if masked else model.loss_fn,
        microbatches=config.schedule.microbatches // parallel.dp,
        schedule=config.schedule.name,
        virtual_stages=parallel.virtual_stages,
        split=config.schedule.split,
        recompute=config.runtime.recompute,
        autocast=torch.bfloat16 if config.runtime.autocast == "bf16" else None,
        device=device,
        timeout=config.runtime.timeout,
        reduction=model.valid_tokens if masked else "mean",
        mesh=shape_of(parallel),
        parallel=ParallelOptions(
            bucket_bytes=parallel.bucket_bytes or "auto",
            check_replicas=parallel.check_replicas,
            family=model.family,
            sequence_parallel=parallel.sequence_parallel,
        ),
        execution=ExecutionOptions(first_timeout=config.runtime.first_timeout),
    )


def _opening(config: Config, model: TrainableModel, path: Path, device: torch.device, data: RunData) -> str:
    ranks = describe(shape_of(config.parallel))
    return (
        f"run {path}: {config.schedule.name} on {ranks} ({device.type}), "
        f"{config.schedule.microbatches} microbatches; {data.summary}; "
        f"learning rate up to {config.optim.lr:g}"
    )
