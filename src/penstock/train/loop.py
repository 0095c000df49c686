"""The training loop: data in, steps through the pipeline, metrics and weights out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from penstock.runtime.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.world import current_world
from penstock.trace.bubbles import busy
from penstock.train import run_folder
from penstock.train.bigram import bigram_bits, bigram_counts
from penstock.train.codec import BYTES, Bytes
from penstock.train.config import Config, resolve
from penstock.train.corpus import Corpus, open_corpora
from penstock.train.data import check_tokens, held_out_positions, train_batch, windows
from penstock.train.fleet import Fleet
from penstock.train.language import Language, language_of, require_readable, words
from penstock.train.loggers import open_loggers, require_loggers
from penstock.train.machine import choose_device, sharing_cores
from penstock.train.mesh import describe, shape_of
from penstock.train.models.transformers.save import save_transformers
from penstock.train.optim import build_optimizer
from penstock.train.profile import Profile
from penstock.train.progress import Reporter
from penstock.train.resume import Keeper
from penstock.train.run_folder import Metrics
from penstock.train.sample import sample_run
from penstock.train.traces import Traces, write_page

MakeReporter = Callable[[int, bool], Reporter]


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        folder: of the run.
        steps: optimizer steps done.
        loss: of the last step, in nats a token.
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
    loss: float
    held_out_bits: float
    bigram_bits: float | None
    seconds: float
    tokens_per_second: float
    unit: str
    sample: str
    report: str | None


@dataclass(frozen=True)
class Text:
    """The data of a run: the training corpus, and the held-out batches, (x, y) of shape (batch, sequence) each."""

    training: Corpus
    held_out: tuple[tuple[Tensor, Tensor], ...]


def train(config: Config, make_reporter: MakeReporter, *, profile: bool = False) -> Outcome | None:
    """Train as told, in threads or as one of the processes that were started, and leave a run folder.

    Args:
        config: checked; what depends on the number of processes is filled in here.
        make_reporter: ``make_reporter(steps, leads)``.
        profile: whether one step is seen by torch's profiler, too; see `Profile`.

    Returns:
        The outcome; None on every process but the leading one.

    Raises:
        ConfigError: something given cannot be used; nothing has been written then.
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
    ):
        # Clipping and the optimizer are many small operations: on a busy machine threads that have to meet after each
        # one wait for one another longer than they compute.
        torch.set_num_threads(threads)
        fleet = Fleet.of(pipe)
        path = Path(fleet.decide(lambda: str(run_folder.create(path, config))))
        optimizer = build_optimizer(pipe, config.optim, config.train.steps)
        with (
            make_reporter(config.train.steps, fleet.leads) as reporter,
            Metrics(path, open_loggers(config, path)) if fleet.leads else Metrics(None) as metrics,
            Keeper(path, config, pipe, optimizer, reporter) as keeper,
        ):
            if fleet.leads:
                reporter.say(_opening(config, language, path, device, text))
            traces = Traces(path, config.train.steps, config.train.trace_every, metrics)
            profiles = Profile(path if profile else None, config.train.steps, fleet.rank)
            result = _steps(
                config, language, text, pipe, fleet, reporter, metrics, traces, profiles, optimizer, keeper
            )
            _save(language, pipe, path, fleet)
            pipe.close()
            if not fleet.leads:
                return None
            bigram = bigram_of(text, language)
            metrics.write("final", step=config.train.steps, bigram_bits=bigram, **vars(result))
            sample = sample_run(path)
            (path / "sample.txt").write_text(sample + "\n", "utf-8")
            page = write_page(path, reporter.say)
            return Outcome(
                str(path),
                config.train.steps,
                bigram_bits=bigram,
                unit=language.codec.unit,
                sample=sample,
                report=str(page) if page else None,
                **vars(result),
            )


def _save(language: Language, pipe: Pipeline, path: Path, fleet: Fleet) -> None:
    """Keep the weights in the run's folder; every process calls it, and each writes its own."""
    if language.source is not None:
        save_transformers(pipe, path, language.source)
        return
    fleet.save(pipe, pipe.state_dict(), path)


def open_text(config: Config, language: Language) -> Text:
    """Find the data and read what every evaluation reads.

    Raises:
        DataError: it cannot be read, is too short, or has tokens outside the vocabulary.
    """
    data, size = config.data, config.train.batch
    training, held_out = open_corpora(data, words(language))
    require_readable(language, [d.path for d in (*training.documents, *held_out.documents)])
    check_tokens(training, "training", data.sequence)
    check_tokens(held_out, "held-out", data.sequence)
    places = held_out_positions(len(held_out), config.train.eval_batches * size, data.sequence)
    x, y = windows(held_out, places, data.sequence, language.vocabulary)
    if language.target_is_input:
        y = x
    text = Text(training, tuple(zip(torch.split(x, size), torch.split(y, size), strict=True)))
    batch_of(text, config, language, 0)
    return text


def batch_of(text: Text, config: Config, language: Language, step: int) -> tuple[Tensor, Tensor]:
    """The training batch of a step, x and y of shape (batch, sequence)."""
    x, y = train_batch(
        text.training,
        seed=config.train.seed,
        step=step,
        batch=config.train.batch,
        sequence=config.data.sequence,
        vocabulary=language.vocabulary,
    )
    return x, x if language.target_is_input else y


def bigram_of(text: Text, language: Language) -> float | None:
    """Bits a byte of a bigram table of the training files on the held-out samples; None for other tokens."""
    if not isinstance(language.codec, Bytes):
        return None
    x = torch.cat([x for x, _ in text.held_out]).numpy()
    y = torch.cat([y for _, y in text.held_out]).numpy()
    if language.target_is_input:
        x, y = x[:, :-1], x[:, 1:]
    return bigram_bits(bigram_counts(text.training, BYTES), x, y)


def build_pipeline(config: Config, language: Language, device: torch.device) -> Pipeline:
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
        family=language.family,
        sequence_parallel=parallel.sequence_parallel,
        bucket_bytes=parallel.bucket_bytes,
    )


@dataclass(frozen=True)
class _Result:
    loss: float
    held_out_bits: float
    seconds: float
    tokens_per_second: float


def _steps(
    config: Config,
    language: Language,
    text: Text,
    pipe: Pipeline,
    fleet: Fleet,
    reporter: Reporter,
    metrics: Metrics,
    traces: Traces,
    profiles: Profile,
    optimizer: PipelineOptimizer,
    keeper: Keeper,
) -> _Result:
    train = config.train
    first = keeper.resume()
    metrics.go_back(first)
    tokens = train.batch * config.data.sequence
    began = perf_counter()
    stepping = since_log = 0.0
    loss = bits = math.nan
    for step in range(first, train.steps):
        done = step + 1
        started = perf_counter()
        x, y = batch_of(text, config, language, step)
        with profiles.of(done):
            before = perf_counter()
            result = pipe.step(x, y)
            in_pipe = perf_counter() - before
            assert result.loss is not None, "a training step has a loss"
            loss = float(result.loss)
            update = optimizer.step()
        assert update.grad_norm is not None, "every step is applied, and measured"
        since_log += perf_counter() - started
        reporter.step(done, loss)
        if done % train.log_every == 0 or done == train.steps:
            stepping += since_log
            speed = tokens * min((done - 1) % train.log_every + 1, done - first) / since_log
            bubble = measured_bubble(pipe, fleet, in_pipe)
            reporter.measured(done, loss, speed, bubble)
            metrics.write(
                "train",
                step=done,
                loss=loss,
                lr=update.lr[0],
                grad_norm=float(update.grad_norm),
                tokens_per_second=speed,
                bubble=bubble,
                seconds=perf_counter() - began,
            )
            since_log = 0.0
        traces.after(done, pipe)
        if done % train.eval_every == 0 or done == train.steps:
            bits = held_out_bits(pipe, text)
            reporter.say(f"step {done}: {bits:.3f} bits/{language.codec.unit} on held-out text")
            metrics.write("held_out", step=done, held_out_bits=bits, seconds=perf_counter() - began)
        keeper.after_step(done)
    return _Result(loss, bits, perf_counter() - began, tokens * (train.steps - first) / stepping)


def held_out_bits(pipe: Pipeline, text: Text) -> float:
    """The model's mean bits a token on the held-out samples."""
    losses = [pipe.evaluate(x, y).loss for x, y in text.held_out]
    return sum(float(loss) for loss in losses if loss is not None) / len(losses) / math.log(2)


def measured_bubble(pipe: Pipeline, fleet: Fleet, seconds: float) -> float:
    """The share of the ranks' time in the last step that went neither into a forward nor into a backward.

    Args:
        pipe: right after the step.
        fleet: its processes; every one calls this.
        seconds: the step took.
    """
    trace = pipe.trace()
    assert trace is not None, "a step has just been done"
    ranks = fleet.size if pipe.in_processes else pipe.ranks
    return max(0.0, 1.0 - fleet.total(float(busy(trace).sum()) / (ranks * seconds)))


def _opening(config: Config, language: Language, path: Path, device: torch.device, text: Text) -> str:
    ranks = describe(shape_of(config.parallel))
    return (
        f"run {path}: {config.schedule.name} on {ranks} ({device.type}), "
        f"{config.schedule.microbatches} microbatches; {len(text.training.documents)} training files with "
        f"{len(text.training):,} {language.codec.unit}s"
    )
