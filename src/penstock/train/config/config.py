"""The config of a training run: a frozen dataclass for each section of its TOML file, checked before anything else."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.base.errors import ConfigError, ScheduleError
from penstock.base.tables import Table, explain
from penstock.schedule.residency import Sharding
from penstock.train.config.optimizers import optim_defaults, require_optimizer
from penstock.train.config.sections import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RuntimeConfig,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config(Table):
    """All sections. `from_mapping` and `penstock.train.config.file.load` build checked ones."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


_NAMES = [
    name
    for section, table in vars(Config()).items()
    for name in (section, *(f"{section}.{key}" for key in vars(table)))
]
_CONFIG = TypeAdapter(Config)
_OF_EXPERTS = (
    "experts_per_token",
    "expert_hidden",
    "shared_hidden",
    "router",
    "auxiliary_loss",
    "bias_update_rate",
)
_EXPERT_MULTIPLE = 8


def from_mapping(tables: dict[str, Any]) -> Config:
    """Check ``{section: {key: value}}`` and fill in the defaults."""
    try:
        config = _CONFIG.validate_python(tables)
    except ValidationError as error:
        # Behind the key there may be a kind of a union, and a place in a list.
        raise ConfigError(explain(error, _no_key, depth=2)) from None
    _check_model(tables.get("model", {}))
    config = dataclasses.replace(
        config,
        optim=optim_defaults(
            config.optim,
            set(tables.get("optim", {})),
            fine_tunes=bool(config.model.path),
        ),
        schedule=_schedule_defaults(config, set(tables.get("schedule", {}))),
    )
    _check_data(tables.get("data", {}), config.data)
    _check_train(tables.get("train", {}), config)
    _check_together(config)
    require_optimizer(config.optim)
    return config


def _schedule_defaults(config: Config, given: set[str]) -> ScheduleConfig:
    """Return ``[schedule]`` with a number of microbatches that the batch allows, if none is given."""
    schedule, dp, batch = config.schedule, config.parallel.dp, config.train.batch
    if "microbatches" in given:
        return schedule
    if batch % dp:
        raise ConfigError(
            f"train.batch {batch} does not divide over parallel.dp {dp}: every replica does an equal share of the batch; "
            f"take {batch + -batch % dp}, or another multiple of {dp}"
        )
    most = max(schedule.microbatches, dp)
    allowed = [m for m in range(dp, most + 1, dp) if batch % m == 0]
    return dataclasses.replace(schedule, microbatches=allowed[-1])


def _no_key(name: str) -> str:
    return f"{nearest_key(name)}; `penstock config` prints the keys of every section"


def nearest_key(name: str) -> str:
    """Return ``' (did you mean ...?)'`` with the keys or sections that `name` may have meant, or an empty string.

    Args:
        name: name with or without a section, leading dashes, and dashes for underscores.
    """
    section, _, own = name.lstrip("-").replace("-", "_").rpartition(".")
    close = [
        known
        for near in difflib.get_close_matches(own, {known.rpartition(".")[2] for known in _NAMES}, cutoff=0.7)
        for known in _NAMES
        if known.rpartition(".")[2] == near
    ]
    here = [known for known in close if known.startswith(f"{section}.")]
    return f" (did you mean {' or '.join((here or close)[:3])}?)" if close else ""


def _check_model(table: dict[str, Any]) -> None:
    """Raise if sizes are given together with a Hugging Face model, which brings its own."""
    sources = [key for key in ("path", "config") if table.get(key)]
    if not sources:
        return
    if len(sources) > 1:
        raise ConfigError("model.path and model.config are both given; a model comes from one of them")
    if sizes := sorted(set(table) - {"path", "config"}):
        raise ConfigError(
            f"model.{sizes[0]} belongs to Penstock's own model; the sizes of a Hugging Face model are in its config.json"
        )


def _check_experts(config: Config) -> None:
    """Raise if keys of the experts exclude each other, or others of the config."""
    model = config.model
    if not model.experts:
        for f in dataclasses.fields(model):
            if f.name in _OF_EXPERTS and getattr(model, f.name) != f.default:
                raise ConfigError(
                    f"model.{f.name} is {getattr(model, f.name)!r}, and model.experts is 0; give the number of experts, or "
                    f"leave model.{f.name} out"
                )
        return
    if model.experts_per_token > model.experts:
        raise ConfigError(
            f"model.experts_per_token {model.experts_per_token} must be at most model.experts {model.experts}"
        )
    hidden = "hidden" if model.expert_hidden is None else "expert_hidden"
    for key in ("width", hidden):
        if getattr(model, key) % _EXPERT_MULTIPLE:
            raise ConfigError(
                f"model.{key} {getattr(model, key)} must be a multiple of {_EXPERT_MULTIPLE} with model.experts: rows of "
                "their matrices begin at multiples of 16 bytes"
            )
    if config.runtime.compile != "none":
        raise ConfigError(
            f"runtime.compile is {config.runtime.compile!r}, and torch.compile takes no products of experts in float32; "
            "take 'none', or model.experts = 0"
        )
    if config.parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.sequence_parallel does not divide the tokens of model.experts {model.experts}, which are whole on "
            "every process of parallel.tp; leave it false"
        )


def _check_data(table: dict[str, Any], data: DataConfig) -> None:
    """Raise if the held-out data is given twice."""
    if data.held_out_path and "held_out" in table:
        raise ConfigError(
            f"data.held_out is {data.held_out:g} and data.held_out_path is {data.held_out_path!r}; give one of them: with "
            "held-out data of its own, a run holds out nothing of its training data"
        )


def _check_train(table: dict[str, Any], config: Config) -> None:
    """Raise if keys are given that exclude each other."""
    if config.train.epochs and "steps" in table:
        raise ConfigError(
            f"train.steps is {config.train.steps} and train.epochs is {config.train.epochs:g}; give one of them "
            "(train.epochs = 0 counts steps)"
        )
    runtime = config.runtime
    if (runtime.recompute == "auto") != bool(runtime.memory):
        raise ConfigError(
            f"runtime.memory is {runtime.memory} and runtime.recompute is {runtime.recompute!r}; 'auto' needs memory, the "
            "bytes of activations that a rank may hold, and nothing else does"
        )


def _check_together(config: Config) -> None:
    _check_experts(config)
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
    if parallel.cp > 1:
        _check_divided_samples(config)
    try:
        Sharding(parallel.shard, parallel.window, parallel.reduce_every, parallel.store)
    except ScheduleError as error:
        raise ConfigError(f"[parallel] {error}") from None
    if parallel.sequence_parallel and config.data.sequence % parallel.tp:
        raise ConfigError(
            f"data.sequence {config.data.sequence} does not divide over parallel.tp {parallel.tp}, which "
            f"parallel.sequence_parallel needs; take a multiple of {parallel.tp}"
        )


def _check_divided_samples(config: Config) -> None:
    """Raise if samples whose tokens are divided (cp) exclude another key."""
    cp, sequence = config.parallel.cp, config.data.sequence
    if sequence % (2 * cp):
        raise ConfigError(
            f"data.sequence {sequence} does not divide into 2 x parallel.cp = {2 * cp} chunks; take a multiple of {2 * cp}"
        )
    parallel, runtime, train, model = config.parallel, config.runtime, config.train, config.model
    refused = {
        "parallel.sequence_parallel": (parallel.sequence_parallel, "it divides the same tokens; take false"),
        "runtime.compile": (runtime.compile != "none", "the exchange of keys and values is not compiled; take 'none'"),
        "train.reduction": (train.reduction == "sum", "means over each process's tokens would be added; take 'mean'"),
        "model.auxiliary_loss": (model.auxiliary_loss, "it would be that of one process's tokens; take 0"),
    }  # fmt: skip
    for key, (given, why) in refused.items():
        if given:
            raise ConfigError(
                f"{key} cannot be used with parallel.cp = {cp}: {why}, or leave parallel.cp at 1"
            )
