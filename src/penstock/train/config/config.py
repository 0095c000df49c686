"""The config of a training run: a frozen dataclass for each section of its TOML file, checked before anything else."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.errors import ConfigError, nearest
from penstock.parallel.data.layout import BUCKET_BYTES
from penstock.train.config.fields import (
    Autocast,
    AxisOrder,
    Changed,
    Count,
    Flag,
    Flow,
    FolderName,
    Fraction,
    LoggerNames,
    Momentum,
    NotNegative,
    NotNegativeNumber,
    Positive,
    Recompute,
    Seconds,
    Share,
    Split,
    Text,
    Threads,
)
from penstock.train.data.tokenizer import BYTES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FINE_TUNING_LR = 2e-5


class _Table:
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class ModelConfig(_Table):
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
    rotary_base: Positive = 10_000.0
    norm_epsilon: Positive = 1e-5


@dataclass(frozen=True)
class DataConfig(_Table):
    """``[data]``: the training and the held-out text.

    Attributes:
        path: file or folder of text, or of tokens in ``.npy`` files; empty for the text of Python's standard library.
        pattern: pattern of the names of a folder's files, at any depth.
        held_out: share of the *files* that are never trained on; share of the tokens, from the end, of a single file.
        sequence: length of a sample in tokens.
        changed: reaction of a resumed run to data that differs from its checkpoint's: ``refuse``, or ``accept`` it and
            report the differences.
    """

    path: Text = ""
    pattern: Text = "*"
    held_out: Fraction = 0.05
    sequence: Count = 128
    changed: Changed = "refuse"


@dataclass(frozen=True)
class OptimConfig(_Table):
    """``[optim]``: AdamW and its learning rate.

    Attributes:
        lr: highest learning rate. The default is 0.004, which suits the small model from random weights, but 2e-5 with
            ``model.path``, whose weights a higher rate would destroy.
        final_lr: last learning rate, as a share of `lr`.
        warmup: share of the steps in which the rate rises linearly.
        weight_decay: weight decay of matrices; vectors and embeddings have none.
        beta1, beta2, epsilon: parameters of AdamW.
        clip: limit of the global gradient norm; 0 for none.
    """

    lr: Positive = 4e-3
    final_lr: Share = 0.05
    warmup: Share = 0.05
    weight_decay: NotNegativeNumber = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    epsilon: Positive = 1e-8
    clip: NotNegativeNumber = 1.0


@dataclass(frozen=True)
class ScheduleConfig(_Table):
    """``[schedule]``: the pipeline schedule.

    Attributes:
        name: name of a schedule family (``penstock schedule list``), or path of a CSV file.
        microbatches: number of equal parts of a batch, divided equally among the ``parallel.dp`` replicas.
        split: ``even``, or a list with the number of blocks of every stage.
        flow: ``on`` lets a rank begin the next step while others end this one, with the same numbers; ``off`` does not, and
            ``auto`` does if the run has a process a rank, nothing forbids it, and the schedule gains by it.
    """

    name: Text = "1f1b"
    microbatches: Count = 8
    split: Split = "even"
    flow: Flow = "auto"


@dataclass(frozen=True)
class ParallelConfig(_Table):
    """``[parallel]``: the ranks on each axis.

    Attributes:
        pp: pipeline ranks (default: the processes that `dp` and `tp` leave under torchrun, else 2 threads).
        virtual_stages: stages a rank (default: the usual number of the schedule family).
        dp: replicas of the pipeline that share each batch; a run takes ``pp * dp * tp`` processes.
        tp: processes that share every matrix of a stage.
        order: order of the axes, outermost first; neighbouring processes differ in the last one.
        sequence_parallel: with `tp`, also divide activations between the matrices along the sequence.
        bucket_bytes: with `dp`, size of the buckets in which gradients are reduced during the backward; 0 chooses a size
            for each stage after the second step.
        zero: with `dp`, each replica keeps a share of the optimizer's state and updates a share of the weights.
        check_replicas: steps between two comparisons of replicated weights (`dp`, `tp`, stages on two ranks); 0 for none.
    """

    pp: Count | None = None
    virtual_stages: Count | None = None
    dp: Count = 1
    tp: Count = 1
    order: AxisOrder = "pp,dp,tp"
    sequence_parallel: Flag = False
    bucket_bytes: NotNegative = BUCKET_BYTES
    zero: Flag = False
    check_replicas: NotNegative = 100


@dataclass(frozen=True)
class TrainConfig(_Table):
    """``[train]``: the run.

    Attributes:
        steps: number of optimizer steps.
        batch: samples a step, over all microbatches.
        seed: seed of the initial weights, the order of the data and the sample.
        name: name of the run folder; empty for the time of the start.
        folder: folder of run folders.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations on held-out text; the last step always has one.
        eval_batches: batches of held-out samples in an evaluation, always the same ones.
        trace_every: steps between two saved traces; the first and the last step are always saved, and with 0 only these.
        loggers: receivers of metrics and timelines beside ``metrics.jsonl``: ``tensorboard``, ``wandb``, or both with a
            comma between them.
        checkpoint_every: steps between two checkpoints; 0 for none.
        keep_last: number of newest checkpoints to keep; 0 for all.
        keep_every: also keep the checkpoints whose step is a multiple; 0 for none.
        skip_nonfinite: number of consecutive steps with a NaN or infinite loss or gradient that are skipped, with weights
            and learning rate unchanged; one more stops the run, and 0 stops at the first.
        resume: folder of a run, or one of its checkpoints, to resume from; ``auto`` for the run `name` if it exists; empty
            for a new run.
    """

    steps: Count = 600
    batch: Count = 16
    seed: NotNegative = 0
    name: FolderName = ""
    folder: Text = "runs"
    log_every: Count = 10
    eval_every: Count = 150
    eval_batches: Count = 16
    trace_every: NotNegative = 100
    loggers: LoggerNames = ""
    checkpoint_every: NotNegative = 100
    keep_last: NotNegative = 3
    keep_every: NotNegative = 0
    skip_nonfinite: NotNegative = 0
    resume: Text = ""


@dataclass(frozen=True)
class SampleConfig(_Table):
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


@dataclass(frozen=True)
class RuntimeConfig(_Table):
    """``[runtime]``: the machine.

    Attributes:
        device: ``cpu``, ``cuda``, ``cuda:1``; empty for the CPU, or for a GPU a process under torchrun if there are enough.
        threads: CPU threads a rank; 0 for OMP_NUM_THREADS, or a share of the cores of the machine or container.
        timeout: limit of any wait between ranks, in seconds.
        first_timeout: limit of the waits in the first step and the first evaluation, in seconds.
        recompute: layers that run again before their backward, to save memory: ``none``, ``full``, or k for every k-th.
        autocast: ``bf16`` for mixed precision, or empty for float32.
    """

    device: Text = ""
    threads: Threads = 0
    timeout: Seconds = 60.0
    first_timeout: Seconds = 600.0
    recompute: Recompute = "none"
    autocast: Autocast = ""


@dataclass(frozen=True)
class Config(_Table):
    """All sections. `from_mapping` and `penstock.train.config.file.load` build checked ones."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()
    runtime: RuntimeConfig = RuntimeConfig()


_CONFIG = TypeAdapter(Config)
_PLAIN = "text without NUL and without broken characters"
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a section with keys",
    "finite_number": "a finite number",
    "float_type": "a finite number",
    "int_type": "a whole number",
    "string_pattern_mismatch": _PLAIN,
    "string_type": "text in quotes",
    "string_unicode": _PLAIN,
}
"""Allowed values by the type of pydantic's error, where its own text does not say how to write them in TOML."""
_SHOWN = 200


def from_mapping(tables: dict[str, Any]) -> Config:
    """Check ``{section: {key: value}}`` and fill in the defaults.

    Raises:
        ConfigError: if a section or key is unknown (with the nearest names), a value has the wrong type or range, or two
            values contradict each other.
    """
    try:
        config = _CONFIG.validate_python(tables)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors(include_url=False)[0])) from None
    _check_model(tables.get("model", {}))
    if config.model.path and "lr" not in tables.get("optim", {}):
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=FINE_TUNING_LR))
    _check_together(config)
    return config


def _explain(error: ErrorDetails) -> str:
    """Turn one of pydantic's errors into a line."""
    section, *keys = map(str, error["loc"])
    name = ".".join((section, *keys))
    if error["type"] == "unexpected_keyword_argument":
        table = getattr(Config, section) if keys else Config
        known = [field.name for field in dataclasses.fields(table)]
        if keys:
            return f"no key {name}{nearest(keys[0], known)}; [{section}] has {', '.join(known)}"
        return f"no section [{section}]{nearest(section, known)}; the sections are {', '.join(known)}"
    allowed = _EXPECTED.get(error["type"]) or re.sub("^(Input should be|Value error,) ", "", error["msg"])
    try:
        value = repr(error["input"])
    except ValueError:
        value = "a number of too many digits"
    if len(value) > _SHOWN:
        value = f"{value[: _SHOWN // 2]}...{value[-_SHOWN // 2 :]}"
    return f"{name} must be {allowed}, got {value}"


def _check_model(table: dict[str, Any]) -> None:
    """Raise if sizes are given beside a Hugging Face model, which brings its own."""
    sources = [key for key in ("path", "config") if table.get(key)]
    if not sources:
        return
    if len(sources) > 1:
        raise ConfigError("model.path and model.config are both given; a model comes from one of them")
    if sizes := sorted(set(table) - {"path", "config"}):
        raise ConfigError(
            f"model.{sizes[0]} belongs to Penstock's own model; the sizes of a Hugging Face model are in its config.json"
        )


def _check_together(config: Config) -> None:
    model, train, m, parallel = config.model, config.train, config.schedule.microbatches, config.parallel
    if model.width % model.heads or (model.width // model.heads) % 2:
        raise ConfigError(
            f"model.width {model.width} does not divide into {model.heads} heads of an even size; "
            "rotary positions turn pairs"
        )
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.heads {model.heads} must be a multiple of model.kv_heads {model.kv_heads}")
    if train.batch % m:
        raise ConfigError(
            f"train.batch {train.batch} does not divide into {m} equal microbatches; schedule.microbatches must divide it"
        )
    if m % parallel.dp:
        raise ConfigError(
            f"schedule.microbatches {m} do not divide over parallel.dp {parallel.dp}: every replica does an equal share of "
            f"the batch; take a multiple of {parallel.dp}, or parallel.dp = {math.gcd(m, parallel.dp)}"
        )
    if parallel.zero and not parallel.bucket_bytes and parallel.dp > 1:
        raise ConfigError(
            "parallel.zero keeps the buckets that it begins with, and parallel.bucket_bytes = 0 chooses them later; give a "
            "number of bytes"
        )
    if parallel.sequence_parallel and config.data.sequence % parallel.tp:
        raise ConfigError(
            f"data.sequence {config.data.sequence} does not divide over parallel.tp {parallel.tp}, which "
            f"parallel.sequence_parallel needs; take a multiple of {parallel.tp}"
        )
