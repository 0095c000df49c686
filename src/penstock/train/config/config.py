"""The configuration of a training run: a frozen dataclass for each section, checked before anything else happens.

The sections are those of the TOML file, which `penstock.train.config.file` reads and writes.
"""

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
    AxisOrder,
    Changed,
    Count,
    Flag,
    FolderName,
    Fraction,
    LoggerNames,
    Momentum,
    NotNegative,
    NotNegativeNumber,
    Positive,
    Seconds,
    Share,
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
        path: a local folder with a Hugging Face causal model, whose weights are trained on; the other keys are then the
            folder's. A ``tokenizer.json`` in it reads the text.
        config: a Hugging Face ``config.json``, whose model starts from weights drawn by ``train.seed``; likewise.
        vocabulary: number of tokens; 256 for bytes.
        width: size of the residual stream.
        layers: number of blocks.
        heads: query heads; `width` is divided among them.
        kv_heads: key and value heads, each shared by ``heads / kv_heads`` query heads.
        hidden: inner size of the SwiGLU feed-forward.
        rotary_base: the longest wavelength of the rotary positions is about 2π times this.
        norm_epsilon: added to the mean square in RMSNorm.
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
    """``[data]``: what is read and what is kept apart.

    Attributes:
        path: a file or folder of text, or a ``.npy`` file of tokens (or a folder of them); empty for the text of
            Python's own standard library.
        pattern: which files of a folder, at any depth.
        held_out: share of the *files* never trained on; of the one file's end where there is only one.
        sequence: tokens a sample.
        changed: what to do if a run that is resumed finds other data than its checkpoint was made with: ``refuse``, or
            ``accept`` and say so.
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
        lr: the highest learning rate. Where it is not set: 0.004, which suits the small model from nothing; 2e-5 for the
            weights of ``model.path``, which the other would wash out.
        final_lr: the last learning rate, as a share of `lr`.
        warmup: share of the steps in which the rate climbs in a line.
        weight_decay: for matrices; vectors and embeddings are not decayed.
        beta1, beta2, epsilon: AdamW's.
        clip: the global gradient norm is cut to this; 0 never cuts.
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
    """``[schedule]``: the order of the work.

    Attributes:
        name: a family's name (``penstock schedule list``) or the path of a CSV file.
        microbatches: equal parts each batch is cut into; each of ``parallel.dp`` pipelines takes an equal share of them.
    """

    name: Text = "1f1b"
    microbatches: Count = 8


@dataclass(frozen=True)
class ParallelConfig(_Table):
    """``[parallel]``: how the model is spread.

    Attributes:
        pp: pipeline ranks. Where it is not set: under torchrun the processes that `dp` and `tp` leave, else 2 threads.
        virtual_stages: stages a rank. Where it is not set: the schedule family's own number.
        dp: pipelines side by side that share each batch; they take ``pp * dp * tp`` processes.
        tp: processes that share every matrix of a stage.
        order: of the axes, outermost first; neighbouring processes differ in the last one.
        sequence_parallel: with `tp`, also cut along the sequence what lies between the matrices.
        bucket_bytes: with `dp`, gradients are added up in buckets of so many bytes, while the backward runs; 0 chooses for
            each stage after the second step.
        zero: with `dp`, each pipeline keeps its share of the optimizer's state, and updates its share of the weights.
        check_replicas: every so many steps the weights of copies (`dp`, `tp`, stages that two ranks hold) are compared; 0
            never.
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
        steps: optimizer steps.
        batch: samples a step, over all microbatches.
        seed: of the initial weights, the order of the data and the sample.
        name: of the run folder; empty for the time it started.
        folder: where run folders are kept.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations on held-out text; there is always one at the end.
        eval_batches: batches of held-out samples an evaluation reads, the same ones each time.
        trace_every: steps between two whose trace is kept, for the report; always the first and the last, and with 0
            these alone.
        loggers: where metrics and timelines go beside ``metrics.jsonl``: ``tensorboard``, ``wandb``, or both with a
            comma between them.
        checkpoint_every: steps between two checkpoints; 0 for none.
        keep_last: how many of the newest checkpoints are kept; 0 for all.
        keep_every: checkpoints whose step divides by it are kept, too; 0 for none.
        skip_nonfinite: how many steps in a row are left out if a loss or gradient is NaN or infinite, with no weight changed
            and the learning rate not moved on; one more stops the run, and 0 stops at the first.
        resume: what to go on from: a run's folder, or one checkpoint in it; ``auto`` for the run of this name, if there
            is one; empty to start a new run.
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
        prompt: what the text starts with; token numbers where the vocabulary is not the 256 bytes. Where it is not
            set: ``def ``, or 0; nothing for a Hugging Face model.
        length: tokens to generate.
        temperature: 0 always takes the likeliest token.
        top_k: draws only among this many likeliest tokens; 0 draws among all.
    """

    prompt: Text | None = None
    length: NotNegative = 256
    temperature: NotNegativeNumber = 0.8
    top_k: NotNegative = 40


@dataclass(frozen=True)
class RuntimeConfig(_Table):
    """``[runtime]``: the machine.

    Attributes:
        device: ``cpu``, ``cuda``, ``cuda:1``; empty is the CPU, but under torchrun a GPU a process where there are
            enough.
        threads: CPU threads a rank computes with; 0 for OMP_NUM_THREADS, or a share of the machine's or container's cores.
        timeout: seconds any wait between ranks may last.
        first_timeout: the same until the first step is done, and in the first evaluation.
    """

    device: Text = ""
    threads: Threads = 0
    timeout: Seconds = 60.0
    first_timeout: Seconds = 600.0


@dataclass(frozen=True)
class Config(_Table):
    """All of it. Build with `from_mapping` (checked) or `penstock.train.config.file.load`."""

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
    "dataclass_type": "a section with keys of its own",
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
