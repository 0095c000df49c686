"""The config sections of the run, of the generated text and of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.train.config.fields import (
    Bytes,
    CallbackNames,
    Compile,
    Count,
    Flag,
    FolderName,
    LoggerNames,
    LogLevel,
    NotNegative,
    NotNegativeNumber,
    Precision,
    Recompute,
    Reduction,
    Seconds,
    Table,
    Text,
    Threads,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Table):
    """``[train]``: the run.

    Attributes:
        steps: number of steps, each one update of the weights.
        epochs: passes over the training samples, also a fraction, in place of `steps`; 0 counts `steps`.
        batch: samples of a batch, over all microbatches.
        accumulate: batches a step, whose gradients are averaged; a step then trains ``accumulate * batch`` samples.
        reduction: how the losses of microbatches are combined: their ``mean`` or their ``sum``.
        seed: seed of the initial weights, dropout, the order of the data and the sample.
        name: name of the run folder; empty for the time of the start.
        folder: folder of run folders.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations on held-out text; the last step always has one.
        eval_batches: batches of held-out samples in an evaluation, always the same ones.
        trace_every: steps between two saved traces; the first and the last step are always saved, and with 0 only these.
        report: write ``report.html``, during the run and at its end; without it, ``penstock trace RUN --html FILE`` draws
            the page later.
        loggers: receivers of metrics and timelines beside ``metrics.jsonl``: ``tensorboard``, ``wandb``, or both
            with a comma between them.
        callbacks: own callbacks: ``MODULE:FUNCTION``, of an installed module or one in the current folder, or several with
            commas between them. The function is called without arguments and returns a `penstock.Callback`.
        log_level: lowest level in the log of each process (``logs/rank-N.log``): ``debug``, ``info``, ``warning`` or
            ``error``; the environment variable PENSTOCK_LOG takes precedence.
        checkpoint_every: steps between two checkpoints; the last step always has one, and 0 is for none.
        keep_last: number of newest checkpoints to keep; 0 for all.
        keep_every: also keep the checkpoints whose step is a multiple; 0 for none.
        skip_nonfinite: number of consecutive steps with a NaN or infinite loss or gradient that are skipped, with weights
            and learning rate unchanged; one more stops the run, and 0 stops at the first.
        resume: folder of a run, or one of its checkpoints, to resume from; ``auto`` for the run `name` if it exists; empty
            for a new run.
    """

    steps: Count = 600
    epochs: NotNegativeNumber = 0.0
    batch: Count = 16
    accumulate: Count = 1
    reduction: Reduction = "mean"
    seed: NotNegative = 0
    name: FolderName = ""
    folder: Text = "runs"
    log_every: Count = 10
    eval_every: Count = 150
    eval_batches: Count = 16
    trace_every: NotNegative = 100
    report: Flag = True
    loggers: LoggerNames = ""
    callbacks: CallbackNames = ""
    log_level: LogLevel = "info"
    checkpoint_every: NotNegative = 100
    keep_last: NotNegative = 3
    keep_every: NotNegative = 0
    skip_nonfinite: NotNegative = 0
    resume: Text = ""


@dataclass(frozen=True)
class SampleConfig(Table):
    """``[sample]``: the text generated at the end.

    Attributes:
        prompt: start of the text, or token numbers for a vocabulary other than the 256 bytes (default: ``def ``, or 0;
            nothing for a Hugging Face model).
        length: number of tokens to generate.
        temperature: divisor of the logits; 0 always takes the likeliest token.
        top_k: number of likeliest tokens to draw from; 0 draws from all.
    """

    prompt: Text | None = None
    length: NotNegative = 256
    temperature: NotNegativeNumber = 0.8
    top_k: NotNegative = 40


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Table):
    """``[runtime]``: the machine.

    Attributes:
        device: ``cpu``, ``cuda``, ``cuda:1``; empty for the CPU, or under torchrun for one GPU each if there are enough.
        threads: CPU threads per rank; 0 for OMP_NUM_THREADS, or a share of the cores of the machine or container.
        timeout: limit of any wait between ranks, in seconds.
        first_timeout: limit of the waits in the first step and the first evaluation, in seconds.
        precision: ``fp32``; ``bf16`` for fp32 weights and bf16 autocast; ``bf16-weights`` for bf16 weights, whose gradients
            and main weights are fp32; ``fp16`` for fp32 weights, fp16 autocast and a scaled loss.
        recompute: layers that run again before their backward, to save memory: ``none``, ``full``, k for every k-th, or
            ``auto`` for as few as `memory` allows, measured in the first step.
        memory: bytes of activations that a rank may hold; for ``recompute = "auto"``, which needs it, and 0 otherwise.
        offload: keep activations in host memory until their backward, for stages on a GPU.
        compile: modules given to ``torch.compile``: ``none``, each ``block``, or each ``stage``.
        check_finite: check every loss and gradient for NaN and infinity before the update; else only the gradients' norm is
            checked, and on a GPU a step ends with one synchronization fewer.
        strict: refuse a layer whose split backward gives other gradients than its full backward, which it would run.
    """

    device: Text = ""
    threads: Threads = 0
    timeout: Seconds = 60.0
    first_timeout: Seconds = 600.0
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    memory: Bytes = 0
    offload: Flag = False
    compile: Compile = "none"
    check_finite: Flag = True
    strict: Flag = False
