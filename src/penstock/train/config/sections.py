"""The sections of a run's config."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.base.tables import Count, Flag, Table
from penstock.parallel.replicas.layout import BUCKET_BYTES
from penstock.train.config.fields import (
    AxisOrder,
    Buffers,
    Bytes,
    CallbackNames,
    Changed,
    Compile,
    DataFormat,
    FolderName,
    Fraction,
    LoggerNames,
    LogLevel,
    LrSchedule,
    Momentum,
    NotNegative,
    NotNegativeNumber,
    OptionalCount,
    Options,
    Positive,
    Precision,
    Recompute,
    Reduction,
    RouterScores,
    Seconds,
    Sharded,
    Share,
    Split,
    Stored,
    Text,
    Threads,
)
from penstock.train.data.tokenizer import BYTES


@dataclass(frozen=True, kw_only=True)
class DataConfig(Table):
    """``[data]``: the training and the held-out data.

    Attributes:
        path: file or folder of text or of tokens (``.npy``), or a folder that ``datasets`` saved; empty for the text of
            Python's standard library.
        pattern: pattern of the names of a folder's files, at any depth.
        format: format of all files: ``text``, ``tokens`` or ``datasets``; ``auto`` takes it from names and content, and
            refuses what is none of these.
        text_field: column with the text, in a folder of ``datasets``.
        split: split to train on, in a folder of ``datasets`` with several.
        held_out: share of the *files* that are never trained on; of a single file or a folder of ``datasets``, share of the
            tokens, from the end.
        held_out_path: file or folder of held-out data, of any format of `path` and read with the same keys; nothing is then
            held out of the training data.
        sequence: length of a sample in tokens.
        changed: reaction of a resumed run to data that differs from its checkpoint's: ``refuse``, or ``accept`` it and
            report the differences.
    """

    path: Text = ""
    pattern: Text = "*"
    format: DataFormat = "auto"
    text_field: Text = "text"
    split: Text = "train"
    held_out: Fraction = 0.05
    held_out_path: Text = ""
    sequence: Count = 128
    changed: Changed = "refuse"


@dataclass(frozen=True)
class ScheduleConfig(Table):
    """``[schedule]``: the pipeline schedule.

    Attributes:
        name: name of a schedule family (``penstock schedule list``), MODULE:FUNCTION that builds one, or path of a CSV file.
        microbatches: number of equal parts of a batch, divided equally among the ``parallel.dp`` replicas (default: 8, or
            the largest number below it that ``train.batch`` allows).
        split: ``even``; ``measured`` for stages of equal time, measured before the first step; or a list with the number of
            blocks of every stage.
    """

    name: Text = "1f1b"
    microbatches: Count = 8
    split: Split = "even"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Table):
    """``[parallel]``: the ranks on each axis.

    Attributes:
        pp: pipeline ranks (default: the processes that the other axes leave under torchrun, else 2 threads, or 1 for
            a model of one layer).
        virtual_stages: stages per rank (default: the usual number of the schedule family).
        dp: replicas of the pipeline that share each batch; with more axes than `pp` a run takes ``pp * dp * cp * tp``
            processes.
        cp: processes that share the tokens of each sample; ``data.sequence`` must be a multiple of ``2 * cp``.
        tp: processes that share every matrix of a stage.
        ep: processes that divide the experts of a mixture: a divisor of ``dp * cp * tp``, whose processes they are.
        order: order of the axes, outermost first; neighbouring processes differ in the last one. `cp` follows `dp` if it
            is not named.
        sequence_parallel: with `tp`, also divide activations between the matrices along the sequence.
        bucket_bytes: with `dp` or `cp`, maximum size of the buckets in which gradients are reduced during the backward.
        zero: with `dp` or `cp`, each replica keeps a share of the optimizer's state and updates a share of the weights.
        shard: what replicas divide: only the ``optimizer`` state, as `zero` does, also the ``gradients`` (ZeRO-2), or also
            the ``weights`` (ZeRO-3), which are gathered before the ops that read them.
        store: where a rank keeps weights that no op reads, and their gradients and optimizer state: on its device
            (``none``), in ``host`` memory, or on ``disk``.
        window: with ``shard = "weights"`` or a store, stages whose weights a rank may hold at once (default: all of the
            rank).
        reduce_every: with ``shard = "gradients"`` or ``"weights"`` or a store, microbatches whose gradients add up before
            replicas sum them, or they go to the store (default: all of the step).
        buffers: reaction to copies of a stage that change a buffer differently: ``refuse`` the step, or take the ``mean`` or
            the ``first``.
        check_replicas: steps between two comparisons of replicated weights (`dp`, `cp`, `tp`, stages on two ranks); 0 for
            none.
    """

    pp: OptionalCount = None
    virtual_stages: OptionalCount = None
    dp: Count = 1
    cp: Count = 1
    tp: Count = 1
    ep: Count = 1
    order: AxisOrder = "pp,dp,tp"
    sequence_parallel: Flag = False
    bucket_bytes: Count = BUCKET_BYTES
    zero: Flag = False
    shard: Sharded = "none"
    store: Stored = "none"
    window: OptionalCount = None
    reduce_every: OptionalCount = None
    buffers: Buffers = "refuse"
    check_replicas: NotNegative = 100


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Table):
    """``[model]``: the Llama-style decoder of `penstock.train.model.llama`; or a Hugging Face model by `path` or `config`.

    Attributes:
        path: local folder of a Hugging Face causal model whose weights to start from; sizes come from its ``config.json``,
            the tokenizer from its ``tokenizer.json``.
        config: ``config.json`` of a Hugging Face model to train from random weights (seed ``train.seed``); sizes and
            tokenizer come from its folder.
        vocabulary: number of tokens; 256 for bytes.
        width: size of the residual stream.
        layers: number of blocks.
        heads: number of query heads, which share `width` equally.
        kv_heads: number of key and value heads, each shared by ``heads / kv_heads`` query heads.
        hidden: inner size of the SwiGLU feed-forward.
        experts: number of experts in each block, in place of its feed-forward; 0 for none.
        experts_per_token: number of experts that each token is sent to.
        expert_hidden: inner size of each expert (default: `hidden`).
        shared_hidden: inner size of a further expert that all tokens take; 0 for none.
        router: scores of the experts: a ``softmax`` over all of them, or a ``sigmoid`` of each; those chosen are divided by
            their sum.
        auxiliary_loss: factor of the loss that balances the experts, over all blocks' tokens of a microbatch; 0 for none.
        bias_update_rate: change of each expert's bias in the choice of experts after an optimizer step, up if it got fewer
            tokens than the mean and down if more; 0 for no biases.
        rotary_base: base of the rotary positions, whose longest wavelength is about 2π times as large.
        norm_epsilon: addend of the mean square in RMSNorm.
    """

    path: Text = ""
    config: Text = ""
    vocabulary: Count = BYTES
    width: Count = 128
    layers: Count = 6
    heads: Count = 4
    kv_heads: Count = 2
    hidden: Count = 352
    experts: NotNegative = 0
    experts_per_token: Count = 2
    expert_hidden: OptionalCount = None
    shared_hidden: NotNegative = 0
    router: RouterScores = "softmax"
    auxiliary_loss: NotNegativeNumber = 0.0
    bias_update_rate: NotNegativeNumber = 0.0
    rotary_base: Positive = 10_000.0
    norm_epsilon: Positive = 1e-5


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Table):
    """``[optim]``: the optimizer and its learning rate.

    The defaults are those of AdamW for a small model with random weights. With ``model.path``, they are those of
    fine-tuning: `lr` 2e-5, `weight_decay` 0.01 and `beta2` 0.999. Another optimizer has
    torch's defaults for `lr`, `weight_decay`, `beta1`, `beta2` and `epsilon`; but with ``model.path`` those of Adam's kind
    (such as ``NAdam``) have these rates, too, and `lr` must be given for the rest.

    Attributes:
        name: class of ``torch.optim``, such as ``AdamW``, ``SGD`` or ``Adafactor``. Refused are ``LBFGS`` and
            ``SparseAdam``, which cannot train a pipeline, and ``Muon``, which is for `matrices`.
        matrices: class for the matrices of the blocks, such as ``Muon``, but for stacks of experts, with its own defaults
            beside `matrices_lr` and `weight_decay`; empty for `name`.
        matrices_lr: highest learning rate of these.
        arguments: further arguments of the class, as in ``[optim.arguments]`` with ``momentum = 0.9``.
        lr: highest learning rate.
        lr_schedule: course of the rate after the warm-up: ``cosine`` or ``linear`` down to `final_lr`, or ``constant``.
        final_lr: last learning rate, as a share of `lr`; ignored if `lr_schedule` is ``constant``.
        warmup: share of the steps in which the rate rises linearly.
        weight_decay: weight decay of matrices; vectors (norms, biases) and embeddings have none.
        beta1, beta2, epsilon: parameters of AdamW and the other optimizers that have ``betas``; those of the others are
            in `arguments`.
        clip: limit of the global gradient norm; 0 for none.
        loss_scale: first factor of the loss with ``runtime.precision = "fp16"``. It is halved when a gradient overflows,
            which skips the step.
        loss_scale_interval: steps in a row without an overflow after which that factor is doubled.
    """

    name: Text = "AdamW"
    matrices: Text = ""
    matrices_lr: Positive = 2e-2
    arguments: Options = field(default_factory=dict)
    lr: Positive = 4e-3
    lr_schedule: LrSchedule = "cosine"
    final_lr: Share = 0.05
    warmup: Share = 0.05
    weight_decay: NotNegativeNumber = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    epsilon: Positive = 1e-8
    clip: NotNegativeNumber = 1.0
    loss_scale: Positive = 65536.0
    loss_scale_interval: Count = 2000


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
