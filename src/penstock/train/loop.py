"""The training loop: data in, steps through the pipeline, metrics and weights out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.atomic import write_text
from penstock.errors import DataError
from penstock.host import to_stderr
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
from penstock.train.data.training_text import Text, bigram_of, open_text
from penstock.train.model.sampling import sample_run
from penstock.train.model.trainable import TrainableModel, language_of
from penstock.train.report.device import choose_device, sharing_cores
from penstock.train.report.loggers import Logger, open_loggers, require_loggers
from penstock.train.report.metrics_writer import MetricsWriter, go_back
from penstock.train.report.profile import Profile
from penstock.train.report.progress import Reporter
from penstock.train.report.traces import Traces, write_page
from penstock.train.resume import RunCheckpointer
from penstock.train.steps import Result, StepContext, Steps, Stopping

MakeReporter = Callable[[int, bool], Reporter]


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        folder: of the run.
        steps: optimizer steps done.
        loss: of the last step that was not skipped, in nats a token; None if none was, or it is not known any more.
        held_out_bits: the model's mean bits a token (a byte, where tokens are bytes) on the held-out samples.
        bigram_bits: a bigram table's on the same samples; None where tokens are not bytes.
        seconds: of the steps and evaluations, without what comes before and after.
        tokens_per_second: trained tokens over the time of the steps alone.
        unit: what a token is called: ``byte`` or ``token``.
        sample: the generated text, with its prompt.
        report: the run's page; None where Bokeh is not installed.
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
    """Train as told, in threads or as one of the processes that were started, and leave a run folder.

    Args:
        config: checked; what depends on the number of processes is filled in here.
        make_reporter: ``make_reporter(steps, leads)``.
        profile: whether one step is seen by torch's profiler, too; see `Profile`.
        stopping: asked before every step, whether this process shall stop; given to every process or to none. All stop at
            the same step if one shall, as `penstock.launch.signals.Interrupts` says after a signal.
        lock: whether the leading process locks the run's folder; False where the launcher holds the lock.

    Returns:
        The outcome; None on every process but the leading one.

    Raises:
        ConfigError: something given cannot be used, or another run uses the folder; nothing has been written then.
        StoppedError: on every process, once the run is saved.
        PenstockError: the run failed on the way; the folder keeps what there was.
    """
    world = current_world()
    config = resolve(config, world.size if world else None)
    path = run_folder.choose(config.train)
    language = language_of(config)
    language.codec.encode(config.sample.prompt or "")
    require_loggers(config)
    in_processes = world is not None
    device = choose_device(config.runtime.device, in_processes=in_processes)
    text = open_text(config, language)
    with (
        sharing_cores(
            shape_of(config.parallel).ranks, config.runtime.threads, in_processes=in_processes
        ) as threads,
        build_pipeline(config, language, device) as pipe,
        ExitStack() as held,
    ):
        # Clipping and the optimizer are many small operations: on a busy machine threads that have to meet after each
        # one wait for one another longer than they compute.
        torch.set_num_threads(threads)
        run_group = RunGroup.of(pipe)
        _require_one_data(run_group, text)
        path = Path(run_group.decide(lambda: str(_create(path, config, held if lock else None))))
        optimizer = build_optimizer(pipe, config.optim, config.train.steps, config.parallel.zero)
        with (
            make_reporter(config.train.steps, run_group.leads) as reporter,
            RunCheckpointer(path, config, text.digest, pipe, optimizer, run_group, reporter) as checkpointer,
        ):
            if run_group.leads:
                reporter.say(_opening(config, language, path, device, text))
                if advice := host_advice():
                    reporter.say(advice)
            standing = checkpointer.resume()
            loggers: list[Logger] = []
            run_group.decide(lambda: loggers.extend(_begin(path, config, standing.done)))
            with MetricsWriter(path if run_group.leads else None, loggers, reporter.say) as metrics:
                traces = Traces(path, config.train.steps, config.train.trace_every, metrics, reporter.say)
                profiles = Profile(path if profile else None, config.train.steps, run_group.rank)
                run = StepContext(
                    config,
                    language,
                    text,
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
                result = Steps(run, standing).take_all()
                _save(language, pipe, path, run_group)
                pipe.close()
                return _finish(run, path, result) if run_group.leads else None


def _require_one_data(run_group: RunGroup, text: Text) -> None:
    """Refuse, on every process, files that are not the same for all: copies on several hosts that differ, for instance."""
    told = run_group.each(lambda: text.digest.short)
    other = next((rank for rank, one in enumerate(told) if one != told[0]), 0)
    if other:
        raise DataError(
            f"the processes do not read the same data: rank 0 has {told[0]}; rank {other} has {told[other]}. data.path must "
            "name the same files on every host"
        )


def _create(path: Path, config: Config, held: ExitStack | None) -> Path:
    """What the leader does first: lock the folder, where that is its task, and make it."""
    if held is not None:
        # A process that has lost the others takes as long as a wait between ranks to find that out, and to end.
        wait = 2 * config.runtime.timeout if may_be_restart() else 0.0
        held.enter_context(locked(path, wait=wait, say=to_stderr))
    return run_folder.create(path, config)


def _begin(path: Path, config: Config, done: int) -> list[Logger]:
    """What the leader does before the first step: nothing is left of steps that will be done anew."""
    go_back(path, done)
    drop_after(path, done)
    return open_loggers(config, path, done)


def _finish(run: StepContext, path: Path, result: Result) -> Outcome:
    """What the leader does after the last step, when the weights are written."""
    language, reporter = run.language, run.reporter
    sample = sample_run(path)
    bigram = bigram_of(run.text, language)
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
        unit=language.codec.unit,
        sample=sample,
        report=str(page) if page else None,
        **vars(result),
    )


def _save(language: TrainableModel, pipe: Pipeline, path: Path, run_group: RunGroup) -> None:
    """Keep the weights in the run's folder; every process calls it, and each writes its own."""
    if language.source is not None:
        save_transformers(pipe, path, language.source)
        return
    save_together(run_group, pipe, own_state(pipe), path)


def build_pipeline(config: Config, language: TrainableModel, device: torch.device) -> Pipeline:
    """The pipeline of a resolved config; this process's one of ``parallel.dp``."""
    parallel = config.parallel
    assert parallel.virtual_stages is not None, "resolved"
    return Pipeline(
        language.layers,
        language.loss_fn,
        microbatches=config.schedule.microbatches // parallel.dp,
        schedule=config.schedule.name,
        virtual_stages=parallel.virtual_stages,
        device=device,
        timeout=config.runtime.timeout,
        mesh=shape_of(parallel),
        parallel=ParallelOptions(
            bucket_bytes=parallel.bucket_bytes or "auto",
            check_replicas=parallel.check_replicas,
            family=language.family,
            sequence_parallel=parallel.sequence_parallel,
        ),
        execution=ExecutionOptions(first_timeout=config.runtime.first_timeout),
    )


def _opening(config: Config, language: TrainableModel, path: Path, device: torch.device, text: Text) -> str:
    ranks = describe(shape_of(config.parallel))
    return (
        f"run {path}: {config.schedule.name} on {ranks} ({device.type}), "
        f"{config.schedule.microbatches} microbatches; {len(text.training.documents)} training files with "
        f"{len(text.training):,} {language.codec.unit}s; learning rate up to {config.optim.lr:g}"
    )
