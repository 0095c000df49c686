"""What a training run is told: one frozen dataclass a section, checked once, before anything else happens.

The sections are those of the TOML file; `config_file` reads and writes it.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, nearest
from penstock.parallel.data.layout import BUCKET_BYTES
from penstock.schedule.families import FAMILIES
from penstock.train.config.allowed import (
    CHANGED,
    COUNT,
    FOLDER_NAME,
    FRACTION,
    KNOWN_LOGGERS,
    MOMENTUM,
    NOT_NEGATIVE,
    ORDER,
    POSITIVE,
    REFUSE,
    SECONDS,
    SHARE,
    THREADS,
    Allowed,
)
from penstock.train.config.limits import require_memory
from penstock.train.config.mesh_config import find_mesh, require_shares
from penstock.train.data.tokenizer import BYTES

FINE_TUNING_LR = 2e-5


def _key(default: object, allowed: Allowed | None = None) -> Any:
    return field(default=default, metadata={"allowed": allowed})


@dataclass(frozen=True)
class ModelConfig:
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

    path: str = _key("")
    config: str = _key("")
    vocabulary: int = _key(BYTES, COUNT)
    width: int = _key(128, COUNT)
    layers: int = _key(6, COUNT)
    heads: int = _key(4, COUNT)
    kv_heads: int = _key(2, COUNT)
    hidden: int = _key(352, COUNT)
    rotary_base: float = _key(10_000.0, POSITIVE)
    norm_epsilon: float = _key(1e-5, POSITIVE)


@dataclass(frozen=True)
class DataConfig:
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

    path: str = _key("")
    pattern: str = _key("*")
    held_out: float = _key(0.05, FRACTION)
    sequence: int = _key(128, COUNT)
    changed: str = _key(REFUSE, CHANGED)


@dataclass(frozen=True)
class OptimConfig:
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

    lr: float = _key(4e-3, POSITIVE)
    final_lr: float = _key(0.05, SHARE)
    warmup: float = _key(0.05, SHARE)
    weight_decay: float = _key(0.1, NOT_NEGATIVE)
    beta1: float = _key(0.9, MOMENTUM)
    beta2: float = _key(0.95, MOMENTUM)
    epsilon: float = _key(1e-8, POSITIVE)
    clip: float = _key(1.0, NOT_NEGATIVE)


@dataclass(frozen=True)
class ScheduleConfig:
    """``[schedule]``: the order of the work.

    Attributes:
        name: a family's name (``penstock schedule list``) or the path of a CSV file.
        microbatches: equal parts each batch is cut into; each of ``parallel.dp`` pipelines takes an equal share of them.
    """

    name: str = _key("1f1b")
    microbatches: int = _key(8, COUNT)


@dataclass(frozen=True)
class ParallelConfig:
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

    pp: int | None = _key(None, COUNT)
    virtual_stages: int | None = _key(None, COUNT)
    dp: int = _key(1, COUNT)
    tp: int = _key(1, COUNT)
    order: str = _key("pp,dp,tp", ORDER)
    sequence_parallel: bool = _key(False)
    bucket_bytes: int = _key(BUCKET_BYTES, NOT_NEGATIVE)
    zero: bool = _key(False)
    check_replicas: int = _key(100, NOT_NEGATIVE)


@dataclass(frozen=True)
class TrainConfig:
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

    steps: int = _key(600, COUNT)
    batch: int = _key(16, COUNT)
    seed: int = _key(0, NOT_NEGATIVE)
    name: str = _key("", FOLDER_NAME)
    folder: str = _key("runs")
    log_every: int = _key(10, COUNT)
    eval_every: int = _key(150, COUNT)
    eval_batches: int = _key(16, COUNT)
    trace_every: int = _key(100, NOT_NEGATIVE)
    loggers: str = _key("", KNOWN_LOGGERS)
    checkpoint_every: int = _key(100, NOT_NEGATIVE)
    keep_last: int = _key(3, NOT_NEGATIVE)
    keep_every: int = _key(0, NOT_NEGATIVE)
    skip_nonfinite: int = _key(0, NOT_NEGATIVE)
    resume: str = _key("")


@dataclass(frozen=True)
class SampleConfig:
    """``[sample]``: the text generated at the end.

    Attributes:
        prompt: what the text starts with; token numbers where the vocabulary is not the 256 bytes. Where it is not
            set: ``def ``, or 0; nothing for a Hugging Face model.
        length: tokens to generate.
        temperature: 0 always takes the likeliest token.
        top_k: draws only among this many likeliest tokens; 0 draws among all.
    """

    prompt: str | None = _key(None)
    length: int = _key(256, NOT_NEGATIVE)
    temperature: float = _key(0.8, NOT_NEGATIVE)
    top_k: int = _key(40, NOT_NEGATIVE)


@dataclass(frozen=True)
class RuntimeConfig:
    """``[runtime]``: the machine.

    Attributes:
        device: ``cpu``, ``cuda``, ``cuda:1``; empty is the CPU, but under torchrun a GPU a process where there are
            enough.
        threads: CPU threads a rank computes with; 0 for OMP_NUM_THREADS, or a share of the machine's or container's cores.
        timeout: seconds any wait between ranks may last.
        first_timeout: the same until the first step is done, and in the first evaluation.
    """

    device: str = _key("")
    threads: int = _key(0, THREADS)
    timeout: float = _key(60.0, SECONDS)
    first_timeout: float = _key(600.0, SECONDS)


@dataclass(frozen=True)
class Config:
    """All of it. Build with `from_mapping` (checked) or `penstock.train.config.file.load`."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()
    runtime: RuntimeConfig = RuntimeConfig()


def from_mapping(tables: dict[str, Any]) -> Config:
    """Check ``{section: {key: value}}`` and fill what is not given with the defaults.

    Raises:
        ConfigError: no such section or key (with the nearest), a value of the wrong type or range, or values that clash.
    """
    kinds = {part.name: type(part.default) for part in dataclasses.fields(Config)}
    sections = {}
    for name, table in tables.items():
        if name not in kinds:
            raise ConfigError(
                f"no section [{name}]{nearest(name, list(kinds))}; the sections are {', '.join(kinds)}"
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{name} is a section with keys of its own, not {table!r}")
        sections[name] = _section(name, kinds[name], table)
    _check_model(tables.get("model", {}))
    config = Config(**sections)
    if config.model.path and "lr" not in tables.get("optim", {}):
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=FINE_TUNING_LR))
    _check_together(config)
    return config


def _section(name: str, kind: type, table: dict[str, Any]) -> Any:
    keys = {part.name: part for part in dataclasses.fields(kind)}
    values = {}
    for key, value in table.items():
        if key not in keys:
            raise ConfigError(
                f"no key {name}.{key}{nearest(key, list(keys))}; [{name}] has {', '.join(keys)}"
            )
        values[key] = _value(f"{name}.{key}", keys[key], value)
    return kind(**values)


_SHOWN = 200
_WORDS = {"int": "a whole number", "float": "a number", "str": "text in quotes", "bool": "true or false"}


def _value(name: str, part: dataclasses.Field[Any], value: Any) -> Any:
    wanted = str(part.type).removesuffix(" | None")
    given = type(value).__name__
    if given != wanted and not (wanted == "float" and given == "int"):
        raise ConfigError(f"{name} must be {_WORDS[wanted]}, not {_brief(value)}")
    if wanted == "float" and not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{name} must be a finite number, not {_brief(value)}")
    if wanted == "str" and not _is_plain(value):
        raise ConfigError(
            f"{name} must be text without NUL and without broken characters, not {_brief(value)}"
        )
    allowed: Allowed | None = part.metadata["allowed"]
    if allowed is not None and not allowed.holds(value):
        raise ConfigError(f"{name} must be {allowed.words}, not {_brief(value)}")
    return float(value) if wanted == "float" else value


def _brief(value: object) -> str:
    """A value as it was given; of a long one its ends."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"


def _is_plain(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _check_model(given: dict[str, Any]) -> None:
    """Refuse sizes beside a Hugging Face model, which brings its own."""
    sources = [key for key in ("path", "config") if given.get(key)]
    if not sources:
        return
    if len(sources) > 1:
        raise ConfigError("model.path and model.config are both given; a model comes from one of them")
    if others := sorted(set(given) - {"path", "config"}):
        raise ConfigError(
            f"model.{others[0]} is one of Penstock's own model; the sizes of a Hugging Face model are in its config.json"
        )


def _check_together(config: Config) -> None:
    model, train, schedule = config.model, config.train, config.schedule
    if model.width % model.heads or (model.width // model.heads) % 2:
        raise ConfigError(
            f"model.width {model.width} does not divide into {model.heads} heads of an even size; "
            "rotary positions turn pairs"
        )
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.heads {model.heads} must be a multiple of model.kv_heads {model.kv_heads}")
    if train.batch % schedule.microbatches:
        raise ConfigError(
            f"train.batch {train.batch} does not divide into {schedule.microbatches} equal microbatches; "
            f"schedule.microbatches must divide it"
        )
    require_shares(config)


def resolve(config: Config, processes: int | None) -> Config:
    """Fill in what depends on how the command was started.

    Args:
        config: checked.
        processes: number of processes torchrun (or the like) started; None for a single process with threads.

    Raises:
        ConfigError: ``[parallel]`` wants another number of processes; or something does not fit in memory.
    """
    pp = find_mesh(config.parallel, processes).pp
    family, v = FAMILIES.get(config.schedule.name), config.parallel.virtual_stages
    if family is not None:
        v = family.require_counts(pp, config.schedule.microbatches // config.parallel.dp, v)
    require_memory(config)
    parallel = dataclasses.replace(config.parallel, pp=pp, virtual_stages=v or 1)
    sample = config.sample
    if sample.prompt is None:
        theirs = config.model.path or config.model.config
        usual = "" if theirs else "def " if config.model.vocabulary == BYTES else "0"
        sample = dataclasses.replace(sample, prompt=usual)
    return dataclasses.replace(config, parallel=parallel, sample=sample)
