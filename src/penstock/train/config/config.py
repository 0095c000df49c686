"""The config of a training run: a frozen dataclass for each section of its TOML file, checked before anything else."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from penstock.errors import ConfigError, nearest
from penstock.train.config.fields import Table
from penstock.train.config.sections.data_section import DataConfig, SourceConfig
from penstock.train.config.sections.layout_section import ParallelConfig, ScheduleConfig
from penstock.train.config.sections.lora_section import LoraSection, check_lora
from penstock.train.config.sections.model_section import ModelConfig
from penstock.train.config.sections.optim_section import OptimConfig
from penstock.train.config.sections.train_section import RuntimeConfig, SampleConfig, TrainConfig

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FINE_TUNING_LR = 2e-5
LORA_LR = 2e-4


@dataclass(frozen=True)
class Config(Table):
    """All sections. `from_mapping` and `penstock.train.config.file.load` build checked ones."""

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraSection = field(default_factory=LoraSection)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


_CONFIG = TypeAdapter(Config)
_PLAIN = "text without NUL and without broken characters"
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a section with keys",
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
    check_lora(tables.get("lora", {}), config.lora, config.model.path, config.parallel.tp)
    if config.model.path and "lr" not in tables.get("optim", {}):
        lr = LORA_LR if config.lora.enabled else FINE_TUNING_LR
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=lr))
    _check_together(config)
    return config


def _explain(error: ErrorDetails) -> str:
    """Turn one of pydantic's errors into a line."""
    section, *keys = map(str, error["loc"])
    name = ".".join((section, *keys))
    if error["type"] == "unexpected_keyword_argument":
        nested = section == "data" and len(keys) > 1
        table = SourceConfig if nested else getattr(Config(), section) if keys else Config
        known = [each.name for each in dataclasses.fields(table)]
        if keys:
            header = "[[data.sources]]" if nested else f"[{section}]"
            return f"no key {name}{nearest(keys[-1], known)}; {header} has {', '.join(known)}"
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
    if config.data.sources and config.data.path:
        raise ConfigError(
            "data.path and data.sources are both given; put the path into [[data.sources]], too"
        )
    if config.data.packing and parallel.sequence_parallel:
        raise ConfigError(
            "data.packing needs each sample's positions on every rank, which parallel.sequence_parallel does not give; set "
            "one of them to false"
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
