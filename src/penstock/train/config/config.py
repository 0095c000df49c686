"""The config of a training run: a frozen dataclass for each section of its TOML file, checked before anything else."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from penstock.base.errors import ConfigError, ScheduleError, nearest
from penstock.schedule.residency import Sharding
from penstock.train.config.fields import Table
from penstock.train.config.hints import KeyHints, assignments
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

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


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


HINTS = KeyHints({section: type(table) for section, table in vars(Config()).items()})
"""Hints for misspelt keys of any section."""
_CONFIG = TypeAdapter(Config)
_PLAIN = "text without NUL and without broken characters"
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a section with keys",
    "dict_type": "a table of names and values",
    "finite_number": "a finite number",
    "float_type": "a finite number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_pattern_mismatch": _PLAIN,
    "string_type": "text in quotes",
    "string_unicode": _PLAIN,
    "missing": "given",
}
"""Allowed values by the type of pydantic's error, where its own text does not say how to write them in TOML."""
_SHOWN = 200
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
        raise ConfigError(_explain(error.errors(include_url=False)[0])) from None
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


def _explain(error: ErrorDetails) -> str:
    """Turn one of pydantic's errors into a line."""
    # The kinds of a union are in the location, too, as literal['even','measured'].
    section, *keys = (
        str(part) for part in error["loc"] if not re.match(r"literal\b|constrained-|list\[", str(part))
    )
    name = ".".join((section, *keys))
    if error["type"] == "unexpected_keyword_argument":
        table = getattr(Config(), section) if keys else Config
        known = [each.name for each in dataclasses.fields(table)]
        if keys:
            near = _suggest(HINTS.exact(name)) or nearest(keys[-1], known)
            return f"no key {name}{near}{_as_in(name, error['input'])}; [{section}] has {', '.join(known)}"
        if not isinstance(error["input"], dict):
            near = _suggest(HINTS.nearest(section))
            return f"{section} is outside of the sections{near}; write a key below its section: {', '.join(known)}"
        return f"no section [{section}]{nearest(section, known)}; the sections are {', '.join(known)}"
    allowed = _EXPECTED.get(error["type"]) or re.sub("^(Input should be|Value error,) ", "", error["msg"])
    try:
        value = repr(error["input"])
    except ValueError:
        value = "a number of too many digits"
    if len(value) > _SHOWN:
        value = f"{value[: _SHOWN // 2]}...{value[-_SHOWN // 2 :]}"
    return f"{name} must be {allowed}, got {value}"


def _suggest(near: Sequence[str]) -> str:
    """Return ``' (did you mean ...?)'`` with the keys that may be meant, or an empty string."""
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def _as_in(name: str, value: object) -> str:
    """Return the likeliest key with the value that was given, as it is written on the command line."""
    near = HINTS.nearest(name)
    if not near or isinstance(value, list | dict) or len(str(value)) > _SHOWN // 4:
        return ""
    return f", as in {assignments(near[:1], str(value).lower() if isinstance(value, bool) else str(value))}"


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
        Sharding(parallel.shard, parallel.window, parallel.reduce_every)
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
